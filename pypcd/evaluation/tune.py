"""Finds a PCD setting that helps on long prompts and costs everyday questions nothing, or finds that none does.

All settings answer the first half of the long questions, and those that gain something there answer the first half of the
everyday questions. The best one then answers the second halves, because the best of many looks better than it is on the
questions that it was chosen by. So does replay, on the long questions: what anyone would do instead of a contrast.

Chats of several turns count as everyday questions. Everyday questions longer than the shortest of the long ones are not asked.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pypcd.errors import InputError, PCDError, UnsupportedError
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import BASELINE, HALVES, Directory, Key, Plan
from pypcd.evaluation.progress import Progress
from pypcd.evaluation.run import Outcome, context_of, counts_of, evaluate, run_options
from pypcd.evaluation.stats import WORTH, Paired, paired
from pypcd.evaluation.tasks import GROUPS
from pypcd.evaluation.tasks.everyday import LEAST, SHORT, kind_of
from pypcd.settings.config import PCDConfig
from pypcd.settings.ranges import Integer

__all__ = ["ALL", "FEW_SETTINGS", "MOST_SPOILT", "N_EVERYDAY", "SETTINGS", "Cell", "Tried", "Tuned", "tune"]

SETTINGS = (
    "unsure",
    "unsure:min_first_entropy=1.5",
    "unsure:beta=1.5",
    "window:beta=1:relative_top=0.3",
    "window:beta=1:relative_top=0.1",
    "window:beta=1.5:relative_top=0.1",
    "window:relative_top=0.3",
    "window:relative_top=0.1",
    "window:window=32:relative_top=0.1",
    "window:window=128:relative_top=0.1",
    "window:window=256:relative_top=0.1",
    "cautious",
)
"""The settings that are tried, the mild ones first: of two that do equally well, the first is taken."""

FEW_SETTINGS = ("unsure", "window:relative_top=0.1")

N_EVERYDAY = 32
"""Everyday questions of each kind, short and in each long form: enough to show that nothing is lost where a setting changes
about 3% of the answers."""

INSTEAD = "replay"
"""The method that is judged beside the best setting."""

MOST_SPOILT = 1.0
"""Percent of the everyday questions that greedy has right: how many of them a setting may have wrong."""

Cell = tuple["str | None", "int | None"]
"""A task or a group of tasks, and a length. (None, None) stands for all of them together."""

ALL: Cell = (None, None)

_FIRST, _SECOND = HALVES
_GROUP_OF = {part: name for name, parts in GROUPS.items() if not name.startswith("ruler") for part in parts}


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting compared with greedy decoding on the first half of the questions.

    Attributes:
        gain: on long questions.
        everyday: on everyday questions; None if it was not asked any, or if greedy answers too few of them.
    """

    gain: Paired
    everyday: Paired | None = None

    @property
    def is_eligible(self) -> bool:
        """Whether it gains something, gets no fewer everyday questions right, and spoils at most 1% of those that greedy has right."""
        usual = self.everyday
        costs_nothing = usual is None or (usual.difference >= 0 and usual.regression <= MOST_SPOILT)
        return self.gain.difference > 0 and costs_nothing


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of tuning. Settings are texts, as PCDConfig.resolve() takes them.

    Attributes:
        best: the eligible setting with the highest gain on the first half; None if no setting is eligible.
        tried: every setting that has answered the first half of the long questions.
        refused: settings that the model cannot run, or that left a question without an answer, with the reason.
        gain: the best setting on the long questions of the second half, by task and length and, last, on all of them.
        everyday: the same on everyday questions. Empty if none were asked, or if greedy answers too few of them.
        replay: the method replay on the long questions of the second half; empty if the model cannot run it.
        n_judged: long questions in the second half.
        plain_everyday: greedy's score on the first half of the everyday questions, in percent; None if none were asked.
    """

    best: str | None
    tried: Mapping[str, Tried]
    refused: Mapping[str, str]
    gain: Mapping[Cell, Paired]
    everyday: Mapping[Cell, Paired]
    n_judged: int
    replay: Mapping[Cell, Paired] = dataclasses.field(default_factory=dict)
    plain_everyday: float | None = None

    @property
    def chosen_by(self) -> Tried:
        """The best setting's figures on the first half, which are too favourable. If there is none, those of the setting
        with the highest gain."""
        return self.tried[self.best] if self.best else max(self.tried.values(), key=lambda tried: tried.gain.difference)

    @property
    def gains(self) -> bool:
        """Whether the best setting beats greedy on the second half of the long questions by more than chance."""
        return ALL in self.gain and self.gain[ALL].is_clear and self.gain[ALL].difference > 0

    @property
    def harms(self) -> bool:
        """Whether it gets fewer everyday questions right, in one form or in all together, by more than chance."""
        return any(result.is_clear and result.difference < 0 for result in self.everyday.values())

    @property
    def spoils(self) -> bool:
        """Whether it spoils more than 1% of the everyday questions that greedy has right (neutral regression)."""
        return bool(self.everyday) and self.everyday[ALL].regression > MOST_SPOILT

    @property
    def verdict(self) -> Literal["on", "off", "unknown"]:
        """The conclusion: the setting helps and everyday questions lose nothing, as far as they say anything ("on"); PCD is best
        left off ("off"); or there were too few questions to tell: a gain of 10 points or a loss of 2 is not excluded."""
        gain = self.gain.get(ALL, self.chosen_by.gain)
        if self.harms or (gain.is_clear and not self.gains):
            return "off"
        if not self.gains:
            return "off" if gain.excludes(WORTH) else "unknown"
        if self.spoils:
            return "off"
        return "on" if not self.everyday or self.everyday[ALL].spares else "unknown"

    @property
    def config(self) -> PCDConfig | None:
        """The setting to use; None if PCD is best left off, or if too little is known."""
        return PCDConfig.resolve(self.best) if self.verdict == "on" else None


def tune(
    plan: Plan,
    directory: str | pathlib.Path,
    *,
    everyday: int = N_EVERYDAY,
    long_everyday: bool = True,
    settings: Sequence[str] = SETTINGS,
    options: Mapping[str, Any] | None = None,
    jobs: Jobs = 1,
    progress: Progress | None = None,
) -> Tuned:
    """Choose a setting by the questions with even numbers, and judge it by those with odd numbers.

    Args:
        plan: the long questions; its methods and its half are ignored.
        directory: for the answers, in the folders `long` and `everyday`, which are runs of evaluate(). A run that was stopped
            continues.
        everyday: everyday questions of each kind, short (300 tokens) and, at the plan's shortest length above that, with
            many examples and behind unrelated text; and chats of each kind, at both lengths. 0: none; then nothing is known of harm.
        long_everyday: whether the longer ones of these are asked.
        settings: texts, the mildest first.
        options, jobs: as in evaluate().
        progress: updated with what is to be answered, and with each answer.

    Raises:
        UnsupportedError: the model can run none of the settings.
        PCDError: plain decoding, or the best setting on the second half, cannot answer a question.
        ValueError, PCDError, ModelError: as evaluate().
    """
    Integer(0)("everyday", everyday)
    if usual := sorted(filter(kind_of, plan.tasks)):
        raise InputError(f"tasks have {usual[0]}; everyday questions are asked by their number, everyday={N_EVERYDAY}")
    for name, n in (*counts_of(plan).items(), *([("everyday", everyday)] if everyday else [])):
        if n < 2:
            raise InputError(f"{name} has {n} question a cell; allowed: at least 2, since half of them are for judging")
    methods = tuple(f"pcd:{text}" for text in settings)
    plan = dataclasses.replace(plan, methods=methods, half=None)
    plans = {"long": plan}
    if everyday:
        more = sorted(length for length in plan.lengths if length > SHORT)[:long_everyday]
        groups = ("everyday", *(["everyday-behind"] if more else []), "chats")
        plans["everyday"] = dataclasses.replace(plan, tasks=groups, lengths=(SHORT, *more), n=everyday)
    options = run_options(plan, options or {}, jobs)
    # one context for all questions: some models compute differently in a long one
    options["n_ctx"] = max(context_of(asked, options) for asked in plans.values())
    progress = progress or Progress()
    how: dict[str, Any] = {"options": options, "jobs": jobs, "progress": progress}
    asked = {name: _Questions(of, Directory(pathlib.Path(directory, name)), how) for name, of in plans.items()}
    long, everyday_ones = asked["long"], asked.get("everyday")
    judging = [*long.keys(_SECOND, [methods[0], INSTEAD])]
    to_come: list[Key] = []
    if everyday_ones:
        to_come = everyday_ones.keys(_FIRST, methods)
        judging += everyday_ones.keys(_SECOND, methods[:1])
        progress.expect([*long.keys(_FIRST, methods), *to_come, *judging])
        # a length that is too short is known now, and not hours later
        everyday_ones.ask(_FIRST, (), to_come[:1])

    progress.expect([*to_come, *judging])
    found, refused = long.compare(_FIRST, methods)
    tried = {name: Tried(found[name][ALL]) for name in methods if name in found}
    if not tried:
        raise UnsupportedError(f"this model can run none of the settings: {next(iter(refused.values()))}")
    gaining = [name for name in tried if tried[name].gain.difference > 0]
    plain = None
    if everyday_ones and gaining:
        progress.expect(judging)
        found, failed = everyday_ones.compare(_FIRST, gaining)
        refused.update(failed)
        plain = found[BASELINE][ALL].score
        if plain < LEAST:
            everyday_ones = None
        else:
            tried.update({name: Tried(tried[name].gain, found[name][ALL]) for name in gaining if name in found})

    eligible = {name: tried[name] for name in tried if name not in refused and tried[name].is_eligible}
    merit = {name: (t.gain.difference, t.everyday.difference if t.everyday else 0.0) for name, t in eligible.items()}
    best = max(merit, key=lambda name: merit[name], default=None)
    chosen = [best] if best is not None else []
    progress.expect(everyday_ones.keys(_SECOND, chosen) if everyday_ones and chosen else [])
    gain, failed = long.compare(_SECOND, [*chosen, INSTEAD])
    lost: dict[str, dict[Cell, Paired]] = {}
    if everyday_ones and chosen:
        progress.expect([])
        lost, more_failed = everyday_ones.compare(_SECOND, chosen)
        failed.update(more_failed)
    if best in failed:
        raise PCDError(f"{best}, the best setting on the first half, cannot be judged: {failed[best]}")
    text = dict(zip(methods, settings))
    return Tuned(
        best=text[best] if best else None,
        tried={text[name]: figures for name, figures in tried.items()},
        refused={text[name]: why for name, why in refused.items()},
        gain=gain.get(best or "", {}),
        everyday=lost.get(best or "", {}),
        n_judged=len(long.keys(_SECOND)),
        replay=gain.get(INSTEAD, {}),
        plain_everyday=plain,
    )


@dataclasses.dataclass(frozen=True)
class _Questions:
    """Long questions or everyday ones, with the run that has the answers; further arguments of evaluate()."""

    plan: Plan
    directory: Directory
    how: Mapping[str, Any]

    def keys(self, half: str, methods: Sequence[str] = ()) -> list[Key]:
        """The answers of greedy and these methods, in the plan's order."""
        plan = dataclasses.replace(self.plan, half=half, methods=(BASELINE, *methods))
        # questions behind text are long ones: below SHORT there is no room for the text
        return [
            key
            for key in plan.everything(counts_of(plan))
            if not (_GROUP_OF.get(key[0]) == "everyday-behind" and key[1] <= SHORT)
        ]

    def ask(self, half: str, methods: Sequence[str], keys: Sequence[Key]) -> Outcome:
        plan = dataclasses.replace(self.plan, half=half, methods=(BASELINE, *methods))
        return evaluate(plan, self.directory, only=set(keys).__contains__, **self.how)

    def compare(self, half: str, methods: Sequence[str]) -> tuple[dict[str, dict[Cell, Paired]], dict[str, str]]:
        """Compare greedy and these methods with greedy, in each cell and, last, in all of them together.

        Returns:
            The comparisons by method, without the methods that the model cannot run; and these, with the reason.

        Raises:
            PCDError: plain decoding cannot answer a question.
        """
        outcome = self.ask(half, methods, self.keys(half, methods))
        refused = dict(outcome.refused)
        for (task, length, index, name), record in outcome.records.items():
            if record.get("error"):
                refused.setdefault(name, f"question {index} of {task} at {length} tokens: {record['error']}")
        if BASELINE in refused:
            raise PCDError(f"plain decoding cannot answer {refused[BASELINE]}")
        found: dict[str, dict[Cell, Paired]] = {}
        for name in (BASELINE, *methods):
            if name not in refused:
                scores: dict[Cell, list[tuple[float, float]]] = {}
                for task, length, index, _ in self.keys(half):
                    mine, plain = (outcome.records[task, length, index, by]["score"] for by in (name, BASELINE))
                    for cell in ((_GROUP_OF.get(task, task), length), ALL):
                        scores.setdefault(cell, []).append((mine, plain))
                scores[ALL] = scores.pop(ALL)
                found[name] = {cell: paired(*zip(*both)) for cell, both in scores.items()}
        return found, refused
