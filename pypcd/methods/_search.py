"""From rows (logits) to an answer: greedy search, sampling, beam search."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pypcd._checks import Integer, Number, check
from pypcd._method import log_softmax
from pypcd.methods._session import Logits

if TYPE_CHECKING:
    from pypcd.methods._rows import Stream

__all__ = ["Beam", "Greedy", "Sampling", "Search"]

Look = Callable[[int, Logits], None]  # called with each chosen token and the row it was chosen from
IsOver = Callable[[Sequence[int]], bool]  # whether tokens are a whole answer, though no token of the model ends it


def _never(tokens: Sequence[int]) -> bool:
    return False


class Search(Protocol):
    """Chooses the tokens of an answer."""

    @property
    def n_sequences(self) -> int:
        """How many sequences it needs, the prompt's included."""
        ...

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = _never
    ) -> list[int]:
        """At most max_tokens tokens, without the one that ends the answer (`look` is called with that one too); with the
        one that makes it whole (is_over), since that may have text of the answer."""
        ...


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token at each step; the lower id if logits are equal."""

    n_sequences = 1

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = _never
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
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = _never
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


@dataclasses.dataclass(frozen=True)
class Beam:
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
    def n_sequences(self) -> int:
        return 2 * self.n + 1

    def run(
        self, stream: Stream, max_tokens: int, is_end: Callable[[int], bool], look: Look, is_over: IsOver = _never
    ) -> list[int]:
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
        return max(done, key=lambda item: item[0])[1]
