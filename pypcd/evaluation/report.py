"""An evaluation's records as tables: every method compared with greedy decoding on the same samples."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pypcd.evaluation.plan import BASELINE, Key, Plan
from pypcd.evaluation.stats import Paired, advised, interval, paired
from pypcd.evaluation.tasks import GROUPS
from pypcd.evaluation.tasks import task as task_named

__all__ = ["Row", "advice", "by_depth", "markdown", "rows"]

N_BANDS = 5  # of depth

_LEGEND = """\
{n} questions a cell{half}, seed {seed}, {asked}. Scores in %. The difference to greedy is in points, on the same questions,
with its 95% bootstrap interval; ~ marks one that spans zero or has p of 0.05 or more: no difference shown. p: exact
McNemar, for graded scores the sign test. Wins and losses: questions on which the method, on which greedy scored higher.
Spoilt: questions that greedy has right and the method has not, of those that greedy has right, and in percent."""


Records = Mapping[Key, Mapping[str, Any]]
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]  # a method's record, and greedy's of the same sample


@dataclasses.dataclass(frozen=True)
class Row:
    """A method in a cell (a task, or a group of tasks, at a length), over the samples that both it and greedy have answered.

    Attributes:
        paired: its score and difference to greedy, in points.
        n_tokens: mean length of its answers.
    """

    task: str
    length: int
    method: str
    paired: Paired
    n_tokens: float

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "paired"}
        return {**values, **dataclasses.asdict(self.paired), "is_clear": self.paired.is_clear}


def rows(plan: Plan, records: Records) -> list[Row]:
    """One row for each task, length and method that has answers, in the plan's order; then the same for each group of
    tasks of which the plan has all, over all of their questions."""
    return [
        Row(name, length, method, _paired(cell), statistics.fmean(mine["n_tokens"] for mine, _ in cell))
        for name, tasks in (*((task, (task,)) for task in plan.tasks), *_groups(plan).items())
        for length in plan.lengths
        for method in plan.methods
        if (cell := _cell(plan, records, tasks, (length,), method))
    ]


def _groups(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {name: parts for name, parts in GROUPS.items() if set(parts) <= set(plan.tasks)}


def _cell(plan: Plan, records: Records, tasks: Sequence[str], lengths: Sequence[int], method: str) -> list[Pair]:
    """The samples that both the method and greedy have answered."""
    samples = itertools.product(tasks, lengths, plan.indices(plan.n))
    both = ((records.get((*sample, method)), records.get((*sample, BASELINE))) for sample in samples)
    return [(mine, plain) for mine, plain in both if mine and plain]


def _paired(cell: Sequence[Pair]) -> Paired:
    return paired([mine["score"] for mine, _ in cell], [plain["score"] for _, plain in cell])


def advice(plan: Plan, records: Records) -> str:
    """A sentence about what to do, by the answers of all tasks and lengths together."""
    cells = {method: _cell(plan, records, plan.tasks, plan.lengths, method) for method in plan.methods}
    return advised(BASELINE, {method: _paired(cell) for method, cell in cells.items() if cell})


def by_depth(plan: Plan, records: Records, task: str, length: int) -> dict[str, list[Paired]]:
    """Each method's comparison with greedy in five bands of depth, the answer's place from the context's start to its
    end; empty if the task has no depth."""
    result = {}
    for method in plan.methods:
        bands: list[list[Pair]] = [[] for _ in range(N_BANDS)]
        for pair in _cell(plan, records, (task,), (length,), method):
            if pair[0]["depth"] is not None:
                bands[min(int(pair[0]["depth"] * N_BANDS), N_BANDS - 1)].append(pair)
        if all(bands):
            result[method] = list(map(_paired, bands))
    return result


def markdown(plan: Plan, records: Records, refused: Mapping[str, str]) -> str:
    """The tables as Markdown; the same records give the same text.

    Args:
        refused: methods that the model cannot run, with the reason.
    """
    table = rows(plan, records)
    asked, form = len(plan.indices(plan.n)), "chat template" if plan.chat else "plain prompts"
    half = f", the {plan.half} half of {plan.n}" if plan.half else ""
    parts = [f"# {plan.model}", "", _LEGEND.format(n=asked, half=half, seed=plan.seed, asked=form), ""]
    there = {row.task for row in table}
    if not records:
        there = {*plan.tasks, *_groups(plan)}
    for name, tasks in _groups(plan).items():
        if name in there:
            kinds = ", ".join(dict.fromkeys(task_named(task).metric for task in tasks))
            parts += _section(f"{name} ({kinds}, its {len(tasks)} tasks together)", name, table)
    for task in plan.tasks:
        if task in there:  # it was not stopped before
            n = len({key[2] for key in records if key[0] == task})
            few = f", {n} questions" if 0 < n < asked else ""
            parts += _section(f"{task} ({task_named(task).metric}{few})", task, table)
            for length in plan.lengths:
                parts += _depth_lines(by_depth(plan, records, task, length), length)
    failed: dict[str, list[str]] = {}
    for key, record in sorted(records.items()):
        if record.get("error"):
            failed.setdefault(key[3], []).append(f"{key[0]}, {key[1]} tokens, question {key[2]}: {record['error']}")
    if failed:
        parts += ["## Not answered", "", "These count as wrong; they are asked again when the run is continued.", ""]
        parts += [f"- {method}: {len(errors)}, such as {errors[0]}" for method, errors in failed.items()]
        parts += [""]
    if refused:
        parts += ["## Refused", "", *(f"- {method}: {reason}" for method, reason in sorted(refused.items())), ""]
    return "\n".join(parts)


def _section(title: str, name: str, table: Sequence[Row]) -> list[str]:
    return [
        f"## {title}",
        "",
        "| tokens | method | score | difference | p | wins / losses | spoilt |",
        "| ---: | --- | ---: | --- | ---: | ---: | ---: |",
        *(_line(row) for row in table if row.task == name),
        "",
    ]


def _line(row: Row) -> str:
    p = row.paired
    cells = [str(row.length), row.method, f"{p.score:.1f}"]
    if row.method == BASELINE:
        cells += [""] * 4
    else:
        chance = f"{p.p:.3f}" if p.p >= 0.001 else "<0.001"
        cells += [interval(p), chance, f"{p.wins} / {p.losses}", f"{p.spoilt} of {p.right}, {p.regression:.1f}"]
    return "| " + " | ".join(cells) + " |"


def _depth_lines(bands: Mapping[str, list[Paired]], length: int) -> list[str]:
    if BASELINE not in bands:
        return []
    edges = [f"{100 * i // N_BANDS}-{100 * (i + 1) // N_BANDS}%" for i in range(N_BANDS)]
    lines = [f"Score by the answer's depth in the context, {length} tokens (0%: its start):", ""]
    lines += ["| method | " + " | ".join(edges) + " |", "| --- |" + " ---: |" * N_BANDS]
    lines += [f"| {method} | " + " | ".join(f"{p.score:.1f}" for p in band) + " |" for method, band in bands.items()]
    return [*lines, ""]
