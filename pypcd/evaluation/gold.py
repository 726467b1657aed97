"""The point where an answer first differs from the right one, and the gold token's rank and salience there (Eq. 1).

The gold text is the right answer; the gold token is the one that would have continued it. Salience is 1 / rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pypcd.decode.vocabulary import SKIPPED, Vocabulary
from pypcd.settings.formula import rank

__all__ = ["Gold"]


class Gold:
    """Follows an answer token by token until it differs from the gold text; pass `look` to a method as its look argument.

    Of several tokens that would continue the gold text, the most probable one counts.

    Args:
        gold: the gold text.
        end: the text that follows it, if the task says which.
        stop: as much of `end` as ends an answer. An end token of the model ends it too.

    Attributes:
        rank: the gold token's rank in the logits from which the first differing token was chosen; 1 if none differs.
            None if not known: the answer ended before it differed or was complete, or `look` was never called.
    """

    def __init__(self, vocabulary: Vocabulary, gold: str, end: str = "", stop: str = "") -> None:
        self._vocabulary = vocabulary
        self._gold, self._with_end, self._with_stop = (
            text.encode().lstrip(SKIPPED) for text in (gold, gold + end, gold + stop)
        )
        self._written = b""
        self.rank: int | None = None

    def look(self, token: int, row: npt.NDArray[np.float32]) -> None:
        if self.rank is not None or not self._gold:
            return
        text = self._vocabulary.text(token)
        written = (self._written + text).lstrip(SKIPPED)
        whole = written.startswith(self._gold) and self._with_end.startswith(written)
        if (text and written.startswith(self._with_stop)) or (not text and whole):
            self.rank = 1  # complete, whatever else the token contains
        elif text and self._with_end.startswith(written):
            self._written += text
        else:
            right = self._vocabulary.next_tokens(self._written, self._with_end)
            self.rank = rank(row, right) if right else None
