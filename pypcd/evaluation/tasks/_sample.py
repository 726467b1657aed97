"""What a benchmark's question is, and what a benchmark must offer. Knows nothing of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pypcd._prompt import Prompt

__all__ = ["Sample", "Task", "Tokenizer"]


class Tokenizer(Protocol):
    """What a task asks of a model: how long its prompts are, and where a text is to be cut."""

    def count(self, prompt: Prompt) -> int:
        """How many tokens the model reads for a prompt, a chat template's included."""
        ...

    def encode(self, text: str) -> list[int]:
        """A plain text's tokens, without a template but with what the model puts ahead of every text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text; special tokens have none."""
        ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        index: its number in its cell, from 0; the depth of the answer sweeps with it.
        prompt: what the model reads.
        answers: what it may answer, or all that it should name, as the task's metric reads them.
        depth: where the answer stands in the context, 0 at its start to 1 at its end; None where that has no meaning.
        extra: further facts, such as the value nearest to the question.
    """

    index: int
    prompt: Prompt
    answers: tuple[str, ...]
    depth: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Task(Protocol):
    """A benchmark: questions, and how their answers are scored.

    Attributes:
        name: as `--task` has it.
        metric: the metric's name, for tables.
        max_tokens: the longest answer.
        n_questions: how many there are; None where they are generated.
        may_exceed: prompts may take more tokens than asked for, since a publication fixes their size otherwise.
    """

    @property
    def n_questions(self) -> int | None: ...

    @property
    def may_exceed(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> str: ...

    @property
    def max_tokens(self) -> int: ...

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        """n questions whose prompts, answers included, come as near to n_tokens as they can without exceeding it.

        The same arguments give the same questions; all that they take from a tokenizer is their size. Where a
        publication fixes the size in another way, the task's docstring says so.

        Raises:
            ValueError: n_tokens is too short for a question; the message says how many are needed.
        """
        ...

    def score(self, prediction: str, sample: Sample) -> float:
        """0 to 1."""
        ...
