"""One plan for any model: every preset, the window with a cut, three controls, and what anyone would do instead (replay, recite),
on questions about a text, everyday questions and chats.

Only the second half of the questions is asked, since settings are chosen on the first. The plan is the same for all models
but for what one cannot take: lengths beyond its training, tasks whose questions its tokenizer makes too long.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pypcd.decode import Control, parse, setting_of
from pypcd.errors import InputError
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import BASELINE, Directory, Key, Plan
from pypcd.evaluation.progress import Progress
from pypcd.evaluation.run import context_of, evaluate, run_options, tasks_of
from pypcd.evaluation.tasks import GROUPS
from pypcd.evaluation.tasks.everyday import SHORT
from pypcd.evaluation.tasks.sample import Tokenizer
from pypcd.gguf import read_gguf, resolve_model
from pypcd.settings.config import PRESETS, write_values

__all__ = [
    "FAR",
    "PARTS",
    "EvalJob",
    "EvalPart",
    "fitting",
    "legs",
    "missing",
    "names_of",
    "run_survey",
    "survey_methods",
    "survey_options",
]

_CUT = "pcd:window:relative_top=0.1"
_CONTROLLED = ("pcd", _CUT, "pcd:unsure")  # the contrasts that have a control


@dataclasses.dataclass(frozen=True)
class EvalPart:
    """Tasks that are asked at the same lengths.

    Attributes:
        lengths: tokens of a prompt with its answer.
        n_questions: different ones in all; everyday questions are the same at every length and in both ways.
        share_beyond: the share of them that is asked in prompts longer than FAR, which take most of the time.
        n_pool: other questions that the control is made from, as in Plan; each is a prompt more in each cell.
        max_tokens: the longest answer; None: each task's own.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    n_questions: int
    share_beyond: float = 1.0
    n_pool: int = 12
    max_tokens: int | None = None

    def n(self, length: int, n_lengths: int) -> int:
        """Questions of a cell, of which half is asked.

        Args:
            n_lengths: how many of the part's own lengths the model can take.
        """
        is_everyday = self.tasks[0] in GROUPS
        cells = len(GROUPS[self.tasks[0]]) if is_everyday else len(self.tasks) * n_lengths
        return 2 * math.ceil(self.n_questions * (self.share_beyond if length > FAR else 1.0) / cells)


FAR = 2000

_LONG_TEXTS = (600, 2000, 6000)

PARTS: Mapping[str, EvalPart] = {
    # a plain model goes on writing after the number or the UUID, up to the longest answer
    "retrieval-numbers": EvalPart(("niah-multikey-2",), _LONG_TEXTS, 150, max_tokens=40),
    "retrieval-uuids": EvalPart(("niah-multikey-3",), _LONG_TEXTS, 150, max_tokens=48),
    "reading": EvalPart(("reading",), _LONG_TEXTS, 300),
    "chats": EvalPart(("chats",), (1000,), 300),
    "everyday-short": EvalPart(("everyday",), (SHORT,), 600),
    "everyday-long": EvalPart(("everyday", "everyday-behind"), (1000, 4000), 300, share_beyond=0.5, n_pool=4),
}


@dataclasses.dataclass(frozen=True)
class EvalJob:
    """One part of the plan at one length, in a directory of its own."""

    part: str
    plan: Plan

    @property
    def length(self) -> int:
        return self.plan.lengths[0]

    def directory(self, folder: pathlib.Path) -> Directory:
        """Where the answers are, in a model's folder."""
        return Directory(folder / f"{self.part}-{self.length}")

    def without(self, tasks: Collection[str]) -> EvalJob | None:
        left = tuple(task for task in self.plan.tasks if task not in tasks)
        return EvalJob(self.part, dataclasses.replace(self.plan, tasks=left)) if left else None


def survey_methods() -> tuple[str, ...]:
    """Greedy, the presets, the window with a cut unless it is a preset, the controls of the paper's contrast, of that window's and
    of unsure's, replay and recite."""
    presets = [f"pcd:{name}" for name in PRESETS]
    cut = [] if setting_of(_CUT) in map(setting_of, presets) else [_CUT]
    values = (write_values(Control(pcd=setting_of(name)).pcd.differences()) for name in _CONTROLLED)  # type: ignore[arg-type]
    controls = (f"control:{written}" if written else "control" for written in values)
    return (BASELINE, *presets, *cut, *controls, "replay", "recite")


def names_of(models: Sequence[str]) -> dict[str, str]:
    """A name for each model, from its file: name -> model.

    Raises:
        FileNotFoundError, ModelError: there is no such model.
        ValueError: two files have the same name.
    """
    names: dict[str, str] = {}
    for model in models:
        name = pathlib.Path(resolve_model(model)).stem
        if name in names:
            raise InputError(
                f"{names[name]} and {model} are both called {name}, so their answers would share a directory; give one of "
                "the files another name"
            )
        names[name] = model
    return names


def legs(
    model: str,
    *,
    parts: Sequence[str] = (),
    methods: Sequence[str] = (),
    lengths: Sequence[int] = (),
    n: int | None = None,
    chat: bool = False,
) -> tuple[list[EvalJob], list[str]]:
    """The plan for a model, and a sentence for each length that it was not trained for.

    Args:
        parts: names of PARTS, or how they begin, such as "everyday"; none: all.
        methods: names; none: survey_methods().
        lengths: other lengths of long prompts, for all parts alike.
        n: questions of a cell, of which half is asked; None: as each part says.

    Raises:
        ValueError: there is no such part.
        FileNotFoundError, ModelError: as resolve_model().
    """
    n_train = read_gguf(resolve_model(model)).shape.n_ctx_train
    for name in parts:
        if not any(part.startswith(name) for part in PARTS):
            raise InputError(
                f"part is {name!r}; allowed: retrieval, reading, chats, everyday, or one of {', '.join(PARTS)}"
            )
    made, notes = [], []
    for name, part in PARTS.items():
        if parts and not name.startswith(tuple(parts)):
            continue
        wanted = tuple(lengths) if lengths and part.lengths != (SHORT,) else part.lengths
        for length in wanted:
            if length > n_train:
                notes.append(f"{name} at {length} tokens is left out: the model was trained for {n_train}")
                continue
            plan = Plan(
                model=model,
                tasks=part.tasks,
                methods=tuple(parse(name).name for name in methods) or survey_methods(),
                lengths=(length,),
                # of the part's own lengths, so that a run can go on with others
                n=n or part.n(length, max(1, sum(own <= n_train for own in part.lengths))),
                n_pool=part.n_pool,
                chat=chat,
                max_tokens=part.max_tokens,
                half="second",
            )
            made.append(EvalJob(name, plan))
    return made, notes


def fitting(plan: Sequence[EvalJob], tokenizer: Tokenizer) -> tuple[list[EvalJob], list[str]]:
    """The plan without tasks whose questions do not fit in a length with this tokenizer, and a sentence for each."""
    made, notes = [], []
    fits: set[tuple[str, str]] = set()  # what fits in a length fits in a longer one
    for leg in sorted(plan, key=lambda leg: leg.length):
        out = []
        for name, task in tasks_of(leg.plan).items():
            if (leg.part, name) in fits:
                continue
            try:
                task.samples(leg.plan.n, leg.length, tokenizer, leg.plan.seed)
                task.samples(leg.plan.n_pool, leg.length, tokenizer, leg.plan.seed + 1)  # the control's
                fits.add((leg.part, name))
            except InputError as error:
                out.append(name)
                notes.append(f"{name} at {leg.length} tokens is left out: {error}")
        left = leg.without(out)
        if left is not None:
            made.append(left)
    return sorted(made, key=lambda leg: list(PARTS).index(leg.part)), notes


def missing(leg: EvalJob, folder: pathlib.Path) -> list[Key]:
    """The answers that a model's folder does not have yet."""
    records = leg.directory(folder).records()
    return [key for key in leg.plan.everything() if records.get(key, {"error": ""}).get("error") is not None]


def run_survey(
    plan: Sequence[EvalJob],
    folder: pathlib.Path,
    *,
    jobs: Jobs = 1,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Make the answers that a model's folder does not have yet; stopped, it goes on where it was.

    Args:
        jobs, options, progress: as in evaluate().

    Returns:
        The methods that the model cannot run, with the reason.

    Raises:
        As evaluate().
    """
    progress, refused = progress or Progress(), {}
    options = survey_options(plan, options or {}, jobs)
    to_come = [missing(leg, folder) for leg in plan]
    for i, leg in enumerate(plan):
        progress.expect(itertools.chain(*to_come[i + 1 :]))
        outcome = evaluate(leg.plan, leg.directory(folder), jobs=jobs, options=options, progress=progress)
        refused.update(outcome.refused)
    return refused


def survey_options(plan: Sequence[EvalJob], options: Mapping[str, Any], jobs: Jobs = 1) -> dict[str, Any]:
    """The options of the model, the same for all legs: one context for the longest, since some models compute differently
    in a long one."""
    n_ctx = max(context_of(leg.plan, options) for leg in plan)
    return run_options(plan[0].plan, {**options, "n_ctx": n_ctx}, jobs)
