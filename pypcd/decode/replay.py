"""Replay: the passages that a question is about are repeated before the question."""

from __future__ import annotations

import dataclasses
from typing import Any

from pypcd.decode.method import Answering, Edited
from pypcd.decode.session import Session
from pypcd.errors import InputError, did_you_mean
from pypcd.find import FINDERS, Asked, find
from pypcd.find.asked import Look
from pypcd.prompt import AnyPrompt
from pypcd.settings.ranges import Integer, check

__all__ = ["Replay"]


@dataclasses.dataclass(frozen=True)
class Replay:
    """After ReContext (arXiv 2607.02509): the passages that a finder takes for what the question is about stand once more between the text
    and the question, in their order.

    Args:
        n: how many passages at most, 1 to 100; None: two, or three if finders disagree.
        n_tokens: how many tokens they have together at most, 1 to 4096. The first one has as many as it has.
        finder: the name of one of pypcd.find.FINDERS.
    """

    n: int | None = None
    n_tokens: int = 512
    finder: str = "both"

    in_conversations = True

    def __post_init__(self) -> None:
        check(self, n_tokens=Integer(1, 4096), **({} if self.n is None else {"n": Integer(1, 100)}))
        if self.finder not in FINDERS:
            near = did_you_mean(self.finder, FINDERS)
            raise InputError(f"finder is {self.finder!r}{near}; allowed: {', '.join(FINDERS)}")

    def edit(self, session: Session, prompt: AnyPrompt, *, chat: bool, answer: Answering) -> Edited:
        return self.repeated(session.llm, prompt, chat=chat, look=session.attention)

    def repeated(self, llm: Any, prompt: AnyPrompt, *, chat: bool, look: Look) -> Edited:
        """A prompt with its passages before the question.

        Args:
            llm: a Llama, or prompt.Elsewhere.
            look: as in Asked; what it raises as UnsupportedError leaves attention out of "both".
        """
        found = find(Asked(llm, prompt, chat, look), finder=self.finder, n=self.n, n_tokens=self.n_tokens)
        texts = [passage.text for passage in found.passages]
        return Edited(prompt.with_passages(texts) if texts else prompt, found)
