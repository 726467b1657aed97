"""Finds the PCD setting that helps on long prompts and costs everyday questions nothing, if there is one.

*Choosing*, by one half of the questions, decodes greedily alone. All settings of a view (`_space`) are judged on recorded
rows (`_rows`, `_screen`): each prompt is read once, with a short pass for each view. Views are tried in rounds, each on new
questions: all views on a quarter, the better half of them on another quarter, half of those on the rest. So every view
has a result early, and the questions are spent on those that promise most.

*Judging*, by the other half, decodes by greedy and the chosen setting. The best of many on the same questions flatters
itself, and recorded rows do not know answers that come right in other words.

What it does not know: everyday questions longer than its plan's shortest long prompts.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pypcd.checks import Integer
from pypcd.config import PCDConfig
from pypcd.decode import PCD
from pypcd.errors import InputError, PCDError, UnsupportedError
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import BASELINE, HALVES, Directory, Key, Plan
from pypcd.evaluation.progress import Progress
from pypcd.evaluation.run import Record, context_of, counts_of, evaluate, facts, run_options, tasks_of
from pypcd.evaluation.stats import Paired, needed, needed_to_spare, paired, paired_counts
from pypcd.evaluation.tasks import GROUPS
from pypcd.evaluation.tasks.everyday import LEAST, SHORT, kind_of
from pypcd.lab import space
from pypcd.lab.formula import Formula
from pypcd.lab.recorded import record
from pypcd.lab.screen import Screen

__all__ = ["N_EVERYDAY", "Cell", "Tuned", "Weighed", "tune"]

Cell = tuple["str | None", "int | None"]  # task or group of tasks, length; (None, None): all together

ALL: Cell = (None, None)
N_EVERYDAY = 32
"""Everyday questions of each kind, short and in each long form: enough to show that nothing is lost where a setting changes
about 3% of the answers."""

_ROUNDS = 3
_FEWEST = 20  # retrieval questions, before a view is given up
_GROUP_OF = {part: name for name, parts in GROUPS.items() for part in parts}


@dataclasses.dataclass(frozen=True)
class Weighed:
    """A setting against greedy: what it gains on long retrieval, and the difference it makes on everyday questions.

    Attributes:
        everyday: None: none were asked, or the model answers too few of them.
    """

    gain: Paired
    everyday: Paired | None

    @property
    def costs(self) -> bool:
        """Whether it gets fewer everyday questions right than greedy."""
        return self.everyday is not None and self.everyday.difference < 0


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    Attributes:
        best: of the settings that cost no everyday questions on the first half, the one that gains most there; None if
            none gains anything.
        chosen_by: its figures on the first half; without a best one, those of the setting nearest to it. Too favourable.
        gain: the best setting on retrieval on the second half: for each task and length and, under (None, None), for all
            together.
        everyday: the same on everyday questions, short and in each long form. Empty if that says nothing (Weighed).
        tried: each setting's figures on the first half's questions that its view was tried on, by its name as a method.
        refused: views that this model cannot run, with the reason, by name too.
        n_judged: retrieval questions in the second half.
        plain_everyday: greedy's score on everyday questions of the first half, in percent; None if none were asked.
    """

    best: PCDConfig | None
    chosen_by: Weighed
    gain: Mapping[Cell, Paired]
    everyday: Mapping[Cell, Paired]
    tried: Mapping[str, Weighed]
    refused: Mapping[str, str]
    n_judged: int
    plain_everyday: float | None = None

    @property
    def method(self) -> str | None:
        """The best setting's name, as a method."""
        return PCD(self.best).name if self.best else None

    @property
    def disagreement(self) -> float:
        """The share of the first half's retrieval questions on which the best setting and greedy scored differently."""
        return _disagreement(self.chosen_by.gain)

    @property
    def n_needed(self) -> int:
        """About how many judged questions show a gain of 10 points with 80% probability, at this disagreement."""
        return needed(self.disagreement)

    @property
    def n_everyday_needed(self) -> int | None:
        """About how many judged everyday questions show, as often, that less than 2 points are lost, if none are; None if
        none say anything."""
        return needed_to_spare(_disagreement(self.everyday[ALL])) if self.everyday else None

    @property
    def gains(self) -> bool:
        """Whether the setting beats greedy on retrieval questions it was not chosen by, by more than chance."""
        return ALL in self.gain and self.gain[ALL].is_clear and self.gain[ALL].difference > 0

    @property
    def harms(self) -> bool:
        """Whether it gets fewer everyday questions right, short ones or one of the long forms or all, by more than chance."""
        return any(result.is_clear and result.difference < 0 for result in self.everyday.values())

    @property
    def spares(self) -> bool:
        """Whether a loss of 2 points on everyday questions is excluded."""
        return bool(self.everyday) and self.everyday[ALL].spares and not self.harms

    @property
    def verdict(self) -> Literal["on", "off", "unknown"]:
        """The conclusion: the setting helps and spares everyday questions ("on"; where they say nothing, it helps), PCD is
        best left off, or there were too few questions to tell."""
        if self.harms or (ALL in self.gain and self.gain[ALL].is_clear and not self.gains):
            return "off"
        if not self.gains:
            return "off" if self.n_judged >= self.n_needed else "unknown"
        if self.spares or not self.everyday:
            return "on"
        return "off" if self.everyday[ALL].n >= (self.n_everyday_needed or 0) else "unknown"

    @property
    def config(self) -> PCDConfig | None:
        """The setting to use; None if PCD is better left off, or too little is known."""
        return self.best if self.verdict == "on" else None


def tune(
    plan: Plan,
    directory: str | pathlib.Path,
    *,
    everyday: int = N_EVERYDAY,
    options: Mapping[str, Any] | None = None,
    jobs: Jobs = 1,
    model_facts: dict[str, Any] | None = None,
    quick: bool = False,
    tell: Callable[[str, Weighed], object] = lambda method, weighed: None,
    progress: Progress | None = None,
) -> Tuned:
    """Choose a setting by the questions with even numbers, and judge it by those with odd numbers.

    Args:
        plan: the long retrieval; its methods are ignored, and so is its half. Settings are chosen by those of its tasks that
            have one right text, and judged by all of them.
        directory: for rows and answers; a run that was stopped continues.
        everyday: everyday questions of each kind, short (300 tokens) and, at the plan's shortest length above that, with
            many examples and behind unrelated text. 0: none; then nothing is known of harm.
        quick: try only a few views.
        tell: called after each round of views with the best setting of each, and its figures so far.
        progress: updated with what is to be answered, and with each answer.

    Raises:
        UnsupportedError: this model can run none of the settings.
        PCDError: plain decoding, or the best setting on the second half, cannot answer a question.
        ValueError, PCDError, ModelError: as evaluate().
    """
    directory = pathlib.Path(directory)
    chosen_by = _check(plan, directory, everyday)
    plan = dataclasses.replace(plan, methods=(BASELINE,), half=None)
    ordinary = _ordinary(plan, everyday) if everyday else None
    progress = progress or Progress()
    options = run_options(plan, options or {}, jobs)  # once, for all passes
    # one context for all questions: what a model does may depend on its size
    options["n_ctx"] = max(context_of(asked, options) for asked in (plan, ordinary) if asked)
    how = {
        "jobs": jobs,
        "options": options,
        "model_facts": facts(plan, options, jobs=jobs) if model_facts is None else model_facts,
        "progress": progress,
    }
    retrieval = _Questions("retrieval", plan, chosen_by, directory, how)
    usual = _Questions("everyday", ordinary, ordinary.tasks, directory, how) if ordinary else None
    return _Search(plan, retrieval, usual, progress, tell).run(quick)


def _check(plan: Plan, directory: pathlib.Path, everyday: int) -> tuple[str, ...]:
    """The tasks to choose by.

    Raises:
        ValueError: something cannot be tuned by.
    """
    Integer(0)("everyday", everyday)
    usual = sorted(filter(kind_of, plan.tasks))
    if usual:
        raise InputError(f"tasks have {usual[0]}; everyday questions are asked by their number, everyday={N_EVERYDAY}")
    for name, n in (*counts_of(plan).items(), *([("everyday", everyday)] if everyday else [])):
        if n < 2:
            raise InputError(f"{name} has {n} question a cell; allowed: at least 2, since half of them are for judging")
    known = tuple(name for name, made in tasks_of(plan).items() if made.one_text)
    if not known:
        raise InputError(
            f"tasks are {', '.join(plan.tasks)}, which can judge a setting but not choose it; add one with one right text, "
            "such as kv or niah-multikey-2"
        )
    if directory.exists() and any(file.name not in ("rows", "answers", "tried.csv") for file in directory.iterdir()):
        raise InputError(f"{directory} is not empty and not a run of this pypcd tune; give another directory")
    return known


def _ordinary(plan: Plan, n: int) -> Plan:
    """Everyday questions: short, and in both long forms at the plan's shortest length above that."""
    long = sorted(length for length in plan.lengths if length > SHORT)[:1]
    groups = ("everyday", "everyday-behind") if long else ("everyday",)
    return dataclasses.replace(plan, tasks=groups, lengths=(SHORT, *long), n=n, data=None)


class _Questions:
    """Questions of one kind, retrieval or everyday: rows to choose by, answers to judge by.

    Args:
        tasks: those to choose by.
        how: further arguments of evaluate().
    """

    def __init__(
        self, name: str, plan: Plan, tasks: Sequence[str], directory: pathlib.Path, how: Mapping[str, Any]
    ) -> None:
        self.plan, self._tasks, self._how = plan, tuple(tasks), how
        self._rows, self._answers = Directory(directory / "rows" / name), Directory(directory / "answers" / name)
        self._counts, self._made = counts_of(plan), tasks_of(plan)
        self._records: dict[Key, Record] = {}

    def begin(self) -> None:
        """Let greedy answer one question to judge by, if there are tasks for judging only: if a length is too short for
        them, or their data is missing, that is known now and not hours later."""
        if set(self._tasks) != set(self.plan.tasks):
            first = self.judged(BASELINE)[0]
            evaluate(self._second(BASELINE), self._answers, only=lambda key: key == first, **self._how)

    def record(self, views: Sequence[PCDConfig], number: int) -> dict[str, str]:
        """Record a round's questions. Returns the views that cannot be used, by name, with the reason.

        Raises:
            PCDError: plain decoding cannot answer a question.
        """
        plan = self._first(views)
        if not any(self._is_in(key, number) for key in plan.everything(self._counts)):
            return {}
        outcome = record(plan, self._rows, k=space.K, only=lambda key: self._is_in(key, number), **self._how)
        refused = dict(outcome.refused)
        for key, made in outcome.records.items():
            if made.get("error"):
                if key[3] == BASELINE:
                    raise PCDError(f"plain decoding cannot answer {_where(key, made)}")
                refused.setdefault(key[3], _where(key, made))
        self._records.update(outcome.records)
        return refused

    def screen(self) -> Screen:
        return Screen(self._records)

    def plain(self) -> float:
        """Greedy's score on the questions so far, in percent."""
        return 100 * float(np.mean([made["score"] for key, made in self._records.items() if key[3] == BASELINE]))

    def expected(self, views: Sequence[PCDConfig], number: int) -> list[Key]:
        """The keys of a round."""
        return [key for key in self._first(views).everything(self._counts) if self._is_in(key, number)]

    def judged(self, method: str) -> list[Key]:
        """The keys of judging."""
        return [key for key in self._second(method).everything(self._counts) if self._is_asked(key)]

    def judge(self, config: PCDConfig) -> dict[Cell, Paired]:
        """Decode the second half.

        Raises:
            PCDError: a question cannot be answered.
        """
        name = PCD(config).name
        outcome = evaluate(
            self._second(name),
            self._answers,
            only=lambda key: self._is_asked(key) and not (key[3] == name and self._is_spared(key, config)),
            **self._how,
        )
        if name in outcome.refused:
            raise PCDError(f"{name}, the best setting on the first half, cannot be judged: {outcome.refused[name]}")
        scores: dict[Cell, list[tuple[float, float]]] = {}
        for key in self.judged(BASELINE):
            plain = outcome.records[key]
            mine = plain if self._is_spared(key, config) else outcome.records[(*key[:3], name)]
            for made, what in ((plain, "plain decoding"), (mine, f"{name}, the best setting on the first half,")):
                if made.get("error"):
                    raise PCDError(f"{what} cannot answer {_where(key, made)}")
            for cell in ((_GROUP_OF.get(key[0], key[0]), key[1]), ALL):
                scores.setdefault(cell, []).append((mine["score"], plain["score"]))
        scores[ALL] = scores.pop(ALL)  # the last one of a table
        return {cell: paired([a for a, _ in both], [b for _, b in both]) for cell, both in scores.items()}

    def _first(self, views: Sequence[PCDConfig]) -> Plan:
        names = tuple(PCD(view).name for view in views)
        return dataclasses.replace(self.plan, half=HALVES[0], tasks=self._tasks, methods=(BASELINE, *names))

    def _second(self, method: str) -> Plan:
        return dataclasses.replace(self.plan, half=HALVES[1], methods=(BASELINE, method))

    def _is_asked(self, key: Key) -> bool:
        """Everyday questions behind text are long ones; without room for text they are the short ones."""
        return not (_GROUP_OF.get(key[0]) == "everyday-behind" and key[1] <= SHORT)

    def _is_in(self, key: Key, number: int) -> bool:
        return self._is_asked(key) and _round_of(key[2]) == number

    def _is_spared(self, key: Key, config: PCDConfig) -> bool:
        """Whether the prompt with its answer ends below min_context, so that the answer is greedy's exactly."""
        return key[1] < config.min_context and not self._made[key[0]].may_exceed


def _round_of(index: int) -> int:
    """The round of a question of the first half. The numbers of each are spread evenly, since a needle's depth follows the
    question's number."""
    return {0: 0, 2: 1}.get(index // 2 % 4, 2)


def _where(key: Key, made: Record) -> str:
    task, length, index, _ = key
    return f"question {index} of {task} at {length} tokens: {made['error']}"


class _Search:
    """The rounds of choosing, then judging.

    Args:
        usual: everyday questions; None: none.
    """

    def __init__(
        self,
        plan: Plan,
        retrieval: _Questions,
        usual: _Questions | None,
        progress: Progress,
        tell: Callable[[str, Weighed], object],
    ) -> None:
        self._plan, self._retrieval, self._usual = plan, retrieval, usual
        self._progress, self._tell = progress, tell
        self._tried: dict[PCDConfig, Weighed] = {}
        self._refused: dict[str, str] = {}

    def run(self, quick: bool) -> Tuned:
        views, plain = space.views(self._plan.lengths, quick=quick), None
        self._retrieval.begin()
        for number in range(_ROUNDS):
            self._expect(views, number)
            for questions in self._sides:
                self._refused.update(questions.record(views, number))
                views = [view for view in views if PCD(view).name not in self._refused]
                if not views:
                    why = next(iter(self._refused.values()))
                    raise UnsupportedError(f"this model can run none of the settings: {why}")
            if self._usual is not None:
                plain = self._usual.plain()
                if plain < LEAST:
                    self._usual = None  # the rest of them is not asked
            best = self._weigh(views)
            ranked = sorted(best, key=lambda view: _merit(self._tried[best[view]]), reverse=True)
            top = best[ranked[0]]
            if self._tried[top].gain.n >= _FEWEST:
                views = [view for view in views if view in ranked[: _half(len(views))]]
        return self._judged(top, plain)

    @property
    def _sides(self) -> list[_Questions]:
        return [self._retrieval, *([self._usual] if self._usual else [])]

    def _expect(self, views: Sequence[PCDConfig], number: int) -> None:
        """Tell the progress what follows this round."""
        keys: list[Key] = []
        for side in self._sides:
            left = views
            for later in range(number + 1, _ROUNDS):
                left = left[: _half(len(left))]
                keys += side.expected(left, later)
            keys += side.judged(PCD(views[0]).name)
        self._progress.expect(keys)

    def _weigh(self, views: Sequence[PCDConfig]) -> dict[PCDConfig, PCDConfig]:
        """Judge all settings of some views by all rows so far. Returns the best one of each view."""
        screens = [side.screen() for side in self._sides]
        floors = space.floors(self._usual.plan.lengths) if self._usual else ()
        plain = [screen.follow(Formula(None))[0] for screen in screens]
        best = {}
        for view in views:
            settings = space.settings(view, floors)
            for config in settings:
                formula = Formula.of(config)
                figures = [paired_counts(screen.follow(formula)[0], greedy) for screen, greedy in zip(screens, plain)]
                self._tried[config] = Weighed(figures[0], figures[1] if len(figures) > 1 else None)
            best[view] = max(settings, key=lambda config: _merit(self._tried[config]))
            self._tell(PCD(best[view]).name, self._tried[best[view]])
        return best

    def _judged(self, top: PCDConfig, plain: float | None) -> Tuned:
        weighed, n = self._tried[top], len(self._retrieval.judged(BASELINE))
        gain: dict[Cell, Paired] = {}
        everyday: dict[Cell, Paired] = {}
        self._progress.expect(())
        helps = weighed.gain.difference > 0 and not weighed.costs
        if helps:
            gain = self._retrieval.judge(top)
            everyday = self._usual.judge(top) if self._usual else {}
        tried = {PCD(config).name: figures for config, figures in self._tried.items()}
        return Tuned(top if helps else None, weighed, gain, everyday, tried, self._refused, n, plain)


def _half(n: int) -> int:
    return (n + 1) // 2


def _merit(weighed: Weighed) -> tuple[bool, float, float]:
    """What settings are compared by. First those that cost no everyday questions, by what they gain on retrieval; then the
    others, by what they cost. Of equal ones the first is taken."""
    gain, everyday = weighed.gain.difference, weighed.everyday.difference if weighed.everyday else 0.0
    return (False, everyday, gain) if weighed.costs else (True, gain, everyday)


def _disagreement(result: Paired) -> float:
    return (result.wins + result.losses) / result.n
