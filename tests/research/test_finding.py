"""The study of finders: its questions against the published files, what counts as found, and its table."""

from __future__ import annotations

import bz2
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pypcd.evaluation.tasks.public import PUBLIC
from research import finding, golds
from research.command import command
from research.golds import Asked

HALVES = ("first", "second")
ARTICLES = json.loads(bz2.decompress((PUBLIC / "xquad.en.json.bz2").read_bytes()))["data"]
TITLES = json.loads((PUBLIC / "halves.json").read_text(encoding="utf-8"))["xquad"]


@pytest.mark.parametrize("half", HALVES)
def test_answers_stand_where_they_were_published(half: str) -> None:
    published = {
        qa["id"]: (qa["question"].strip(), qa["answers"][0]["text"], paragraph["context"])
        for article in ARTICLES
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if article["title"] in TITLES[half]
    }
    texts = list(golds.xquad(half, 1000, 55))
    assert [len(text.split("\n\n")) for text, _ in texts] == [55, 55, 55]
    found = {one.id: (text, one) for text, asked in texts for one in asked}
    assert found.keys() == published.keys()
    assert sum(len(asked) for _, asked in texts) == len(found)
    for key, (text, one) in found.items():
        ((begin, end),), ((first, last),) = one.paragraphs, one.needed
        assert (one.question, text[first:last], text[begin:end]) == published[key]
        assert one.answer == text[first:last] and begin <= first < last <= end


def test_so_many_questions_are_drawn_and_reworded_ones_are_the_same_in_other_words() -> None:
    asked = {half: [one for _, asked in golds.xquad(half, 40, 20) for one in asked] for half in HALVES}
    assert [len(some) for some in asked.values()] == [40, 40]
    reworded = [one for half in HALVES for _, asked in golds.xquad(half, 100, 55, reworded=True) for one in asked]
    published = {one.id: one for half in HALVES for _, asked in golds.xquad(half, 1000, 55) for one in asked}
    assert len({one.id for one in reworded}) == 100
    for one in reworded:
        assert one._replace(question="") == published[one.id]._replace(question="")
        assert one.question != published[one.id].question


def test_records_are_a_pair_a_line_and_halves_share_none() -> None:
    texts = {half: list(golds.records(half, 10)) for half in HALVES}
    assert not {text for text, _ in texts["first"]} & {text for text, _ in texts["second"]}
    for text, asked in (pair for some in texts.values() for pair in some):
        assert len(text.splitlines()) == 140 and len({one.id for one in asked}) == 4
        for one in asked:
            ((begin, end),) = one.needed
            assert re.fullmatch(r'"(.*)": "(.*)"', text[begin:end]).groups() == (one.id, one.answer)  # type: ignore[union-attr]
            assert one.id in one.question


def test_two_paragraphs_are_needed_and_stand_anywhere(tmp_path: Path) -> None:
    rows = [
        {
            "_id": f"row {i}",
            "question": "Which?",
            "answer": "blue",
            "title_a": "A",
            "para_a": ["One. ", "Two."],
            "title_b": "B",
            "para_b": ["Three."],
            "distractors": [["C", ["Four."], 1.0], ["D", ["Five."], 2.0]],
        }
        for i in range(20)
    ]
    (tmp_path / "hotpot.json").write_text(json.dumps(rows))
    texts = list(golds.hotpot(str(tmp_path / "hotpot.json"), "second", 8))
    assert [one.id for _, (one,) in texts] == [f"row {i}" for i in range(1, 16, 2)]
    for text, (one,) in texts:
        assert [text[begin:end] for begin, end in one.needed] == ["A\nOne. Two.", "B\nThree."]
        assert sorted(text.split("\n\n")) == ["A\nOne. Two.", "B\nThree.", "C\nFour.", "D\nFive."]
    assert len({text for text, _ in texts}) > 1


def test_counts_and_subjects_are_of_the_whole_text() -> None:
    of = {p["context"]: article["title"].replace("_", " ") for article in ARTICLES for p in article["paragraphs"]}
    asked = [(text.split("\n\n"), one) for text, some in golds.counts("first", 20, 55) for one in some]
    for parts, one in asked:
        n = len([part for part in parts if one.id in re.split(r"\W+", part)])
        assert one.id in one.question and one.answer == str(n)
    assert Counter(one.answer for _, one in asked).keys() == set("23456") and len(asked) == 20
    texts = list(golds.subjects("second", 3, 20))
    for text, (one,) in texts:
        assert one.answer.splitlines() == sorted({of[part] for part in text.split("\n\n")})
    assert len({text for text, _ in texts}) == 3


def test_a_question_may_say_what_to_answer_if_the_text_does_not() -> None:
    plain, told = golds.unanswered("first", 9, 20), golds.told(golds.unanswered("first", 9, 20))
    for (text, asked), (same, others) in zip(plain, told):
        assert text == same and len(asked) == len(others)
        for one, other in zip(asked, others):
            assert other == one._replace(question=other.question) and other.question.startswith(one.question)
            assert other.question.endswith(one.answer)


@pytest.mark.parametrize(
    ("passages", "paragraph", "answer"),
    [
        ([], False, False),
        ([(0, 10)], False, False),  # up to the paragraph
        ([(0, 11)], True, False),
        ([(12, 16)], True, True),
        ([(15, 30), (12, 15)], True, True),  # in two passages
        ([(12, 14), (15, 30)], True, False),
    ],
)
def test_an_answer_counts_as_found_if_all_of_it_is_in_passages(passages, paragraph, answer) -> None:
    asked = Asked("", "", "", [(10, 20)], [(12, 16)])
    assert asked.found(passages) == {"paragraph": paragraph, "answer": answer}
    both = asked._replace(paragraphs=[(10, 20), (40, 50)], needed=[(12, 16), (41, 42)])
    assert both.found(passages) == {"paragraph": False, "answer": False}
    assert both.found([*passages, (40, 60)]) == {"paragraph": paragraph, "answer": answer}


def test_finders_are_held_against_the_first_one() -> None:
    nothing, right = ({"answer": found, "paragraph": found, "passages": int(found)} for found in (False, True))
    rest = {"tokens": 100, "seconds": 0.25, "score": 1.5}
    _, _, none, some = finding.table(
        {"none": [nothing | rest] * 30, "some": [right | rest] * 15 + [nothing | rest] * 15}
    )
    assert none == "| none | 0.0 | +0.0 [+0.0, +0.0] ~ | 0 / 0 | 0.0% | 0.00 | 100 | 0.25 | 1.50, 1.50, 1.50 |"
    assert re.fullmatch(
        r"\| some \| 50.0 \| \+50.0 \[.*\] \| 15 / 0 \| 50.0% \| 0.50 \| 100 \| 0.25 \| 1.50, 1.50, 1.50 \|", some
    )


def test_keyword_search_finds_the_key_and_seldom_what_is_reworded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def rows(*options: str) -> list[dict[str, Any]]:
        assert (
            command("finding", finding.add_arguments, finding.run, ["demo", "--finder=bm25", "--json", *options]) == 0
        )
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    keys = rows("--questions=kv", "--n=8")
    assert len(keys) == 8 and all(row["answer"] and row["tokens"] <= 512 for row in keys)
    published = rows("--questions=xquad", "--n=100")
    assert sum(row["answer"] for row in published) >= 90
    (tmp_path / "xquad.xx.json").write_text(json.dumps({"data": ARTICLES}), encoding="utf-8")
    same = rows(f"--questions={tmp_path / 'xquad.xx.json'}", "--n=100")
    assert [row | {"seconds": 0} for row in same] == [row | {"seconds": 0} for row in published]
    folder = rows("--questions=xquad", "--n=100", "--files=9")
    assert [row["answer"] for row in folder] == [row["answer"] for row in published]
    assert sum(row["answer"] for row in rows("--questions=reworded")) <= 10
    foreign = rows("--questions=xquad", "--foreign", "--n=100")
    assert not {row["id"] for row in foreign} & {row["id"] for row in published}
    assert sum(row["score"] for row in foreign) < 0.7 * sum(row["score"] for row in published)


DATA = PUBLIC / "reworded.json"
FUNCTION_WORDS = """a an and any are as at be been but by can could did do does each for from had has have her his how
if in is it its many may might most much must no not of off on or out over since so such than that
the their them there they this to too under until up was we were what when where which who whom
whose why will with without would"""
ENDINGS = ("ies", "es", "s", "ing", "ed", "ly", "e", "y")


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", re.sub(r"['’]s\b", "", text.casefold())))


def stems(text: str) -> set[str]:
    """The words but for function words, without endings, a doubled last letter once."""
    found = words(text) - words(FUNCTION_WORDS)
    for ending in ENDINGS:
        found = {word.removesuffix(ending) if len(word) > len(ending) + 2 else word for word in found}
    return {re.sub(r"(.)\1$", r"\1", word) for word in found}


def test_no_word_of_a_reworded_question_stands_in_its_paragraph() -> None:
    reworded = {one["id"]: one["question"] for one in json.loads(DATA.read_text(encoding="utf-8"))}
    asked = [
        (article["title"] in TITLES["first"], paragraph["context"], qa)
        for article in ARTICLES
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if qa["id"] in reworded
    ]
    assert len(asked) == len(set(reworded.values())) == 100
    assert Counter(is_first for is_first, _, _ in asked) == {True: 50, False: 50}
    assert max(Counter(paragraph for _, paragraph, _ in asked).values()) <= 2
    for _, paragraph, qa in asked:
        question = reworded[qa["id"]]
        assert not stems(question) & stems(paragraph), question
        assert qa["answers"][0]["text"].casefold() not in question.casefold()
    # as they were published, almost all share words with their paragraph: the comparison sees them
    assert sum(bool(stems(qa["question"]) & stems(paragraph)) for _, paragraph, qa in asked) >= 95
