"""A benchmark's question (Sample), and the interface of a benchmark (Task). Knows nothing of models.

A cell is one task at one length.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from pypcd.errors import InputError
from pypcd.prompt import Prompt
from pypcd.settings.ranges import Integer

__all__ = ["HALVES", "Sample", "Task", "Tokenizer"]

HALVES = ("first", "second")
"""Of the questions: those with even numbers and those with odd ones."""


class Tokenizer(Protocol):
    """What a task needs from a model: the length of prompts, and tokens to cut a text by."""

    def count(self, prompt: Prompt) -> int:
        """The number of tokens of a prompt, including those of a chat template."""
        ...

    def encode(self, text: str) -> list[int]:
        """A plain text's tokens, without a template but with what the model puts before every text (such as BOS)."""
        ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        index: its number in its cell, from 0; the answer's depth may depend on it.
        prompt: the model's prompt.
        answers: the right answers: one of them, or all, is needed; the task's metric decides.
        depth: the answer's place in the context, 0 at its start to 1 at its end; None if it has no single place.
        extra: further facts, such as the value nearest to the question.
        gold: the right answer as a perfect model writes it after the prompt; if not given, the first of the answers.
        end: the text that follows the gold answer in a plain prompt; "" if the task does not say. The model's own end token
            ends an answer as well, and through a chat template it alone does.
    """

    index: int
    prompt: Prompt
    answers: tuple[str, ...]
    depth: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gold: str = ""
    end: str = ""

    def __post_init__(self) -> None:
        if not self.gold:
            object.__setattr__(self, "gold", self.answers[0])


class Task(abc.ABC):
    """A benchmark: questions, and how their answers are scored.

    Attributes:
        name: its name for `--task`.
        metric: the metric's name, for tables.
        max_tokens: the longest answer.
        stop: the text that ends an answer, besides the model's own end token; "" if none does.
        may_exceed: whether prompts may have more than n_tokens, since a publication or a file fixes their size.
    """

    name: str
    metric: str
    max_tokens: int
    stop: str = ""
    may_exceed: bool = False

    @property
    def n_questions(self) -> int | None:
        """How many there are; None if they are generated."""
        return None

    def check(self, n: int, n_tokens: int) -> None:
        """
        Raises:
            ValueError: one of them is not an integer of at least 1, or there are not so many questions.
        """
        Integer(1)("n", n)
        Integer(1)("n_tokens", n_tokens)
        if self.n_questions is not None and n > self.n_questions:
            raise InputError(f"n is {n}; allowed: 1 to {self.n_questions}, the questions of {self.name}")

    @abc.abstractmethod
    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        """n questions whose prompts, with their answers, are as long as possible without exceeding n_tokens.

        The same arguments give the same questions; a tokenizer decides only how long they are. If a publication
        or a file fixes the size in another way, the task's docstring says so.

        Raises:
            ValueError: n_tokens is too short for a question; the message says how many are needed.
        """

    @abc.abstractmethod
    def score(self, prediction: str, sample: Sample) -> float:
        """The score of an answer, 0 to 1."""
