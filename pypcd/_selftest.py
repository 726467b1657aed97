"""Three identities that a working engine satisfies, measured on a given model."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import pypcd
from pypcd import PCDConfig, PCDError, UnsupportedError, _native

__all__ = ["can_run", "self_test"]

TOLERANCE = 0.05  # of the logits' standard deviation: above what quantised kernels differ by, far below a wrong angle


def self_test(llm: pypcd.Llama) -> dict[str, Any]:
    """Three identities on a random prompt. Where nothing can be over-rotated, the window twin is tested."""
    result: dict[str, Any] = {"model": llm.model_path, "checks": []}
    windowed = can_run(llm, PCDConfig()) != "yes"
    base = PCDConfig.windowed() if windowed else PCDConfig()
    reason = can_run(llm, base)
    if reason != "yes":
        return {**result, "skipped": reason}
    tokens = np.random.default_rng(0).integers(0, llm.n_vocab(), 40).tolist()

    def rows(config: PCDConfig) -> pypcd.PCDLogits:
        llm.reset()
        llm.pcd = config
        llm.eval(tokens)
        return llm.pcd_logits()

    def check(what: str, first: Any, second: Any, also: bool = True) -> None:
        shown = np.isfinite(first) & np.isfinite(second)
        difference = float(np.abs(first[shown] - second[shown]).max() / scale)
        result["checks"].append(
            {"what": what, "passed": bool(difference <= TOLERANCE and also), "difference": difference}
        )

    llm.reset()
    llm.pcd = False
    llm.eval(tokens)
    plain = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()
    scale = float(plain.std())
    try:
        none = rows(base.replace(beta=0.0)).contrasted
        check(
            "beta=0 decodes as without PCD",
            none,
            plain,
            also=bool(plain[none.argmax()] >= plain.max() - TOLERANCE * scale),
        )
        same = rows(base.replace(window=len(tokens)) if windowed else base.replace(base_ratio=1.0))
        check(
            "window=all changes nothing" if windowed else "base_ratio=1 changes nothing",
            same.over_rotated,
            same.standard,
        )
        fused, alternate = rows(base), rows(base.replace(evaluation="alternate"))
        check("fused equals alternate", fused.over_rotated, alternate.over_rotated)
    except UnsupportedError as error:  # one of the variants may be refused still
        result["skipped"] = str(error)
    except RuntimeError as error:
        raise PCDError(f"the self-test could not evaluate the model: {error}") from error
    finally:
        llm.pcd = False
    return result


def can_run(llm: pypcd.Llama, config: PCDConfig) -> str:
    """ "yes", or why not."""
    error = ctypes.create_string_buffer(1024)
    status = _native.pcd_check(llm._ctx.ctx, ctypes.byref(pypcd._llama._native_params(config)), error, len(error))
    return "yes" if status == _native.OK else error.value.decode()
