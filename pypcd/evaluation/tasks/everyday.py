"""Everyday questions: what a small model gets mostly right, to measure what a setting costs where people live.

A question comes after examples of its kind (`kinds`). Two ways make it long: more examples, or unrelated text (`prose`)
before them. Question i is the same at every length and in both ways, and so are the examples nearest to it. Questions with
even and with odd numbers, and their examples, come from two halves of everything that can be asked: no question of one half
is asked or shown in the other, whatever the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Literal

from pypcd.evaluation.tasks.kinds import KINDS, Kind, Topic
from pypcd.evaluation.tasks.prose import paragraphs, sentences
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, largest
from pypcd.prompt import Prompt

__all__ = ["EVERYDAY", "LEAST", "SHORT", "Asked", "Everyday", "after", "asked_of", "kind_of"]

SHORT = 300
"""The longest prompt with its answer that counts as short: it has a few examples, though more might fit."""

LEAST = 20.0
"""A model that gets fewer everyday questions right, in percent, tells nothing of what a setting costs there."""

FEWEST = 2  # examples
_TRIES = 50  # to draw something that was not drawn before; some topics have few questions


@dataclasses.dataclass(frozen=True)
class Everyday:
    """A kind of everyday questions in one of two ways.

    Attributes:
        way: "shots": a prompt longer than SHORT has as many examples as fit; "behind": it has as much unrelated text
            before a few examples.
    """

    kind: Kind
    way: Literal["shots", "behind"] = "shots"

    metric = "accuracy"
    one_text = True
    may_exceed = False
    n_questions = None

    @property
    def name(self) -> str:
        return f"everyday-{self.kind.name}" + ("-behind" if self.way == "behind" else "")

    @property
    def max_tokens(self) -> int:
        return self.kind.max_tokens

    @property
    def stop(self) -> str:
        return "\n\n" if self.kind.in_lines else "\n"

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        made: list[Sample] = []
        size = 0
        for i, asked in zip(range(n), asked_of(self.kind, seed)):
            size = largest(
                lambda size, i=i, asked=asked: self._sample(i, asked, size),  # type: ignore[misc]
                FEWEST,
                n_tokens,
                self.max_tokens,
                tokenizer,
                near=size,
                most=self.kind.n_examples if self.way == "shots" and n_tokens <= SHORT else None,
            )
            made.append(self._sample(i, asked, size))
        return made

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer, up to the stop and without white space around its lines, is the right one; else 0."""
        answer = prediction.strip().split(self.stop)[0]
        return float([line.strip() for line in answer.split("\n")] == sample.answers[0].split("\n"))

    def _sample(self, i: int, asked: Asked, size: int) -> Sample:
        """The question with as many examples as `size`, or with the few of a short prompt and a sentence for each more."""
        n_examples = size if self.way == "shots" else min(size, self.kind.n_examples)
        shots = [(question, after(question, answer)) for question, answer in asked.examples(n_examples)[::-1]]
        prompt = Prompt(after=asked.question)
        if n_examples < size:  # as a text that was handed over, in which methods look for what the question needs
            (question, answer), *others = shots
            shots = [(f"\n\n{question}", answer), *others]
            text = tuple(paragraphs(asked.sentences(size - n_examples)).split("\n\n"))
            prompt = prompt.replace(segments=text, joiner="\n\n", text_first=True)
        prompt = prompt.replace(shots=tuple(shots))
        return Sample(i, prompt, (asked.answer,), gold=after(asked.question, asked.answer), end="\n\n")


class Asked:
    """A question, with as many examples and as much unrelated text as are wanted: the same ones again each time."""

    def __init__(self, topic: Topic, rng: random.Random, half: int) -> None:
        self.question, self.answer = _drawn(topic, rng, 0, half)
        self._rng, self._topic, self._half = rng, topic, half
        self._examples: list[tuple[str, str]] = []
        self._seen = {self.question}
        self._sentences: list[str] = []
        self._prose: Iterator[str] = sentences(random.Random(rng.random()))

    def examples(self, n: int) -> list[tuple[str, str]]:
        """The n examples nearest to the question, the nearest first. The question is not among them; examples repeat only
        where the topic has no others."""
        while len(self._examples) < n:
            place = len(self._examples) + 1
            for _ in range(_TRIES):
                question, answer = _drawn(self._topic, self._rng, place, self._half)
                if question not in self._seen:
                    break
            while question == self.question:
                question, answer = _drawn(self._topic, self._rng, place, self._half)
            self._seen.add(question)
            self._examples.append((question, answer))
        return self._examples[:n]

    def sentences(self, n: int) -> list[str]:
        self._sentences += itertools.islice(self._prose, max(0, n - len(self._sentences)))
        return self._sentences[:n]


def asked_of(kind: Kind, seed: int) -> Iterator[Asked]:
    """The questions of a kind in their order; one is asked again, after other examples, only where there are no others."""
    seen: set[str] = set()
    for i in itertools.count():
        for attempt in range(_TRIES):
            rng = random.Random(f"everyday-{kind.name} {seed} {i} {attempt}")
            asked = Asked(kind.topic(rng), rng, i % 2)
            if asked.question not in seen:
                break
        seen.add(asked.question)
        yield asked


def _drawn(topic: Topic, rng: random.Random, place: int, half: int) -> tuple[str, str]:
    """A question of a half of all questions, and its answer."""
    while True:
        question, answer = topic(rng, place)
        if zlib.crc32(question.encode()) % 2 == half:
            return question, answer


def after(question: str, answer: str) -> str:
    """The answer as it follows the question in a plain text: below it, or after a space."""
    return answer if question.endswith("\n") else f" {answer}"


EVERYDAY = tuple(Everyday(kind, way) for way in ("shots", "behind") for kind in KINDS)  # type: ignore[arg-type]

_KINDS_BY_TASK = {made.name: made.kind.name for made in EVERYDAY}


def kind_of(task: str) -> str | None:
    """The kind of questions of an everyday task, the same in both ways; None: it is another task."""
    return _KINDS_BY_TASK.get(task)
