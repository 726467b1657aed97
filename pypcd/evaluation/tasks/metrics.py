"""The metrics on one answer, 0 to 1. Those of published benchmarks are computed as in their public code."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["any_match", "first_named", "recall", "same_sentence", "set_f1", "word_match"]


def word_match(prediction: str, answer: str) -> float:
    """InfiniteBench's get_score_one_kv_retrieval: 1 if the answer is one of the prediction's words."""
    return float(answer in re.sub("[\n:\"'.,?!{}]", " ", prediction).split())


def recall(prediction: str, references: Sequence[str]) -> float:
    """RULER's string_match_all: the share of the references found anywhere in the prediction, upper or lower case."""
    prediction = re.sub(r"[\x00-\x1f]", "\n", prediction).lower()
    return sum(reference.lower() in prediction for reference in references) / len(references)


def any_match(prediction: str, references: Sequence[str]) -> float:
    """RULER's string_match_part: 1 if one of the references is found anywhere in the prediction, upper or lower case."""
    return float(recall(prediction, references) > 0)


def set_f1(prediction: str, references: Sequence[str]) -> float:
    """F1 of a comma-separated list as a set, as GraphWalks is scored: a repeated item counts once, and the case matters."""
    items = {item.strip() for item in prediction.split(",")} - {""}
    return 2 * len(items.intersection(references)) / (len(items) + len(references))


def first_named(prediction: str, answer: str, others: Sequence[str] = (), spelt: str = "") -> float:
    """1 if the prediction's first line names the answer, and none of the others before it; upper or lower case.

    Only whole words count. If the answer is a number, every other number is one of the others.

    Args:
        spelt: a number in words, which is right too.
    """
    line = prediction.strip().split("\n")[0]
    texts = sorted(filter(None, (answer, spelt, *others)), key=len, reverse=True)
    is_number = answer[:1].isdigit()
    number = r"\d+(?:[.,:]\d+)*|" if is_number else ""
    found = re.search(rf"(?<!\w)(?:{number}{'|'.join(map(re.escape, texts))})(?!\w)", line, re.IGNORECASE)
    if found is None:
        return 0.0
    given = found[0].casefold()
    if is_number and given != spelt.casefold():
        return float(_number(given) == _number(answer))
    return float(given in (answer.casefold(), spelt.casefold()))


def same_sentence(prediction: str, answer: str) -> float:
    """1 if the prediction's first line, up to a closing quotation mark, is the answer; white space and the mark at the end of
    the sentence do not count."""
    parts = (_bare(part) for part in re.split('["\u201c\u201d\u00ab\u00bb]', prediction.strip().split("\n")[0]))
    return float(next(filter(None, parts), "") == _bare(answer))


def _bare(sentence: str) -> str:
    return " ".join(sentence.split()).strip("' ").rstrip(".!? ")


def _number(text: str) -> float | None:
    try:
        if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
            return float(text.replace(",", ""))
        return float(text.replace(",", "."))
    except ValueError:  # a time of day, or a date
        return None
