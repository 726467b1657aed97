"""Tokens as text: which tokens may begin an answer, and how a token is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pypcd.engine import is_end, token_bytes

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["END", "SKIPPED", "Vocabulary", "shown"]

END = "(end)"  # how a token is shown that ends an answer
SKIPPED = b'" :\\'  # characters before an answer, which the paper's authors skip


class Vocabulary:
    """The texts of a model's tokens, read once."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._texts = [token_bytes(llm, token) for token in range(llm.n_vocab())]
        self._bare: dict[bytes, list[int]] = {}
        for token, text in enumerate(self._texts):
            self._bare.setdefault(text.lstrip(SKIPPED), []).append(token)
        self._by_text: dict[bytes, list[int]] = {}
        for token, text in enumerate(self._texts):
            self._by_text.setdefault(text, []).append(token)

    def text(self, token: int) -> bytes:
        """Empty for control tokens."""
        return self._texts[token]

    def shown(self, token: int) -> str:
        """A token as readable text, safe for terminals; "(end)" for one that ends an answer."""
        if is_end(self._llm, token):
            return END
        return shown(self._texts[token])

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
