"""Early exits: logits that the output head computes from the hidden states of earlier layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.engine._calls import call, context
from pypcd.engine._handles import is_open
from pypcd.errors import PCDError

__all__ = ["exit_rows", "has_tied_head", "set_exits"]


def has_tied_head(llm: llama_cpp.Llama) -> bool:
    """Whether the output head is the embedding matrix."""
    return bool(_bindings.pcd_has_tied_head(context(llm)))


def set_exits(llm: llama_cpp.Llama, layers: Sequence[int]) -> None:
    """From now on, compute the exits of these layers whenever logits are computed; an empty list ends that.

    Args:
        layers: 0 for the embeddings that enter the first block, i for the output of block i.

    Raises:
        ValueError: the model does not have one of them.
        UnsupportedError: this model cannot do it, or PCD is on.
    """
    if layers or is_open(llm):
        call(_bindings.pcd_set_exits, llm, (ctypes.c_int32 * len(layers))(*layers), len(layers))


def exit_rows(llm: llama_cpp.Llama, n_layers: int, i: int) -> npt.NDArray[np.float32]:
    """The logits of those layers for entry i of the last batch, float32[n_layers, n_vocab].

    Raises:
        PCDError: there are none.
    """
    pointers = [_bindings.pcd_get_exit_logits(context(llm), layer, i) for layer in range(n_layers)]
    if not all(pointers):
        raise PCDError(f"there are no early exits for entry {i} of the last batch")
    return np.stack([np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)) for pointer in pointers])
