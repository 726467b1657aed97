"""Beam search: several answers go on side by side, and the most probable one is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pypcd.decode import values_of
from pypcd.decode.search import IsOver, Look, Search, never
from pypcd.settings.formula import log_softmax
from pypcd.settings.ranges import Integer, Number, check

if TYPE_CHECKING:
    from pypcd.decode.rows import Stream

__all__ = ["Beam", "parse"]


@dataclasses.dataclass(frozen=True)
class Beam(Search):
    """Beam search: the answer with the highest sum of log-probabilities divided by length ** length_penalty.

    As in Hugging Face's transformers: of the 2 n best continuations of n beams, those that end the answer and are among
    the n best are set aside; the others go on. It stops when n answers are set aside and no beam can beat them.

    Args:
        n: number of beams, 2 to 31.
        length_penalty: -10 to 10; 0 compares plain sums, which favours short answers.

    Raises:
        ValueError: a value is out of range.
    """

    n: int = 2
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check(self, n=Integer(2, 31), length_penalty=Number(-10, 10))

    @property
    def n_sequences(self) -> int:  # type: ignore[override]
        return 2 * self.n + 1

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = never
    ) -> Iterator[int]:
        n = self.n
        done: list[tuple[float, list[int]]] = []
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        rows = stream.first[None]
        here, there = list(range(1, n + 1)), list(range(n + 1, 2 * n + 1))  # sequences take turns
        sources = [0]  # which sequence each beam is in

        for length in range(1, max_tokens + 1):
            scores = np.stack([score + log_softmax(row) for (score, _), row in zip(beams, rows)])
            best = np.argsort(-scores, axis=None, kind="stable")[: 2 * n]
            going: list[tuple[float, list[int], int]] = []
            for rank, at in enumerate(best):
                i, token = divmod(int(at), scores.shape[1])
                score = float(scores[i, token])
                if score == -np.inf:
                    break
                tokens = beams[i][1] if is_end(token) else [*beams[i][1], token]
                if is_end(token) or is_over(tokens):
                    if rank < n:
                        done.append((score / length**self.length_penalty, tokens))
                elif len(going) < n:
                    going.append((score, tokens, sources[i]))
            done = sorted(done, key=lambda item: -item[0])[:n]
            if not going or length == max_tokens:
                done += [(score / length**self.length_penalty, tokens) for score, tokens, _ in going]
                break
            if len(done) == n and going[0][0] / length**self.length_penalty <= done[-1][0]:
                break
            beams = [(score, tokens) for score, tokens, _ in going]
            stream.fork({target: source for target, (_, _, source) in zip(here, going)})
            stream.drop([seq for seq in sources if seq])
            sources = here[: len(going)]
            rows = stream.step({seq: tokens[-1] for seq, (_, tokens) in zip(sources, beams)})
            here, there = there, here
        yield from max(done, key=lambda item: item[0])[1]


def parse(words: Sequence[str]) -> Beam:
    """From the words behind the name: beam:4."""
    return values_of(Beam, words, "n")
