"""Position ratios of attention heads: each head divides positions by its own ratio (Ms-PoE)."""

from __future__ import annotations

import ctypes

import llama_cpp

from pypcd.engine import _bindings
from pypcd.engine._calls import call, context
from pypcd.engine._handles import is_open

__all__ = ["HEAD_ORDERS", "find_head_order", "knows_head_order", "set_head_ratios", "unset_head_ratios"]

HEAD_ORDERS = tuple(_bindings.HEAD_ORDER)


def set_head_ratios(llm: llama_cpp.Llama, min_ratio: float, max_ratio: float, *, first_layer: int, order: str) -> None:
    """Position t becomes t / r, with r from min_ratio up to max_ratio over a layer's heads, from first_layer on.

    Keys and values in the cache were computed with the ratios in force at the time: clear it after a change.

    Args:
        order: which head has which ratio, one of HEAD_ORDERS. "outlier" needs find_head_order().

    Raises:
        ValueError: a value is out of range.
        UnsupportedError: this model cannot do it, or PCD is on.
    """
    ratios = _bindings.HeadRatios(min_ratio, max_ratio, first_layer, _bindings.HEAD_ORDER[order])
    call(_bindings.pcd_set_head_ratios, llm, ctypes.byref(ratios))


def unset_head_ratios(llm: llama_cpp.Llama) -> None:
    if is_open(llm):
        call(_bindings.pcd_set_head_ratios, llm, None)


def find_head_order(llm: llama_cpp.Llama) -> None:
    """Find the order of the heads in the next evaluation: a whole prompt, from position 0, in one micro-batch.

    Raises:
        ValueError, UnsupportedError: no order can be found.
    """
    call(_bindings.pcd_find_head_order, llm)


def knows_head_order(llm: llama_cpp.Llama, layer: int) -> bool:
    return bool(_bindings.pcd_get_head_ratios(context(llm), layer, None, 0) >= 0)
