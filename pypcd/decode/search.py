"""From rows (logits) to an answer: greedy search and sampling."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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


class Search(abc.ABC):
    """Chooses the tokens of an answer.

    Attributes:
        n_sequences: how many sequences it needs, the prompt's included.
    """

    n_sequences = 1

    @abc.abstractmethod
    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = never
    ) -> Iterator[int]:
        """At most max_tokens tokens as they are chosen, without the one that ends the answer (`look` is called with that one too).

        Args:
            is_over: for those that follow several answers at once; the one that makes an answer whole is given too.
        """


class OneByOne(Search):
    """Follows one answer, each of whose tokens it chooses from its row."""

    @abc.abstractmethod
    def chooser(self, prompt: bytes) -> Callable[[Logits], int]:
        """What chooses the tokens of one answer.

        Args:
            prompt: anything that differs from prompt to prompt.
        """

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = never
    ) -> Iterator[int]:
        row, choose = stream.first, self.chooser(stream.first.tobytes())
        for n in range(max_tokens):
            token = choose(row)
            look(token, row)
            if is_end(token):
                return
            yield token
            if n + 1 < max_tokens:
                row = stream.step({0: token})[0]


@dataclasses.dataclass(frozen=True)
class Greedy(OneByOne):
    """The most probable token at each step; the lower id if logits are equal.

    Args:
        repeat_penalty: as Sampling's.
    """

    repeat_penalty: float = 1.0

    def chooser(self, prompt: bytes) -> Callable[[Logits], int]:
        written: list[int] = []

        def choose(row: Logits) -> int:
            written.append(int(penalised(row, written[-_PENALISED:], self.repeat_penalty).argmax()))
            return written[-1]

        return choose


@dataclasses.dataclass(frozen=True)
class Sampling(OneByOne):
    """Draws each token, as llama.cpp does: top_k, then the smallest set of tokens with probability top_p, then those with at least min_p of
    the best one's probability, then temperature. Behind a penalty, all are of the penalised logits.

    Args:
        temperature: more than 0, at most 100.
        top_k: 0 keeps all tokens.
        top_p: 0 to 1; 0 keeps one token.
        seed: of the random numbers. The same seed gives the same answer to the same prompt, whatever other prompts were
            answered.
        min_p: 0 to 1.
        repeat_penalty: what the logits of the answer's last 64 tokens are divided by if positive, else multiplied; 1: nothing.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        check(
            self,
            temperature=Number(0, 100, open_below=True, note="for 0 use the method greedy"),
            top_p=Number(0, 1),
            top_k=Integer(0),
            seed=Integer(0, 2**32 - 1),
            min_p=Number(0, 1),
            repeat_penalty=Number(0.01, 100),
        )

    def chooser(self, prompt: bytes) -> Callable[[Logits], int]:
        # a part of the seed, or all questions would get the same random numbers
        digest = hashlib.sha256(prompt).digest()
        rng = np.random.default_rng([self.seed, int.from_bytes(digest[:8], "little")])
        written: list[int] = []

        def draw(row: Logits) -> int:
            row = penalised(row, written[-_PENALISED:], self.repeat_penalty)
            ids = _best(row, self.top_k)
            p = np.exp(log_softmax(row[ids]))
            n = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1
            n = max(min(n, int((p >= self.min_p * p[0]).sum())), 1)
            # in float64 and below 0: none is too large, however low the temperature
            q = np.exp(log_softmax((row[ids[:n]].astype(np.float64) - row[ids[0]]) / self.temperature))
            written.append(int(rng.choice(ids[:n], p=q / q.sum())))
            return written[-1]

        return draw


_PENALISED = 64  # tokens, as in llama.cpp


def penalised(row: Logits, tokens: Sequence[int], penalty: float) -> Logits:
    """A row in which the tokens that were written count less (arXiv 1909.05858, section 4.1)."""
    if penalty == 1 or not tokens:
        return row
    row, ids = row.copy(), list(set(tokens))
    row[ids] = np.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)
    return row


def _best(row: Logits, n: int) -> npt.NDArray[np.intp]:
    """The ids of the n highest logits, the highest first; 0: of all."""
    if not 0 < n < len(row):
        return np.argsort(-row, kind="stable")
    least = np.partition(row, len(row) - n)[len(row) - n]
    ids = np.flatnonzero(row >= least)
    return ids[np.argsort(-row[ids], kind="stable")][:n]
