"""A question about texts in a prompt, as finders get it, and what they give back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd.prompt import AnyPrompt, Laid, Turn, lay

if TYPE_CHECKING:
    from pypcd.find.heads import Heads
    from pypcd.llama import Llama

__all__ = ["Asked", "Finder", "Look", "Passage", "Ranked"]

SHARE = 0.2  # of the best segment's score, that others need to be found too

# how much attention tokens pay to each position, as Session.attention() tells
Look = Callable[[Sequence[int], Sequence[int], int, "Heads | None"], Mapping[int, npt.NDArray[np.float32]]]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt whose last message ends with a question.

    Attributes:
        prompt: its pieces of kind "segment" are what is searched, the last one of kind "question" what is asked.
        look: reads attention.
    """

    llm: Llama
    prompt: AnyPrompt
    chat: bool
    look: Look

    @functools.cached_property
    def turns(self) -> tuple[Turn, ...]:
        return self.prompt.turns

    @functools.cached_property
    def segments(self) -> tuple[str, ...]:
        return tuple(piece.text for _, message in self.turns for piece in message if piece.kind == "segment")

    @property
    def own(self) -> str:
        """The question by itself."""
        return "".join([piece.text.strip() for piece in self.turns[-1][1] if piece.kind == "question"][-1:])

    @property
    def question(self) -> str:
        """The question, behind the one before it."""
        return "\n".join(filter(None, [self.prompt.earlier.strip(), self.own]))

    def laid(self, question: str) -> Laid:
        """The prompt with another question in the place of this one."""
        *others, (role, message) = self.turns
        asked = tuple(
            piece._replace(text=piece.text.replace(piece.text.strip(), question)) if piece.kind == "question" else piece
            for piece in message
        )
        return lay(self.llm, (*others, (role, asked)), chat=self.chat, answer_prefix=self.prompt.answer_prefix)


@dataclasses.dataclass(frozen=True)
class Passage:
    """A segment that was found.

    Attributes:
        index: of all segments of the prompt.
        score: how well it fits, in its finder's own units.
        finder: the name of what found it.
    """

    index: int
    text: str
    score: float
    finder: str


@dataclasses.dataclass(frozen=True)
class Ranked:
    """What a finder has found.

    Attributes:
        hits: the segments that fit, the best first.
        n: how many of them to repeat, if nobody says.
        note: what was done in another way than asked for, in a sentence, or "".
    """

    hits: list[Passage]
    n: int = 2
    note: str = ""

    @classmethod
    def of(cls, asked: Asked, scores: npt.NDArray[np.float64], finder: str) -> Ranked:
        """What a finder has found that scores segments."""
        order = (int(i) for i in np.argsort(-scores, kind="stable"))
        best = (i for i in order if scores[i] > 0 and scores[i] >= SHARE * scores.max())
        return cls([Passage(i, asked.segments[i].strip(), float(scores[i]), finder) for i in best])


# ranks the segments of a prompt; an UnsupportedError says why it cannot work with this model
Finder = Callable[[Asked], Ranked]
