"""A second context of the stock engine, which evaluates the whole text with over-rotated frequencies (PCDConfig.cache="separate").

It shares the model's weights, and has keys and values of its own. What is done to the first one's memory is done to its memory too,
and what it has not evaluated yet, it evaluates once a row is wanted.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _log
from pypcd.engine._calls import batch_of
from pypcd.engine._rotation import Rho, Rotation, Watch
from pypcd.errors import PCDError, UnsupportedError

__all__ = ["MEMORY_CALLS", "UNKNOWN", "Second", "Texts"]

UNKNOWN = -1  # for a token
_SIZE = re.compile(r"buffer size = *([\d.]+) MiB")


class Texts:
    """Which token is at which position of each sequence of a memory, as far as that is known."""

    def __init__(self) -> None:
        self.of: collections.defaultdict[int, dict[int, int]] = collections.defaultdict(dict)

    def clear(self, *_: Any) -> None:
        self.of.clear()

    def remove(self, seq: int, begin: int, end: int) -> None:
        for text in list(self.of.values()) if seq < 0 else [self.of[seq]]:
            for pos in _within(text, begin, end):
                del text[pos]

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        text = self.of[source]
        self.of[target].update({pos: text[pos] for pos in _within(text, begin, end)})

    def keep(self, seq: int) -> None:
        kept = self.of[seq]
        self.of.clear()
        self.of[seq] = kept

    def add(self, seq: int, begin: int, end: int, delta: int) -> None:
        text = self.of[seq]
        moved = {pos + delta: text.pop(pos) for pos in _within(text, begin, end)}
        text.update({pos: token for pos, token in moved.items() if pos >= 0})
        # cells that another sequence shares move with these
        self._forget(other for other in self.of if other != seq and delta)

    def divide(self, *_: Any) -> None:
        self._forget(self.of)

    def _forget(self, seqs: Any) -> None:
        for seq in list(seqs):
            self.of[seq] = dict.fromkeys(self.of[seq], UNKNOWN)


def _within(text: Mapping[int, int], begin: int, end: int) -> list[int]:
    return [pos for pos in text if pos >= begin and (end < 0 or pos < end)]


# what changes a memory
MEMORY_CALLS: dict[str, Callable[..., None]] = {
    "llama_memory_clear": Texts.clear,
    "llama_memory_seq_rm": Texts.remove,
    "llama_memory_seq_cp": Texts.copy,
    "llama_memory_seq_keep": Texts.keep,
    "llama_memory_seq_add": Texts.add,
    "llama_memory_seq_div": Texts.divide,
}


class Second:
    """The second context. It is freed by close().

    Args:
        first: the first one.
        params: what that was opened with.
        type_k: the type of its keys (PCDConfig.type_k_over), -1: that of the first one's.

    Raises:
        UnsupportedError: there is no memory for it.
    """

    def __init__(self, first: Any, model: Any, params: Any, type_k: int) -> None:
        self._first, self.type_k, self._rho_of = first, type_k, None
        self._rotation, self._watch, self._texts = Rotation(), Watch(), Texts()
        self._watch.rotation = self._rotation
        own = type(params).from_buffer_copy(params)
        own.cb_eval, own.type_k = self._watch.callback, params.type_k if type_k < 0 else type_k
        _log.clear_errors()
        with _log.collected() as lines:
            self._ctx = llama_cpp.llama_init_from_model(model, own)
        if not self._ctx:
            raise UnsupportedError(f'there is no memory for the second context of cache="separate": {_log.reason()}')
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self.n_bytes = int(2**20 * sum(float(size) for line in lines for size in _SIZE.findall(line)))
        _log.logger.info("PCD: a second context for cache=separate takes %.1f MiB", self.n_bytes / 2**20)

    def close(self) -> None:
        if self._ctx:
            llama_cpp.llama_free(self._ctx)
            self._rotation.close()
            self._ctx = None

    def set(self, table: Any, rho: Rho) -> None:
        """The frequencies from here on; `table` is the same for the same ones."""
        if table != self._rho_of:
            self.change("llama_memory_clear", True)
            self._rotation.turn(self._ctx, rho)
            self._rho_of = table

    def change(self, name: str, *args: Any) -> None:
        """Do to this memory what was done to the first one's."""
        if self._ctx:
            getattr(llama_cpp, name)(self._memory, *args)
            MEMORY_CALLS[name](self._texts, *args)

    def follow(self, function: Any, *args: Any) -> None:
        """Do to this context what was done to the first one."""
        if self._ctx:
            function(self._ctx, *args)

    def rows(
        self, seq: int, text: Mapping[int, int], wanted: Sequence[int]
    ) -> tuple[list[npt.NDArray[np.float32]], int]:
        """L* at some positions of a sequence, and how many tokens were evaluated for them.

        Args:
            text: which token is at which position.

        Raises:
            UnsupportedError: the text is not known.
            PCDError: llama_decode failed, or has no room.
        """
        held, positions = self._texts.of[seq], sorted(pos for pos in text if pos <= max(wanted))
        if UNKNOWN in {text[pos] for pos in positions}:
            raise UnsupportedError(
                'cache="separate" evaluates the whole text, and a part of this one is no text, or was restored without its tokens; '
                "use cache=shared, or evaluate it from its beginning"
            )
        begin = next((pos for pos in positions if held.get(pos) != text[pos]), max(wanted))
        begin = min(begin, *wanted)
        self.change("llama_memory_seq_rm", seq, begin, -1)
        llama_cpp.llama_set_n_threads(
            self._ctx, llama_cpp.llama_n_threads(self._first), llama_cpp.llama_n_threads_batch(self._first)
        )
        missing = [pos for pos in positions if pos >= begin]
        size, found = int(llama_cpp.llama_n_batch(self._ctx)), dict[int, npt.NDArray[np.float32]]()
        for i in range(0, len(missing), size):
            part = missing[i : i + size]
            with batch_of([(text[pos], pos, [seq], pos in wanted) for pos in part]) as batch:
                status = llama_cpp.llama_decode(self._ctx, batch)
            if status != 0:
                self.change("llama_memory_seq_rm", seq, part[0], -1)
                raise PCDError(
                    f'llama_decode returned {status} in the second context of cache="separate": {_log.reason()}'
                )
            self._rotation.check()
            self._texts.of[seq].update({pos: text[pos] for pos in part})
            for k, pos in enumerate(part):
                if pos in wanted:
                    pointer = llama_cpp.llama_get_logits_ith(self._ctx, k)
                    found[pos] = np.ctypeslib.as_array(pointer, shape=(self._n_vocab,)).copy()
        return [found[pos] for pos in wanted], len(missing)
