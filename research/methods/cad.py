"""Context-aware decoding: a contrast with the same prompt without its context (arXiv 2305.14739)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pypcd.decode import values_of
from pypcd.decode.rows import RowSource, Stream
from pypcd.decode.session import Logits, Rows2D, Session
from pypcd.errors import InputError
from pypcd.prompt import Prompt, prompt_tokens
from pypcd.settings.ranges import Number, check

__all__ = ["CAD", "parse"]


@dataclasses.dataclass(frozen=True)
class CAD(RowSource):
    """Context-aware decoding (arXiv 2305.14739): (1 + alpha) logits with the context - alpha logits without it.

    The second prompt is the same without its context. Both are evaluated in one batch, the second one in the sequences
    with odd ids.

    Args:
        alpha: 0 to 100; 0.5 for summaries, 1 for conflicting knowledge in the authors' examples.
    """

    alpha: float = 1.0

    n_sequences = 2
    in_conversations = False

    def __post_init__(self) -> None:
        check(self, alpha=Number(0, 100))

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        bare = prompt_tokens(session.llm, prompt.replace(segments=()), chat=chat)
        if not bare:
            raise InputError("without its context the prompt is empty; give Prompt a question (before or after)")
        if list(bare) == list(tokens):
            raise InputError(
                "the prompt has no context to leave out; give it one (--context, or the segments of a Prompt)"
            )
        first = session.start(tokens)
        return _CADStream(session, first, session.read(1, bare), self.alpha)


class _CADStream(Stream):
    def __init__(self, session: Session, first: Logits, bare: Logits, alpha: float) -> None:
        self._alpha = alpha
        super().__init__(session, (1 + alpha) * first - alpha * bare)

    def step(self, tokens: Mapping[int, int]) -> Rows2D:
        rows = self.session.step({2 * seq + i: token for i in (0, 1) for seq, token in tokens.items()})
        with_context, without = np.split(rows, 2)
        return (1 + self._alpha) * with_context - self._alpha * without

    def fork(self, pairs: Mapping[int, int]) -> None:
        self.session.fork({2 * target + i: 2 * source + i for i in (0, 1) for target, source in pairs.items()})

    def drop(self, seqs: Sequence[int]) -> None:
        self.session.drop([2 * seq + i for i in (0, 1) for seq in seqs])


def parse(words: Sequence[str]) -> CAD:
    """From the words behind the name: cad:0.5."""
    return values_of(CAD, words, "alpha")
