"""A model's context: decoding, the rows (logits) that come out, and the sequences in its memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _log
from pypcd.engine._calls import context, memory, stock
from pypcd.engine._handles import check_shift, is_open, shifts
from pypcd.errors import PCDError

__all__ = [
    "can_shift",
    "clear",
    "copy_sequence",
    "decode",
    "has_row",
    "rewind",
    "row",
    "rows",
    "set_abort",
    "set_threads",
    "shift",
    "synchronize",
]

_ALL = -1  # sequences


def decode(llm: llama_cpp.Llama, entries: Sequence[tuple[int, int, int, bool]]) -> bool:
    """llama_decode of (token, position, sequence, whether its logits are wanted), all in one batch.

    Returns:
        False if the context has no room for them; then nothing is evaluated.

    Raises:
        PCDError: it failed for another reason; the message has it.
    """
    batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
    try:
        batch.n_tokens = len(entries)
        for i, (token, pos, seq, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        _log.clear_errors()
        twins = stock(llm)
        status = twins.decode(batch) if twins else llama_cpp.llama_decode(context(llm), batch)
    finally:
        llama_cpp.llama_batch_free(batch)
    if status not in (0, 1):
        raise PCDError(f"llama_decode returned {status}: {_log.reason()}")
    return bool(status == 0)


def row(llm: llama_cpp.Llama, i: int = -1) -> npt.NDArray[np.float32]:
    """The logits of one token of the last batch, as every caller of llama.cpp sees them, copied.

    Args:
        i: its index in the batch, or negative, counted from the end of those whose logits were requested.

    Returns:
        float32[n_vocab]

    Raises:
        PCDError: there are no logits for it.
    """
    return _view(llm, i).copy()


def rows(llm: llama_cpp.Llama, n: int) -> npt.NDArray[np.float32]:
    """The logits of the first n entries of the last batch, float32[n, n_vocab]."""
    return np.stack([_view(llm, i) for i in range(n)])


def _view(llm: llama_cpp.Llama, i: int) -> npt.NDArray[np.float32]:
    """The library's own memory, which the next evaluation overwrites."""
    twins = stock(llm)
    kept = twins.row(i) if twins else None
    if kept is not None:
        return kept  # type: ignore[no-any-return]
    pointer = llama_cpp.llama_get_logits_ith(context(llm), i)
    if not pointer:
        raise PCDError(f"there are no logits for row {i}: evaluate tokens first, and request their logits")
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),))


def has_row(llm: llama_cpp.Llama, i: int = -1) -> bool:
    """Whether there are logits for an entry of the last batch."""
    return bool(llama_cpp.llama_get_logits_ith(context(llm), i))


def rewind(llm: llama_cpp.Llama, n_past: int, seq: int = _ALL) -> bool:
    """Forget position n_past of a sequence and all after it; 0 forgets the whole sequence.

    Returns:
        False if a recurrent state cannot go back.
    """
    return bool(llama_cpp.llama_memory_seq_rm(memory(llm), seq, n_past, -1))


def clear(llm: llama_cpp.Llama) -> None:
    """Forget all sequences, and the tokens that llama_cpp.Llama remembers."""
    llm.reset()
    llama_cpp.llama_memory_clear(memory(llm), True)
    if twins := stock(llm):
        twins.forget_answers()


def copy_sequence(llm: llama_cpp.Llama, source: int, target: int) -> None:
    """Make one sequence continue another. In the cache they share their common part."""
    llama_cpp.llama_memory_seq_cp(memory(llm), source, target, -1, -1)
    if twins := stock(llm):
        twins.copy_answer(source, target)


def synchronize(llm: llama_cpp.Llama) -> None:
    """Wait until what was decoded is computed: a GPU goes on after llama_decode has returned."""
    llama_cpp.llama_synchronize(context(llm))


def can_shift(llm: llama_cpp.Llama) -> bool:
    """Whether positions in the cache can be moved."""
    return shifts(llm._ctx) and bool(llama_cpp.llama_memory_can_shift(memory(llm)))


def shift(llm: llama_cpp.Llama, seq: int, first: int, last: int, by: int) -> None:
    """Move positions first to last - 1 of a sequence.

    Raises:
        PCDError: llama.cpp cannot move these keys.
    """
    check_shift(llm._ctx)
    llama_cpp.llama_memory_seq_add(memory(llm), seq, first, last, by)


_aborts: weakref.WeakKeyDictionary[llama_cpp.Llama, Any] = weakref.WeakKeyDictionary()  # keeps callbacks alive


def set_abort(llm: llama_cpp.Llama, stopped: Callable[[], bool] | None) -> None:
    """Stop llama_decode half-way once `stopped` returns True (on the CPU; GPU backends finish their batch). None: never."""
    if stopped is None and not is_open(llm):
        return
    callback = llama_cpp.ggml_abort_callback(*([] if stopped is None else [lambda _: stopped()]))
    llama_cpp.llama_set_abort_callback(context(llm), callback, ctypes.c_void_p(0))
    _aborts[llm] = callback


def set_threads(llm: llama_cpp.Llama, decode: int, batch: int) -> None:
    """The numbers of CPU threads, for one token at a time and for prompts."""
    llama_cpp.llama_set_n_threads(context(llm), decode, batch)
