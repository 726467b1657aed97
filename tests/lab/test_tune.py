"""Tuning: what it chooses, on made-up rows and on real ones; its verdicts; how it goes on after a stop."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import pypcd
from pypcd.decode import PCD
from pypcd.decode import setting_of as parsed
from pypcd.evaluation import Directory, Outcome, Paired, Plan, Progress, paired
from pypcd.evaluation.plan import BASELINE
from pypcd.lab import space
from pypcd.lab import tune as tuning
from pypcd.lab.formula import Formula
from pypcd.lab.recorded import _packed, compared, view_of
from pypcd.lab.tune import ALL, Tuned, Weighed, tune
from pypcd.settings import PRESETS

ONE = {"n_threads": 1, "n_threads_batch": 1}
setting_of = functools.cache(parsed)
W64, W32 = (pypcd.PCDConfig.windowed().replace(window=window) for window in (64, 32))


def pairs(wins: int, losses: int, n: int) -> Paired:
    return paired([1.0] * wins + [0.0] * (n - wins), [0.0] * wins + [1.0] * losses + [0.0] * (n - wins - losses))


# -- verdicts --------------------------------------------------------------------------------------------------------


def judged(gain: Paired, *everyday: Paired, disagreement: float = 0.0) -> Tuned:
    """A chosen setting with its results on the second half; everyday: each form's, and all together last."""
    chosen_by = Weighed(pairs(round(100 * disagreement), 0, 100), everyday[-1] if everyday else None)
    cells = dict(zip([*((f"form {i}", 300) for i in range(len(everyday) - 1)), ALL], everyday))
    return Tuned(W64, chosen_by, {ALL: gain}, cells, {}, {}, gain.n)


NOTHING = pairs(0, 0, 600)


@pytest.mark.parametrize(
    ("tuned", "verdict"),
    [
        # everyday questions say nothing
        (judged(pairs(5, 0, 5)), "unknown"),  # p is 2/32: no five questions show anything
        (judged(pairs(6, 0, 6)), "on"),  # 2/64
        (judged(pairs(0, 6, 6)), "off"),  # a loss is shown as soon
        (judged(pairs(3, 1, 76), disagreement=0.1), "unknown"),
        (judged(pairs(3, 1, 77), disagreement=0.1), "off"),  # enough to have shown 10 points
        (judged(pairs(3, 1, 77), disagreement=0.3), "unknown"),  # where two disagree so often, chance makes more
        (judged(pairs(3, 1, 234), disagreement=0.3), "off"),
        # they do
        (judged(pairs(30, 5, 100), NOTHING), "on"),
        (judged(pairs(30, 5, 100), pairs(0, 0, 188)), "unknown"),  # too few, though nothing was lost
        (judged(pairs(30, 5, 100), pairs(0, 0, 189)), "on"),
        (judged(pairs(30, 5, 100), pairs(8, 9, 600)), "on"),  # -0.2 [-1.5, +1.2]
        (judged(pairs(30, 5, 100), pairs(4, 5, 200)), "unknown"),  # -0.5 [-3.5, +2.5]
        (judged(pairs(30, 5, 100), pairs(9, 12, 576)), "unknown"),  # -0.5 [-2.1, +1.0], 716 are needed
        (judged(pairs(30, 5, 100), pairs(9, 12, 800)), "on"),
        (judged(pairs(30, 5, 100), pairs(10, 20, 1000)), "off"),  # -1.0 [-2.1, +0.1], and 589 would have been enough
        (judged(pairs(30, 5, 100), pairs(2, 12, 600)), "off"),  # -1.7 [-3.0, -0.5]
        (judged(pairs(30, 5, 100), pairs(0, 8, 2000), pairs(9, 8, 6000)), "off"),  # p is 0.008 in one form
        (judged(pairs(0, 9, 100), NOTHING), "off"),
        (judged(pairs(3, 1, 77), NOTHING, disagreement=0.1), "off"),  # nothing lost, nothing gained
    ],
)
def test_what_follows_from_so_many_questions(tuned: Tuned, verdict: str) -> None:
    assert tuned.verdict == verdict
    assert (tuned.verdict == "on") == (tuned.config is not None) and (tuned.config is None or tuned.gains)


@pytest.mark.parametrize(("n", "verdict"), [(76, "unknown"), (77, "off")])
def test_where_nothing_was_chosen_the_number_of_questions_decides(n: int, verdict: str) -> None:
    tuned = Tuned(None, Weighed(pairs(0, 0, 20), None), {}, {}, {}, {}, n)
    assert tuned.verdict == verdict and tuned.config is None and tuned.method is None


# -- the space -------------------------------------------------------------------------------------------------------


def test_views_are_tried_in_the_order_of_what_they_promise() -> None:
    views = space.views((1024, 4096))
    assert [view.window for view in views[:5]] == [64, 32, 128, 256, 512] and views[0] == W64
    assert [view.base_ratio for view in views[5:8]] == [0.1, 0.5, 0.01]
    assert len(set(views)) == len(views) and all(view_of(view) == view for view in views)
    assert {view_of(pypcd.PCDConfig.preset(name)) for name in PRESETS} <= set(views)
    assert {view.cache for view in views} == {"rerotated", "shared", "separate"}
    assert [view.window for view in space.views((400,))[:4]] == [64, 32, 128, None]  # wider ones see most of the prompt
    assert space.views((4096,), quick=True) == [*views[:3], views[5], pypcd.PCDConfig()]


def test_settings_are_the_engines_and_the_mild_ones_come_first() -> None:
    for view in space.views((4096,)):
        made = space.settings(view, (512,))
        assert len(set(made)) == len(made) >= 64 and all(view_of(config) == view for config in made)
        assert all(Formula.of(config).config == config and config.gamma <= space.K for config in made)
        floors = [config.min_context for config in made]
        n = floors.count(512)
        assert floors[: 2 * n] == [512] * n + [0] * n
        assert set(made[2 * n :]) <= set(map(pypcd.PCDConfig.preset, PRESETS))
        assert made[0].adaptive == "jsd" and made[0].relative_top == 0.5
    everything = {config for view in space.views((4096,)) for config in space.settings(view, (512,))}
    tried = set(map(pypcd.PCDConfig.preset, PRESETS.keys() - {"blog"}))  # whose gamma is beyond what is recorded
    assert tried <= everything and pypcd.PCDConfig.blog() not in everything


def test_a_preset_of_its_own_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(PRESETS["window"], fields={"perturbation": "none", "window": 48, "beta": 3.25})
    monkeypatch.setitem(PRESETS, "own", own)  # type: ignore[arg-type]
    views = space.views((1024,))
    config = pypcd.PCDConfig.preset("own")
    assert view_of(config) == views[-1] and space.settings(views[-1])[-1] == config


def test_floors_by_hand() -> None:
    assert space.floors((300, 1024)) == (512,)  # the square root of 300 * 1024 is 554
    assert space.floors((4096, 300, 1024)) == (512, 2048)
    assert space.floors((300, 600)) == (416,)  # 424; 512 would leave some prompts of "600 tokens" alone too
    assert space.floors((300,)) == space.floors((300, 400)) == ()  # a prompt of "400 tokens" may have 340


# -- choosing, on made-up rows ---------------------------------------------------------------------------------------

Strike = Callable[[pypcd.PCDConfig, str, int, int], bool]


class World:
    """A model whose L prefers token 0 everywhere, which is wrong on needles and right on most everyday questions. Where a
    view strikes, a contrast that is strong enough chooses token 1: right on needles, wrong on everyday questions."""

    def __init__(self, strikes: Strike, *, n_prompt: Callable[[int], int] = lambda length: length - 40) -> None:
        self._strikes, self._n_prompt = strikes, n_prompt
        self.plain_right = 0.8  # of everyday questions
        self.recorded: list[tuple[Any, ...]] = []
        self.decoded: list[tuple[Any, ...]] = []
        self.refused: dict[str, str] = {}
        self.failing = ""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuning, "record", self.record)
        monkeypatch.setattr(tuning, "evaluate", self.evaluate)
        monkeypatch.setattr(tuning, "facts", lambda *args, jobs: {})

    def _right(self, key: Any) -> int:
        task, _, index, _ = key
        if not task.startswith("everyday"):
            return 1
        return 0 if (7 * index + len(task)) % 20 < 20 * self.plain_right else 2

    def _row(self, config: pypcd.PCDConfig | None, key: Any) -> np.ndarray:
        row = np.full(space.K, -20.0)
        row[:3] = 2.0, 1.9, -4.0
        if config is not None and self._strikes(config, *key[:3]):
            row[1] = -3.0
        return row

    def _record(self, key: Any) -> dict[str, Any]:
        config, first = setting_of(key[3]), self._row(None, key)
        if key[3] == self.failing:
            return {"error": "out of memory", "score": 0.0}
        if config is None:
            edges = [[0, self._right(key), "right"]]
            ids = _packed(np.arange(space.K)[None].astype("<i4"))
            row = {"steps": [0], "edges": edges, "ids": ids, "lse": [compared(first, first)["lse"]]}
            return {**row, "logits": self._pack(first), "n_prompt": self._n_prompt(key[1]), **self._answer(key)}
        second = self._row(config, key)
        scalars = {name: [value] for name, value in compared(first, second).items()}
        return {"logits": self._pack(first), "logits_s": self._pack(second), **scalars}

    @staticmethod
    def _pack(row: np.ndarray) -> str:
        return _packed(row[None].astype("f4"))

    def _answer(self, key: Any) -> dict[str, Any]:
        config = setting_of(key[3])
        chosen = 0
        if config is not None and self._n_prompt(key[1]) >= config.min_context:
            first, second = self._row(None, key)[:2], self._row(config, key)[:2]
            contrast = first + (1.0 if config.adaptive is None else 0.3) * config.beta * (first - second)
            chosen = int(contrast.argmax()) if config.relative_top < 0.9 else 0
        return {"score": float(chosen == self._right(key))}

    def record(self, plan: Plan, directory: Directory, *, k: int, only: Any, **how: Any) -> Outcome:
        assert k == space.K and directory.path.parent.name == "rows" and plan.half == "first"
        keys = [key for key in plan.everything() if only(key)]
        self.recorded += keys
        return Outcome({key: self._record(key) for key in keys if key[3] not in self.refused}, self.refused)

    def evaluate(self, plan: Plan, directory: Directory, *, only: Any, **how: Any) -> Outcome:
        assert directory.path.parent.name == "answers" and plan.half == "second"
        keys = [key for key in plan.everything() if only(key)]
        self.decoded += keys
        return Outcome({key: self._answer(key) for key in keys}, {})


def plan_of(n: int = 96, tasks: tuple[str, ...] = ("niah-multikey-2",), lengths: tuple[int, ...] = (1024,)) -> Plan:
    return Plan("demo", tasks, ("greedy",), lengths, n=n)


def strong_window(config: pypcd.PCDConfig, task: str, length: int, index: int) -> bool:
    """Window 32 finds most needles, and harms at any length; window 64 finds some fewer, and harms short prompts alone."""
    everyday = task.startswith("everyday")
    if config.window == 32:
        return index % 16 < 2 if everyday else True
    if config.window == 64:
        return length <= 300 and index % 16 < 4 if everyday else index % 8 < 6
    return False


def test_a_floor_is_chosen_where_it_spares_what_the_setting_would_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(strong_window)
    world.install(monkeypatch)
    told: list[str] = []
    tuned = tune(plan_of(), tmp_path, options=ONE, tell=lambda method, weighed: told.append(method))
    assert tuned.best is not None and view_of(tuned.best) == W64 and tuned.best.min_context == 512
    assert tuned.chosen_by.gain.difference > 50 and tuned.chosen_by.everyday == tuned.tried[tuned.method].everyday
    assert tuned.chosen_by.everyday is not None and tuned.chosen_by.everyday.losses == 0
    # another one gained more and was not taken
    assert max(weighed.gain.difference for weighed in tuned.tried.values()) > tuned.chosen_by.gain.difference
    assert setting_of(told[0]) is not None and view_of(setting_of(told[0])) == W64  # type: ignore[arg-type]

    assert tuned.verdict == "on" and tuned.config == tuned.best
    assert list(tuned.everyday) == [("everyday", 300), ("everyday", 1024), ("everyday-behind", 1024), ALL]
    assert [result.n for result in tuned.everyday.values()] == [192, 192, 192, 576]
    assert list(tuned.gain) == [("niah-multikey-2", 1024), ALL] and tuned.gain[ALL].n == tuned.n_judged == 48
    # short prompts are plain below the floor, so only greedy answers them
    assert {key[3] for key in world.decoded if key[1] == 300} == {BASELINE}
    assert {key[3] for key in world.decoded if key[1] == 1024} == {BASELINE, tuned.method}


def test_each_prompt_is_read_once_and_better_views_get_more_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(strong_window)
    world.install(monkeypatch)
    tuned = tune(plan_of(), tmp_path, options=ONE, everyday=8)
    views = space.views((1024,))
    assert len(world.recorded) == len(set(world.recorded))
    needles = {key[2]: [] for key in world.recorded if key[0] == "niah-multikey-2"}  # type: ignore[var-annotated]
    for task, _, index, method in world.recorded:
        if task == "niah-multikey-2" and method != BASELINE:
            needles[index].append(method)
    assert sorted(needles) == list(range(0, 96, 2))
    numbers = sorted(map(len, needles.values()))
    half = (len(views) + 1) // 2
    # 12 questions are too few to give up a view
    assert numbers == [half] * 24 + [len(views)] * 24
    # the 24 numbers of the first two rounds are spread from first to last, since depths are
    assert all(len(needles[index]) == len(views) for index in range(0, 96, 4))
    assert all(methods[0] == PCD(W64).name for methods in needles.values())
    assert len(tuned.tried) == sum(len(space.settings(view, (512,))) for view in views)
    assert not any(task.endswith("-behind") and length == 300 for task, length, _, _ in world.recorded)


@given(seed=st.integers(0, 10**6), everyday=st.sampled_from([2, 8]))
@settings(max_examples=5, deadline=None)
def test_what_loses_on_everyday_questions_is_never_chosen(
    tmp_path_factory: pytest.TempPathFactory, seed: int, everyday: int
) -> None:
    """Views that strike at random, on needles more often than on everyday questions."""

    def strikes(config: pypcd.PCDConfig, task: str, length: int, index: int) -> bool:
        rng = np.random.default_rng([seed, abs(hash(config)) % 2**31, len(task), length, index])
        share = np.random.default_rng([seed, abs(hash(config)) % 2**31]).uniform(0, 0.6)
        return bool(rng.uniform() < (share / 12 if task.startswith("everyday") else share))

    with pytest.MonkeyPatch.context() as monkeypatch:
        World(strikes).install(monkeypatch)
        tuned = tune(
            plan_of(24), tmp_path_factory.mktemp("run"), options=ONE, everyday=everyday, quick=True, progress=Progress()
        )
    all_asked = max(weighed.gain.n for weighed in tuned.tried.values())
    fair = {name: weighed for name, weighed in tuned.tried.items() if weighed.gain.n == all_asked and not weighed.costs}
    if tuned.method is None:
        assert tuned.chosen_by.costs or tuned.chosen_by.gain.difference <= 0
    else:
        assert tuned.chosen_by.everyday is not None and tuned.chosen_by.everyday.difference >= 0
        assert tuned.chosen_by.gain.difference == max(weighed.gain.difference for weighed in fair.values()) > 0


def test_of_equal_settings_the_mildest_of_the_first_view_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    World(lambda config, task, length, index: not task.startswith("everyday")).install(monkeypatch)
    tuned = tune(plan_of(), tmp_path, options=ONE, everyday=2)
    equal = [name for name, weighed in tuned.tried.items() if weighed.gain == tuned.chosen_by.gain]
    assert tuned.method == equal[0] and len(equal) > 100 and tuned.best is not None
    assert view_of(tuned.best) == W64 and tuned.best.min_context == 512 and tuned.best.adaptive == "jsd"


def test_everyday_questions_that_a_model_cannot_answer_say_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(strong_window)
    world.plain_right = 0.1
    world.install(monkeypatch)
    tuned = tune(plan_of(), tmp_path, options=ONE)
    assert tuned.plain_everyday is not None and tuned.plain_everyday < 20 and not tuned.everyday
    assert tuned.best is not None and view_of(tuned.best) == W32  # the highest gain
    assert tuned.verdict == "on" and tuned.n_everyday_needed is None and tuned.chosen_by.everyday is None
    usual = {key[2] for key in world.recorded if key[0].startswith("everyday")}
    assert usual == set(range(0, 32, 8))  # no more were asked than showed it


def test_no_everyday_questions_no_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(strong_window)
    world.install(monkeypatch)
    tuned = tune(plan_of(), tmp_path, options=ONE, everyday=0)
    assert tuned.plain_everyday is None and not tuned.everyday and tuned.verdict == "on"
    assert all(setting_of(name).min_context == 0 for name in tuned.tried)  # type: ignore[union-attr]
    assert {key[0] for key in world.recorded + world.decoded} == {"niah-multikey-2"}


def test_tasks_that_cannot_be_screened_judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(strong_window)
    world.install(monkeypatch)
    tuned = tune(plan_of(tasks=("vt", "niah-multikey-2")), tmp_path, options=ONE, everyday=0)
    assert {key[0] for key in world.recorded} == {"niah-multikey-2"}
    assert world.decoded[0] == ("vt", 1024, 1, BASELINE)  # asked before anything is chosen
    assert list(tuned.gain) == [("vt", 1024), ("niah-multikey-2", 1024), ALL] and tuned.n_judged == 96


def test_what_a_model_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(strong_window)
    world.refused = {PCD(W64).name: "no window"}
    world.install(monkeypatch)
    tuned = tune(plan_of(), tmp_path / "a", options=ONE, everyday=2, quick=True)
    assert tuned.refused == world.refused
    assert not any(view_of(setting_of(name)) == W64 for name in tuned.tried)  # type: ignore[arg-type]
    world.refused = dict.fromkeys((PCD(view).name for view in space.views((1024,), quick=True)), "no twin")
    with pytest.raises(pypcd.UnsupportedError, match="can run none of the settings: no twin"):
        tune(plan_of(), tmp_path / "b", options=ONE, everyday=2, quick=True)

    world.refused, world.failing = {}, PCD(W32).name
    tuned = tune(plan_of(), tmp_path / "c", options=ONE, everyday=2, quick=True)
    assert "question 0 of niah-multikey-2 at 1024 tokens: out of memory" in tuned.refused[world.failing]
    world.failing = BASELINE
    with pytest.raises(pypcd.PCDError, match="plain decoding cannot answer question 0 of niah-multikey-2"):
        tune(plan_of(), tmp_path / "d", options=ONE, everyday=2, quick=True)


def test_what_is_to_come_is_known_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(strong_window)
    world.install(monkeypatch)
    later: list[int] = []
    expect = Progress.expect

    def counted(self: Progress, keys: Any) -> None:
        keys = list(keys)
        later.append(len(keys))
        expect(self, keys)

    monkeypatch.setattr(Progress, "expect", counted)
    tune(plan_of(192), tmp_path, options=ONE, everyday=8)
    per_question = [len(space.views((1024,))) + 1, (len(space.views((1024,))) + 1) // 2 + 1]
    n = 192 // 8 + 8 // 8 * 36  # questions of the first round, and of the second; the third has two as many
    per_question.append((per_question[1] - 1 + 1) // 2 + 1)
    judging = 2 * (192 // 2 + 8 // 2 * 36)
    assert later == [
        n * per_question[1] + 2 * n * per_question[2] + judging,
        2 * n * per_question[2] + judging,
        judging,
        0,
    ]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_tuned_by_is_refused(tmp_path: Path) -> None:
    for plan, everyday, message in (
        (plan_of(n=1), 8, "niah-multikey-2 has 1 question a cell; allowed: at least 2"),
        (plan_of(), 1, "everyday has 1 question a cell; allowed: at least 2"),
        (plan_of(), -1, "everyday is -1; allowed"),
        (plan_of(tasks=("kv", "everyday")), 8, "everyday questions are asked by their number, everyday=32"),
        (
            plan_of(tasks=("vt",)),
            8,
            "tasks are vt, which can judge a setting but not choose it; add one with one right",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tune(plan, tmp_path / "run", everyday=everyday)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="old is not empty and not a run of this pypcd tune; give another directory"):
        tune(plan_of(), tmp_path / "old")


# -- real runs -------------------------------------------------------------------------------------------------------


def test_tuning_finds_what_helps_the_demo_model_and_goes_on_byte_for_byte(tmp_path: Path) -> None:
    plan, progress = Plan("demo", ("kv-short",), ("greedy",), (450,), n=36), Progress()
    told: list[tuple[str, Weighed]] = []

    def run(progress: Progress | None = None) -> Tuned:
        told.clear()
        return tune(
            plan,
            tmp_path / "run",
            options=ONE,
            everyday=0,
            quick=True,
            tell=lambda *args: told.append(args),
            progress=progress,
        )

    tuned = run(progress)
    assert tuned.best is not None and tuned.chosen_by.gain.difference > 5 and tuned.gain[ALL].n == 18
    assert tuned.chosen_by == tuned.tried[tuned.method]
    assert progress.n_answers_done == progress.n_answers and progress.seconds_left == 0
    first = list(told)
    assert [view_of(setting_of(method)) for method, _ in first[:5]] == space.views((450,), quick=True)  # type: ignore[arg-type]

    rows, answers = (tmp_path / "run" / name / "retrieval" / "samples.jsonl" for name in ("rows", "answers"))
    whole = rows.read_bytes(), answers.read_bytes()
    assert (
        run() == tuned and told == first and (rows.read_bytes(), answers.read_bytes()) == whole
    )  # nothing is made twice

    lines = whole[0].splitlines(keepends=True)
    rows.write_bytes(b"".join(lines[: len(lines) // 3])[:-20])  # stopped within a line of the first round or the second
    answers.write_bytes(b"")
    assert run() == tuned and told == first

    def made(text: bytes) -> list[Any]:
        return sorted(({**json.loads(line), "seconds": 0} for line in text.splitlines()), key=json.dumps)

    assert made(rows.read_bytes()) == made(whole[0]) and made(answers.read_bytes()) == made(whole[1])


def test_a_length_too_short_for_judging_is_known_before_anything_is_chosen(tmp_path: Path) -> None:
    plan = Plan("demo", ("kv-short", "vt"), ("greedy",), (250,), n=4)
    with pytest.raises(ValueError, match="vt at length 250: n_tokens is 250; allowed: at least"):
        tune(plan, tmp_path, options=ONE, everyday=0)
    assert not (tmp_path / "rows").exists()


def test_where_nothing_helps_tuning_says_so(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A random model is always wrong, whatever its setting, also on everyday questions."""
    monkeypatch.setattr(tuning, "SHORT", 560)  # its tokens are short
    plan = Plan(str(tiny("llama")), ("kv-short",), ("greedy",), (600,), n=2, max_tokens=2)
    tuned = tune(plan, tmp_path / "run", options={**ONE, "n_ctx": 1024}, everyday=2, quick=True)
    assert tuned.method is None and not tuned.gains and tuned.config is None
    assert tuned.plain_everyday == 0.0 and tuned.chosen_by.everyday is None
    assert not (tmp_path / "run" / "answers").exists()
