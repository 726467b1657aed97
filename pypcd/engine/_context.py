"""A model's context: decoding, the rows (logits) that come out, and the sequences in its memory."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _log
from pypcd.engine._calls import batch_of, context, memory, model, stock
from pypcd.engine._handles import is_open
from pypcd.engine._model import slides
from pypcd.errors import PCDError

__all__ = [
    "cache_settings",
    "clear",
    "copy_sequence",
    "decode",
    "has_row",
    "load_sequence",
    "rewind",
    "row",
    "rows",
    "save_sequence",
    "set_abort",
    "set_threads",
]

_ALL = -1  # sequences
# of llama_context_params: what changes keys and values, or how they are stored. Versions of llama.cpp have not all of them
_OF_THE_CACHE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "type_k",
    "type_v",
    "flash_attn",
    "flash_attn_type",
    "swa_full",
)
# of a model that does not say; below 0: these
_YARN = {"yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}


def decode(llm: llama_cpp.Llama, entries: Sequence[tuple[int, int, int, bool]]) -> bool:
    """llama_decode of (token, position, sequence, whether its logits are wanted), all in one batch.

    Returns:
        False if the context has no room for them; then nothing is evaluated.

    Raises:
        PCDError: it failed for another reason; the message has it.
    """
    with batch_of([(token, pos, [seq], wanted) for token, pos, seq, wanted in entries]) as batch:
        _log.clear_errors()
        twins = stock(llm)
        status = twins.decode(batch) if twins else llama_cpp.llama_decode(context(llm), batch)
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
        False if a recurrent state cannot go back, or layers with a sliding window no longer hold what lies before that position.
    """
    if n_past > 0 and slides(llm):
        first = llama_cpp.llama_memory_seq_pos_min(memory(llm), max(seq, 0))
        if first > max(n_past - int(llama_cpp.llama_model_n_swa(model(llm))), 0):
            return False
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


def save_sequence(llm: llama_cpp.Llama, path: str, tokens: Sequence[int]) -> int:
    """Write the state of sequence 0 to a file, behind the tokens that made it; returns the file's size in bytes.

    Raises:
        PCDError: it could not be written.
    """
    _log.clear_errors()
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    size = llama_cpp.llama_state_seq_save_file(context(llm), os.fsencode(path), 0, array, len(tokens))
    if not size:
        raise PCDError(f"{path} could not be written: {_log.reason()}")
    return int(size)


def load_sequence(llm: llama_cpp.Llama, path: str) -> None:
    """Replace sequence 0 by what save_sequence() has written. A file that was changed since may end the process.

    Raises:
        PCDError: this context cannot hold it; then sequence 0 is empty.
    """
    _log.clear_errors()
    tokens, n = (llama_cpp.llama_token * llm.n_ctx())(), ctypes.c_size_t()
    if not llama_cpp.llama_state_seq_load_file(
        context(llm), os.fsencode(path), 0, tokens, len(tokens), ctypes.byref(n)
    ):
        rewind(llm, 0, 0)
        raise PCDError(f"{path} could not be restored: {_log.reason()}")


def cache_settings(given: Any, metadata: Iterable[str], is_sliding: bool, n_ctx: int) -> str:
    """A context's settings that keys and values depend on, as far as they are not llama.cpp's own.

    Args:
        given: its llama_context_params, or what llama-server tells of them.
        metadata: names of the model's.
        is_sliding: slides().
    """
    usual = llama_cpp.llama_context_default_params()
    scaling = [name for name in metadata if ".rope.scaling." in name]
    words = []
    for name in _OF_THE_CACHE:
        if not hasattr(usual, name) or (name == "swa_full" and not is_sliding):
            continue
        value, other = getattr(given, name), getattr(usual, name)
        if name in _YARN and not scaling:
            value, other = value if value >= 0 else _YARN[name], _YARN[name]
        if value != other:
            words.append(f"{name}={value:g}")
    if any(name.endswith("original_context_length") for name in scaling):
        words.append(f"n_ctx={n_ctx}")  # LongRoPE has other factors beyond that length
    return " ".join(words)


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
