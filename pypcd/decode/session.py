"""A model's context, used step by step: one prompt, and sequences that continue it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.errors import InputError, PCDError

if TYPE_CHECKING:
    from pypcd.llama import Llama
    from pypcd.settings.config import PCDConfig

__all__ = ["Logits", "Rows2D", "Session"]

_PART = object()  # the kind of a prompt's beginning, which the next prompts may build on

Logits = npt.NDArray[np.float32]  # [n_vocab]
Rows2D = npt.NDArray[np.float32]  # [n_sequences, n_vocab]


class Session:
    """One model's context. Sequence 0 holds the prompt; others are made by fork() or read().

    A prompt, all but its last token, is evaluated with PCD off into an empty cache, and stays there: every answer to it
    starts from the same keys and values, and is evaluated in one way (PCDConfig.repeatable). So an answer
    does not depend on earlier ones, on their order, or on how busy the machine is.

    Attributes:
        n_evaluated: prompt tokens evaluated so far.
        refusals: why this model cannot run a method, as far as known; for Method.

    Args:
        read: evaluates a prompt's tokens, all but the last, in the empty cache, and returns how many of them were not on disk; by
            default Llama.eval.

    Raises:
        UnsupportedError: the model has an encoder.
    """

    def __init__(self, llm: Llama, read: Callable[[Sequence[int]], int] | None = None) -> None:
        engine.check_decoder(llm)
        self.llm = llm
        self._evaluate = read
        self.n_evaluated = 0
        self.refusals: dict[tuple[object, bool], str | None] = {}
        self._prompt: list[int] = []
        self._n_prompt = 0  # number of its positions, without its last token
        self._n_changes = -1  # the model's own count, when the prompt was evaluated
        self._kind: object = None
        self._before: tuple[PCDConfig | None] | None = None  # the model's setting, while another is in force
        self._undo: list[Callable[[], object]] = []
        self._n_past: dict[int, int] = {}

    @property
    def n_vocab(self) -> int:
        return self.llm.n_vocab()

    def start(
        self,
        tokens: Sequence[int],
        setting: PCDConfig | None = None,
        *,
        kind: object = None,
        read: Callable[[Sequence[int]], int] | None = None,
    ) -> Logits:
        """Evaluate a prompt in sequence 0; returns the row after its last token. All other sequences are dropped.

        Args:
            setting: the PCD setting from the prompt's last token on.
            kind: what the cached prompt depends on besides its tokens; if it differs, the prompt is evaluated again.
            read: evaluates the prompt without its last token in sequence 0 of the empty cache, and returns how many
                positions that takes; None: Llama.eval.

        Raises:
            ValueError: the prompt is empty or does not fit in the context.
            PCDError: llama_decode failed.
            UnsupportedError: this model cannot run the setting.
        """
        llm, tokens = self.llm, list(tokens)
        if not tokens or len(tokens) >= llm.n_ctx():
            raise InputError(
                f"the prompt has {len(tokens)} tokens; allowed: 1 to {llm.n_ctx() - 1}, a context of {llm.n_ctx()} "
                "with room for an answer"
            )
        self._set_pcd_aside()
        is_mine = self._n_changes == llm._n_changes  # no other code has evaluated in this context
        if self._kind is _PART and kind is None and is_mine:
            self._go_on(tokens)
        elif not (is_mine and kind == self._kind and tokens == self._prompt and self._rewind()):
            self.clear()
            llm.pcd = None
            self._n_prompt = (read or self._read)(tokens[:-1])
            self._prompt, self._kind, self._n_changes = tokens, kind, llm._n_changes
            self.n_evaluated += len(tokens)
        llm.pcd = setting and setting.repeatable()
        self._n_past = {0: self._n_prompt}
        return self.step({0: tokens[-1]})[0]

    def back(self, n: int) -> None:
        """Forget all but the first n tokens of the prompt that was started. Until the answer is finished, prompts that begin
        with some of them keep these."""
        tokens = self._prompt[:n]
        self.drop([seq for seq in self._n_past if seq])
        if not engine.rewind(self.llm, n, 0):
            self.clear()
            self._read(tokens)
            self.n_evaluated += n
        self._prompt, self._kind, self._n_past = tokens, _PART, {0: n}

    def _go_on(self, tokens: list[int]) -> None:
        """Evaluate a prompt without its last token, from where it differs from what back() has left."""
        n = 0
        while n < min(len(self._prompt), len(tokens) - 1) and self._prompt[n] == tokens[n]:
            n += 1
        self.back(n)
        self.llm.pcd = None
        self._extend(0, tokens[n:-1])
        self._n_prompt = len(tokens) - 1
        self.n_evaluated += len(tokens) - n

    def step(self, tokens: Mapping[int, int]) -> Rows2D:
        """Give sequences their next tokens, all in one batch.

        Returns:
            float32[len(tokens), n_vocab]: their logits, in the same order.
        """
        entries = [(token, self._n_past[seq], seq, True) for seq, token in tokens.items()]
        self.decode(entries)
        for seq in tokens:
            self._n_past[seq] += 1
        return engine.rows(self.llm, len(entries))

    def read(self, seq: int, tokens: Sequence[int]) -> Logits:
        """Evaluate another prompt in a sequence of its own, next to the one in sequence 0.

        Returns:
            float32[n_vocab]: the row after its last token.
        """
        self.drop([seq])
        self._n_past[seq] = 0
        self._extend(seq, tokens[:-1])
        self.n_evaluated += len(tokens)
        return self.step({seq: tokens[-1]})[0]

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Evaluate more tokens of a sequence, without their logits."""
        for i in range(0, len(tokens), self.llm.n_batch):
            part, n_past = tokens[i : i + self.llm.n_batch], self._n_past[seq]
            self.decode([(token, n_past + j, seq, False) for j, token in enumerate(part)])
            self._n_past[seq] = n_past + len(part)

    def fork(self, pairs: Mapping[int, int]) -> None:
        """Make sequences continue others: target -> source. In the cache they share their common part."""
        self.drop(pairs)
        for target, source in pairs.items():
            engine.copy_sequence(self.llm, source, target)
            self._n_past[target] = self._n_past[source]

    def drop(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if not 0 <= seq < self.llm.n_seq_max:
                raise InputError(
                    f"sequence is {seq}; allowed: 0 to {self.llm.n_seq_max - 1}; load the model with a larger n_seq_max"
                )
            engine.rewind(self.llm, 0, seq)
            self._n_past.pop(seq, None)

    def plainly(self) -> None:
        """Switch PCD off, until the answer is finished."""
        self._set_pcd_aside()
        self.llm.pcd = None

    def _set_pcd_aside(self) -> None:
        if self._before is None:
            self._before = (self.llm.pcd,)

    def on_finish(self, undo: Callable[[], object]) -> None:
        """Call something when the answer is finished, or has failed."""
        self._undo.append(undo)

    def finish(self) -> None:
        """Restore the model to its state after evaluating the prompt, with its own PCD setting."""
        try:
            if self._kind is _PART or (self._prompt and not self._rewind()):
                self.clear()
            if self._kind is not None:
                self.llm.reset()  # so that plain decoding does not reuse these keys
        finally:
            while self._undo:
                self._undo.pop()()
            if self._before is not None:
                (self.llm.pcd,) = self._before
                self._before = None

    def clear(self) -> None:
        """Forget the prompt too."""
        engine.clear(self.llm)
        self._prompt, self._kind, self._n_past = [], None, {}

    def is_end(self, token: int) -> bool:
        return engine.is_end(self.llm, token)

    def _rewind(self) -> bool:
        """Go back to the prompt without its last token; False if a recurrent state cannot go back."""
        self.drop([seq for seq in self._n_past if seq])
        return engine.rewind(self.llm, self._n_prompt, 0)

    def _read(self, tokens: Sequence[int]) -> int:
        if tokens and self._evaluate is not None:
            self.n_evaluated -= len(tokens) - self._evaluate(tokens)
        elif tokens:
            self.llm.eval(tokens)
        return len(tokens)

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Evaluate (token, position, sequence, whether its logits are wanted), all in one batch."""
        if not engine.decode(self.llm, entries):
            raise PCDError(
                f"the context of {self.llm.n_ctx()} tokens is full with {len(self._n_past)} sequences; load the model "
                "with a larger n_ctx"
            )
