"""Questions for an analysis: prompts with their right answers, from a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pypcd import _tasks
from pypcd._errors import did_you_mean
from pypcd._prompt import Prompt
from pypcd.evaluation._sample import Count, Sample, Task

__all__ = ["TASKS", "Question", "questions", "task_named"]

Question = tuple[Prompt, Sequence[str]]
"""A prompt and what may be answered to it."""


class _KV:
    """Retrieve.KV as a Task."""

    metric = "exact match"

    def __init__(self, name: str, groups: tuple[int, ...]) -> None:
        self.name, self._groups = name, groups
        self.max_tokens = 2 * sum(groups)

    def samples(self, n: int, n_tokens: int, count: Count, seed: int) -> list[Sample]:
        def made(n_pairs: int) -> list[Sample]:
            return [
                Sample(i, Prompt(after=s.prompt), (s.answer,), s.depth, {"nearest": s.nearest})
                for i, s in enumerate(_tasks.kv_retrieval(n, n_pairs, groups=self._groups, seed=seed))
            ]

        def size(samples: Iterable[Sample]) -> int:
            return max(count(s.prompt.replace(after=s.prompt.after + s.answers[0])) for s in samples)

        low, high = 1, 2
        if size(made(low)) > n_tokens:
            raise ValueError(f"n_tokens is {n_tokens}; allowed: at least {size(made(low))} for the task {self.name}")
        while size(made(high)[:1]) <= n_tokens:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(made(middle)[:1]) <= n_tokens else (low, middle)
        while size(made(low)) > n_tokens:
            low -= 1
        return made(low)

    def score(self, prediction: str, sample: Sample) -> float:
        return float(prediction.strip() == sample.answers[0])


TASKS: dict[str, Task] = {"kv": _KV("kv", (8, 4, 4, 4, 12)), "kv-short": _KV("kv-short", (4, 4))}


def task_named(name: str) -> Task:
    """A task.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}{did_you_mean(name, TASKS)}; there are: {', '.join(TASKS)}")
    return TASKS[name]


def questions(task: Task, n: int, n_tokens: int, count: Count, seed: int = 0) -> Iterator[Question]:
    """A task's samples as questions.

    Raises:
        ValueError: n_tokens is too short for the task.
    """
    for sample in task.samples(n, n_tokens, count, seed):
        yield sample.prompt, sample.answers
