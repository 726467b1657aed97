"""Questions that others wrote and published: XQuAD's English ones, and the key-value records of "Lost in the Middle".

The data are in `data/public`, with their licences. `halves.json` there splits XQuAD's articles and the records in two. A question with an
even number is of the first half, one with an odd number of the second, and so is all text around it: what is chosen on the first half of a
cell is judged on texts that had no part in the choice.
"""

from __future__ import annotations

import bz2
import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pypcd.evaluation.tasks import frozen
from pypcd.evaluation.tasks.kv import KV
from pypcd.evaluation.tasks.metrics import any_match
from pypcd.evaluation.tasks.sample import HALVES, Sample
from pypcd.prompt import Prompt

__all__ = ["KV_RECORDS", "KVRecords", "XQuAD", "articles", "reworded"]

T = TypeVar("T")
Pairs = list[tuple[str, str]]

PUBLIC = frozen.DATA / "public"
KEYS = 4  # of a record that are asked for


class XQuAD(frozen.Written["_Question"]):
    """A question about one paragraph of Wikipedia, which stands among paragraphs of other questions, as in RULER's `qa`.

    Questions are by people: XQuAD (arXiv 1910.11856), which has them from SQuAD 1.1. Question i, its gold paragraph's depth and the
    paragraphs around it are the same at every length; a longer text has more paragraphs. One that is longer than its half of XQuAD
    (about 20,000 tokens) has paragraphs twice. The metric is RULER's for `qa`, on the answer's first line.
    """

    name = "xquad"
    metric = "accuracy"
    max_tokens = 32
    stop = "\n"

    @property
    def questions(self) -> Sequence[_Question]:
        return _questions()

    def sample(self, i: int, asked: _Question, size: int) -> Sample:
        """The question on a text of this number of paragraphs."""
        rng = random.Random(asked.id)
        others = itertools.cycle(rng.sample(asked.others, len(asked.others)))
        at = round(rng.random() * (size - 1))
        text = list(itertools.islice(others, size - 1))
        text.insert(at, asked.paragraph)
        prompt = Prompt(
            "Answer the question at the end with a few words from the text.\n\n",
            tuple(text),
            "\n\n",
            f"\n\nQuestion: {asked.question}\n",
            answer_prefix="Answer:",
        )
        depth = at / max(size - 1, 1)
        return Sample(i, prompt, (asked.answer,), depth, {"id": asked.id}, gold=f" {asked.answer}", end="\n")

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the first line has the answer in it, upper or lower case."""
        return any_match(prediction.strip().split(self.stop)[0], sample.answers)


@dataclasses.dataclass(frozen=True)
class _Question:
    id: str
    question: str
    answer: str
    paragraph: str
    others: tuple[str, ...]  # the other paragraphs of its half


@functools.cache
def _questions() -> Sequence[_Question]:
    return _interleaved(*(_of_articles(articles(half)) for half in HALVES))


def _of_articles(of_half: Sequence[Sequence[dict[str, Any]]]) -> list[_Question]:
    """The questions of a half, in one mixed order for all seeds."""
    asked = [paragraph for article in of_half for paragraph in article]
    texts = [paragraph["context"] for paragraph in asked]
    found = [
        _Question(qa["id"], qa["question"], qa["answers"][0]["text"], text, (*texts[:k], *texts[k + 1 :]))
        for k, (paragraph, text) in enumerate(zip(asked, texts))
        for qa in paragraph["qas"]
    ]
    random.Random("xquad").shuffle(found)
    return found


@dataclasses.dataclass(frozen=True)
class KVRecords(KV):
    """Retrieve.KV on the records of "Lost in the Middle" (arXiv 2307.03172) of 140 pairs, of which InfiniteBench's task is the longer form.

    A text has the first pairs of a record; behind its 140th pair those of the next record of the same half follow. Answers are spread
    evenly over the context, as in KV, so that records asked twice are asked for other keys.
    """

    @property
    def n_questions(self) -> int:
        return KEYS * len(_records())

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        records = frozen.in_order(_records(), seed)
        for i in range(n):
            begin = i % len(records)
            in_half = itertools.cycle([*records[begin::2], *records[begin % 2 : begin : 2]])
            pairs = list(itertools.islice(itertools.chain.from_iterable(in_half), size))
            yield self.question(i, pairs, i * size // n)


def articles(half: str) -> list[list[dict[str, Any]]]:
    """The paragraphs of each of XQuAD's articles of the "first" or "second" half, as SQuAD's format has them: "context" and "qas"."""
    made = {article["title"]: article["paragraphs"] for article in json.loads(_content("xquad.en.json"))["data"]}
    return [made[title] for title in _parts("xquad", half)]


def reworded() -> dict[str, str]:
    """Questions of XQuAD in other words, by their ids: none of their words, but for function words, stands in the paragraph with the
    answer."""
    rows = json.loads((PUBLIC / "reworded.json").read_text(encoding="utf-8"))
    return {row["id"]: row["question"] for row in rows}


@functools.cache
def _records() -> Sequence[Pairs]:
    lines = [json.loads(line)["ordered_kv_records"] for line in _content("kv140.jsonl").splitlines()]
    return _interleaved(*([[*map(tuple, lines[k])] for k in _parts("kv140", half)] for half in HALVES))


def _interleaved(first: Sequence[T], second: Sequence[T]) -> list[T]:
    return [one for pair in zip(first, second) for one in pair]


def _parts(name: str, half: str) -> list[Any]:
    """The titles of articles, or the numbers of records, of a half."""
    found: list[Any] = json.loads((PUBLIC / "halves.json").read_text(encoding="utf-8"))[name][half]
    return found


def _content(file: str) -> str:
    return bz2.decompress((PUBLIC / f"{file}.bz2").read_bytes()).decode("utf-8")


KV_RECORDS = KVRecords("kv-records", max_tokens=50)
