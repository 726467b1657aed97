"""Calls into the library: a model's handles, batches, and the exception for each status."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings, _log
from pypcd.errors import InputError, UnsupportedError

__all__ = ["ask", "batch_of", "call", "context", "memory", "model", "positions_by_cell", "stock", "vocabulary"]

# of a state's head, in 32-bit words
_LAYOUTS = [(header, stride) for header in (4, 3, 2, 1) for stride in (3, 6, 5, 2)]


def context(llm: llama_cpp.Llama) -> Any:
    """The llama_context of a model.

    Raises:
        PCDError: the model is closed, or another process's.
    """
    return llm._ctx.ctx


def stock(llm: llama_cpp.Llama) -> Any:
    """The engine "stock" of a model; None if its engine is "native".

    Raises:
        PCDError: the model is closed.
    """
    return getattr(llm._ctx, "stock", None)


def memory(llm: llama_cpp.Llama) -> Any:
    return llama_cpp.llama_get_memory(context(llm))


def model(llm: llama_cpp.Llama) -> Any:
    """The llama_model; it exists before the context does.

    Raises:
        PCDError: the model is closed.
    """
    return llm._model.model


def vocabulary(llm: llama_cpp.Llama) -> Any:
    return llama_cpp.llama_model_get_vocab(model(llm))


@contextlib.contextmanager
def batch_of(entries: Sequence[tuple[int, int, Sequence[int], bool]]) -> Iterator[Any]:
    """A llama_batch of (token, position, its sequences, whether its logits are wanted), freed at the end of the block."""
    batch = llama_cpp.llama_batch_init(len(entries), 0, max(len(seqs) for _, _, seqs, _ in entries))
    try:
        batch.n_tokens = len(entries)
        for i, (token, pos, seqs, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos, wanted
            batch.n_seq_id[i] = len(seqs)
            for k, seq in enumerate(seqs):
                batch.seq_id[i][k] = seq
        yield batch
    finally:
        llama_cpp.llama_batch_free(batch)


def ask(function: Any, llm: llama_cpp.Llama, *args: Any) -> tuple[int, str]:
    """Call a function of the library whose last arguments are an error buffer and its size.

    Returns:
        Its status, and the text it left in the buffer.
    """
    error = ctypes.create_string_buffer(1024)
    status = function(context(llm), *args, error, len(error))
    return status, error.value.decode("utf-8", "replace")


def call(function: Any, llm: llama_cpp.Llama, *args: Any) -> None:
    """The same, but any status other than OK raises an exception.

    Raises:
        ValueError: a value is out of range.
        UnsupportedError: this model or context cannot do it, or there is not enough memory for it.
        PCDError: the model is closed.
    """
    status, text = ask(function, llm, *args)
    if status == _bindings.INVALID:
        raise InputError(text)
    if status != _bindings.OK:
        raise UnsupportedError(text)


def positions_by_cell(
    ctx: Any, seq: int, known: Sequence[int] | npt.NDArray[np.int_], *, of_window: bool = False
) -> npt.NDArray[np.int32]:
    """The positions of a sequence in the order of their cells.

    A state begins with them; a buffer that has room for no more gets them before llama.cpp finds that it is too small, without a copy of
    the keys.

    Args:
        known: the positions, ascending.
        of_window: of the layers with a sliding window, which may have only the last ones.

    Raises:
        UnsupportedError: this llama.cpp lays out states in another way, or the sequence has other positions.
    """
    n = len(known)
    buffer = np.zeros(8 + 6 * n, np.int32)
    data = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    with _log.silent():
        if of_window and hasattr(llama_cpp, "llama_state_seq_get_data_ext"):  # llama-cpp-python 0.3.17 and newer
            llama_cpp.llama_state_seq_get_data_ext(ctx, data, buffer.nbytes, seq, 1)
        elif not of_window:
            llama_cpp.llama_state_seq_get_data(ctx, data, buffer.nbytes, seq)
    for header, stride in _LAYOUTS:
        count = int(buffer[header - 1])
        if count == n or (of_window and 0 < count < n):
            found = buffer[header : header + stride * count : stride]
            if np.array_equal(np.sort(found), known[n - count :]):
                return found.copy()
    raise UnsupportedError("this llama.cpp does not say which position each cell of its cache holds")
