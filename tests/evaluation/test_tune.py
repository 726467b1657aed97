"""Tuning: what it chooses, by made-up answers and real ones; its verdicts; how it goes on after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ONE, pairs

import pypcd
from pypcd.evaluation import Directory, Outcome, Paired, Plan, Progress
from pypcd.evaluation import tune as tuning
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.tune import ALL, FEW_SETTINGS, INSTEAD, SETTINGS, Tried, Tuned, tune

# -- verdicts --------------------------------------------------------------------------------------------------------


def judged(gain: Paired, *everyday: Paired) -> Tuned:
    """A chosen setting with its results on the second half; everyday: each form's, and all together last."""
    cells = dict(zip([*((f"form {i}", 300) for i in range(len(everyday) - 1)), ALL], everyday))
    return Tuned("unsure", {"unsure": Tried(pairs(9, 0, 100))}, {}, {ALL: gain}, cells, gain.n)


NOTHING, GAIN = pairs(0, 0, 600), pairs(30, 5, 100)


@pytest.mark.parametrize(
    ("tuned", "verdict"),
    [
        # everyday questions say nothing
        (judged(pairs(5, 0, 5)), "unknown"),  # p is 2/32: no five questions show anything
        (judged(pairs(6, 0, 6)), "on"),  # 2/64
        (judged(pairs(0, 6, 6)), "off"),  # a loss is shown as soon
        (judged(pairs(3, 1, 50)), "unknown"),  # +4.0 [-4.0, +12.0]
        (judged(pairs(3, 1, 77)), "off"),  # +2.6 [-2.6, +7.8]: no gain of 10 points
        # they do
        (judged(GAIN, NOTHING), "on"),
        (judged(GAIN, pairs(0, 0, 188)), "unknown"),  # too few, though nothing was lost
        (judged(GAIN, pairs(0, 0, 189)), "on"),
        (judged(GAIN, pairs(0, 5, 510)), "unknown"),  # -1.0 [-2.0, -0.2]
        (judged(GAIN, pairs(6, 5, 600)), "on"),  # +0.2 [-0.8, +1.3], 5 of 594 are spoilt
        (judged(GAIN, pairs(8, 9, 600)), "off"),  # -0.2 [-1.5, +1.2], 9 of 592
        (judged(GAIN, pairs(5, 8, 805)), "on"),  # 8 of 800: 1% may be spoilt
        (judged(GAIN, pairs(6, 8, 805)), "off"),  # 8 of 799
        (judged(GAIN, pairs(2, 12, 600)), "off"),  # -1.7 [-3.0, -0.5]
        (judged(GAIN, pairs(0, 8, 2000), pairs(9, 8, 6000)), "off"),  # p is 0.008 in one form
        (judged(pairs(0, 9, 100), NOTHING), "off"),
        (judged(pairs(3, 1, 77), NOTHING), "off"),  # nothing lost, nothing gained
    ],
)
def test_what_follows_from_so_many_questions(tuned: Tuned, verdict: str) -> None:
    assert tuned.verdict == verdict
    assert tuned.config == (pypcd.PCDConfig.preset("unsure") if verdict == "on" else None)
    assert verdict != "on" or tuned.gains


@pytest.mark.parametrize(("n", "verdict"), [(34, "unknown"), (35, "off")])
def test_where_nothing_was_chosen_the_first_half_decides(n: int, verdict: str) -> None:
    tuned = Tuned(None, {"unsure": Tried(pairs(0, 0, n)), "window": Tried(pairs(0, 1, n))}, {}, {}, {}, n)
    assert tuned.verdict == verdict and tuned.config is None and tuned.chosen_by == tuned.tried["unsure"]


def test_settings_are_different_ones_and_the_mild_come_first() -> None:
    for texts in (SETTINGS, FEW_SETTINGS):
        configs = [pypcd.PCDConfig.resolve(text) for text in texts]
        assert len(set(configs)) == len(texts) and configs[0] == pypcd.PCDConfig.preset(
            pypcd.settings.config.RECOMMENDED
        )
    assert set(FEW_SETTINGS) < set(SETTINGS)


# -- choosing, by made-up answers ------------------------------------------------------------------------------------

Strike = Callable[[str, str, int, int], bool]
WIDE, NARROW = "pcd:window:relative_top=0.1", "pcd:window:window=32:relative_top=0.1"


def is_usual(task: str) -> bool:
    return task.startswith(("everyday", "chat"))


class World:
    """Greedy is wrong on all long questions and right on most everyday ones. Where a setting strikes, it is the other way
    round."""

    def __init__(self, strikes: Strike) -> None:
        self._strikes = strikes
        self.plain_right = 0.8  # of everyday questions
        self.answered: list[tuple[Any, ...]] = []
        self.refused: dict[str, str] = {}
        self.failing = ""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> World:
        monkeypatch.setattr(tuning, "evaluate", self.evaluate)
        return self

    def _record(self, key: Any) -> dict[str, Any]:
        task, length, index, method = key
        if method == self.failing:
            return {"error": "out of memory", "score": 0.0}
        is_right = is_usual(task) and (7 * index + len(task)) % 20 < 20 * self.plain_right
        strikes = method != BASELINE and self._strikes(method, task, length, index)
        return {"score": float(is_right != strikes)}

    def evaluate(self, plan: Plan, directory: Directory, *, only: Any, **how: Any) -> Outcome:
        assert directory.path.name == ("everyday" if is_usual(plan.tasks[0]) else "long")
        keys = [key for key in plan.everything() if only(key)]
        self.answered += [key for key in keys if key not in self.answered]
        how["progress"].begin(keys, keys)
        for key in keys:
            how["progress"].answered(key, None)
        refused = {method: why for method, why in self.refused.items() if method in plan.methods}
        return Outcome({key: self._record(key) for key in keys if key[3] not in refused}, refused)

    def methods(self, is_everyday: bool, half: int) -> set[str]:
        """The methods that answered questions of a kind and a half."""
        kind = (key for key in self.answered if is_usual(key[0]) == is_everyday)
        return {key[3] for key in kind if key[2] % 2 == half}


def plan_of(n: int = 96, tasks: tuple[str, ...] = ("niah-multikey-2",), lengths: tuple[int, ...] = (1024,)) -> Plan:
    return Plan("demo", tasks, ("greedy",), lengths, n=n)


def windows(method: str, task: str, length: int, index: int) -> bool:
    """The narrow window finds most and harms; the wide one finds fewer and harms nothing; replay finds a half; others do nothing."""
    if method == INSTEAD:
        return index % 4 == 1
    if is_usual(task):
        return method == NARROW and index % 16 < 2
    return method == NARROW or (method == WIDE and index % 8 < 6)


def test_the_highest_gain_that_costs_nothing_is_chosen_and_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(windows).install(monkeypatch)
    tuned = tune(plan_of(), tmp_path, options=ONE)
    assert f"pcd:{tuned.best}" == WIDE and list(tuned.tried) == list(SETTINGS)
    narrow = tuned.tried[NARROW.removeprefix("pcd:")]
    assert narrow.gain.difference == 100 > tuned.chosen_by.gain.difference == 75
    assert narrow.everyday is not None and narrow.everyday.losses > 0
    assert tuned.chosen_by.everyday == pairs_of_equals(640, 80.0)
    assert tuned.verdict == "on" and tuned.config == pypcd.PCDConfig.resolve(tuned.best)

    chats = [("chats", 300), ("chats", 1024)]
    assert list(tuned.everyday) == [("everyday", 300), ("everyday", 1024), ("everyday-behind", 1024), *chats, ALL]
    assert [result.n for result in tuned.everyday.values()] == [192, 192, 192, 32, 32, 640]
    assert list(tuned.gain) == [("niah-multikey-2", 1024), ALL] and tuned.gain[ALL].n == tuned.n_judged == 48
    assert (tuned.gain[ALL].wins, tuned.gain[ALL].losses) == (36, 0)
    assert list(tuned.replay) == list(tuned.gain) and (tuned.replay[ALL].wins, tuned.replay[ALL].n) == (24, 48)
    # who was asked what
    everyone = {BASELINE, *(f"pcd:{text}" for text in SETTINGS)}
    assert world.methods(False, 0) == everyone and world.methods(False, 1) == {BASELINE, WIDE, INSTEAD}
    assert world.methods(True, 0) == {BASELINE, WIDE, NARROW} and world.methods(True, 1) == {BASELINE, WIDE}
    assert not any(task.endswith("-behind") and length == 300 for task, length, _, _ in world.answered)


def pairs_of_equals(n: int, score: float) -> Any:
    """n questions on which two methods agree."""
    right = pytest.approx(n * score / 100, abs=n / 50)
    return Paired(n, pytest.approx(score, abs=2), 0, 0, 0.0, 0.0, 0.0, 1.0, right, 0)


def test_what_a_setting_may_cost() -> None:
    gain = pairs(9, 0, 100)
    for tried, eligible in (
        (Tried(gain), True),  # nothing is known of everyday questions
        (Tried(gain, pairs(3, 3, 600)), True),  # 3 of 597 are spoilt
        (Tried(gain, pairs(8, 8, 600)), False),  # 8 of 592: more than 1%
        (Tried(gain, pairs(2, 3, 600)), False),  # one less is right
        (Tried(pairs(9, 9, 100), pairs(0, 0, 600)), False),  # no gain
    ):
        assert tried.is_eligible == eligible


@given(seed=st.integers(0, 10**6), everyday=st.sampled_from([2, 8]))
@settings(max_examples=5, deadline=None)
def test_what_loses_everyday_questions_is_never_chosen(
    tmp_path_factory: pytest.TempPathFactory, seed: int, everyday: int
) -> None:
    """Settings that strike at random, on long questions more often than on everyday ones."""

    def strikes(method: str, task: str, length: int, index: int) -> bool:
        rng = np.random.default_rng([seed, *method.encode(), len(task), length, index])
        share = np.random.default_rng([seed, *method.encode()]).uniform(0, 0.6)
        return bool(rng.uniform() < (share / 12 if is_usual(task) else share))

    with pytest.MonkeyPatch.context() as monkeypatch:
        World(strikes).install(monkeypatch)
        tuned = tune(plan_of(24), tmp_path_factory.mktemp("run"), options=ONE, everyday=everyday)
    asked = [t for t in tuned.tried.values() if t.everyday]
    fair = [
        t.gain.difference for t in asked if t.everyday.difference >= 0 and t.everyday.spoilt <= 0.01 * t.everyday.right
    ]  # type: ignore[union-attr]
    assert (tuned.best is not None) == any(gain > 0 for gain in fair)
    if tuned.best is not None:
        assert tuned.chosen_by.everyday is not None and tuned.chosen_by.everyday.difference >= 0
        assert tuned.chosen_by.gain.difference == max(fair) > 0


def test_of_equal_settings_the_mildest_is_chosen_and_none_that_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    World(lambda method, task, length, index: not is_usual(task)).install(monkeypatch)
    assert tune(plan_of(), tmp_path, options=ONE, everyday=2).best == SETTINGS[0]
    World(windows).install(monkeypatch)
    narrow = [NARROW.removeprefix("pcd:")]
    assert tune(plan_of(), tmp_path, options=ONE, everyday=2, settings=narrow).best is None


def test_everyday_questions_that_a_model_cannot_answer_say_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(windows).install(monkeypatch)
    world.plain_right = 0.1
    tuned = tune(plan_of(), tmp_path, options=ONE)
    assert tuned.plain_everyday is not None and tuned.plain_everyday < 20 and not tuned.everyday
    assert f"pcd:{tuned.best}" == NARROW  # the highest gain
    assert tuned.verdict == "on" and tuned.chosen_by.everyday is None
    assert world.methods(True, 1) == set()


def test_without_gain_no_everyday_questions_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(lambda *where: False).install(monkeypatch)
    tuned = tune(plan_of(160), tmp_path, options=ONE)
    assert tuned.best is None and tuned.plain_everyday is None and tuned.verdict == "off" and tuned.n_judged == 80
    assert len([key for key in world.answered if is_usual(key[0])]) == 1  # that they fit is known
    assert is_usual(world.answered[0][0]) and not is_usual(world.answered[1][0])
    assert world.methods(False, 1) == {BASELINE, INSTEAD} and tuned.replay[ALL].n == 80 and not tuned.gain


def test_none_need_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    World(windows).install(monkeypatch)
    tuned = tune(plan_of(tasks=("vt", "niah-multikey-2")), tmp_path, options=ONE, everyday=0, settings=FEW_SETTINGS)
    assert tuned.plain_everyday is None and not tuned.everyday and tuned.verdict == "on"
    assert f"pcd:{tuned.best}" == WIDE and list(tuned.tried) == list(FEW_SETTINGS)
    assert list(tuned.gain) == [("vt", 1024), ("niah-multikey-2", 1024), ALL] and tuned.n_judged == 96


def test_what_a_model_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world, how = World(windows).install(monkeypatch), {"options": ONE, "everyday": 2}
    world.refused = {WIDE: "no window"}
    tuned = tune(plan_of(), tmp_path / "a", **how)
    assert tuned.refused == {WIDE.removeprefix("pcd:"): "no window"} and tuned.tried.keys().isdisjoint(tuned.refused)
    world.refused = dict.fromkeys((f"pcd:{text}" for text in SETTINGS), "no twin")
    with pytest.raises(pypcd.UnsupportedError, match="no twin"):
        tune(plan_of(), tmp_path / "b", **how)

    world.refused = {INSTEAD: "no attention weights"}
    tuned = tune(plan_of(), tmp_path / "instead", **how)
    assert f"pcd:{tuned.best}" == WIDE and tuned.replay == {} and tuned.gain and INSTEAD not in tuned.refused
    world.refused, world.failing = {}, NARROW
    tuned = tune(plan_of(), tmp_path / "c", **how)
    assert "out of memory" in tuned.refused[NARROW.removeprefix("pcd:")] and f"pcd:{tuned.best}" == WIDE
    world.failing = BASELINE
    with pytest.raises(pypcd.PCDError, match="question 0 of .*: out of memory"):
        tune(plan_of(), tmp_path / "d", **how)


def test_what_is_to_come_is_known_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    World(windows).install(monkeypatch)
    seen: list[int] = []
    begin = Progress.begin

    def counted(self: Progress, *keys: Any) -> None:
        begin(self, *keys)
        seen.append(self.n_answers)

    monkeypatch.setattr(Progress, "begin", counted)
    tune(plan_of(192), tmp_path, options=ONE, everyday=8)
    n_long, n_everyday, n = 192 // 2, 8 // 2 * 40, len(SETTINGS) + 1
    judging = 3 * n_long + 2 * n_everyday
    whole = n_long * n + n_everyday * n + judging
    assert seen == [whole, whole, *[n_long * n + n_everyday * 3 + judging] * 3]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_tuned_by_is_refused(tmp_path: Path) -> None:
    for plan, everyday, message in (
        (plan_of(n=1), 8, "niah-multikey-2 has 1 question"),
        (plan_of(), 1, "everyday has 1 question"),
        (plan_of(), -1, "everyday is -1"),
        (plan_of(tasks=("kv", "everyday")), 8, "everyday=32"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(plan, tmp_path / "run", everyday=everyday)
    assert not (tmp_path / "run").exists()


# -- real runs -------------------------------------------------------------------------------------------------------


SOME = (*FEW_SETTINGS, "window:beta=1:relative_top=0.3", "cautious")


def test_tuning_finds_what_helps_the_demo_model_and_goes_on_byte_for_byte(tmp_path: Path) -> None:
    plan, progress = Plan("demo", ("kv-short",), ("greedy",), (450,), n=36), Progress()

    def run(progress: Progress | None = None) -> Tuned:
        return tune(plan, tmp_path / "run", options=ONE, everyday=0, settings=SOME, progress=progress)

    tuned = run(progress)
    assert tuned.best is not None and tuned.chosen_by.gain.difference > 5 and tuned.gain[ALL].n == 18
    assert progress.n_answers_done == progress.n_answers and progress.seconds_left == 0

    answers = tmp_path / "run" / "long" / "samples.jsonl"
    whole = answers.read_bytes()
    assert run() == tuned and answers.read_bytes() == whole  # nothing is answered twice

    def made(text: bytes) -> list[Any]:
        return sorted(({**json.loads(line), "seconds": 0} for line in text.splitlines()), key=json.dumps)

    lines = whole.splitlines(keepends=True)
    for share in (0.4, 0.9):  # stopped within a line, of choosing and of judging
        answers.write_bytes(b"".join(lines[: int(share * len(lines))])[:-20])
        assert run() == tuned and made(answers.read_bytes()) == made(whole)


def test_everyday_questions_are_really_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo model gets none of them right; here that counts, and its prompts may be longer."""
    monkeypatch.setattr(tuning, "SHORT", 700)
    monkeypatch.setattr(tuning, "LEAST", 0.0)
    plan = Plan("demo", ("kv-short",), ("greedy",), (450, 750), n=12, max_tokens=12)
    how = {"options": ONE, "everyday": 2, "settings": ["cautious"]}
    tuned = tune(plan, tmp_path / "run", **how)
    assert tuned.best == "cautious" and tuned.plain_everyday is not None and tuned.n_judged == 12
    assert [result.n for result in tuned.everyday.values()] == [12, 12, 12, 2, 2, 40]
    folders = [Directory(tmp_path / "run" / name) for name in ("long", "everyday")]
    assert [len(folder.records()) for folder in folders] == [2 * 24 + 12, 2 * 80]
    whole = [folder.samples.read_bytes() for folder in folders]
    assert tune(plan, tmp_path / "run", **how) == tuned
    assert [folder.samples.read_bytes() for folder in folders] == whole


def test_a_length_too_short_for_everyday_questions_is_known_at_once(tiny: Tiny, tmp_path: Path) -> None:
    """A random model's tokens are short: a question that is easily asked in 600 has no room in 300."""
    plan = Plan(str(tiny("llama")), ("kv-short",), ("greedy",), (600,), n=2)
    with pytest.raises(ValueError, match="at length 300: n_tokens is 300; allowed: at least"):
        tune(plan, tmp_path, options={**ONE, "n_ctx": 1024}, everyday=2)
    assert not (tmp_path / "long").exists()
