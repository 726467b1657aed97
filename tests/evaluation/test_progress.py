"""Progress against simulated runs with known times."""

from __future__ import annotations

import io

import pytest
from processes import within

from pypcd.cli import _progress, _terminal
from pypcd.cli._progress import duration
from pypcd.evaluation import Plan, Progress

METHODS = ("greedy", "pcd", "control")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def follow(plan: Plan, progress: Progress, clock: Clock, n_jobs: int = 1, stop: int | None = None) -> list[tuple]:
    """Answer a whole plan: greedy evaluates the prompt, the others share it. Gives the estimate and the true time left after
    each answer."""
    keys = list(plan.everything())
    progress.begin(keys, keys)
    times = [{"greedy": 2.0, "pcd": 0.5, "control": 0.25}[key[3]] * key[1] / 1000 for key in keys]
    clock.now += 50  # until the model is loaded
    seen = []
    for i, (key, seconds) in enumerate(zip(keys, times)):
        clock.now += seconds / n_jobs
        progress.answered(key, seconds / n_jobs)
        seen.append((progress.seconds_left, sum(times[i + 1 :]) / n_jobs))
        if i + 1 == stop:
            break
    return seen


@pytest.mark.parametrize("n_jobs", [1, 4])
def test_the_time_left_is_in_proportion_to_the_tokens(n_jobs: int) -> None:
    plan = Plan("m", ("kv", "vt"), METHODS, (1000, 2000, 8000), n=20)
    clock = Clock()
    seen = follow(plan, Progress(clock=clock), clock, n_jobs)
    for estimated, left in seen[len(METHODS) - 1 :: len(METHODS)]:  # after each question
        assert estimated == pytest.approx(left)
    assert seen[-1][0] == 0


def test_questions_are_counted_and_what_was_there_takes_no_time() -> None:
    plan = Plan("m", ("kv",), METHODS, (1000,), n=10)
    keys = list(plan.everything())
    todo = [key for key in keys if key[2] >= 6 or (key[2] == 5 and key[3] == "pcd")]
    clock = Clock()
    progress = Progress(clock=clock)
    progress.begin(keys, todo)
    assert (progress.n_questions, progress.n_questions_done, progress.n_answers_done) == (10, 5, 17)
    assert progress.seconds_left is None and progress.n_answers == 30
    clock.now += 1
    progress.answered(("kv", 1000, 5, "pcd"), 1.0)
    assert (progress.n_questions_done, progress.n_answers_done) == (6, 18)
    assert progress.seconds_left == pytest.approx(12)
    progress.answered(("kv", 1000, 6, "control"), None)  # refused: no time
    assert progress.seconds_left == pytest.approx(11)


def test_later_passes_are_expected_until_they_come() -> None:
    plan = Plan("m", ("kv",), METHODS, (1000,), n=10)
    keys = list(plan.everything())
    clock = Clock()
    progress = Progress(clock=clock)
    progress.expect(("kv", 1000, i, "new") for i in range(10))
    progress.begin(keys, keys)
    assert (progress.n_questions, progress.n_answers, progress.n_questions_done) == (10, 40, 0)
    for key in keys:
        clock.now += 2
        progress.answered(key, 2.0)
    assert progress.seconds_left == pytest.approx(20)
    progress.expect(())
    later = [("kv", 3000, 0, "greedy")]
    progress.begin(later, later)
    assert (progress.n_questions, progress.n_questions_done, progress.n_answers) == (11, 10, 31)
    assert progress.seconds_left == pytest.approx(6)


@pytest.mark.parametrize(
    ("methods", "lengths", "n", "said"),
    [
        # 200 questions of 2.75 s per 1000 tokens : 275 + 1100 s. It is said after greedy's eighth answer, which takes longest
        (METHODS, (1000, 4000), 100, ["about 24 min for 600 answers"]),
        (("greedy",), (1000,), 12, []),  # a short run
    ],
)
def test_how_long_it_takes_is_said_once_if_there_is_no_terminal(
    methods: tuple[str, ...], lengths: tuple[int, ...], n: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with _progress.following("answering") as progress:
        progress._clock = clock
        follow(Plan("m", ("kv",), methods, lengths, n=n), progress, clock)
    assert [line.partition(" at the speed")[0] for line in capsys.readouterr().err.splitlines()] == said


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (45, "45 s"), (89.4, "89 s"), (120, "2 min"), (89.4 * 60, "89 min"), (130 * 60, "2 h 10 min")],
)
def test_durations_are_for_a_reader(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_bar_shows_questions_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    plan, clock = Plan("m", ("kv",), ("greedy",), (1000,), n=40), Clock()
    monkeypatch.setattr(_terminal.Bar, "delay", 0)
    monkeypatch.setenv("COLUMNS", "100")
    with _progress.following("answering") as progress:
        progress._clock = clock
        follow(plan, progress, clock, stop=11)
        assert within(lambda: "11 of 40" in stream.getvalue())  # a thread draws it
        drawn = stream.getvalue()
    assert "answering: 11 of 40 questions, about 58 s left" in drawn and " 28%" in drawn
    assert stream.getvalue() != drawn and stream.getvalue().endswith("\x1b[2K"), "it is taken away at the end"


def test_the_percentage_of_a_run_that_goes_on_is_that_of_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, init = list[_terminal.Bar](), _terminal.Bar.__init__
    monkeypatch.setattr(_terminal.Bar, "__init__", lambda bar, *a, **how: made.append(bar) or init(bar, *a, **how))
    keys = list(Plan("m", ("kv",), ("greedy", "pcd"), (1000,), n=50).everything())
    with _progress.following("answering") as progress:
        progress.begin(keys, [key for key in keys if key[2] >= 26])
    (bar,) = made
    assert bar.text == "answering: 26 of 50 questions" and bar.n == 26 / 50
