"""From rows (logits) to an answer: greedy search and sampling."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pypcd.decode.session import Logits
from pypcd.settings.formula import log_softmax
from pypcd.settings.ranges import Integer, Number, check

if TYPE_CHECKING:
    from pypcd.decode.rows import Stream

__all__ = ["Greedy", "IsOver", "Look", "Sampling", "Search", "never"]

Look = Callable[[int, Logits], None]  # called with each chosen token and the row it was chosen from
IsOver = Callable[[Sequence[int]], bool]  # whether tokens are a whole answer, though no token of the model ends it


def never(tokens: Sequence[int]) -> bool:
    return False


class Search(Protocol):
    """Chooses the tokens of an answer."""

    @property
    def n_sequences(self) -> int:
        """How many sequences it needs, the prompt's included."""
        ...

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = never
    ) -> list[int]:
        """At most max_tokens tokens, without the one that ends the answer (`look` is called with that one too); with the
        one that makes it whole (is_over), since that may have text of the answer."""
        ...


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token at each step; the lower id if logits are equal."""

    n_sequences = 1

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = never
    ) -> list[int]:
        return _one_by_one(stream, max_tokens, is_end, look, is_over, lambda row: int(row.argmax()))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draws each token: temperature, then top_k, then the smallest set of tokens with probability top_p.

    Args:
        temperature: more than 0, at most 100.
        top_k: 0 keeps all tokens.
        top_p: more than 0, at most 1.
        seed: of the random numbers. The same seed gives the same answer to the same prompt, whatever other prompts were
            answered.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    n_sequences = 1

    def __post_init__(self) -> None:
        check(
            self,
            temperature=Number(0, 100, open_below=True, note="for 0 use the method greedy"),
            top_p=Number(0, 1, open_below=True),
            top_k=Integer(0),
            seed=Integer(0),
        )

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = never
    ) -> list[int]:
        return _one_by_one(stream, max_tokens, is_end, look, is_over, self.chooser(stream.first.tobytes()))

    def chooser(self, prompt: bytes) -> Callable[[Logits], int]:
        """What draws the tokens of one answer.

        Args:
            prompt: anything that differs from prompt to prompt: it is part of the seed, or all questions would get the same
                random numbers.
        """
        digest = hashlib.sha256(prompt).digest()
        rng = np.random.default_rng([self.seed, int.from_bytes(digest[:8], "little")])

        def draw(row: Logits) -> int:
            ids = np.argsort(-row, kind="stable")[: self.top_k or None]
            p = np.exp(log_softmax(row[ids] / self.temperature))
            n = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1
            return int(rng.choice(ids[:n], p=p[:n] / p[:n].sum()))

        return draw


def _one_by_one(
    stream: Stream,
    max_tokens: int,
    is_end: Callable[[int], bool],
    look: Look,
    is_over: IsOver,
    choose: Callable[[Logits], int],
) -> list[int]:
    tokens: list[int] = []
    row = stream.first
    while len(tokens) < max_tokens:
        token = choose(row)
        look(token, row)
        if is_end(token):
            break
        tokens.append(token)
        if is_over(tokens):
            break
        if len(tokens) < max_tokens:
            row = stream.step({0: token})[0]
    return tokens
