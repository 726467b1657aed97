"""A tokenizer without a model: pieces of up to four letters or three digits, single spaces and signs."""

from __future__ import annotations

import re

from pypcd.prompt import Prompt

BOS = 0


class Pieces:
    """Puts BOS before every text.

    Args:
        template: how many tokens its chat template adds to every prompt.
    """

    pattern = r"[^\W\d]{1,4}|\d{1,3}|\W"

    def __init__(self, template: int = 0) -> None:
        self.template = template
        self._ids: dict[str, int] = {}

    def count(self, prompt: Prompt) -> int:
        asked = "".join(piece.text for _, message in prompt.turns for piece in message)
        return len(self.encode(asked + prompt.answer_prefix)) + self.template

    def encode(self, text: str) -> list[int]:
        return [BOS, *(self._ids.setdefault(piece, len(self._ids) + 1) for piece in re.findall(self.pattern, text))]


class Words(Pieces):
    """Pieces as a released model has them: words with the space before them, single digits, signs in a row."""

    pattern = r" ?[^\W\d]{1,7}|\d| ?[^\w\s]{1,3}|\s"
