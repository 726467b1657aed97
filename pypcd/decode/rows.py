"""Rows, the logits of each step: the model's own, contrasted ones, or the control experiment's.

A stream is the series of rows that follows one prompt.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.decode.session import Logits, Rows2D, Session
from pypcd.prompt import Prompt, prompt_tokens
from pypcd.settings.config import PCDConfig
from pypcd.settings.fields import names
from pypcd.settings.formula import contrast, entropy, log_softmax, put_behind
from pypcd.settings.ranges import Integer, check

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["PCD", "Control", "Plain", "RowSource", "Stream"]


class Stream:
    """The rows of one prompt's answer, or of several answers in parallel.

    Attributes:
        first: float32[n_vocab], the row after the prompt (sequence 0).
    """

    def __init__(
        self, session: Session, first: Logits, change: Callable[[int, Rows2D], Rows2D] = lambda t, rows: rows
    ) -> None:
        self.session, self._change, self._t = session, change, 0
        self.first = change(0, first[None])[0]

    def step(self, tokens: Mapping[int, int]) -> Rows2D:
        """Give each sequence its next token. Returns the rows that follow, float32[len(tokens), n_vocab]."""
        self._t += 1
        return self._change(self._t, self.session.step(tokens))

    def fork(self, pairs: Mapping[int, int]) -> None:
        """Make sequences continue others: target -> source."""
        self.session.fork(pairs)

    def drop(self, seqs: Sequence[int]) -> None:
        self.session.drop(seqs)


class RowSource:
    """Makes the rows of an answer. Sources that do not change how the prompt is cached share the cached prompt.

    Attributes:
        forks: whether several answers can be generated in parallel, as beam search needs.
        n_sequences: sequences of the context that each answer needs.
        whole_prompt: whether a prompt must be evaluated in one micro-batch.
        pcd: the PCD setting, if the rows are contrasted by PCD.
        in_conversations: whether the prompt may be several messages.
    """

    forks = True
    n_sequences = 1
    whole_prompt = False
    in_conversations = True
    pcd: PCDConfig | None = None

    def refusal(self, llm: Llama) -> str | None:
        """Why this model cannot give these rows, in a sentence; None if it can."""
        return None

    def with_pool(self, prompts: tuple[Prompt, ...]) -> RowSource:
        """The same source, made from these other prompts of the same kind if it needs any (Control does)."""
        return self

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        """Evaluate a prompt.

        Args:
            tokens: the prompt's tokens.
            chat: whether they were made with the chat template.
        """
        return Stream(session, session.start(tokens))


class Plain(RowSource):
    """The model's own logits."""


@dataclasses.dataclass(frozen=True)
class PCD(RowSource):
    """Positional Contrastive Decoding (arXiv 2506.08371, Eq. 6) with a setting."""

    pcd: PCDConfig = dataclasses.field(default_factory=PCDConfig)

    def refusal(self, llm: Llama) -> str | None:
        return engine.pcd_refusal(llm, self.pcd)

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        return Stream(session, session.start(tokens, self.pcd))


_CONTRAST = names("contrast")  # arguments of contrast()
OF_CONTROL = (*names("contrast", "floor"), "n_steps")  # the control's values: of a PCD setting, and its own

# of each model, the pool that was answered last and its means, by the number of steps and whether the chat template was used:
# all controls share them, whatever their contrast
_MEANS: weakref.WeakKeyDictionary[Any, tuple[tuple[Prompt, ...], dict[tuple[int, bool], npt.NDArray[np.float64]]]]
_MEANS = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Control(RowSource):
    """The control experiment for PCD: the same contrast, but with nothing that depends on position.

    Instead of L* it subtracts the mean log-probabilities of other prompts' answers at the same step. A gain that both
    have does not come from position.

    Args:
        pool: other prompts of the same kind; each is answered once, greedily and without PCD.
        pcd: how it contrasts, and where; what else a setting has is left out.
        n_steps: how many tokens of each answer are used; later steps use the mean of the last one.
    """

    pool: tuple[Prompt, ...] = ()
    pcd: PCDConfig = dataclasses.field(default_factory=PCDConfig)
    n_steps: int = 32

    def __post_init__(self) -> None:
        check(self, n_steps=Integer(1))
        used = {name: value for name, value in self.pcd.differences().items() if name in OF_CONTROL}
        object.__setattr__(self, "pcd", PCDConfig(**used))

    def refusal(self, llm: Llama) -> str | None:
        return None if self.pool else "the control needs other prompts of the same kind, but has none"

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        means = self.means(session, chat)
        first = session.start(tokens)
        least = self.pcd.min_first_entropy
        if least > 0.0 and (len(tokens) < self.pcd.min_context or entropy(first) < least):
            return Stream(session, first)  # the whole answer is plain decoding's
        values = {name: getattr(self.pcd, name) for name in _CONTRAST}

        def change(t: int, rows: Rows2D) -> Rows2D:
            if len(tokens) + t < self.pcd.min_context:
                return rows
            prior = means[min(t, len(means) - 1)]
            logs = map(log_softmax, rows)
            return np.stack([put_behind(contrast(row, prior, **values), row) for row in logs]).astype(np.float32)

        return Stream(session, first, change)

    def with_pool(self, prompts: tuple[Prompt, ...]) -> Control:
        return dataclasses.replace(self, pool=prompts)

    def means(self, session: Session, chat: bool) -> npt.NDArray[np.float64]:
        """Mean log-probabilities at each step of the answers to the pool's prompts, float64[n_steps, n_vocab]."""
        pool, known = _MEANS.get(session.llm, ((), {}))
        if pool != self.pool:
            _MEANS[session.llm] = self.pool, (known := {})
        if (self.n_steps, chat) not in known:
            sums: list[npt.NDArray[np.float64]] = []
            counts: list[int] = []
            for prompt in self.pool:
                row = session.start(prompt_tokens(session.llm, prompt, chat=chat))
                for t in range(self.n_steps):
                    if t == len(sums):
                        sums.append(np.zeros(len(row)))
                        counts.append(0)
                    sums[t] += log_softmax(row)
                    counts[t] += 1
                    token = int(row.argmax())
                    if session.is_end(token):
                        break
                    row = session.step({0: token})[0]
            known[self.n_steps, chat] = np.stack([s / n for s, n in zip(sums, counts)])
        return known[self.n_steps, chat]
