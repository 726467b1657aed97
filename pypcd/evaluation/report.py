"""An evaluation's records as tables: every method compared with greedy decoding on the same samples."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pypcd.evaluation.plan import BASELINE, Key, Plan
from pypcd.evaluation.stats import Paired, interval, paired
from pypcd.evaluation.tasks import GROUPS

__all__ = ["Row", "advice", "by_depth", "effective_lengths", "markdown", "rows"]

N_BANDS = 5  # of depth
EFFECTIVE = 0.85  # of the score at the shortest length
LITTLE_TO_GAIN = 90.0  # percent that greedy has right

_LEGEND = """\
{n} questions a cell{half}, seed {seed}, {asked}. Scores in %. The difference to greedy is in points, on the same questions,
with its 95% bootstrap interval; ~ marks one that spans zero or has p of 0.05 or more: no difference shown. p: exact
McNemar, for graded scores the sign test. Wins and losses: questions on which the method, on which greedy scored higher.
Spoilt: questions that greedy has right and the method has not, of those that greedy has right, and in percent.
MRR: mean reciprocal rank of the gold token where an answer first leaves it, of all and of wrong answers."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A method in a cell (a task, or a group of tasks, at a length), over the samples that both it and greedy have answered.

    Attributes:
        paired: its score and difference to greedy, in points.
        mrr: mean reciprocal rank of the gold token (the next one of the right answer) where an answer first differs from
            it; 1 if it does not differ (Eq. 1's S).
        mrr_wrong: the same over answers with a score below 1; None if there are none.
        n_tokens: mean length of its answers.
    """

    task: str
    length: int
    method: str
    paired: Paired
    mrr: float | None
    mrr_wrong: float | None
    n_tokens: float

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "paired"}
        return {**values, **dataclasses.asdict(self.paired), "is_clear": self.paired.is_clear}


def rows(plan: Plan, records: Mapping[Key, Mapping[str, Any]]) -> list[Row]:
    """One row for each task, length and method that has answers, in the plan's order; then the same for each group of
    tasks of which the plan has all, over all of their questions."""
    result = []
    for name, parts in (*((task, (task,)) for task in plan.tasks), *_groups(plan).items()):
        for length in plan.lengths:
            for method in plan.methods:
                cell = [pair for task in parts for pair in _cell(plan, records, task, length, method)]
                if cell:
                    result.append(_row(name, length, method, cell))
    return result


def _groups(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {name: parts for name, parts in GROUPS.items() if set(parts) <= set(plan.tasks)}


def advice(plan: Plan, records: Mapping[Key, Mapping[str, Any]]) -> str:
    """A sentence about what to do, by the answers of all tasks and lengths together."""
    cells = {
        method: [
            pair
            for task in plan.tasks
            for length in plan.lengths
            for pair in _cell(plan, records, task, length, method)
        ]
        for method in plan.methods
    }
    found = {
        method: paired([mine["score"] for mine, _ in cell], [plain["score"] for _, plain in cell])
        for method, cell in cells.items()
        if cell
    }
    plain = found.pop(BASELINE).score if BASELINE in found else 0.0
    if plain >= LITTLE_TO_GAIN:
        return f"{BASELINE} has {plain:.0f}% right, so there is little to gain here: ask longer prompts (--length), or leave it at that."
    gains = {method: one for method, one in found.items() if one.is_clear and one.difference > 0}
    if gains:
        best = max(gains, key=lambda method: gains[method].difference)
        return f"Use {best} for questions like these: {gains[best].wins} answers more are right with it, and {gains[best].losses} fewer."
    return f"No method shows a gain over {BASELINE}, so there is no reason to use one for questions like these."


def by_depth(plan: Plan, records: Mapping[Key, Mapping[str, Any]], task: str, length: int) -> dict[str, list[Paired]]:
    """Each method's comparison with greedy in five bands of depth, the answer's place from the context's start to its
    end; empty if the task has no depth."""
    result = {}
    for method in plan.methods:
        cell = _cell(plan, records, task, length, method)
        bands: list[list[tuple[Any, Any]]] = [[] for _ in range(N_BANDS)]
        for mine, plain in cell:
            if mine["depth"] is not None:
                bands[min(int(mine["depth"] * N_BANDS), N_BANDS - 1)].append((mine, plain))
        if all(bands):
            result[method] = [paired([a["score"] for a, _ in band], [b["score"] for _, b in band]) for band in bands]
    return result


def effective_lengths(table: Sequence[Row], task: str) -> dict[str, int]:
    """How far each method gets in a task, or a group: the longest length before its score falls below 85% of its score at the shortest
    one. Methods that have nothing right at the shortest length are left out."""
    result = {}
    for method in dict.fromkeys(row.method for row in table if row.task == task):
        scores = sorted((row.length, row.paired.score) for row in table if (row.task, row.method) == (task, method))
        least = EFFECTIVE * scores[0][1]
        too_long = [length for length, score in scores if score < least]
        if least:
            result[method] = max(length for length, _ in scores if not too_long or length < too_long[0])
    return result


def _cell(
    plan: Plan, records: Mapping[Key, Mapping[str, Any]], task: str, length: int, method: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Records of the method, each with greedy's for the same sample."""
    both = []
    for index in plan.indices(plan.n):
        mine, plain = records.get((task, length, index, method)), records.get((task, length, index, BASELINE))
        if mine and plain:
            both.append((mine, plain))
    return both


def _row(task: str, length: int, method: str, cell: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Row:
    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    mine = [record for record, _ in cell]
    salience = [(record["salience"], record["score"]) for record in mine if record["salience"] is not None]
    return Row(
        task,
        length,
        method,
        paired([record["score"] for record in mine], [record["score"] for _, record in cell]),
        mean([s for s, _ in salience]),
        mean([s for s, score in salience if score < 1]),
        statistics.fmean(record["n_tokens"] for record in mine),
    )


def markdown(
    plan: Plan, records: Mapping[Key, Mapping[str, Any]], metrics: Mapping[str, str], refused: Mapping[str, str]
) -> str:
    """The tables as Markdown; the same records give the same text.

    Args:
        metrics: the name of each task's metric.
        refused: methods that the model cannot run, with the reason.
    """
    table = rows(plan, records)
    parts = [f"# {plan.model}", ""]
    asked, form = len(plan.indices(plan.n)), "chat template" if plan.chat else "plain prompts"
    half = f", the {plan.half} half of {plan.n}" if plan.half else ""
    parts += [_LEGEND.format(n=asked, half=half, seed=plan.seed, asked=form), ""]
    for name, tasks in _groups(plan).items():
        if records and not any(row.task == name for row in table):
            continue
        kinds = ", ".join(dict.fromkeys(metrics[task] for task in tasks))
        parts += _section(f"{name} ({kinds}, its {len(tasks)} tasks together)", name, table)
    for task in plan.tasks:
        n = len({key[2] for key in records if key[0] == task})
        if not n and records:  # it was stopped before
            continue
        parts += _section(f"{task} ({metrics[task]}{f', {n} questions' if n < asked else ''})", task, table)
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
        parts += ["## Refused", ""]
        parts += [f"- {method}: {reason}" for method, reason in sorted(refused.items())]
        parts += [""]
    return "\n".join(parts)


def _section(title: str, name: str, table: Sequence[Row]) -> list[str]:
    return [
        f"## {title}",
        "",
        "| tokens | method | score | difference | p | wins / losses | spoilt | MRR | MRR, wrong |",
        "| ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *(_line(row) for row in table if row.task == name),
        "",
        *_effective_line(table, name),
    ]


def _effective_line(table: Sequence[Row], name: str) -> list[str]:
    lengths = sorted({row.length for row in table if row.task == name})
    found = effective_lengths(table, name) if len(lengths) > 1 else {}
    if not found:
        return []
    of_each = ", ".join(f"{method} {length}" for method, length in found.items())
    return [
        f"Effective length, before the score falls below {EFFECTIVE:.0%} of that at {lengths[0]} tokens: {of_each}.",
        "",
    ]


def _line(row: Row) -> str:
    p = row.paired
    cells = [str(row.length), row.method, f"{p.score:.1f}"]
    if row.method == BASELINE:
        cells += [""] * 4
    else:
        cells += [interval(p), _p(p.p), f"{p.wins} / {p.losses}", f"{p.spoilt} of {p.right}, {p.regression:.1f}"]
    cells += ["" if mrr is None else f"{mrr:.3f}" for mrr in (row.mrr, row.mrr_wrong)]
    return "| " + " | ".join(cells) + " |"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def _depth_lines(bands: Mapping[str, list[Paired]], length: int) -> list[str]:
    if BASELINE not in bands:
        return []
    edges = [f"{100 * i // N_BANDS}-{100 * (i + 1) // N_BANDS}%" for i in range(N_BANDS)]
    lines = [f"Score by the answer's depth in the context, {length} tokens (0%: its start):", ""]
    lines += ["| method | " + " | ".join(edges) + " |", "| --- |" + " ---: |" * N_BANDS]
    lines += [f"| {method} | " + " | ".join(f"{p.score:.1f}" for p in band) + " |" for method, band in bands.items()]
    return [*lines, ""]
