"""XQuAD and the key-value records: the published data, what is asked of them, and that no text of one half is in the other."""

from __future__ import annotations

import bz2
import hashlib
import json
import re
from typing import Any

import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation import task, tasks
from pypcd.evaluation.tasks.public import KV_RECORDS, PUBLIC, XQuAD

XQUAD, HALVES = XQuAD(), json.loads((PUBLIC / "halves.json").read_text())
few = settings(max_examples=8)
lengths, seeds = st.integers(900, 4000), st.integers(0, 99)


def _published(file: str) -> bytes:
    return bz2.decompress((PUBLIC / f"{file}.bz2").read_bytes())


ARTICLES: dict[str, Any] = {article["title"]: article for article in json.loads(_published("xquad.en.json"))["data"]}
WORDS = Words()
RECORDS = [dict(json.loads(line)["ordered_kv_records"]) for line in _published("kv140.jsonl").splitlines()]


@pytest.mark.parametrize(
    ("file", "sha256"),
    [
        ("xquad.en.json", "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29"),
        ("kv140.jsonl", "cd2d241ff78b327da02f9245e9bd799c715fa525ca526e19c4c682b2adb36bf8"),
    ],
)
def test_the_data_are_as_published(file: str, sha256: str) -> None:
    assert hashlib.sha256(_published(file)).hexdigest() == sha256
    assert f"{file}.bz2" in (PUBLIC / "README.md").read_text()


@pytest.mark.parametrize(("name", "parts"), [("xquad", set(ARTICLES)), ("kv140", set(range(100)))])
def test_every_article_and_record_is_in_one_half(name: str, parts: set[Any]) -> None:
    first, second = HALVES[name]["first"], HALVES[name]["second"]
    assert len(first) == len(second) == len(parts) / 2 and {*first, *second} == parts


@few
@given(n_tokens=lengths, seed=seeds)
def test_a_question_stands_behind_its_paragraph_among_others_of_its_half(n_tokens: int, seed: int) -> None:
    for sample in XQUAD.samples(6, n_tokens, WORDS, seed):
        articles = [ARTICLES[title] for title in HALVES["xquad"][("first", "second")[sample.index % 2]]]
        found = [
            (paragraph["context"], qa)
            for article in articles
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            if qa["id"] == sample.extra["id"]
        ]
        ((gold, qa),) = found
        assert f"Question: {qa['question']}\n" in sample.prompt.after
        assert sample.answers == (qa["answers"][0]["text"],) and sample.answers[0] in gold
        assert sample.prompt.segments.count(gold) == 1
        assert sample.prompt.segments.index(gold) == round((sample.depth or 0) * (len(sample.prompt.segments) - 1))
        texts = {paragraph["context"] for article in articles for paragraph in article["paragraphs"]}
        assert texts.issuperset(sample.prompt.segments)


def test_questions_of_any_length_can_be_asked() -> None:
    (sample,) = XQUAD.samples(1, 60_000, WORDS, 0)
    assert len(sample.prompt.segments) > len(set(sample.prompt.segments)) == 120


def test_all_questions_but_those_of_the_longer_half_can_be_asked() -> None:
    n_of = [
        sum(len(p["qas"]) for title in HALVES["xquad"][half] for p in ARTICLES[title]["paragraphs"])
        for half in ("first", "second")
    ]
    assert XQUAD.n_questions == 2 * min(n_of) and sum(n_of) == 1190
    asked = {sample.extra["id"] for sample in XQUAD.samples(XQUAD.n_questions, 900, WORDS, 3)}
    assert len(asked) == XQUAD.n_questions


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("{}", 1), (" the {}.", 1), ("\n{}\nno", 1), ("no\n{}", 0), ("", 0), ("n/a", 0)],
)
def test_the_first_line_has_to_have_the_answer(prediction: str, score: float) -> None:
    (sample,) = XQUAD.samples(1, 900, WORDS, 0)
    assert XQUAD.score(prediction.format(sample.answers[0]), sample) == score
    assert XQUAD.score(prediction.format(sample.answers[0].upper()), sample) == score


# -- key-value records ---------------------------------------------------------------------------------------------------


def _object(text: str) -> dict[str, str]:
    match = re.search(r"JSON data:\n(\{.*\})\n\n\nKey: ", text)
    assert match
    return dict(json.loads(match[1]))


@few
@given(n=st.integers(1, 8), n_pairs=st.integers(2, 400), seed=seeds)
def test_a_text_is_records_of_one_half_one_behind_another(n: int, n_pairs: int, seed: int) -> None:
    for sample in KV_RECORDS.questions(n, n_pairs, seed):
        pairs = _object(sample.prompt.text)
        of_half = [RECORDS[k] for k in HALVES["kv140"][("first", "second")[sample.index % 2]]]
        begin = next(k for k, record in enumerate(of_half) if next(iter(record)) == next(iter(pairs)))
        found = list(pairs.items())
        assert len(found) == n_pairs and found[:140] == list(of_half[begin].items())[:n_pairs]
        for part in (dict(found[start : start + 140]) for start in range(0, n_pairs, 140)):
            assert any(record.items() >= part.items() for record in of_half)
        key = sample.prompt.after.partition('Key: "')[2].partition('"')[0]
        assert sample.answers == (pairs[key],) and list(pairs).index(key) == sample.index * n_pairs // n


def test_a_record_is_asked_as_published_and_for_several_keys() -> None:
    samples = list(KV_RECORDS.questions(KV_RECORDS.n_questions, 140))
    asked: dict[str, set[str]] = {}
    for sample in samples:
        pairs = _object(sample.prompt.text)
        assert pairs in RECORDS
        asked.setdefault(next(iter(pairs)), set()).add(sample.answers[0])
    assert len(asked) == 100 and {len(keys) for keys in asked.values()} == {4}


# -- what left -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("longbench-qasper", "--tasks longbench$"),
        ("longbench-v2", "--tasks longbench2$"),
        ("ruler-qa_1", "--tasks ruler$"),
        ("constrained-needle", "commit 23bc9434"),
        ("mrcr", "commit 7d6ac68"),
        ("nolima", "commit 2e7ce90"),
        ("vt-authors", "python -m research.eval MODEL --task vt-authors"),
    ],
)
def test_a_task_that_left_says_who_asks_its_questions_now(
    name: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(tasks._TASKS, name, raising=False)  # another test's module may have it registered
    with pytest.raises(ValueError, match=f"{name} is no task of pypcd eval any more; .*{instead}"):
        task(name)
