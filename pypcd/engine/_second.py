"""A second context of the stock engine, which evaluates a whole text with over-rotated frequencies (PCDConfig.cache="separate").

It shares the model's weights and has keys and values of its own, of one text. What it does not hold yet, it evaluates once a row is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _log
from pypcd.engine._calls import batch_of
from pypcd.engine._rotation import Rho, Rotation, Watch
from pypcd.errors import UnsupportedError

__all__ = ["Second"]

_SIZE = re.compile(r"buffer size = *([\d.]+) MiB")


class Second:
    """The second context. It is freed by close().

    Args:
        first: what holds the first context.
        model: its llama_model.
        params: what that was opened with.
        type_k: the type of its keys (PCDConfig.type_k_over), -1: that of the first one's.

    Raises:
        UnsupportedError: there is no memory for it.
    """

    def __init__(self, first: Any, model: Any, params: Any, type_k: int) -> None:
        self._first, self.type_k, self._table, self._held = first, type_k, None, list[int]()
        self._rotation, self._watch, self.n_evaluated = Rotation(), Watch(), 0
        self._watch.rotation = self._rotation
        own = type(params).from_buffer_copy(params)
        own.cb_eval, own.type_k = self._watch.callback, params.type_k if type_k < 0 else type_k
        _log.clear_errors()
        with _log.collected() as lines:
            self.ctx = llama_cpp.llama_init_from_model(model, own)
        if not self.ctx:
            raise UnsupportedError(f'there is no memory for the second context of cache="separate": {_log.reason()}')
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self.n_bytes = int(2**20 * sum(float(size) for line in lines for size in _SIZE.findall(line)))
        _log.logger.info("PCD: the second context of cache=separate takes %.1f MiB", self.n_bytes / 2**20)

    def close(self) -> None:
        if self.ctx:
            llama_cpp.llama_free(self.ctx)
            self._rotation.close()
            self.ctx = None

    def turn(self, table: Any, rho: Rho) -> None:
        """The frequencies from here on; an equal `table` means the same ones."""
        if table != self._table:
            self._keep(0)
            self._rotation.turn(self.ctx, rho)
            self._table = table

    def rows(
        self, text: Sequence[int], wanted: Sequence[int], abort: Any
    ) -> tuple[int, dict[int, npt.NDArray[np.float32]]]:
        """llama_decode's status, and L* at some positions of a text; n_evaluated says how many tokens that took."""
        end, size = max(wanted) + 1, int(llama_cpp.llama_n_batch(self.ctx))
        same = next((i for i, pair in enumerate(zip(text, self._held)) if pair[0] != pair[1]), len(self._held))
        begin = min(same, *wanted)
        self._keep(begin)
        self.n_evaluated = end - begin
        threads = llama_cpp.llama_n_threads(self._first.ctx), llama_cpp.llama_n_threads_batch(self._first.ctx)
        llama_cpp.llama_set_n_threads(self.ctx, *threads)
        llama_cpp.llama_set_abort_callback(self.ctx, *abort)
        found: dict[int, npt.NDArray[np.float32]] = {}
        for at in range(begin, end, size):
            part = range(at, min(at + size, end))
            with batch_of([(text[pos], pos, [0], pos in wanted) for pos in part]) as batch:
                status = int(llama_cpp.llama_decode(self.ctx, batch))
            if status != 0:
                return status, {}
            self._rotation.check()
            self._held += [text[pos] for pos in part]
            for pos in {*wanted}.intersection(part):
                row = llama_cpp.llama_get_logits_ith(self.ctx, pos - at)
                found[pos] = np.ctypeslib.as_array(row, shape=(self._n_vocab,)).copy()
        return 0, found

    def forget(self, text: Sequence[int] | None) -> None:
        """A text is gone (None: one that is not known), so what is held of it is not that of a later one."""
        if text is None or [*text[: len(self._held)]] == self._held:
            self._keep(0)

    def _keep(self, n: int) -> None:
        """Forget what is behind the first n tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), 0, n, -1)
        del self._held[n:]
