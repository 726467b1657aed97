"""The reworded questions: no word leads a keyword search to the paragraph, and the answer is the published one."""

from __future__ import annotations

import bz2
import json
import re
from collections import Counter

from pypcd.evaluation.tasks.public import PUBLIC

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
    halves = json.loads((PUBLIC / "halves.json").read_text(encoding="utf-8"))["xquad"]
    articles = json.loads(bz2.decompress((PUBLIC / "xquad.en.json.bz2").read_bytes()))["data"]
    asked = [
        (article["title"] in halves["first"], paragraph["context"], qa)
        for article in articles
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
