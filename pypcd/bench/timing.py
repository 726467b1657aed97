"""Times prompts and steps of one or several sequences on a llama_cpp.Llama. A step is one token of each sequence.

Run as a script, it times llama-cpp-python's own library, in a process without pypcd: `measurement` sends requests on stdin,
one JSON object a line. So it imports nothing from pypcd.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np

Tokens = Sequence[int]

# tokens of each sequence that are not timed: graphs are built, second keys made
WARM_UP = 6

_PART = 128  # tokens that fill() evaluates between two calls of `tell`


class Texts:
    """Sequences of equal length in a context, decoded side by side. Nothing else may use the context.

    Args:
        n: how many; sequences 0 to n - 1.
    """

    def __init__(self, llm: llama_cpp.Llama, n: int = 1) -> None:
        self.n, self.n_past = n, 0
        self._first: Tokens = []  # the tokens of sequence 0
        self._llm, self._ctx = llm, llm._ctx.ctx
        self._evaluate: Any = llm._ctx.decode  # a pypcd.Llama's puts twins into the same batch
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        model = llm._model.model
        # a recurrent state cannot go back to an earlier token: the states after fill() are kept, and loaded
        kinds = ("llama_model_is_recurrent", "llama_model_is_hybrid")  # the second since llama-cpp-python 0.3.17
        self._keeps = any(getattr(llama_cpp, kind)(model) for kind in kinds if hasattr(llama_cpp, kind))
        self._kept: list[Any] = []
        self._next: list[int] = []

    def clear(self) -> None:
        for seq in range(self.n):
            self._forget(seq, 0)
        self.n_past = 0

    def read(self, texts: Sequence[Tokens]) -> float:
        """Evaluate prompts, one for each sequence, with the logits of their last tokens. Returns the seconds it took."""
        self.clear()
        seconds = self._read(dict(enumerate(texts)), 0)
        self._first, self.n_past = texts[0], len(texts[0])
        return seconds

    def fill(self, texts: Sequence[Tokens], tell: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Fill the cache with a text for each sequence. What they begin with in common is evaluated once; the others get
        a copy of it in cells of their own. What sequence 0 holds of it already is kept.

        Args:
            tell: called with how many tokens are evaluated, and how many are to be.
        """
        n_common = _common(texts)
        if self.n_past > n_common or self._first != texts[0][: self.n_past]:
            self.clear()
        for seq in range(1, self.n):
            self._forget(seq, 0)
        n_new = n_common - self.n_past
        n = n_new + sum(len(text) - n_common for text in texts)
        tell(0, n)
        self._read({0: texts[0][self.n_past : n_common]}, self.n_past, _PART, lambda done: tell(done, n))
        if n_common and self.n > 1:
            state = self._state(0)
            for seq in range(1, self.n):
                self._load(seq, state)
        rests = {seq: text[n_common:] for seq, text in enumerate(texts)}
        self._read(rests, n_common, _PART, lambda done: tell(n_new + done, n))
        self._first, self.n_past = texts[0], len(texts[0])
        self._kept = [self._state(seq) for seq in range(self.n)] if self._keeps else []

    def continuations(self, n_tokens: int) -> list[list[int]]:
        """The tokens that greedy decoding adds to each sequence after fill() or read()."""
        found = [self._next]
        for i in range(n_tokens - 1):
            self._decode([(token, self.n_past + i, seq, True) for seq, token in enumerate(found[-1])])
            found.append(self._most_probable(self.n))
        self._rewind()
        return [list(tokens) for tokens in zip(*found)]

    def time(self, tokens: Sequence[Tokens], n_rows: int = 1) -> float:
        """Seconds for a step of `n_rows` tokens of each sequence with the logits of all, without the steps of the first
        WARM_UP tokens. The cache is left unchanged."""
        seconds = []
        for first in range(0, len(tokens[0]) - n_rows + 1, n_rows):
            step = range(first, first + n_rows)
            seconds.append(
                self._decode([(text[i], self.n_past + i, seq, True) for seq, text in enumerate(tokens) for i in step])
            )
        self._rewind()
        timed = seconds[WARM_UP // n_rows :] or seconds[-1:]
        return sum(timed) / len(timed)

    def _read(
        self,
        texts: dict[int, Tokens],
        n_past: int,
        n_most: int = 2**31,
        tell: Callable[[int], object] = lambda done: None,
    ) -> float:
        entries = [
            (token, n_past + i, seq, i == len(text) - 1) for seq, text in texts.items() for i, token in enumerate(text)
        ]
        seconds, self._next = 0.0, []
        size = min(self._llm.n_batch, n_most)
        for first in range(0, len(entries), size):
            part = entries[first : first + size]
            seconds += self._decode(part)
            self._next += self._most_probable(sum(entry[-1] for entry in part))
            tell(first + len(part))
        return seconds

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> float:
        """Seconds for a batch of (token, position, sequence, whether its logits are wanted)."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, seq, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            rows = range(-sum(entry[-1] for entry in entries), 0)
            start = time.perf_counter()
            self._evaluate(types.SimpleNamespace(batch=batch))
            for i in rows:
                llama_cpp.llama_get_logits_ith(self._ctx, i)
            if not rows:
                llama_cpp.llama_synchronize(self._ctx)
            return time.perf_counter() - start
        finally:
            llama_cpp.llama_batch_free(batch)

    def _most_probable(self, n: int) -> list[int]:
        """Of the last n rows."""
        n_vocab = self._llm.n_vocab()
        pointers = [llama_cpp.llama_get_logits_ith(self._ctx, i) for i in range(-n, 0)]
        return [int(np.ctypeslib.as_array(pointer, shape=(n_vocab,)).argmax()) for pointer in pointers]

    def _rewind(self) -> None:
        for seq in range(self.n):
            self._forget(seq, 0 if self._keeps else self.n_past)
            if self._keeps:
                self._load(seq, self._kept[seq])

    def _forget(self, seq: int, n_past: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, seq, n_past, -1)

    def _state(self, seq: int) -> Any:
        size = llama_cpp.llama_state_seq_get_size(self._ctx, seq)
        state = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self._ctx, state, size, seq) != size:
            raise RuntimeError(f"the state of sequence {seq} could not be saved")
        return state

    def _load(self, seq: int, state: Any) -> None:
        if llama_cpp.llama_state_seq_set_data(self._ctx, state, len(state), seq) == 0:
            raise RuntimeError(f"the context has no room for a copy of {len(state)} bytes in sequence {seq}")


def _common(texts: Sequence[Tokens]) -> int:
    """How many tokens the texts begin with in common; not the last one, whose logits are read."""
    ends = (i for i, tokens in enumerate(zip(*texts)) if len(set(tokens)) > 1)
    return min(next(ends, len(texts[0])), len(texts[0]) - 1)


def main() -> None:
    texts = Texts(llama_cpp.Llama(verbose=False, **json.loads(sys.argv[1])))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(texts, request["do"])(*request["args"])), flush=True)


if __name__ == "__main__":
    main()
