"""Choosing tokens: beam search against exhaustive search, sampling against its own distribution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd.decode import Greedy, Sampling
from pypcd.decode.search import never
from research.methods.beam import Beam

N_VOCAB, END = 4, 3


class Table:
    """A stream from a simulated model: the row after some tokens is random, from a seed and these tokens."""

    def __init__(self, seed: int) -> None:
        self.seed, self.texts = seed, {0: ()}
        self.first = self.row(())

    def row(self, tokens: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([self.seed, *tokens, 99]).normal(0, 2, N_VOCAB).astype(np.float32)

    def step(self, tokens: Any) -> np.ndarray:
        for seq, token in tokens.items():
            self.texts[seq] = (*self.texts[seq], token)
        return np.stack([self.row(self.texts[seq]) for seq in tokens])

    def fork(self, pairs: Any) -> None:
        self.texts.update({target: self.texts[source] for target, source in pairs.items()})

    def drop(self, seqs: Any) -> None:
        for seq in seqs:
            del self.texts[seq]


def log_p(table: Table, tokens: tuple[int, ...]) -> float:
    total = 0.0
    for i, token in enumerate(tokens):
        row = table.row(tokens[:i]).astype(float)
        total += row[token] - np.log(np.exp(row).sum())
    return total


def every_answer(max_tokens: int) -> list[tuple[int, ...]]:
    """All answers from a vocabulary of four tokens, one of which ends the answer; with that one."""
    going = [0, 1, 2]
    done = [(*head, END) for n in range(max_tokens) for head in itertools.product(going, repeat=n)]
    return done + list(itertools.product(going, repeat=max_tokens))


def is_end(token: int) -> bool:
    return token == END


def unseen(token: int, row: np.ndarray) -> None:
    pass


def has_two_ones(tokens: Any) -> bool:
    return list(tokens).count(1) == 2


@given(
    seed=st.integers(0, 10**6),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    is_over=st.sampled_from([never, has_two_ones]),
)
def test_wide_enough_beams_find_what_exhaustive_search_finds(seed: int, penalty: float, is_over: Any) -> None:
    """Also if an answer ends with its second 1, which is part of it."""
    found = Beam(27, penalty).run(Table(seed), 3, is_end, unseen, is_over)  # type: ignore[arg-type]
    table = Table(seed)  # at most 27 beams are alive before the last of three tokens
    ended = {next((t[:i] for i in range(len(t)) if is_over(t[:i])), t) for t in every_answer(3)}
    best = max(ended, key=lambda tokens: log_p(table, tokens) / len(tokens) ** penalty)
    assert tuple(found) == tuple(token for token in best if token != END)


def test_greedy_tells_of_every_token_and_its_row_the_end_included() -> None:
    class Two(Table):
        def row(self, tokens: tuple[int, ...]) -> np.ndarray:
            return np.eye(N_VOCAB, dtype=np.float32)[END if len(tokens) == 2 else len(tokens)]

    seen = []
    stream: Any = Two(0)
    assert list(Greedy().run(stream, 9, is_end, lambda token, row: seen.append((token, int(row.argmax()))))) == [0, 1]
    assert seen == [(0, 0), (1, 1), (END, END)]


@pytest.mark.parametrize(
    ("row", "wanted"), [([2.0, 1.5, -1.0, -9.0], [0, 1, 0, 0]), ([-1.0, -1.5, -1.8, -9.0], [0, 1, 2, 0])]
)
def test_tokens_that_were_written_count_half(row: list[float], wanted: list[int]) -> None:
    class Same(Table):
        def row(self, tokens: tuple[int, ...]) -> np.ndarray:
            return np.array(row, np.float32)

    for search in (Greedy(repeat_penalty=2.0), Sampling(top_k=1, repeat_penalty=2.0)):
        stream: Any = Same(0)
        assert list(search.run(stream, 4, is_end, unseen)) == wanted
    stream = Same(0)
    assert list(Greedy().run(stream, 3, is_end, unseen)) == [0, 0, 0]


def test_other_prompts_draw_other_numbers() -> None:
    """With one seed, different questions must not get the same draws."""

    class Prompted(Table):
        def row(self, tokens: tuple[int, ...]) -> np.ndarray:
            return np.log(np.array([0.25, 0.25, 0.25, 0.25 + 1e-6 * self.seed])).astype(np.float32)

    def draw() -> list[int]:
        return [next(Sampling(1.0, 0, 1.0, seed=5).run(Prompted(i), 1, lambda t: False, unseen)) for i in range(200)]  # type: ignore[arg-type]

    drawn = draw()
    assert min(np.bincount(drawn, minlength=4)) > 20 and drawn == draw()
