"""How much of a run is done, and how long the rest will take. Knows nothing of models or terminals."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Collection, Iterable

from pypcd.evaluation.plan import Key

__all__ = ["Progress"]

_Cell = tuple[str, int, str]  # task, length, method


class Progress:
    """Follows a run, answer by answer.

    The time left is estimated from the answers so far: each answer to come takes as long as those of the same method and
    length; if there are none, as long as those of the nearest length, in proportion to the tokens; and for a new method,
    as long as the mean of the others. The first answer of a method in a cell (a task at a length) may have to prepare
    something (the method control answers other questions first), so its extra time counts once a cell. The sum is scaled
    by the time the clock shows over the sum of the answers' own times, which accounts for other work and for several
    processes.

    Args:
        tell: called with this object at the start of each pass and after each answer.
        clock: returns seconds.

    Attributes:
        n_questions: of the whole run. If it goes over its questions several times, as tune() does, each time counts.
        n_answers: of the whole run. A question is answered by several methods.
        n_questions_done: including those from before this run.
        n_answers_done: including those from before this run.
        n_questions_asked: questions completed in this run.
        seconds: since the first answer was begun; 0 before it is complete.
    """

    def __init__(
        self, tell: Callable[[Progress], object] = lambda progress: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.n_questions = self.n_questions_done = self.n_questions_asked = self.n_answers = self.n_answers_done = 0
        self._n_asked = 0
        self._tell, self._clock = tell, clock
        self._begun: float | None = None
        self._left: collections.Counter[_Cell] = collections.Counter()
        self._later: collections.Counter[_Cell] = collections.Counter()
        self._n_questions_later = 0
        self._open: collections.Counter[tuple[str, int, int]] = collections.Counter()  # answers left of a question
        self._taken: dict[_Cell, list[float]] = collections.defaultdict(list)

    @property
    def seconds(self) -> float:
        return 0.0 if self._begun is None else self._clock() - self._begun

    @property
    def n_asked(self) -> int:
        """How many answers this run makes in all, without those from before."""
        return self._n_asked + sum(self._later.values())

    @property
    def is_extrapolated(self) -> bool:
        """Whether lengths are to come that no answer has been timed at."""
        known = {length for _, length, _ in self._taken}
        return any(n and cell[1] not in known for cell, n in (*self._left.items(), *self._later.items()))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end; None before the first answer."""
        taken = sum(map(sum, self._taken.values()))
        if taken <= 0:
            return None
        first = self._by_method(slice(1))
        each = {**first, **self._by_method(slice(1, None))}
        total = 0.0
        for cell, n in (*self._left.items(), *self._later.items()):
            _, length, method = cell
            one = _at(length, each.get(method) or _merged(each))
            total += n * one
            if n and cell not in self._taken and method in first:
                total += max(_at(length, first[method]) - one, 0.0)
        return total * max(self.seconds, 0.0) / taken

    def expect(self, keys: Iterable[Key]) -> None:
        """Set what later passes are likely to need; each call replaces the last one."""
        self.n_answers -= sum(self._later.values())
        self.n_questions -= self._n_questions_later
        keys = list(keys)
        self._later = collections.Counter((task, length, method) for task, length, _, method in keys)
        self._n_questions_later = len({key[:3] for key in keys})
        self.n_answers += len(keys)
        self.n_questions += self._n_questions_later

    def begin(self, keys: Collection[Key], todo: Collection[Key]) -> None:
        """Begin a pass.

        Args:
            keys: all keys of the pass.
            todo: those without an answer yet.
        """
        self._left = collections.Counter((task, length, method) for task, length, _, method in todo)
        self._open = collections.Counter(key[:3] for key in todo)
        n_questions = len({key[:3] for key in keys})
        self.n_questions += n_questions
        self.n_questions_done += n_questions - len(self._open)
        self.n_answers += len(keys)
        self.n_answers_done += len(keys) - len(todo)
        self._n_asked += len(todo)
        self._tell(self)

    def answered(self, key: Key, seconds: float | None) -> None:
        """Count an answer and the seconds it took; None: this model cannot run the method."""
        task, length, _, method = key
        self._left[task, length, method] -= 1
        self._open[key[:3]] -= 1
        self.n_questions_done += self._open[key[:3]] == 0
        self.n_questions_asked += self._open[key[:3]] == 0
        self.n_answers_done += 1
        if seconds is not None:
            if self._begun is None:
                self._begun = self._clock() - seconds
            self._taken[task, length, method].append(seconds)
        self._tell(self)

    def _by_method(self, which: slice) -> dict[str, dict[int, float]]:
        """Mean seconds of an answer by method and length: the first answer of each cell, or the others."""
        found: dict[str, dict[int, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for (_, length, method), values in self._taken.items():
            if values[which]:
                found[method][length] += values[which]
        return {
            method: {length: statistics.fmean(values) for length, values in lengths.items()}
            for method, lengths in found.items()
        }


def _merged(by_method: dict[str, dict[int, float]]) -> dict[int, float]:
    """The mean over methods, by length."""
    found: dict[int, list[float]] = collections.defaultdict(list)
    for lengths in by_method.values():
        for length, seconds in lengths.items():
            found[length].append(seconds)
    return {length: statistics.fmean(values) for length, values in found.items()}


def _at(length: int, known: dict[int, float]) -> float:
    """Seconds at a length: those of the nearest known length, in proportion to the tokens."""
    nearest = min(known, key=lambda other: max(other / length, length / other))
    return known[nearest] * length / nearest
