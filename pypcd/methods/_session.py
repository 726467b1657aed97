"""A model's context, driven step by step: one prompt, and sequences that go on from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Callable

import numpy as np
import numpy.typing as npt

from pypcd import _engine
from pypcd._errors import PCDError

if TYPE_CHECKING:
    from pypcd._config import PCDConfig
    from pypcd._llama import Llama

__all__ = ["Logits", "Rows2D", "Session"]

Logits = npt.NDArray[np.float32]  # [n_vocab]
Rows2D = npt.NDArray[np.float32]  # [n_sequences, n_vocab]


class Session:
    """One model's context. Sequence 0 holds the prompt; others are made by fork() or read().

    A prompt is evaluated from an empty cache, all but its last token, with PCD off, and stays: whatever is asked of it
    next starts from these same numbers. So an answer depends neither on what was asked before nor on its order.

    Attributes:
        n_evaluated: prompt tokens evaluated so far.
        refusals: what is known of what this model cannot do, for Method.

    Raises:
        UnsupportedError: the model's decoder waits for an encoder.
    """

    def __init__(self, llm: Llama) -> None:
        _engine.check_decoder(llm)
        self.llm = llm
        self.n_evaluated = 0
        self.refusals: dict[tuple[object, bool], str | None] = {}
        self._prompt: list[int] = []
        self._n_prompt = 0  # positions of all but its last token
        self._n_changes = -1  # of the model's cache, when the prompt was evaluated
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
        """The row after the last token of a prompt, in sequence 0. All other sequences are gone.

        Args:
            setting: PCD from the prompt's last token on.
            kind: what the cached prompt depends on beside its tokens; of another kind, it is evaluated anew.
            read: evaluates the prompt but its last token in sequence 0 of the empty cache, and returns how many positions
                it takes there; None: as they come.

        Raises:
            ValueError: the prompt is empty or does not fit in the context.
            PCDError: llama_decode failed.
            UnsupportedError: this model cannot run the setting.
        """
        llm, tokens = self.llm, list(tokens)
        if not tokens or len(tokens) >= llm.n_ctx():
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; allowed: 1 to {llm.n_ctx() - 1}, a context of {llm.n_ctx()} "
                "with room for an answer"
            )
        self._set_pcd_aside()
        is_mine = self._n_changes == llm._n_changes  # nobody else has evaluated in this context
        if not (is_mine and kind == self._kind and tokens == self._prompt and self._rewind()):
            self.clear()
            llm.pcd = None
            self._n_prompt = (read or self._read)(tokens[:-1])
            self._prompt, self._kind, self._n_changes = tokens, kind, llm._n_changes
            self.n_evaluated += len(tokens)
        llm.pcd = setting
        self._n_past = {0: self._n_prompt}
        return self.step({0: tokens[-1]})[0]

    def step(self, tokens: Mapping[int, int]) -> Rows2D:
        """Give each of some sequences its next token, all in one batch.

        Returns:
            float32[len(tokens), n_vocab]: their logits, in the same order.
        """
        entries = [(token, self._n_past[seq], seq, True) for seq, token in tokens.items()]
        self.decode(entries)
        for seq in tokens:
            self._n_past[seq] += 1
        return _engine.rows(self.llm, len(entries))

    def read(self, seq: int, tokens: Sequence[int]) -> Logits:
        """Another prompt in a sequence of its own, beside the one in sequence 0.

        Returns:
            float32[n_vocab]: the row after its last token.
        """
        self.drop([seq])
        self._n_past[seq] = 0
        n_batch = self.llm.n_batch
        for i in range(0, len(tokens) - 1, n_batch):
            part = tokens[i : min(i + n_batch, len(tokens) - 1)]
            self.decode([(token, i + j, seq, False) for j, token in enumerate(part)])
        self._n_past[seq] = len(tokens) - 1
        self.n_evaluated += len(tokens)
        return self.step({seq: tokens[-1]})[0]

    def fork(self, pairs: Mapping[int, int]) -> None:
        """Make sequences go on from others: target -> source. They share what both have in the cache."""
        self.drop(pairs)
        for target, source in pairs.items():
            _engine.copy_sequence(self.llm, source, target)
            self._n_past[target] = self._n_past[source]

    def drop(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if not 0 <= seq < self.llm.n_seq_max:
                raise ValueError(
                    f"sequence is {seq}; allowed: 0 to {self.llm.n_seq_max - 1}; load the model with a larger n_seq_max"
                )
            _engine.rewind(self.llm, 0, seq)
            self._n_past.pop(seq, None)

    def plainly(self) -> None:
        """Switch PCD off, until the answer is finished."""
        self._set_pcd_aside()
        self.llm.pcd = None

    def _set_pcd_aside(self) -> None:
        if self._before is None:
            self._before = (self.llm.pcd,)

    def on_finish(self, undo: Callable[[], object]) -> None:
        """Have something called when the answer is finished, or has failed."""
        self._undo.append(undo)

    def finish(self) -> None:
        """Leave the model as after evaluating the prompt, with its own PCD setting."""
        try:
            if self._prompt and not self._rewind():
                self.clear()
            if self._kind is not None:
                self.llm.reset()  # keys that plain decoding must not take for its own
        finally:
            while self._undo:
                self._undo.pop()()
            if self._before is not None:
                (self.llm.pcd,) = self._before
                self._before = None

    def clear(self) -> None:
        """Forget the prompt too."""
        _engine.clear(self.llm)
        self._prompt, self._kind, self._n_past = [], None, {}

    def is_end(self, token: int) -> bool:
        return _engine.is_end(self.llm, token)

    def _rewind(self) -> bool:
        """Back to the prompt without its last token; False where a recurrent state cannot go back."""
        self.drop([seq for seq in self._n_past if seq])
        return _engine.rewind(self.llm, self._n_prompt, 0)

    def _read(self, tokens: Sequence[int]) -> int:
        if tokens:
            self.llm.eval(tokens)
        return len(tokens)

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Evaluate (token, position, sequence, whether its logits are wanted), all in one batch."""
        if not _engine.decode(self.llm, entries):
            raise PCDError(
                f"the context of {self.llm.n_ctx()} tokens is full with {len(self._n_past)} sequences; load the model "
                "with a larger n_ctx"
            )
