"""Changes to a prompt before it is answered."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from pypcd._prompt import Prompt
from pypcd.methods._session import Session

__all__ = ["Edit", "Rephrase"]


class Edit(Protocol):
    """Makes the prompt that is answered from the one that was asked."""

    def edit(self, session: Session, prompt: Prompt, *, chat: bool) -> Prompt: ...


@dataclasses.dataclass(frozen=True)
class Rephrase:
    """Context recalling: the model is asked to repeat what matters before it answers.

    The paper gives no wording. This one stands, unused, in its authors' public LongBench script; it goes behind the
    question.
    """

    request: str = " Please repeat the relevant content before analysis."

    def edit(self, session: Session, prompt: Prompt, *, chat: bool) -> Prompt:
        return prompt.replace(after=prompt.after + self.request)
