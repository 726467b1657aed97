"""Salience: ranks by hand and by counting, gold tokens by their text, rows against plain evaluation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import contrasted, rounding_of
from hypothesis import given
from hypothesis import strategies as st

import pypcd
from pypcd.decode import Session
from pypcd.engine import token_bytes
from pypcd.evaluation import ModelTokenizer, Sample, task
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import interval
from pypcd.prompt import Prompt, prompt_tokens
from research.salience import RANKS, Reading, count_ranks, measure, salience_rows
from research.vocabulary import Vocabulary, rank


@pytest.fixture(scope="module")
def vocabulary(demo: pypcd.Llama) -> Vocabulary:
    return Vocabulary(demo)


# -- ranks ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 200)))
def test_every_rank_falls_into_one_bin(ranks: list[int]) -> None:
    ends = [*RANKS[1:], 10**9]
    assert count_ranks(ranks) == [sum(low <= r < high for r in ranks) for low, high in zip(RANKS, ends)]


def reading(
    index: int, method: str, rank: int, logit: float | None = 1.0, others: tuple[float, ...] = (2.0,)
) -> Reading:
    return Reading(
        index, method, 100 + index, 0, rank, '"a"', logit, tuple((f'"{i}"', v) for i, v in enumerate(others))
    )


def test_cells_by_hand() -> None:
    plain = [reading(0, BASELINE, 1), reading(1, BASELINE, 2), reading(2, BASELINE, 4, others=(6.0, 1.0))]
    mine = [reading(0, "PCD", 2), reading(1, "PCD", 1), reading(2, "PCD", 1, logit=None, others=())]
    first, second = salience_rows(128, list(zip(plain, mine)))
    assert (first.method, first.n, first.length, first.n_tokens) == (BASELINE, 3, 128, 101)
    assert first.salience == pytest.approx(1.75 / 3) and first.difference == first.low == first.high == 0
    assert (first.n_wrong, first.n_own_wrong) == (2, 2)
    assert first.salience_wrong == first.salience_own_wrong == pytest.approx(0.375)
    assert first.median_rank == 2 and first.worst_rank == 4
    assert first.competitor_logits == pytest.approx([10 / 3, 1.0])
    assert second.n_wrong == 2 and second.salience_wrong == 1  # the questions that plain decoding gets wrong
    assert second.n_own_wrong == 1 and second.salience_own_wrong == 0.5  # those that it gets wrong itself
    assert second.difference == pytest.approx((-0.5 + 0.5 + 0.75) / 3)
    assert -0.5 <= second.low <= second.difference <= second.high <= 0.75
    assert second.gold_logit == 1.0  # of two


def test_a_difference_of_salience_follows_the_rule_of_evaluations() -> None:
    """Four of four higher: the interval excludes zero, but p is 2/16. Six of six: 2/64."""
    for n, clear in ((4, False), (6, True)):
        pairs = [(reading(i, BASELINE, 2), reading(i, "PCD", 1)) for i in range(n)]
        row = salience_rows(128, pairs)[1]
        assert row.low == row.high == row.difference == 0.5
        assert (row.p, row.is_clear) == (pytest.approx(2 / 2**n), clear)
        assert interval(row, 3) == "+0.500 [+0.500, +0.500]" + (" ~" if n == 4 else "")


# -- which tokens an answer can begin with ----------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [['"43fb'], ["a", "b0-1"]])
def test_first_tokens_are_those_that_the_text_begins_with(demo, vocabulary, answers: list[str]) -> None:
    wanted = []
    for token in range(demo.n_vocab()):
        text = token_bytes(demo, token).lstrip(b'" :\\')
        if text and any(a.encode().lstrip(b'" :\\').startswith(text) for a in answers):
            wanted.append(token)
    assert vocabulary.first_tokens(answers) == wanted != []
    for answer in answers:  # the tokenizer's own choice is among them
        own = [t for t in demo.tokenize(answer.encode(), add_bos=False) if not vocabulary.is_skipped(t)]
        assert own[0] in wanted


def test_an_answer_without_text_is_an_error(vocabulary) -> None:
    with pytest.raises(ValueError, match="no token begins any of the answers"):
        vocabulary.first_tokens(["", '"'])


@pytest.mark.parametrize(
    "row, gold, wanted",
    [
        ([5, 2, 2, 2], [3], 2),  # ties do not count
        ([5, 4, 3, 2], [3, 1], 2),  # the better of two gold tokens
        ([1, float("-inf"), 0, float("-inf")], [1], 3),
        ([3, 1, 3, 2], 1, 4),
    ],
)
def test_ranks_by_hand(row: list[float], gold: list[int] | int, wanted: int) -> None:
    assert rank(row, gold) == wanted


# -- readings ---------------------------------------------------------------------------------------------------------


def test_readings_are_those_of_an_evaluation_by_itself(demo, vocabulary) -> None:
    asked = task("kv-short").samples(4, 200, ModelTokenizer(demo), 1)
    setting = pypcd.PCDConfig(gamma=12)
    found = measure(Session(demo), asked, {BASELINE: None, "PCD": setting}, vocabulary)
    for sample, (plain, mine) in zip(asked, found):
        prompt, (answer,) = sample.prompt, sample.answers
        limit = contrasted(rounding_of(demo, prompt_tokens(demo, prompt)), setting.beta)
        demo.pcd = setting
        demo.eval(prompt_tokens(demo, prompt))
        rows = demo.pcd_logits()
        demo.pcd = None
        gold = [
            t for t in range(demo.n_vocab()) if answer.encode().startswith(vocabulary.text(t)) and vocabulary.text(t)
        ]
        assert plain.n_skipped == mine.n_skipped == 0
        assert plain.n_tokens == len(prompt_tokens(demo, prompt))
        for got, row in ((plain, rows.standard), (mine, rows.contrasted)):
            best = max(row[t] for t in gold)
            assert got.rank == 1 + sum(1 for value in row if value > best)
            assert got.gold_logit == pytest.approx(best, abs=limit)
            others = sorted((v for t, v in enumerate(row) if t not in gold and np.isfinite(v)), reverse=True)
            # other gold tokens count as competitors, too
            assert got.competitors[0][1] >= others[0] - limit
            assert [v for _, v in got.competitors] == sorted((v for _, v in got.competitors), reverse=True)


class Scripted:
    """A session with given rows, by the number of tokens after the prompt."""

    def __init__(self, rows: dict[str, list[list[float]]]) -> None:
        self.rows = {name: np.array(r, np.float32) for name, r in rows.items()}
        self.llm = self
        self.given: list[int] = []

    def start(self, tokens, setting=None):
        self.kind, self.given = ("plain" if setting is None else "pcd"), []
        return self.rows[self.kind][0]

    def step(self, tokens):
        self.given.append(tokens[0])
        return self.rows[self.kind][[len(self.given)]]

    def pcd_logits(self):
        row = self.rows["pcd"][len(self.given)]
        return pypcd.PCDLogits(row, row, np.where(row < row.max() - 55, -np.inf, row).astype(np.float32))

    def finish(self):
        pass


class Letters:
    """Token 0 is a quotation mark, 1 to 4 are a to d."""

    texts = ('"', "a", "b", "c", "d")

    def is_skipped(self, token):
        return token == 0

    def first_tokens(self, answers):
        return [self.texts.index(a[0]) for a in answers]

    def shown(self, token):
        return self.texts[token]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Reading]]:
    """The readings of a question whose answer is c, without PCD and, unless a session has no such rows, with it."""
    monkeypatch.setattr("research.salience.prompt_tokens", lambda *args, **kwargs: [0])

    def run(**rows: list[list[float]]) -> list[Reading]:
        settings = {BASELINE: None, **({"PCD": pypcd.PCDConfig()} if "pcd" in rows else {})}
        [readings] = measure(Scripted(rows), [Sample(0, Prompt(after="q"), ("c",))], settings, Letters())
        return readings

    return run


def test_a_quotation_mark_is_not_yet_the_answer(read) -> None:
    plain, mine = read(
        plain=[[9, 1, 1, 1, 1], [0, 1, 3, 2, 2]],  # first it writes the mark
        pcd=[[0, 9, 9, 9, 9], [0, 5, 3, 4, -57.5]],  # given the mark, whatever it would write itself
    )
    assert (plain.n_skipped, mine.n_skipped) == (1, 1)
    assert (plain.rank, mine.rank) == (2, 2)  # b above; a tie with d does not count; a above
    assert (plain.gold, plain.gold_logit, mine.gold_logit) == ("c", 2.0, 4.0)
    assert [t for t, _ in plain.competitors] == ["b", "d", "a", '"']
    assert [t for t, _ in mine.competitors] == ["a", "b", '"']  # d is excluded


def test_an_excluded_gold_token_keeps_its_place_behind_the_others(read) -> None:
    plain, mine = read(plain=[[0, 1, 3, 2, 2.5]], pcd=[[-57.5, 5, 3, -55.5, -55]])
    assert (plain.rank, mine.rank) == (3, 4) and mine.gold_logit is None


def test_a_model_that_writes_only_marks_comes_to_an_end(read) -> None:
    [plain] = read(plain=[[9.0, 1, 1, 1, 1]] * 20)
    assert plain.n_skipped == 8 and plain.rank == 2
