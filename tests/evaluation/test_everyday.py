"""Everyday questions: halves, examples, unrelated text, scores, and runs of them. What is asked is in test_published.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ONE, lines, without_time

from pypcd.evaluation import GROUPS, TASKS, Directory, Plan, evaluate
from pypcd.evaluation.tasks.everyday import EVERYDAY, SHORT, Everyday, kind_of
from pypcd.evaluation.tasks.frozen import in_order, rows
from pypcd.evaluation.tasks.sample import Sample
from pypcd.evaluation.tasks.size import largest
from pypcd.prompt import Prompt

SHOTS = {made.kind: made for made in EVERYDAY if not made.behind}
BEHIND = {made.kind: made for made in EVERYDAY if made.behind}
NAMES = list(SHOTS)


few = settings(max_examples=20)


def short(name: str, n: int, seed: int = 0) -> list[Sample]:
    return SHOTS[name].samples(n, SHORT, Words(), seed)


def pairs_of(sample: Sample) -> list[tuple[str, str]]:
    """Every question of a prompt with its answer: the examples and the question itself."""
    return [*((q, a.strip()) for q, a in sample.prompt.shots), (sample.prompt.after, sample.answers[0])]


# -- questions -------------------------------------------------------------------------------------------------------


def test_a_kind_is_asked_in_two_ways() -> None:
    assert set(NAMES) == set(BEHIND)
    for name in NAMES:
        assert kind_of(f"everyday-{name}") == kind_of(f"everyday-{name}-behind") == name
    assert {kind_of(other) for other in (*TASKS, *GROUPS, "everyday-nothing")} == {None, *NAMES}


@few
@given(st.integers(1, 40), st.integers(0, 99))
def test_a_seed_leaves_a_question_in_its_half(n: int, seed: int) -> None:
    order = in_order(range(n), seed)
    assert sorted(order) == list(range(n)) and all(at % 2 == number % 2 for number, at in enumerate(order))
    assert in_order(range(n), 0) == list(range(n)) and order == in_order(range(n), seed)


@pytest.mark.parametrize("name", NAMES)
def test_no_question_of_one_half_is_asked_or_shown_in_the_other(name: str) -> None:
    halves: tuple[set[str], set[str]] = (set(), set())
    for seed in range(3):
        for sample in SHOTS[name].samples(100, 2500 if seed == 2 else 500, Words(), seed):
            halves[sample.index % 2].update(question for question, _ in pairs_of(sample))
    assert min(map(len, halves)) > 50 and not halves[0] & halves[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_shows_all_examples_before_one_is_shown_again(name: str) -> None:
    """Beyond its own examples a question has those of others of its kind and half."""
    n_own = len(next(row["examples"] for row in rows("everyday") if row["kind"] == name))
    (sample,) = SHOTS[name].samples(1, 20_000, Words(), 0)
    nearest_first = sample.prompt.shots[::-1]
    assert sample.prompt.after not in [question for question, _ in nearest_first]
    own, more = nearest_first[:n_own], nearest_first[n_own:]
    n_more = len({*more} - {*own})
    assert (n_more > 100 or name == "facts") and len({*more[:n_more]} - {*own}) == n_more


# -- lengths ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(0, 2),
    st.integers(1, 150),
    st.none() | st.integers(2, 30),
)
def test_the_largest_size_is_found(lengths: list[int], smallest: int, n_tokens: int, most: int | None) -> None:
    """Against trying every size; a size's prompt has one letter and as many more as its parts have."""

    def make(size: int) -> Sample:
        return Sample(0, Prompt(after="漢" + "".join("漢" * lengths[i % len(lengths)] for i in range(size))), ("",))

    class Letters(Words):
        pattern = "."

    sizes = [
        size
        for size in range(smallest, 1 + (200 if most is None else most))
        if Letters().count(make(size).prompt) + 3 <= n_tokens
    ]
    if not sizes:
        with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}; allowed: at least"):
            largest(make, smallest, n_tokens, 3, Letters(), most)
    else:
        assert largest(make, smallest, n_tokens, 3, Letters(), most) == max(sizes)


@pytest.mark.parametrize("name", NAMES)
def test_unrelated_text_stands_before_the_examples_and_answers_nothing(name: str) -> None:
    full, bare = SHOTS[name].samples(5, 900, Words(), 0), short(name, 5)
    for sample, other, plain in zip(BEHIND[name].samples(5, 900, Words(), 0), full, bare):
        text, question = sample.prompt.context, sample.prompt.shots[0][0].removeprefix("\n\n")
        assert sample.prompt.whole.startswith(f"{text}\n\n{question}{sample.prompt.shots[0][1]}\n\n")
        assert question in [q for q, _ in other.prompt.shots][-len(sample.prompt.shots) :]
        assert len(text) > 500 and plain.prompt.after == sample.prompt.after
        assert not re.search(r"[\d{}\[\]:]", text)
        paragraphs = text.split("\n\n")
        assert all(re.fullmatch(r"([A-Z][^.]+\. ?)+", paragraph) for paragraph in paragraphs)
        assert len(set(paragraphs)) == len(paragraphs)


# -- scores and the gold answer --------------------------------------------------------------------------------------


@few
@given(st.sampled_from(EVERYDAY), st.integers(0, 99))
def test_the_right_answer_scores_and_near_misses_do_not(made: Everyday, seed: int) -> None:
    for sample in made.samples(3, 400, Words(), seed):
        (answer,) = sample.answers
        question, its_answer = sample.prompt.shots[-1]
        going_on = f"{sample.gold}\n\n{question}{its_answer}"
        assert made.score(going_on, sample) == 1.0
        assert made.score(f"\n {answer} \n", sample) == 1.0
        assert made.score(f"\n {sample.gold}{made.stop}more", sample) == 1.0
        near = {answer[:-1], f"{answer}.", f"{answer} {answer}", answer.swapcase()}
        for wrong in near - {answer}:  # digits have no case
            assert made.score(wrong, sample) == 0.0, wrong


def test_lines_are_all_needed_and_no_more() -> None:
    made = SHOTS["copy"]
    sample = next(s for s in short("copy", 20) if "\n" in s.answers[0])
    lines = sample.answers[0].split("\n")
    assert made.score("\n".join(f" {line} " for line in lines), sample) == 1.0
    for wrong in (lines[:-1], [*lines, "9. hat"], lines[::-1]):
        assert made.score("\n".join(wrong), sample) == 0.0


# -- groups and runs -------------------------------------------------------------------------------------------------


def test_halves_make_a_whole_run(tmp_path: Path) -> None:
    tasks = ("everyday-facts", "everyday-classify-behind")
    first, second, both = (
        Plan("demo", tasks, ("greedy",), (700,), n=5, max_tokens=3, half=half) for half in ("first", "second", None)
    )
    whole = evaluate(both, Directory(tmp_path / "whole"), options=ONE).records
    run = Directory(tmp_path / "halves")
    assert {key[2] for key in evaluate(first, run, options=ONE).records} == {0, 2, 4} and len(lines(run)) == 6
    assert {key[2] for key in evaluate(second, run, options=ONE).records} == {1, 3}
    size = run.samples.stat().st_size
    assert without_time(evaluate(both, run, options=ONE).records) == without_time(whole)
    assert run.samples.stat().st_size == size  # nothing was asked again
    assert "half" not in json.loads((run.path / "run.json").read_text())
    assert any(record["n_tokens"] < 3 or "\n" not in record["prediction"].strip() for record in whole.values())
