"""A run's progress on stderr: questions done and in all, the time left, and once an estimate of the total time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pypcd.cli import _terminal
from pypcd.evaluation import Progress

FIRST_SECONDS = 20.0  # of work, after which the speed is known


@contextlib.contextmanager
def following(what: str) -> Iterator[Progress]:
    """A block in which a run's progress is a bar on a terminal. One line, printed once, estimates the total time."""
    with _terminal.Bar(1, what, tells_time=False) as bar:
        said = False

        def show(run: Progress) -> None:
            nonlocal said
            left = run.seconds_left
            if not said and run.seconds >= FIRST_SECONDS:
                said = True
                if left is not None and left >= FIRST_SECONDS:  # else it is almost done
                    total, n = duration(run.seconds + left), f"{run.n_made + run.n_answers - run.n_answers_done:,}"
                    _terminal.say(f"about {total} for {n} answers at the speed of the first {run.seconds:.0f} s")
            done = run.n_answers_done / max(run.n_answers, 1)  # those from before this run too, as in the text
            bar.text = f"{what}: {run.n_questions_done:,} of {run.n_questions:,} questions"
            if left is not None:
                bar.text += f", about {duration(left)} left"
            bar.update(done - bar.n)

        yield Progress(show)


def duration(seconds: float) -> str:
    """Seconds as text: 45 s, 12 min, 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
