"""How much of a run is done, and how long the rest will take. Knows nothing of models or terminals."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable

from pypcd.evaluation.plan import Key

__all__ = ["Progress"]


class Progress:
    """Follows a run, answer by answer. A question is answered by several methods, and a run may have several passes, as tune()'s has.

    The time left is that of the answers so far, in proportion to the tokens of their prompts.

    Args:
        tell: called with this object at the start of each pass and after each answer.
        clock: returns seconds.

    Attributes:
        n_questions: of all passes that are known.
        n_made: answers made so far, without those from before this run.
        seconds: since the first answer was begun; 0 before it is complete.
    """

    def __init__(
        self, tell: Callable[[Progress], object] = lambda progress: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock = tell, clock
        self._done: set[Key] = set()
        self._todo: set[Key] = set()
        self._later: set[Key] = set()
        self._left: set[Key] = set()
        self._left_of: collections.Counter[tuple[str, int, int]] = collections.Counter()  # answers left of a question
        self._begun: float | None = None
        self.n_questions = self.n_made = self._tokens_read = self._tokens_left = 0

    def _count(self) -> None:
        """Once a pass begins, not after each answer: there may be tens of thousands."""
        self._left = self._todo | (self._later - self._done)
        self._left_of = collections.Counter(key[:3] for key in self._left)
        self._tokens_left = sum(key[1] for key in self._left)
        self.n_questions = len({key[:3] for key in self._done} | self._left_of.keys())

    @property
    def n_answers(self) -> int:
        return self.n_answers_done + len(self._left)

    @property
    def n_answers_done(self) -> int:
        """Including those from before this run."""
        return len(self._done)

    @property
    def n_questions_done(self) -> int:
        return self.n_questions - len(self._left_of)

    @property
    def seconds(self) -> float:
        return 0.0 if self._begun is None else self._clock() - self._begun

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end; None before the first answer."""
        return self.seconds * self._tokens_left / self._tokens_read if self._tokens_read else None

    def expect(self, keys: Iterable[Key]) -> None:
        """Set what later passes are likely to need; each call replaces the last one."""
        self._later = set(keys)
        self._count()

    def begin(self, keys: Iterable[Key], todo: Iterable[Key]) -> None:
        """Begin a pass, of which `todo` has no answers yet."""
        self._todo = set(todo)
        self._done = (self._done | set(keys)) - self._todo
        self._count()
        self._tell(self)

    def answered(self, key: Key, seconds: float | None) -> None:
        """Count an answer and the seconds it took; None: this model cannot run the method."""
        self._todo.discard(key)
        self._done.add(key)
        if key in self._left:
            self._left.remove(key)
            self._tokens_left -= key[1]
            self._left_of[key[:3]] -= 1
            if not self._left_of[key[:3]]:
                del self._left_of[key[:3]]
        self.n_made += 1
        if seconds is not None:
            self._tokens_read += key[1]
            self._begun = self._clock() - seconds if self._begun is None else self._begun
        self._tell(self)
