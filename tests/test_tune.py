"""Tuning: the setting it finds, its verdict, and how many questions a verdict needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny

import pypcd
from pypcd.evaluation import (
    Directory,
    Plan,
    Progress,
    Tuned,
    paired,
    tune,
)
from pypcd.evaluation._tune import READINGS
from pypcd.methods import PCD, Method

ONE = {"n_threads": 1, "n_threads_batch": 1}


def judged(wins: int, losses: int, n: int, disagreement: float = 0.0) -> Tuned:
    """The best setting on the first half, with its results on n questions of the second."""
    result = paired([1.0] * wins + [0.0] * (n - wins), [0.0] * wins + [1.0] * losses + [0.0] * (n - wins - losses))
    return Tuned(pypcd.PCDConfig(), result, {(None, None): result}, {"pcd": 10.0}, {}, n, disagreement)


@pytest.mark.parametrize(
    ("tuned", "verdict"),
    [
        (judged(5, 0, 5), "unknown"),  # p is 2/32: no five questions show anything
        (judged(6, 0, 6), "on"),  # 2/64
        (judged(0, 6, 6), "off"),  # harm is shown as soon
        (judged(3, 1, 76, 0.1), "unknown"),
        (judged(3, 1, 77, 0.1), "off"),  # enough to have shown 10 points
        (judged(3, 1, 77, 0.3), "unknown"),  # where two disagree so often, chance makes more of a difference
        (judged(3, 1, 234, 0.3), "off"),
        (judged(30, 10, 77, 0.1), "on"),
        (Tuned(None, None, {}, {"pcd": 0.0}, {}, 76), "unknown"),
        (Tuned(None, None, {}, {"pcd": 0.0}, {}, 77), "off"),
    ],
)
def test_what_follows_from_so_many_questions(tuned: Tuned, verdict: str) -> None:
    assert tuned.verdict == verdict
    assert tuned.helps == (verdict == "on") == (tuned.config is not None)


def test_quick_tuning_tries_the_readings_alone(tmp_path: Path) -> None:
    plan, progress = Plan("demo", ("kv-short",), ("greedy",), (180,), n=4), Progress()
    tuned = tune(plan, Directory(tmp_path / "run"), options=ONE, quick=True, progress=progress)
    assert list(tuned.tried) == [PCD(config).name for config in READINGS] and tuned.n_judged == 2
    wanted = 2 * (1 + len(READINGS)) + (2 * 2 if tuned.method else 0)
    assert progress.n_answers_done == progress.n_answers == progress.n_asked == wanted


def test_all_passes_of_tuning_are_counted_before_they_come(tmp_path: Path) -> None:
    """The largest possible number: the second pass varies the reading (starting point) with the most single values."""
    plan, seen = Plan("demo", ("kv-short",), ("greedy",), (180,), n=2), []
    progress = Progress(lambda p: seen.append((p.n_answers_done, p.n_answers)))
    tuned = tune(plan, Directory(tmp_path / "run"), options=ONE, progress=progress)
    done, first_guess = seen[0]
    assert done == 0 and 1 + 22 < first_guess <= 1 + 37 + 2 and len(tuned.tried) <= 37
    assert progress.n_answers_done == progress.n_answers and progress.seconds_left == 0


def test_tuning_finds_what_helps_the_demo_model_and_the_profile_loads(tmp_path: Path) -> None:
    plan = Plan("demo", ("kv-short",), ("greedy",), (450,), n=40)
    told: list[tuple[str, float]] = []
    tuned = tune(plan, Directory(tmp_path / "run"), options=ONE, tell=lambda *args: told.append(args))
    assert dict(told) == tuned.tried and len(tuned.tried) > 20
    assert tuned.method is not None and tuned.chosen_by is not None
    assert tuned.chosen_by.difference == max(tuned.tried.values()) > 5
    assert tuned.judged_by[None, None].n == tuned.chosen_by.n == 20
    assert tuned.config is None or tuned.helps


def test_where_nothing_helps_tuning_says_so(tiny: Tiny, tmp_path: Path) -> None:
    """A random model is always wrong, whatever its setting."""
    plan = Plan(str(tiny("llama")), ("kv-short",), ("greedy",), (400,), n=2, max_tokens=2)
    tuned = tune(plan, Directory(tmp_path / "run"), options={**ONE, "n_ctx": 1024})
    assert tuned.method is None and not tuned.helps and tuned.config is None


def fail(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    generate = Method.generate

    def failing(self: Method, *args: Any, **kwargs: Any) -> Any:
        if self.name == method:
            raise pypcd.PCDError("llama_decode returned -2: out of memory")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Method, "generate", failing)


def test_what_cannot_be_answered_is_no_wrong_answer_to_tune_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = Plan("demo", ("kv-short",), ("greedy",), (180,), n=2)
    monkeypatch.setattr("pypcd.evaluation._tune.READINGS", (pypcd.PCDConfig(), pypcd.PCDConfig(cache="shared")))
    monkeypatch.setattr("pypcd.evaluation._tune._variants", lambda config: [])
    fail(monkeypatch, "pcd:cache=shared")
    tuned = tune(plan, Directory(tmp_path / "a"), options=ONE)
    assert "question 0 of kv-short at 180 tokens: llama_decode" in tuned.refused["pcd:cache=shared"]
    assert list(tuned.tried) == ["pcd"]
    monkeypatch.undo()
    fail(monkeypatch, "greedy")
    with pytest.raises(pypcd.PCDError, match="plain decoding cannot answer question 0 of kv-short"):
        tune(plan, Directory(tmp_path / "b"), options=ONE)


def test_a_single_question_cannot_be_halved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv-short has 1 question a cell; allowed: at least 2"):
        tune(Plan("demo", ("kv-short",), ("greedy",), (200,), n=1), Directory(tmp_path))
