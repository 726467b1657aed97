"""Times prompts and steps on a llama_cpp.Llama.

Run as a script, it times llama-cpp-python's own library, in a process without pypcd: `measurement` sends requests on stdin,
one JSON object a line. So it imports nothing from pypcd.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

WARM_UP = 6  # tokens that are not timed: graphs are built, second keys made


class Text:
    """A text in a context, which nothing else may use."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm, self._ctx = llm, llm._ctx.ctx
        self._decode: Any = llm._ctx.decode  # a pypcd.Llama's puts twins into the same batch
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._tokens: list[int] = []
        # a recurrent state cannot go back to an earlier token: the state after fill() is kept, and loaded
        kinds = ("llama_model_is_recurrent", "llama_model_is_hybrid")  # the second since llama-cpp-python 0.3.17
        self._is_recurrent = any(
            getattr(llama_cpp, kind)(llm._model.model) for kind in kinds if hasattr(llama_cpp, kind)
        )
        self._state: Any = None
        self._next = 0  # the most probable token after the text

    def read(self, tokens: Sequence[int]) -> float:
        """Evaluate a prompt from an empty cache, with the logits of its last token. Returns the seconds it took."""
        self._llm.reset()
        start = time.perf_counter()
        self._llm.eval(tokens)
        llama_cpp.llama_synchronize(self._ctx)
        self._tokens = list(tokens)
        return time.perf_counter() - start

    def fill(self, tokens: Sequence[int]) -> None:
        """Fill the cache. If it holds the text's beginning already, only the rest is evaluated."""
        n_past = len(self._tokens)
        if 0 < n_past < len(tokens) and self._tokens == list(tokens[:n_past]):
            self._llm.eval(tokens[n_past:])
            self._tokens = list(tokens)
        else:
            self.read(tokens)
        self._next = self._most_probable()
        if self._is_recurrent:
            self._state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self._ctx, 0))()
            llama_cpp.llama_state_seq_get_data(self._ctx, self._state, len(self._state), 0)

    def continuation(self, n_tokens: int) -> list[int]:
        """The tokens that greedy decoding adds after fill()."""
        tokens = [self._next]
        while len(tokens) < n_tokens:
            self._step(tokens[-1:], len(tokens) - 1)
            tokens.append(self._most_probable())
        self._rewind()
        return tokens

    def time(self, tokens: Sequence[int], n_rows: int = 1) -> float:
        """Seconds for a step of `n_rows` tokens with the logits of all, without the steps of the first WARM_UP tokens. The cache is
        left unchanged."""
        starts = range(0, len(tokens) - n_rows + 1, n_rows)
        seconds = [self._step(tokens[at : at + n_rows], at) for at in starts]
        self._rewind()
        timed = seconds[WARM_UP // n_rows :] or seconds[-1:]
        return sum(timed) / len(timed)

    def _step(self, tokens: Sequence[int], at: int) -> float:
        """Seconds for tokens, the first of them `at` behind the text."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, len(self._tokens) + at + i, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            start = time.perf_counter()
            self._decode(types.SimpleNamespace(batch=batch))
            for i in range(-len(tokens), 0):
                llama_cpp.llama_get_logits_ith(self._ctx, i)
            return time.perf_counter() - start
        finally:
            llama_cpp.llama_batch_free(batch)

    def _most_probable(self) -> int:
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._ctx, -1), shape=(self._llm.n_vocab(),))
        return int(row.argmax())

    def _rewind(self) -> None:
        if self._is_recurrent:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, 0, -1)
            if llama_cpp.llama_state_seq_set_data(self._ctx, self._state, len(self._state), 0) == 0:
                raise RuntimeError(f"the state after {len(self._tokens)} tokens could not be loaded")
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, len(self._tokens), -1)


def main() -> None:
    text = Text(llama_cpp.Llama(verbose=False, **json.loads(sys.argv[1])))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(text, request["do"])(*request["args"])), flush=True)


if __name__ == "__main__":
    main()
