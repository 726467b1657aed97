"""What a llama_cpp.Llama holds of the library -- its model, context and batch -- where a wrong call would end the process.

guard_handles() gives each a class that checks what llama.cpp does not; invalidate_handles() leaves, of what was freed, something that raises
a sentence whatever is asked of it, also through a tokenizer that outlives its model. In a process forked with a model
open the context goes the same way, and nothing of the parent's is freed; tokenization needs no context and goes on. None of
this costs a test per call. Knows nothing of threads.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import _internals

from pypcd.engine import _log
from pypcd.errors import InputError, ModelError, PCDError, UnsupportedError

if TYPE_CHECKING:
    from pypcd.engine._stock import Stock

__all__ = ["guard_handles", "invalidate_handles", "is_open"]

_CLOSED = "the model is closed, by close() or the end of its with block; open it again with pypcd.Llama(...)"
_LOST = "this model's context could not be opened again, and is gone ({}); close the model and open it again"
_NO_ROOM = "there is no memory to open this context again ({}); use a smaller n_ctx"
_FORKED = (
    "this process was forked with the model open, and the threads that compute stayed behind in process {}; open the "
    'model in this process, or start processes by multiprocessing.get_context("spawn")'
)


class _Model(_internals.LlamaModel):
    """A model that writes only tokens that it has; llama.cpp ends the process at others."""

    def detokenize(self, tokens: Any, special: bool = False) -> bytes:
        tokens, n = list(tokens), self.n_vocab()
        if wrong := [token for token in tokens if not 0 <= token < n]:
            raise InputError(f"token {wrong[0]} is not in the vocabulary; allowed: 0 to {n - 1}")
        return bytes(super().detokenize(tokens, special))


class _Context(_internals.LlamaContext):
    """A context whose batches have twins.

    Attributes:
        stock: what evaluates them, if the library does not.
        size, pooling: what n_ctx() and pooling_type() return.
    """

    stock: Stock | None = None
    size: int
    pooling: int

    def decode(self, batch: _internals.LlamaBatch) -> None:
        if self.stock is None:
            super().decode(batch)
        elif (status := self.stock.decode(batch.batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def n_ctx(self) -> int:
        """It does not change, and other threads may ask while the context is opened again; so may they for pooling_type()."""
        return self.size

    def pooling_type(self) -> int:
        return self.pooling

    def reopen(self, params: Any, then: Callable[[], object]) -> None:
        """Another llama_context in place of this one, with other llama_context_params and the same state: tokens, keys and values. The rows
        of the last batch are gone, and so is what was set on the context by llama.cpp's own functions.

        Args:
            then: called once there is one.

        Raises:
            UnsupportedError: there is no memory for it; a context like the former one has the state.
            PCDError: nor for that one, or the state cannot be restored; then there is no context any more.
        """
        # in another thread: Ctrl-C is an exception in this one, and would leave a context that is freed
        with ThreadPoolExecutor(1, "pypcd opens a context") as pool:
            done, interrupt = pool.submit(self._reopen, params, then), None
            while not done.done():
                try:
                    wait([done])
                except BaseException as error:  # noqa: BLE001  raised below
                    interrupt = error
        if interrupt is not None:
            raise interrupt
        done.result()

    def _reopen(self, params: Any, then: Callable[[], object]) -> None:
        old, memory = self.ctx, llama_cpp.llama_get_memory(self.ctx)
        state = np.zeros(0, np.uint8)
        if any(llama_cpp.llama_memory_seq_pos_max(memory, seq) >= 0 for seq in range(llama_cpp.llama_n_seq_max(old))):
            try:
                state = np.zeros(llama_cpp.llama_state_get_size(old), np.uint8)
            except MemoryError as error:
                raise UnsupportedError(_NO_ROOM.format(error)) from error
            if llama_cpp.llama_state_get_data(old, _bytes_of(state), state.nbytes) != state.nbytes:
                raise UnsupportedError(
                    "llama.cpp does not give this context's state, with which it would be opened again"
                )
        n_threads = llama_cpp.llama_n_threads(old), llama_cpp.llama_n_threads_batch(old)
        _log.clear_errors()
        self.ctx = None
        llama_cpp.llama_free(old)  # first: a device may have no memory for both
        ctx = llama_cpp.llama_init_from_model(self.model.model, params)
        why = "" if ctx else _log.reason()
        ctx = ctx or llama_cpp.llama_init_from_model(self.model.model, self.params)
        if not ctx or (state.nbytes and not llama_cpp.llama_state_set_data(ctx, _bytes_of(state), state.nbytes)):
            lost = _LOST.format(_log.reason())
            if ctx:
                llama_cpp.llama_free(ctx)
            stack = self._exit_stack
            stack.close()
            _leave(self, lost)
            vars(self)["_exit_stack"] = stack  # the model closes it too
            raise PCDError(lost)
        llama_cpp.llama_set_n_threads(ctx, *n_threads)
        self.ctx, self.memory = ctx, llama_cpp.llama_get_memory(ctx)
        if not why:
            self.params.cb_eval = params.cb_eval
        then()
        if why:
            raise UnsupportedError(_NO_ROOM.format(why))

    def get_logits(self) -> Any:
        rows = None if self.stock is None else self.stock.rows()
        return super().get_logits() if rows is None else rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class _Batch(_internals.LlamaBatch):
    """A batch that takes at least one token: an empty one would be written beside its memory."""

    def set_batch(self, batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        _check_some(batch)
        super().set_batch(batch, n_past, logits_all)

    def add_sequence(self, batch: Sequence[int], seq_id: int, logits_all: bool) -> None:
        _check_some(batch)
        super().add_sequence(batch, seq_id, logits_all)


def _check_some(tokens: Sequence[int]) -> None:
    if not len(tokens):
        raise InputError("there are no tokens to evaluate; give a text that is not empty")


class _Gone:
    """What is left of a handle that was freed, or that belongs to another process."""

    _why: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise PCDError(self._why)

    def close(self) -> None:
        pass


_CLASSES = {"_model": _Model, "_ctx": _Context, "_batch": _Batch}
_open: weakref.WeakSet[llama_cpp.Llama] = weakref.WeakSet()  # for a process that is forked


def is_open(llm: llama_cpp.Llama) -> bool:
    return not isinstance(getattr(llm, "_ctx", None), (_Gone, type(None)))


def guard_handles(llm: llama_cpp.Llama, stock: Stock | None = None) -> None:
    """Once a model is open: check what is asked of it.

    Args:
        stock: what evaluates the twins, if the library does not.

    Raises:
        ModelError: its LoRA was not read, which llama_cpp does not see.
    """
    if llm._lora_adapter is not None and not llm._lora_adapter:
        raise ModelError(f"the LoRA {llm.lora_path} cannot be used with {llm.model_path}: {_log.reason()}")
    for name, of in _CLASSES.items():
        getattr(llm, name).__class__ = of
    ctx = llm._ctx
    vars(ctx).update(
        stock=stock, size=_internals.LlamaContext.n_ctx(ctx), pooling=_internals.LlamaContext.pooling_type(ctx)
    )
    _open.add(llm)


def invalidate_handles(llm: llama_cpp.Llama) -> None:
    """Once a model is closed: a sentence in place of freed memory."""
    _open.discard(llm)
    for name in _CLASSES:
        if hasattr(llm, name):
            _leave(getattr(llm, name), _CLOSED)


def _bytes_of(state: Any) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _leave(handle: Any, why: str) -> None:
    vars(handle).clear()
    handle.__class__ = _Gone
    handle._why = why


def _forked() -> None:
    """In a new process, before it goes on: what the parent has opened is the parent's."""
    for llm in list(_open):
        for stack in (llm._stack, llm._model._exit_stack):
            stack.pop_all()  # what would free it
        for name in ("_ctx", "_batch"):
            _leave(getattr(llm, name), _FORKED.format(os.getppid()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
