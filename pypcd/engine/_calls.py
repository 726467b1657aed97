"""Calls into the library: a model's handles, batches, and the exception for each status."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp

from pypcd.engine import _bindings
from pypcd.errors import InputError, UnsupportedError

__all__ = ["ask", "batch_of", "call", "context", "memory", "model", "stock", "vocabulary"]


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
