"""Tokens as text: which tokens may begin an answer, how a token is shown, and how high it ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd.engine import is_end, token_bytes
from pypcd.errors import InputError

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["END", "SKIPPED", "Vocabulary", "rank", "shown"]

END = "(end)"  # how a token is shown that ends an answer
SKIPPED = b'" :\\'  # characters before an answer, which the paper's authors skip


class Vocabulary:
    """The texts of a model's tokens, read once."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._texts = [token_bytes(llm, token) for token in range(llm.n_vocab())]
        self._by_text, self._bare = dict[bytes, list[int]](), dict[bytes, list[int]]()
        for token, text in enumerate(self._texts):
            self._by_text.setdefault(text, []).append(token)
            self._bare.setdefault(text.lstrip(SKIPPED), []).append(token)

    def text(self, token: int) -> bytes:
        """Empty for control tokens."""
        return self._texts[token]

    def shown(self, token: int) -> str:
        """A token as readable text, safe for terminals; "(end)" for one that ends an answer."""
        if is_end(self._llm, token):
            return END
        return shown(self._texts[token])

    def is_skipped(self, token: int) -> bool:
        """Whether a token has text, but only characters that may come before an answer."""
        return bool(self.text(token)) and not self.text(token).strip(SKIPPED)

    def first_tokens(self, answers: Sequence[str]) -> list[int]:
        """All tokens that can begin one of the answers: without the skipped characters, their text is a prefix of it.

        The paper's authors count them all; the one that the tokenizer would choose is among them.

        Raises:
            ValueError: none of the answers has a letter or a digit to begin with.
        """
        found: set[int] = set()
        for answer in answers:
            text = answer.encode().lstrip(SKIPPED)
            for n in range(1, len(text) + 1):
                found.update(self._bare.get(text[:n], ()))
        if not found:
            raise InputError(f"no token begins any of the answers {list(answers)!r}; each needs a letter or a digit")
        return sorted(found)

    def next_tokens(self, written: bytes, answer: bytes) -> list[int]:
        """All tokens that continue a text towards an answer; empty once it is complete, or differs from it."""
        bare = written.lstrip(SKIPPED)
        if not answer.startswith(bare) or bare == answer:
            return []
        rest = answer[len(bare) :]
        texts = self._by_text if bare else self._bare
        return sorted(token for n in range(1, len(rest) + 1) for token in texts.get(rest[:n], ()))


def shown(text: bytes) -> str:
    """A token's text, readable: in quotes, with escape sequences for what cannot be printed or is not UTF-8.

    Safe for terminals: control codes and characters that change the direction of text are escaped.
    """
    if not text:
        return "(control)"
    characters = text.decode("utf-8", "backslashreplace")
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in characters) + '"'


def rank(logits: npt.ArrayLike, tokens: int | Sequence[int]) -> int:
    """The rank of the gold token, the one that begins the right answer: 1 + how many tokens are more probable (Eq. 1).

    A token of equal probability does not count against it.

    Args:
        logits: float[n_vocab].
        tokens: the gold token, or several; then the most probable one counts.
    """
    row = np.asarray(logits)
    return 1 + int((row > row[np.asarray(tokens)].max()).sum())
