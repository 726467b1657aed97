"""Attention heads that see positions at scales of their own (Ms-PoE)."""

from __future__ import annotations

import ctypes

import llama_cpp

from pypcd._engine import _bindings
from pypcd._engine._calls import call, context, is_open

__all__ = ["HEAD_ORDERS", "find_head_order", "knows_head_order", "set_head_ratios", "unset_head_ratios"]

HEAD_ORDERS = tuple(_bindings.HEAD_ORDER)


def set_head_ratios(llm: llama_cpp.Llama, min_ratio: float, max_ratio: float, *, first_layer: int, order: str) -> None:
    """Position t becomes t / r, r from min_ratio up to max_ratio over a layer's heads, from a layer on.

    What is in memory was evaluated with the ratios of its time: clear it after a change.

    Args:
        order: of HEAD_ORDERS, which head has which ratio. "outlier" needs find_head_order().

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
    """Say that the next evaluation is a whole prompt, from position 0 on and in one micro-batch, which tells the order.

    Raises:
        ValueError, UnsupportedError: there is none to find.
    """
    call(_bindings.pcd_find_head_order, llm)


def knows_head_order(llm: llama_cpp.Llama, layer: int) -> bool:
    return bool(_bindings.pcd_get_head_ratios(context(llm), layer, None, 0) >= 0)
