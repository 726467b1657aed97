"""Checks that a working engine passes on any model: three identities, and that the twin differs from its token.

The twin is PCD's second evaluation of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pypcd import _engine
from pypcd._config import PCDConfig
from pypcd._engine import PCDLogits
from pypcd._errors import PCDError, UnsupportedError
from pypcd._llama import Llama

__all__ = ["self_test"]

# a share of the logits' standard deviation: quantised kernels differ by less, a wrong angle makes far more
TOLERANCE = 0.05


def self_test(llm: Llama) -> dict[str, Any]:
    """Four checks on a random prompt. If the model cannot be over-rotated, a twin with a window is tested."""
    result: dict[str, Any] = {"model": llm.model_path, "checks": []}
    windowed = llm.pcd_refusal(PCDConfig()) is not None
    base = (PCDConfig(perturbation="none", window=8) if windowed else PCDConfig()).repeatable()
    reason = llm.pcd_refusal(base)
    if reason is not None:
        return {**result, "skipped": reason}
    tokens = np.random.default_rng(0).integers(0, llm.n_vocab(), 40).tolist()

    def rows(config: PCDConfig) -> PCDLogits:
        llm.reset()
        llm.pcd = config
        llm.eval(tokens)
        return llm.pcd_logits()

    def difference(first: Any, second: Any) -> float:
        shown = np.isfinite(first) & np.isfinite(second)
        return float(np.abs(first[shown] - second[shown]).max() / scale)

    def check(what: str, value: float, passed: bool) -> None:
        result["checks"].append({"what": what, "passed": bool(passed), "difference": value})

    llm.reset()
    llm.pcd = False
    llm.eval(tokens)
    plain = _engine.row(llm)
    scale = float(plain.std())
    try:
        none = rows(base.replace(beta=0.0)).contrasted
        value = difference(none, plain)
        same_token = plain[none.argmax()] >= plain.max() - TOLERANCE * scale
        check("beta=0 decodes as without PCD", value, value <= TOLERANCE and same_token)

        still = rows(base.replace(window=len(tokens)) if windowed else base.replace(base_ratio=1.0))
        value = difference(still.over_rotated, still.standard)
        what = "window=all" if windowed else "base_ratio=1"
        check(f"{what} leaves the twin equal to its token", value, value <= TOLERANCE)

        fused, alternate = rows(base), rows(base.replace(evaluation="alternate"))
        value = difference(fused.over_rotated, alternate.over_rotated)
        check("fused equals alternate", value, value <= TOLERANCE)

        value = difference(fused.over_rotated, fused.standard)
        check("the twin differs from its token", value, value > TOLERANCE)
    except UnsupportedError as error:  # the model may still not support one of the variants
        result["skipped"] = str(error)
    except RuntimeError as error:
        raise PCDError(f"the self-test could not evaluate the model: {error}") from error
    finally:
        llm.pcd = False
    return result
