"""How much of a run is done, and how long the rest will take. Knows nothing of models or terminals."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Collection, Iterable

from pypcd.evaluation.plan import Key

__all__ = ["Progress"]


class Progress:
    """Follows a run, answer by answer.

    The time left is that of the answers so far, in proportion to the tokens of their prompts.

    Args:
        tell: called with this object at the start of each pass and after each answer.
        clock: returns seconds.

    Attributes:
        n_questions: of the whole run. If it goes over its questions several times, as tune() does, each time counts.
        n_answers: of the whole run. A question is answered by several methods.
        n_questions_done: including those from before this run.
        n_answers_done: including those from before this run.
        n_asked: answers that this run makes in all, without those from before.
        seconds: since the first answer was begun; 0 before it is complete.
    """

    def __init__(
        self, tell: Callable[[Progress], object] = lambda progress: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.n_questions = self.n_questions_done = self.n_answers = self.n_answers_done = self.n_asked = 0
        self._tell, self._clock = tell, clock
        self._begun: float | None = None
        self._later: Collection[Key] = ()
        self._n_left: collections.Counter[tuple[str, int, int]] = collections.Counter()  # answers left of a question
        self._tokens_left = self._tokens_read = 0

    @property
    def seconds(self) -> float:
        return 0.0 if self._begun is None else self._clock() - self._begun

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end; None before the first answer."""
        return self.seconds * self._tokens_left / self._tokens_read if self._tokens_read else None

    def expect(self, keys: Iterable[Key]) -> None:
        """Set what later passes are likely to need; each call replaces the last one."""
        self._count(self._later, -1)
        self._later = list(keys)
        self._count(self._later, 1)

    def begin(self, keys: Collection[Key], todo: Collection[Key]) -> None:
        """Begin a pass.

        Args:
            keys: all keys of the pass.
            todo: those without an answer yet.
        """
        self._n_left = collections.Counter(key[:3] for key in todo)
        self._count(todo, 1)
        n_before, n_questions_before = len(keys) - len(todo), len({key[:3] for key in keys}) - len(self._n_left)
        self.n_answers += n_before
        self.n_answers_done += n_before
        self.n_questions += n_questions_before
        self.n_questions_done += n_questions_before
        self._tell(self)

    def answered(self, key: Key, seconds: float | None) -> None:
        """Count an answer and the seconds it took; None: this model cannot run the method."""
        self._n_left[key[:3]] -= 1
        self.n_questions_done += self._n_left[key[:3]] == 0
        self.n_answers_done += 1
        self._tokens_left -= key[1]
        if seconds is not None:
            self._tokens_read += key[1]
            self._begun = self._clock() - seconds if self._begun is None else self._begun
        self._tell(self)

    def _count(self, keys: Collection[Key], sign: int) -> None:
        """Count what is still to be answered, or (-1) no longer."""
        self.n_questions += sign * len({key[:3] for key in keys})
        self.n_answers += sign * len(keys)
        self.n_asked += sign * len(keys)
        self._tokens_left += sign * sum(key[1] for key in keys)
