"""Where an answer leaves the right one: the gold token's rank and salience there (Eq. 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd._prompt import token_bytes

if TYPE_CHECKING:
    from pypcd._llama import Llama

__all__ = ["Gold", "rank"]

SKIPPED = frozenset(b'" :\\')  # what may stand before an answer; the paper's authors skip the same


def rank(row: npt.ArrayLike, token: int) -> int:
    """1 + how many tokens have a higher logit (Eq. 1): ties are not counted against it."""
    logits = np.asarray(row)
    return 1 + int((logits > logits[token]).sum())


class Gold:
    """Follows an answer token by token until it leaves the gold text; `look` is a method's look argument.

    Attributes:
        rank: the gold token's rank in the row from which the first differing token was chosen, 1 where none differs;
            None while nothing is known: the answer ended on the way, or nothing looked.
    """

    def __init__(self, llm: Llama, gold: str) -> None:
        def tokens(text: str) -> list[int]:
            return llm.tokenize(text.encode(), add_bos=False, special=False)

        # a word is tokenized otherwise behind a space, and behind a quote
        paths, quote = [tokens(gold), tokens(" " + gold), tokens('"' + gold)], tokens('"')
        paths[2] = paths[2][len(quote) :] if paths[2][: len(quote)] == quote else []
        self._llm = llm
        self._all = self._paths = [path for path in paths if path]
        self._n = 0
        self._begun = False  # something else than what may stand before an answer is written
        self.rank: int | None = None

    def look(self, token: int, row: npt.NDArray[np.float32]) -> None:
        if self.rank is not None or not self._all:
            return
        written = token_bytes(self._llm, token)
        is_skipped = bool(written) and not set(written) - SKIPPED
        going = [path for path in self._paths if path[self._n] == token]
        if not going and is_skipped and not self._begun:
            self._paths, self._n = self._all, 0
            return
        if not going:
            self.rank = min(rank(row, path[self._n]) for path in self._paths)
            return
        self._begun |= not is_skipped
        self._n += 1
        self._paths = [path for path in going if len(path) > self._n]
        if len(self._paths) < len(going):
            self.rank = 1
