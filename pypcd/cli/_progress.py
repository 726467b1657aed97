"""A run's progress on stderr: questions done and in all, the time left, and once an estimate of the total time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pypcd.cli import _terminal
from pypcd.evaluation import Progress

FIRST_SECONDS = 20.0  # of work, after which the speed is known


class Follower(Progress):
    """Progress as a bar on a terminal, with one line, printed once, that estimates the total time.

    Args:
        bar: from 0 to 1.
    """

    def __init__(self, bar: _terminal.Bar, what: str) -> None:
        super().__init__(lambda _: self._show())
        self._bar, self._what = bar, what
        self._said = False

    def _show(self) -> None:
        left = self.seconds_left
        if not self._said and self.seconds >= FIRST_SECONDS:
            self._said = True
            if left is not None and left >= FIRST_SECONDS:  # else it is almost done
                total, n = duration(self.seconds + left), f"{self.n_made + self.n_answers - self.n_answers_done:,}"
                _terminal.say(f"about {total} for {n} answers at the speed of the first {self.seconds:.0f} s")
        done = self.n_answers_done / max(self.n_answers, 1)  # those from before this run too, as in the text
        text = f"{self._what}: {self.n_questions_done:,} of {self.n_questions:,} questions"
        if left is not None:
            text += f", about {duration(left)} left"
        self._bar.text = text
        self._bar.update(done - self._bar.n)


@contextlib.contextmanager
def following(what: str) -> Iterator[Follower]:
    """A block in which a run's progress is shown."""
    with _terminal.Bar(1, what, tells_time=False) as bar:
        yield Follower(bar, what)


def duration(seconds: float) -> str:
    """Seconds as text: 45 s, 12 min, 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
