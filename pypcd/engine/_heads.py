"""Position ratios of attention heads: each head divides positions by its own ratio (Ms-PoE)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.engine._calls import call, context
from pypcd.engine._handles import is_open
from pypcd.engine._tap import tap

__all__ = ["evaluate_with_ratios", "head_counts", "set_head_ratios", "unset_head_ratios"]

Array = npt.NDArray[np.float64]


def head_counts(llm: llama_cpp.Llama) -> list[int]:
    """How many query heads each layer has."""
    counts: list[int] = []
    ctx = context(llm)
    while (n := int(_bindings.pcd_get_head_ratios(ctx, len(counts), None, 0))) >= 0:
        counts.append(n)
    return counts


def set_head_ratios(llm: llama_cpp.Llama, ratios: Sequence[Array]) -> None:
    """Position t becomes t / r, with these ratios r for the query heads of each layer.

    Keys and values in the cache were computed with the ratios in force at the time: clear it after a change. A layer whose
    ratios are all 1 is not changed.

    Raises:
        ValueError: a value is out of range.
        UnsupportedError: this model cannot do it, or PCD is on.
    """
    call(_bindings.pcd_set_head_ratios, llm, *_floats(np.concatenate([*ratios, []])))


def unset_head_ratios(llm: llama_cpp.Llama) -> None:
    if is_open(llm):
        call(_bindings.pcd_set_head_ratios, llm, None, 0)


def evaluate_with_ratios(
    llm: llama_cpp.Llama, evaluate: Callable[[], object], find: Callable[[int, Array, Array], Array]
) -> dict[int, Array]:
    """Evaluate something, with ratios for each layer that are found while it is evaluated. Some are set already.

    Args:
        find: from a layer's index, its queries [n_tokens, n_heads, d] and keys [n_tokens, n_heads_kv, d], both before
            they are rotated, to the ratios of its query heads.

    Returns:
        The ratios that were found; a layer is missing if it does not show its queries and keys.
    """
    halves: dict[int, dict[str, Array]] = {}
    found: dict[int, Array] = {}

    def look(name: str, tensor: Any) -> None:
        half, _, index = name.partition("-")
        layer = halves.setdefault(int(index), {})
        layer[half] = np.asarray(tensor[0], np.float64)
        if len(layer) == 2:
            il = int(index)
            found[il] = find(il, layer["pcd_q"], layer["pcd_k"])
            call(_bindings.pcd_set_layer_ratios, llm, il, *_floats(found[il]))

    with tap(llm, ["pcd_q-", "pcd_k-"], look):
        evaluate()
    return found


def _floats(values: Array) -> tuple[Any, int]:
    return (ctypes.c_float * len(values))(*values), len(values)
