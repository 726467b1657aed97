"""Everyday questions: what a small model gets mostly right, to measure what a setting costs where people live.

A question comes after examples of its kind. Two ways make it long: more examples, or unrelated text before them. Question i is the
same at every length and in both ways, and so are the examples nearest to it. Questions with even and with odd numbers, and their
examples, are two halves: no question of one half is asked or shown in the other, whatever the seed.

A question has as many examples and sentences of its own as the published figures needed. A longer prompt goes on with those of other
questions of its kind and half.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from pypcd.evaluation.tasks import frozen
from pypcd.evaluation.tasks.sample import Sample
from pypcd.prompt import Prompt

__all__ = ["EVERYDAY", "LEAST", "SHORT", "Everyday", "kind_of"]

SHORT = 300
"""The longest prompt with its answer that counts as short: it has a few examples, though more might fit."""

LEAST = 20.0
"""A model that gets fewer everyday questions right, in percent, tells nothing of what a setting costs there."""

Pair = tuple[str, str]
"""A question and its answer. A question that ends with a line break has its answer below it."""


@dataclasses.dataclass(eq=False)
class Everyday(frozen.Written[int]):
    """A kind of everyday questions in one of two ways.

    Attributes:
        max_tokens: the longest answer; a right one takes about half of it.
        n_examples: of a short prompt.
        in_lines: whether an answer may have several lines.
        behind: whether a long prompt has unrelated text before a few examples. Else one longer than SHORT has as many examples as fit.
    """

    kind: str
    max_tokens: int
    n_examples: int
    in_lines: bool = False
    behind: bool = False

    metric = "accuracy"
    smallest = 2  # examples

    def __post_init__(self) -> None:
        self.name = f"everyday-{self.kind}" + "-behind" * self.behind
        self.stop = "\n\n" if self.in_lines else "\n"

    @property
    def questions(self) -> Sequence[int]:
        return range(len(frozen.rows("everyday", self.kind)))

    def most(self, n_tokens: int) -> int | None:
        return None if self.behind or n_tokens > SHORT else self.n_examples

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer, up to the stop and without white space around its lines, is the right one; else 0."""
        answer = prediction.strip().split(self.stop)[0]
        return float([line.strip() for line in answer.split("\n")] == sample.answers[0].split("\n"))

    def sample(self, i: int, asked: int, size: int) -> Sample:
        """The question with as many examples as `size`, or with the few of a short prompt and a sentence for each more."""
        row = frozen.rows("everyday", self.kind)[asked]
        n_examples = min(size, self.n_examples) if self.behind else size
        shots = [(question, _after(question, answer)) for question, answer in self.examples(asked, n_examples)[::-1]]
        prompt = Prompt(after=row["question"])
        if n_examples < size:  # as a text that was handed over, in which methods look for what the question needs
            (question, answer), *others = shots
            shots = [(f"\n\n{question}", answer), *others]
            sentences = itertools.chain(row["sentences"], frozen.unrelated(asked))
            text = frozen.paragraphs(list(itertools.islice(sentences, size - n_examples)))
            prompt = prompt.replace(segments=tuple(text), joiner="\n\n", text_first=True)
        prompt = prompt.replace(shots=tuple(shots))
        return Sample(i, prompt, (row["answer"],), gold=_after(row["question"], row["answer"]), end="\n\n")

    def examples(self, asked: int, n: int) -> list[Pair]:
        """The n examples nearest to a question, the nearest first. The question is not among them; examples repeat only where its
        kind and half has no others."""
        own = _pairs(frozen.rows("everyday", self.kind)[asked])
        if n <= len(own):
            return own[:n]
        return [*own, *itertools.islice(itertools.cycle(_others(self.kind, asked)), n - len(own))]


@functools.cache
def _others(kind: str, asked: int) -> list[Pair]:
    """The examples that a question has besides its own: questions and examples of its kind and half, then its own again."""
    rows = frozen.rows("everyday", kind)
    own, others = _pairs(rows[asked]), [*rows[asked + 2 :: 2], *rows[asked % 2 : asked : 2]]
    found = {(row["question"], row["answer"]): None for row in others}
    found.update((pair, None) for row in others for pair in _pairs(row))
    return [*(pair for pair in found if pair not in own and pair[0] != rows[asked]["question"]), *own]


def _pairs(row: frozen.Row) -> list[Pair]:
    return [(question, answer) for question, answer in row["examples"]]


def _after(question: str, answer: str) -> str:
    """The answer as it follows the question in a plain text: below it, or after a space."""
    return answer if question.endswith("\n") else f" {answer}"


_KINDS = (
    Everyday("facts", 12, 8),
    Everyday("json", 48, 3),
    Everyday("schema", 48, 3),
    Everyday("tools", 48, 3),
    Everyday("copy", 48, 4, in_lines=True),
    Everyday("sort", 16, 8),
    Everyday("arithmetic", 10, 8),
    Everyday("spelling", 16, 8),
    Everyday("formats", 24, 5),
    Everyday("classify", 8, 7),
    Everyday("code", 24, 4),
    Everyday("brackets", 32, 4),
)
EVERYDAY = (*_KINDS, *(dataclasses.replace(made, behind=True) for made in _KINDS))

_KINDS_BY_TASK = {made.name: made.kind for made in EVERYDAY}


def kind_of(task: str) -> str | None:
    """The kind of questions of an everyday task, the same in both ways; None: it is another task."""
    return _KINDS_BY_TASK.get(task)
