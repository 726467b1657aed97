"""Questions whose answer is a JSON object under its schema's grammar: what they ask, what the grammar allows, what scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from fake_tokenizer import Words
from runs import ONE

import pypcd
from pypcd import engine
from pypcd.evaluation import Directory, Plan, evaluate, task
from pypcd.evaluation.tasks.constrained import CONSTRAINED, ObjectKV, ObjectNeedle, Objects, share_of_values
from pypcd.evaluation.tasks.everyday import EVERYDAY
from pypcd.evaluation.tasks.sample import Sample

OBJECTS = [made for made in CONSTRAINED if not isinstance(made, ObjectKV)]


def some(made: Any, n: int = 6, n_tokens: int = 600) -> list[Sample]:
    return list(made.samples(n, n_tokens, Words(), 0))


def examples(sample: Sample) -> list[Any]:
    """The objects that a prompt shows."""
    text = "".join(question + answer + "\n" for question, answer in sample.prompt.shots) + sample.prompt.text
    return [json.loads(line) for line in re.findall(r"^\{.*\}$", text, re.MULTILINE)]


# -- questions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [made for made in OBJECTS if isinstance(made, Objects)], ids=lambda made: made.name)
def test_a_question_is_that_of_the_everyday_task(made: Objects) -> None:
    everyday = next(other for other in EVERYDAY if other.kind is made.kind and other.way == "behind")
    for ours, theirs in zip(some(made), everyday.samples(6, 600, Words(), 0)):
        assert ours.prompt.after.endswith(theirs.prompt.after) and ours.answers == theirs.answers
        if made.shown:
            assert [answer for _, answer in ours.prompt.shots] == [answer for _, answer in theirs.prompt.shots[-2:]]
        if made.kind.name == "tools":
            (names,) = re.findall(r"Tool: \w+\(([\w, ]+)\)", ours.prompt.after)
            assert list(json.loads(ours.answers[0])) == names.split(", ")


@pytest.mark.parametrize("made", OBJECTS, ids=lambda made: made.name)
def test_only_a_task_that_says_so_shows_the_form(made: Any) -> None:
    for sample in some(made):
        assert len(examples(sample)) == (2 if made.name.endswith("-shown") else 0)
        for example in examples(sample):
            assert example != json.loads(sample.answers[0])


@pytest.mark.parametrize(
    "made", [made for made in OBJECTS if isinstance(made, ObjectNeedle)], ids=lambda made: made.name
)
def test_the_needle_is_in_the_text_once_and_examples_are_others_of_it(made: ObjectNeedle) -> None:
    for sample in some(made):
        (word, value), *others = [
            next(iter(each.items())) for each in (json.loads(sample.answers[0]), *examples(sample))
        ]
        sentence = "One of the special magic numbers for {} is: {}."
        assert sample.prompt.context.count(sentence.format(word, value)) == 1
        assert sample.prompt.after.rstrip("\n").split("\n")[-1].count(word) == 1
        assert len({word, *dict(others)}) == 1 + len(others)
        for other in others:
            assert sentence.format(*other) in sample.prompt.context


# -- the grammar, and scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", CONSTRAINED, ids=lambda made: made.name)
def test_the_grammar_allows_the_right_answer_and_no_text(made: Any, tiny: Tiny, load: Any) -> None:
    llm: pypcd.Llama = load(tiny("llama"), False)
    for sample in some(made, 3):
        rules = engine.Grammar(llm, sample.grammar)
        row = np.zeros(llm.n_vocab(), np.float32)
        assert all(rules.masked(row)[token] == -float("inf") for token in llm.tokenize(b"The", add_bos=False)[-1:])
        for token in llm.tokenize(sample.answers[0].encode(), add_bos=False, special=False):
            if engine.token_bytes(llm, token).strip():  # the vocabulary puts a space first
                assert rules.masked(row)[token] == 0
                rules.accept(token)
        assert any(rules.masked(row)[token] == 0 for token in range(llm.n_vocab()) if engine.is_end(llm, token))


def test_a_score_is_the_share_of_the_values() -> None:
    right = json.dumps({"a": "Paris", "b": 7})
    for given, score in (
        (right, 1.0),
        ('{ "b": 7,\n "a": "Paris" } ', 1.0),
        ('{"a": "Paris,", "b": 7}', 0.5),
        ('{"a": "Paris", "b": "7"}', 0.5),
        ('{"a": "paris"}', 0.0),
        ('{"a": "Paris", "b": 7', 0.0),
        ('["Paris", 7]', 0.0),
        ("", 0.0),
    ):
        assert share_of_values(given, right) == score, given


def test_a_run_has_answers_that_the_schema_allows(tiny: Tiny, tmp_path: Path) -> None:
    tasks = ("constrained-tools", "constrained-needle")
    plan = Plan(str(tiny("llama")), tasks, ("greedy", "pcd:window=8"), (900,), n=2)
    outcome = evaluate(plan, Directory(tmp_path), options=ONE)
    assert len(outcome.records) == 8 and not outcome.refused
    for (name, _, index, _), record in outcome.records.items():
        assert record.get("error") is None and record["prediction"].lstrip().startswith("{"), record
        keys = re.findall(r'"([^"]+)":', record["answers"][0])
        assert f'"{keys[0]}"'.startswith(record["prediction"].lstrip("{ \n\t")[: len(keys[0]) + 2].rstrip(": "))
        assert task(name).metric == "values" and index in (0, 1)
