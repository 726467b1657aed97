"""Questions written once and kept in `data`: JSON objects, one a line, compressed.

They are the questions of the published figures. The code that drew them is in the history, up to the commit that added the files.
"""

from __future__ import annotations

import abc
import bz2
import functools
import itertools
import json
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer
from pypcd.evaluation.tasks.size import largest

__all__ = ["Row", "Written", "in_order", "paragraphs", "rows", "unrelated"]

T = TypeVar("T")
Row = dict[str, Any]

DATA = pathlib.Path(__file__).with_name("data")


@functools.cache
def rows(file: str, kind: str | None = None) -> tuple[Row, ...]:
    """The rows of a file in `data`, in the published order; those of a kind, or all."""
    if kind is not None:
        return tuple(row for row in rows(file) if row["kind"] == kind)
    with bz2.open(DATA / f"{file}.jsonl.bz2", "rt", encoding="utf-8") as lines:
        return tuple(map(json.loads, lines))


def in_order(questions: Sequence[T], seed: int) -> list[T]:
    """Questions in the order of a seed. 0 is the published order; another seed mixes the questions with even numbers and those with
    odd ones, each among themselves, so that a question stays in its half."""
    if seed == 0:
        return list(questions)
    rng = random.Random(seed)
    mixed = [*questions]
    for half in (0, 1):
        mixed[half::2] = rng.sample(questions[half::2], len(questions[half::2]))
    return mixed


class Written(Task, Generic[T]):
    """A benchmark of questions that are kept. Each is as long as fits, whatever the size of the others."""

    smallest = 1

    @property
    @abc.abstractmethod
    def questions(self) -> Sequence[T]:
        """All questions, in the published order."""

    @abc.abstractmethod
    def sample(self, i: int, asked: T, size: int) -> Sample:
        """A question as number i of a cell, with a context of a size."""

    def most(self, n_tokens: int) -> int | None:
        """The largest size at a length; None: whatever fits."""
        return None

    @property
    def n_questions(self) -> int:
        return len(self.questions)

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        self.check(n, n_tokens)
        made: list[Sample] = []
        for i, asked in enumerate(in_order(self.questions, seed)[:n]):
            make = functools.partial(self.sample, i, asked)
            size = largest(make, self.smallest, n_tokens, self.max_tokens, tokenizer, self.most(n_tokens))
            made.append(make(size))
        return made


def unrelated(at: int) -> Iterator[str]:
    """Sentences that answer no question, without end: a pool that begins at another place for each number."""
    pool = _pool()
    return itertools.islice(itertools.cycle(pool), at * 997 % len(pool), None)


@functools.cache
def _pool() -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentence for row in rows("everyday") for sentence in row["sentences"]))


def paragraphs(sentences: Sequence[str]) -> list[str]:
    """The sentences as text, five in a paragraph."""
    return [" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)]
