"""Everyday questions: halves, examples, answers in lines, and runs of halves. What is asked is in test_published.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_tokenizer import Words
from runs import ONE, lines, without_time

from pypcd.evaluation import Directory, Plan, evaluate
from pypcd.evaluation.tasks.everyday import EVERYDAY
from pypcd.evaluation.tasks.frozen import rows

SHOTS = {made.kind: made for made in EVERYDAY if not made.behind}
NAMES = list(SHOTS)


@pytest.mark.parametrize("name", NAMES)
def test_no_question_of_one_half_is_asked_or_shown_in_the_other(name: str) -> None:
    halves: tuple[set[str], set[str]] = (set(), set())
    for seed in range(3):
        for sample in SHOTS[name].samples(100, 2500 if seed == 2 else 500, Words(), seed):
            halves[sample.index % 2].update([sample.prompt.after, *(question for question, _ in sample.prompt.shots)])
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


def test_lines_are_all_needed_and_no_more() -> None:
    made = SHOTS["copy"]
    sample = next(s for s in made.samples(20, 300, Words(), 0) if "\n" in s.answers[0])
    lines = sample.answers[0].split("\n")
    assert made.score("\n".join(f" {line} " for line in lines), sample) == 1.0
    for wrong in (lines[:-1], [*lines, "9. hat"], lines[::-1]):
        assert made.score("\n".join(wrong), sample) == 0.0


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
