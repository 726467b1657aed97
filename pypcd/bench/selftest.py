"""Checks that a working engine passes on any model: three identities, and that the twin differs from its token.

The twin is PCD's second evaluation of a token. Two evaluations that are equal in theory differ by rounding, and by how much is
the model's own: plain decoding says it, whose rows differ between shapes of batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.errors import PCDError, UnsupportedError
from pypcd.llama import Llama
from pypcd.settings.config import PCDConfig

__all__ = ["self_test"]

_Rows = npt.NDArray[np.float64]

_N_PROMPT, _N_ROWS = 32, 8
# Of each shape: how many tokens a batch of the prompt has, and one behind it. A step of plain decoding has one token, one with a twin two.
_SHAPES = ((_N_PROMPT, 1), (1, 1), (2, 2))
# Of plain decoding the row counts that differs most, of two evaluations that are compared the row in the middle. A twin's goes through
# two rotations and one more shape of attention.
_FACTOR = 2.0
_FLOOR = 2.0**-11  # of a cache in 16 bits: all shapes may round alike
_EQUAL = 2.0**-17  # of a token and its twin in one batch, which are computed alike
_NOISY = 0.5  # with a limit beyond that, a twin that is wrong might pass: rows of different texts are about 1 apart


def self_test(llm: Llama) -> dict[str, Any]:
    """Four checks on a random prompt. If the model cannot be over-rotated, a twin with a window is tested.

    Differences are in standard deviations of the logits; "limit" is what plain decoding's own allow.
    """
    result: dict[str, Any] = {"model": llm.model_path, "checks": []}
    windowed = engine.pcd_refusal(llm, PCDConfig()) is not None
    base = (PCDConfig(perturbation="none", window=8) if windowed else PCDConfig()).repeatable()
    reason = engine.pcd_refusal(llm, base)
    if reason is not None:
        return {**result, "skipped": reason}
    tokens = np.random.default_rng(0).integers(0, llm.n_vocab(), _N_PROMPT + _N_ROWS).tolist()
    if llm.token_bos() >= 0:
        tokens[0] = llm.token_bos()  # without it some models compute little but noise
    try:
        _check(llm, tokens, base, windowed, result)
    except UnsupportedError as error:  # the model may still not support one of the variants
        result["skipped"] = str(error)
    except RuntimeError as error:
        raise PCDError(f"the self-test could not evaluate the model: {error}") from error
    finally:
        llm.pcd = False
    return result


def _check(llm: Llama, tokens: list[int], base: PCDConfig, windowed: bool, result: dict[str, Any]) -> None:
    llm.pcd = False
    plain, *others = (dict(_rows(llm, tokens, shape)) for shape in _SHAPES)
    noise = max(max(_differences(plain, other)) for other in others)
    limit = result["limit"] = _FACTOR * max(noise, _FLOOR)
    if limit > _NOISY:
        result["skipped"] = (
            f"plain decoding of this model differs from itself by {noise:.2g} standard deviations between shapes of batches, "
            "so that nothing can be told"
        )
        return

    def twins(config: PCDConfig) -> dict[str, dict[int, _Rows]]:
        """L, L* and their contrast."""
        llm.pcd = config
        found: dict[str, dict[int, _Rows]] = {"standard": {}, "local": {}, "contrasted": {}}
        for at, _ in _rows(llm, tokens, _SHAPES[0]):
            logits = llm.pcd_logits()
            for name, rows in found.items():
                if getattr(logits, name) is not None:  # no twin is evaluated for beta=0
                    rows[at] = np.array(getattr(logits, name), np.float64)
        return found

    def check(what: str, value: float, passed: bool) -> None:
        result["checks"].append({"what": what, "passed": bool(passed), "difference": value})

    none = twins(base.replace(beta=0.0))
    value = _difference(plain, none["contrasted"])
    same_token = all(none["standard"][at].argmax() == row.argmax() for at, row in none["contrasted"].items())
    check("beta=0 decodes as without PCD", value, value <= limit and same_token)

    still = twins(base.replace(window=len(tokens)) if windowed else base.replace(base_ratio=1.0))
    equal = _difference(still["standard"], still["local"])
    what = "window=all" if windowed else "base_ratio=1"
    check(f"{what} leaves the twin equal to its token", equal, equal <= limit)

    fused, alternate = twins(base), twins(base.replace(evaluation="alternate"))
    value = _difference(fused["local"], alternate["local"])
    check("fused equals alternate", value, value <= limit)

    value = _difference(fused["standard"], fused["local"])
    check("the twin differs from its token", value, value > _FACTOR * max(equal, _EQUAL))


def _rows(llm: Llama, tokens: list[int], shape: tuple[int, int]) -> Iterator[tuple[int, _Rows]]:
    """The rows that callers see of the last tokens, each with its token's place."""
    llm.reset()
    for first, end, size in ((0, _N_PROMPT, shape[0]), (_N_PROMPT, len(tokens), shape[1])):
        for at in range(first, end, size):
            llm.eval(tokens[at : at + size])
            if first:
                yield at + size - 1, np.array(engine.row(llm), np.float64)


def _difference(some: dict[int, _Rows], others: dict[int, _Rows]) -> float:
    return float(np.median(_differences(some, others)))


def _differences(some: dict[int, _Rows], others: dict[int, _Rows]) -> list[float]:
    """How far rows of the same places are apart, in standard deviations of the first ones; masked tokens do not count."""
    found = []
    for at in some.keys() & others.keys():
        first, second = some[at], others[at]
        shown = np.isfinite(first) & np.isfinite(second)
        found.append(float(np.sqrt(np.mean((first[shown] - second[shown]) ** 2)) / first[np.isfinite(first)].std()))
    return found
