"""Questions for an analysis: prompts with their right answers, from a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pypcd.evaluation.tasks.sample import Task, Tokenizer
from pypcd.prompt import Prompt

__all__ = ["Question", "questions"]

Question = tuple[Prompt, Sequence[str]]
"""A prompt and its right answers."""


def questions(task: Task, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int = 0) -> Iterator[Question]:
    """A task's samples as questions.

    Raises:
        ValueError: n_tokens is too short for the task.
    """
    for sample in task.samples(n, n_tokens, tokenizer, seed):
        yield sample.prompt, sample.answers
