"""Early exits: what a model's output head makes of the hidden states of earlier layers.

The hidden states come from a tap on llama.cpp's graph. The head is read from the model's file, and its products are numpy's: the matrix
stays in memory as float32 (2.5 GB for 152,000 tokens and a width of 4096), and a step reads all of it once more. With a large vocabulary
that takes longer than the model's own step; for a study it is enough.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.errors import InputError, UnsupportedError, require
from pypcd.gguf import parts, read_gguf
from research.tensors import tap

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Exits", "has_tied_head", "read_head"]

Rows = npt.NDArray[np.float32]


def has_tied_head(llm: Llama) -> bool:
    """Whether the output head is the embedding matrix: the file has no head of its own."""
    return "output.weight" not in _tensors(llm)


def _tensors(llm: Llama) -> set[str]:
    return {name for path in parts(llm.model_path) for name in read_gguf(path).tensors}


class Exits:
    """From now on, the hidden states of the last token that is evaluated are read; until close().

    Args:
        layers: 0 for the embeddings that enter the first block, i for the output of block i.

    Raises:
        ValueError: the model does not have one of them.
        UnsupportedError: this model, or its context, cannot do it.
    """

    def __init__(self, llm: Llama, layers: Sequence[int]) -> None:
        n_layer, tensors = engine.n_layer(llm), _tensors(llm)
        if wrong := [il for il in layers if not 0 <= il < n_layer]:
            raise InputError(
                f"an exit's layer is {wrong[0]}; allowed: 0 (the embeddings) to {n_layer - 1}, for this model has {n_layer} layers"
            )
        if getattr(llm, "lora_path", None):
            raise UnsupportedError(
                "early exits are read through the head of the model's file, which a LoRA adapter may change"
            )
        if 0 in layers and "blk.0.attn_norm.weight" not in tensors:
            raise UnsupportedError(
                "this model's first block has no norm in front, by which its input is found; leave layer 0 out"
            )
        self._llm, self._layers = llm, tuple(layers)
        self._hidden: dict[int, Rows] = {}
        self._norms: list[Rows] = []  # what the norms of block 0 are made of, in their order
        self._attention = 0  # which of them is in front of attention; bloom has one before it
        names = {f"l_out-{max(il - 1, 0)}" for il in layers} | ({"norm-0", "attn_norm-0"} if 0 in layers else set())
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(tap(llm, sorted(names), self._look))

    def close(self) -> None:
        self._stack.close()

    def rows(self) -> Rows:
        """The exits of the token that was evaluated last, float32[n_layers, n_vocab].

        No final norm, no scale and no cap: the head's matrix and its bias alone.

        Raises:
            UnsupportedError: this model's graph does not show one of the hidden states, or its head cannot be read.
        """
        if missing := [il for il in self._layers if il not in self._hidden]:
            arch = self._llm.metadata.get("general.architecture")
            raise UnsupportedError(
                f"llama.cpp's graph of the architecture {arch!r} does not show what enters block {missing[0]}; early exits need it"
            )
        matrix, bias = read_head(self._llm.model_path)
        rows: Rows = np.stack([self._hidden[il] for il in self._layers]) @ matrix.T + bias
        self._hidden.clear()
        return rows

    def _look(self, name: str, array: Rows, tensor: int) -> None:
        kind, _, index = name.rpartition("-")
        if kind == "norm":  # before its weights
            self._norms.append(engine.contents(engine.Tensor.from_address(tensor).src[0])[0, 0, -1])
        elif kind == "attn_norm":  # with them
            self._attention = len(self._norms) - 1
        else:
            self._hidden[int(index) + 1] = array[0, 0, -1]
            if index == "0" and self._norms:
                self._hidden[0] = self._norms[self._attention]
                self._norms.clear()


@functools.lru_cache(maxsize=1)
def read_head(path: str) -> tuple[Rows, Rows]:
    """The output head's matrix, [n_vocab, n_embd], and its bias."""
    gguf = require("gguf", "the output head of a model")
    found = {}
    for part in parts(path):
        for tensor in gguf.GGUFReader(str(part)).tensors:
            if tensor.name in ("output.weight", "token_embd.weight", "output.bias", "output.scale"):
                found[tensor.name] = tensor
    tensor = found.get("output.weight", found.get("token_embd.weight"))
    if tensor is None or "output.scale" in found:
        raise UnsupportedError(f"{path} has no output head that is a matrix and a bias; early exits need one")
    try:
        matrix = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except NotImplementedError as error:
        raise UnsupportedError(f"the package gguf cannot read the output head of {path}: {error}") from error
    bias = found.get("output.bias")
    return matrix, np.zeros(len(matrix), np.float32) if bias is None else bias.data.astype(np.float32)
