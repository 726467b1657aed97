"""Finds the PCD setting that helps a model most: chosen on one half of the questions, judged on the other half."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from pypcd._config import PCDConfig
from pypcd._errors import PCDError, UnsupportedError
from pypcd.evaluation._plan import BASELINE, HALVES, Directory, Key, Plan
from pypcd.evaluation._progress import Progress
from pypcd.evaluation._run import counts_of, evaluate, run_options
from pypcd.evaluation._stats import Paired, needed, paired
from pypcd.methods import PCD

__all__ = ["READINGS", "Tuned", "tune"]

# starting points: ways to make the twin's logits (L*). They are tried together with each single change of the default;
# then each single change of the best one is tried
READINGS = (
    PCDConfig.paper(),
    PCDConfig.cautious(),
    PCDConfig(cache="separate"),
    PCDConfig(cache="shared"),
    PCDConfig.windowed(),
    PCDConfig.windowed().replace(relative_top=0.1),
    PCDConfig.windowed().replace(window=256),
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "beta": (0.5, 1.0, 1.5, 2.5, 4.0),
    "relative_top": (0.0, 0.03, 0.1, 0.3),
    "alpha": (0.1, 0.2, 0.3, 0.5),
    "base_ratio": (1e-5, 1e-4, 1e-3, 1e-2),
    "gamma": (10, 30, 100),
    "window": (16, 64, 256, 1024),
}


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    Attributes:
        best: the best setting; None if none beat greedy on the first half.
        chosen_by: its comparison with greedy on the first half. Too favourable, since it is the best of many.
        judged_by: the same on the second half, for each task and length and, under (None, None), for all together.
        tried: each setting's gain on the first half, in points, by its name as a method.
        refused: settings that this model cannot run, with the reason, by name too.
        n_judged: number of questions in the second half, over all tasks and lengths.
        disagreement: the share of the first half's questions on which the best setting and greedy scored differently.
    """

    best: PCDConfig | None
    chosen_by: Paired | None
    judged_by: dict[tuple[str | None, int | None], Paired]
    tried: dict[str, float]
    refused: dict[str, str]
    n_judged: int = 0
    disagreement: float = 0.0

    @property
    def n_needed(self) -> int:
        """About how many judged questions show a gain of 10 points with 80% probability, at this disagreement."""
        return needed(self.disagreement)

    @property
    def verdict(self) -> Literal["on", "off", "unknown"]:
        """The conclusion: the setting helps ("on"), PCD is best left off, or there were too few questions to tell."""
        result = self.judged_by.get((None, None))
        if self.helps:
            return "on"
        return "off" if self.n_judged >= self.n_needed or (result is not None and result.is_clear) else "unknown"

    @property
    def method(self) -> str | None:
        """The best setting's name, as a method."""
        return PCD(self.best).name if self.best else None

    @property
    def helps(self) -> bool:
        """Whether the setting beats greedy on the questions it was not chosen by, by more than chance."""
        result = self.judged_by.get((None, None))
        return result is not None and result.is_clear and result.difference > 0

    @property
    def config(self) -> PCDConfig | None:
        """The setting to use; None if PCD is better left off."""
        return self.best if self.helps else None


def tune(
    plan: Plan,
    directory: Directory,
    *,
    options: Mapping[str, Any] | None = None,
    jobs: int = 1,
    model_facts: dict[str, Any] | None = None,
    quick: bool = False,
    tell: Callable[[str, float], object] = lambda method, gain: None,
    progress: Progress | None = None,
) -> Tuned:
    """Try settings on the questions with even numbers, and judge the best one on those with odd numbers.

    Args:
        plan: its methods are ignored, and so is its half.
        directory: for the answers; a run that was stopped continues.
        quick: try only READINGS, without changes of single values.
        tell: called with each setting that has been tried and its gain over greedy, in points.
        progress: updated with what is to be answered, and with each answer.

    Raises:
        UnsupportedError: this model can run none of the settings.
        PCDError: plain decoding, or the best setting on the second half, cannot answer a question.
        ValueError, PCDError, ModelError: as evaluate().
    """
    first, second = (dataclasses.replace(plan, half=half) for half in HALVES)
    counts = counts_of(plan)
    for task, n in counts.items():
        if n < 2:
            raise ValueError(f"{task} has {n} question a cell; allowed: at least 2, since half of them are for judging")
    options = run_options(plan, options or {}, jobs)  # once, for all passes
    records: dict[Key, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    tried: dict[PCDConfig, float] = {}
    progress = progress or Progress()

    def keys(half: Plan, methods: Collection[str]) -> list[Key]:
        every = dataclasses.replace(half, methods=(BASELINE, *methods)).everything(counts)
        return [key for key in every if key[3] in methods]

    def names(settings: Iterable[PCDConfig]) -> list[str]:
        return [PCD(config).name for config in settings]

    def run(settings: Iterable[PCDConfig], half: Plan) -> None:
        part = dataclasses.replace(half, methods=(BASELINE, *names(settings)))
        outcome = evaluate(part, directory, jobs=jobs, options=options, model_facts=model_facts, progress=progress)
        records.update(outcome.records)
        refused.update(outcome.refused)
        for (task, length, index, method), record in outcome.records.items():
            if record.get("error"):
                where = f"question {index} of {task} at {length} tokens: {record['error']}"
                if method == BASELINE:
                    raise PCDError(f"plain decoding cannot answer {where}")
                refused.setdefault(method, where)

    def attempt(settings: Sequence[PCDConfig]) -> None:
        new = [config for config in settings if config not in tried and PCD(config).name not in refused]
        run(new, first)
        for config in new:
            if PCD(config).name not in refused:
                tried[config] = _compare(first, counts, records, config).difference
                tell(PCD(config).name, tried[config])

    # two passes over the prompts for any number of settings: a long prompt costs more than all of its answers
    settings = list(dict.fromkeys([*READINGS, *([] if quick else _variants(PCDConfig()))]))
    judging = keys(second, (BASELINE, *names(READINGS[:1])))  # stands for the best one, which is not known yet
    more = [] if quick else max(([v for v in _variants(c) if v not in settings] for c in settings), key=len)
    progress.expect([*keys(first, names(more)), *judging])
    attempt(settings)
    best = _best(tried)
    if best is not None and not quick:
        progress.expect(judging)
        attempt(_variants(best))
        best = _best(tried)

    if best is None:
        raise UnsupportedError(f"this model can run none of the settings: {next(iter(refused.values()))}")
    gains = {PCD(config).name: gain for config, gain in tried.items()}
    progress.expect(())
    chosen_by = _compare(first, counts, records, best)
    n_judged, disagreement = len(judging) // 2, (chosen_by.wins + chosen_by.losses) / chosen_by.n
    if tried[best] <= 0:
        return Tuned(None, None, {}, gains, refused, n_judged, disagreement)
    run([best], second)
    name = PCD(best).name
    if name in refused:
        raise PCDError(f"{name}, the best setting on the first half, cannot answer {refused[name]}")
    judged: dict[tuple[str | None, int | None], Paired] = {(None, None): _compare(second, counts, records, best)}
    for task in plan.tasks:
        for length in plan.lengths:
            cell = dataclasses.replace(second, tasks=(task,), lengths=(length,))
            judged[task, length] = _compare(cell, counts, records, best)
    return Tuned(best, chosen_by, judged, gains, refused, n_judged, disagreement)


def _variants(config: PCDConfig) -> list[PCDConfig]:
    """All settings with one value changed."""
    result = []
    for name, values in _VALUES.items():
        if name == "window" and config.window is None:
            continue
        if name in ("alpha", "base_ratio") and config.perturbation != "over-rotation":
            continue
        result += [config.replace(**{name: value}) for value in values if getattr(config, name) != value]
    return result


def _best(tried: Mapping[PCDConfig, float]) -> PCDConfig | None:
    """The setting with the highest gain; ties go to the one tried first, which is simpler."""
    return max(tried, key=lambda config: tried[config], default=None)


def _compare(plan: Plan, counts: Mapping[str, int], records: Mapping[Key, Any], config: PCDConfig) -> Paired:
    method = PCD(config).name
    keys = [key[:3] for key in plan.everything(counts) if key[3] == BASELINE]
    return paired(
        [records[(*key, method)]["score"] for key in keys], [records[(*key, BASELINE)]["score"] for key in keys]
    )
