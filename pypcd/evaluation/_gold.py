"""Where an answer leaves the right one: the gold token's rank and salience there (Eq. 1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pypcd._method import rank
from pypcd._vocabulary import SKIPPED, Vocabulary

__all__ = ["Gold"]


class Gold:
    """Follows an answer token by token until it leaves the gold text; `look` is a method's look argument.

    Where it does, the gold token is the best of those that would have gone on.

    Attributes:
        rank: the gold token's rank in the row from which the first differing token was chosen, 1 where none differs;
            None while nothing is known: the answer ended on the way, or nothing looked.
    """

    def __init__(self, vocabulary: Vocabulary, gold: str) -> None:
        self._vocabulary = vocabulary
        self._gold = gold.encode().lstrip(SKIPPED)
        self._written = b""
        self.rank: int | None = None

    def look(self, token: int, row: npt.NDArray[np.float32]) -> None:
        if self.rank is not None or not self._gold:
            return
        text = self._vocabulary.text(token)
        written = (self._written + text).lstrip(SKIPPED)
        if text and written.startswith(self._gold):  # complete, whatever the same token says behind it
            self.rank = 1
        elif text and self._gold.startswith(written):
            self._written += text
        else:
            right = self._vocabulary.next_tokens(self._written, self._gold)
            self.rank = rank(row, right) if right else None
