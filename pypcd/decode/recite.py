"""Recite first: the model copies what the question needs from its context, and then answers from the copy alone."""

from __future__ import annotations

import dataclasses

from pypcd.decode.method import Answering, Edited
from pypcd.decode.session import Session
from pypcd.prompt import Prompt
from pypcd.settings.ranges import Integer, check

__all__ = ["Recite"]


@dataclasses.dataclass(frozen=True)
class Recite:
    """Two calls (arXiv 2510.05381): the prompt, with the request to copy the passage that the question needs; then the question
    with that passage as its whole context. So the answer comes from a short prompt.

    The paper's wording is for instruction models. This one is ours; it goes after the question and ends where a base model
    goes on with the passage. A passage ends at an empty line. A prompt without context is answered as it is, and so is one for which
    no passage is written.

    Args:
        n_tokens: the longest passage, 1 to 4096 tokens.
        request: the words.
    """

    n_tokens: int = 96
    request: str = "\n\nBefore the answer, the part of the text above that is needed for it is copied word for word.\n\nThe part of the text:"

    def __post_init__(self) -> None:
        check(self, n_tokens=Integer(1, 4096))

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Edited:
        if not prompt.segments:
            return Edited(prompt)
        asked = prompt.replace(after=prompt.after + self.request, answer_prefix="", shots=())
        passage = answer(asked, self.n_tokens).strip().partition("\n\n")[0].strip()
        return Edited(prompt.replace(segments=(passage,)) if passage else prompt)
