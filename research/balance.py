"""What a method gains on questions about a text against what it costs on all others, from the answers of evaluations.

Questions about a text are long retrieval (needles, key-value pairs, variables) and reading; the others are everyday questions
in short and in long prompts, and chats. Knows nothing of models; the directories may come from any `pypcd eval`.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pypcd.decode import PCD, Control, parse
from pypcd.errors import InputError
from pypcd.evaluation.plan import BASELINE, Directory, Key, is_in
from pypcd.evaluation.stats import MARGIN, Paired, interval, paired
from pypcd.evaluation.tasks import GROUPS, TASKS
from pypcd.evaluation.tasks.everyday import LEAST, SHORT, kind_of

__all__ = [
    "CHATS",
    "LONG",
    "READING",
    "RETRIEVAL",
    "SHORT_PROMPTS",
    "GainLoss",
    "Run",
    "balance",
    "balance_markdown",
    "controlled",
    "read_run",
]

RETRIEVAL, READING = "retrieval", "reading"
SHORT_PROMPTS, LONG, CHATS = "everyday, short", "everyday, long", "chats"
"""The groups of questions."""

_ABOUT_A_TEXT, _OTHERS = (RETRIEVAL, READING), (SHORT_PROMPTS, LONG, CHATS)

_TASKS = {
    RETRIEVAL: frozenset(task for task in TASKS if task.startswith(("kv", "niah-", "vt"))),
    READING: frozenset(GROUPS["reading"]),
    CHATS: frozenset(GROUPS["chats"]),
}

_LEGEND = f"""\
Questions of the {{half}} half, for each model the same ones for all methods. Greedy: its score in % and the number of
questions. Methods: difference to greedy in points with its 95% bootstrap interval over questions (~ marks no difference
shown: the interval spans zero, or p is 0.05 or more), and wins / losses: questions on which the method, on which greedy scored
higher. An everyday question that was asked in several forms (at several lengths, after examples and behind text) counts
once, with the mean of its scores. Spoilt: everyday questions and chats that greedy has right and the method has not, of all that
greedy has right (neutral regression). Loss on everyday questions, short and long, and in chats: `none` if a loss of {MARGIN:g} points
is excluded on each (the interval lies above -{MARGIN:g}, and Tango's score test agrees: a bootstrap is too narrow where few answers
differ), `shown` if a difference below zero is shown, `not told` if neither, or if greedy gets fewer than {LEAST:g}% right, so that
there is little to lose. A control subtracts what other questions make likely, in place of L*, and contrasts otherwise as the
settings beside it: a gain that these share with it does not come from positions."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One model's answers.

    Attributes:
        name: the model's, in tables.
        methods: in the order in which they were asked for.
        records: by task, length, index and method.
        facts: the run.json of each directory, by its place in the folder.
        notes: what was left out, and why; sentences.
    """

    name: str
    methods: tuple[str, ...]
    records: Mapping[Key, Mapping[str, Any]]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GainLoss:
    """A method's gain and loss on a model: its comparison with greedy in each group that has answers.

    Attributes:
        right: how many answers to everyday questions and in chats greedy has right, each form of a question for itself.
        spoilt: how many of them the method has wrong: neutral regression, as Paired.regression has it.
    """

    model: str
    method: str
    groups: Mapping[str, Paired]
    right: int = 0
    spoilt: int = 0

    @property
    def loss(self) -> str:
        """Whether it costs something on everyday questions: "none", "shown", "not told" or, without answers, "not asked"."""
        found = [self.groups[name] for name in _OTHERS if name in self.groups]
        if any(p.is_clear and p.difference < 0 for p in found):
            return "shown"
        if not {SHORT_PROMPTS, LONG} <= self.groups.keys():
            return "not asked"
        if min(greedys(p) for p in found) < LEAST or not all(p.spares for p in found):
            return "not told"
        return "none"


def greedys(p: Paired) -> float:
    """Greedy's score on the same questions, in percent."""
    return p.score - p.difference


def read_run(folder: pathlib.Path, name: str | None = None) -> Run:
    """All answers in a folder: a directory of an evaluation, or several below it.

    Raises:
        ValueError: there are none, they do not belong together, they are recorded rows, or a file is damaged.
    """
    places = sorted(path.parent for path in folder.rglob("samples.jsonl"))
    if not places:
        raise InputError(
            f"{folder} has no answers; give a GGUF file, or a folder that `pypcd eval` has written (--out)"
        )
    methods: dict[str, None] = {}
    records: dict[Key, Mapping[str, Any]] = {}
    facts: dict[str, Any] = {}
    for place in places:
        directory = Directory(place)
        made, found = directory.facts(), directory.records()
        if "rows" in made:
            raise InputError(
                f"{place} has recorded rows and no answers; give a folder that `pypcd eval` has written (--out)"
            )
        for before in facts.values():
            for what, key in (("model", "weights"), ("form of prompts", "chat")):
                if made.get(key) != before.get(key):
                    raise InputError(f"{folder} has answers of more than one {what}; give one folder for each")
        if records.keys() & found.keys():
            raise InputError(f"{folder} has some answers twice, also in {place}; give one of the folders in it")
        facts["/".join(place.relative_to(folder).parts) or place.name] = made
        methods.update(dict.fromkeys(made["methods"]))
        records.update(found)
    return Run(name or folder.resolve().name, tuple(methods), records, facts)


def balance(run: Run, half: str | None = "second") -> list[GainLoss]:
    """A row for each method that has answers, greedy first.

    Args:
        half: of the questions, as in Plan; None: all.
    """
    scores: dict[tuple[str, str], dict[tuple[Any, ...], list[tuple[float, float]]]]
    scores = collections.defaultdict(lambda: collections.defaultdict(list))
    for (task, length, index, method), record in run.records.items():
        group, plain = group_of(task, length), run.records.get((task, length, index, BASELINE))
        if group is not None and plain is not None and is_in(half, index):
            scores[method, group][_question(task, length, index)].append((record["score"], plain["score"]))
    result = []
    for method in sorted(run.methods, key=lambda name: name != BASELINE):
        groups, right = {}, list[float]()
        for group in (*_ABOUT_A_TEXT, *_OTHERS):
            asked = scores.get((method, group))
            if asked:
                means = [tuple(map(statistics.fmean, zip(*asked[question]))) for question in sorted(asked)]
                groups[group] = paired([mine for mine, _ in means], [plain for _, plain in means])
                if group in _OTHERS:
                    right += [mine for pairs in asked.values() for mine, plain in pairs if plain == 1]
        if groups:
            result.append(GainLoss(run.name, method, groups, len(right), sum(score < 1 for score in right)))
    return result


def controlled(method: str, methods: Iterable[str]) -> tuple[str, ...]:
    """The settings among some methods that a control has the contrast of; none for other methods."""
    control = parse(method).rows
    if not isinstance(control, Control):
        return ()
    found = {name: parse(name).rows for name in methods}
    return tuple(name for name, rows in found.items() if isinstance(rows, PCD) and Control(pcd=rows.pcd) == control)


def group_of(task: str, length: int) -> str | None:
    """The group that a cell belongs to; None for other tasks."""
    if kind_of(task):
        return SHORT_PROMPTS if length <= SHORT else LONG
    return next((group for group, tasks in _TASKS.items() if task in tasks), None)


def _question(task: str, length: int, index: int) -> tuple[Any, ...]:
    """What is asked. Everyday questions are the same at every length and in both ways: their answers stand and fall
    together, so an interval over single answers would be too narrow."""
    kind = kind_of(task)
    return (kind, index) if kind else (task, length, index)


# -- tables -----------------------------------------------------------------------------------------------------------


def balance_markdown(runs: Sequence[Run], half: str | None = "second") -> str:
    """One table of all models; the same records give the same text."""
    table = {run.name: balance(run, half) for run in runs}
    there = {group for rows in table.values() for row in rows for group in row.groups}
    groups = [group for group in (*_ABOUT_A_TEXT, *_OTHERS) if group in there]
    lines = ["# Gain on questions about a text, loss on others", "", _LEGEND.format(half=half or "whole"), ""]
    lines += [
        f"| model | method | {' | '.join(groups)} | spoilt | loss |",
        "| --- | --- |" + " --- |" * (len(groups) + 2),
    ]
    for run in runs:
        for row in table[run.name]:
            found = [row.groups.get(group) for group in groups]
            if row.method == BASELINE:
                cells = [f"{p.score:.1f} of {p.n}" if p else "" for p in found]
                lines.append(f"| {row.model} | {row.method} | {' | '.join(cells)} |  |  |")
                continue
            cells = [f"{interval(p)}, {p.wins} / {p.losses}" if p else "" for p in found]
            of = ", ".join(f"`{name}`" for name in controlled(row.method, run.methods))
            name = f"`{row.method}`" + (f", of {of}" if of else "")
            spoilt = f"{row.spoilt} of {row.right}, {100 * row.spoilt / row.right:.1f}%" if row.right else ""
            lines.append(f"| {row.model} | {name} | {' | '.join(cells)} | {spoilt} | {row.loss} |")
    lines += ["", "## What was asked", ""]
    for run in runs:
        lines += [f"- **{run.name}**: {'; '.join(_asked(run, half))}.", *(f"  - {note}" for note in run.notes)]
    return "\n".join([*lines, ""])


def _asked(run: Run, half: str | None) -> Iterator[str]:
    """The tasks and lengths of each group, and what greedy's scores say about it."""
    plain = next((row for row in balance(run, half) if row.method == BASELINE), None)
    for group, p in (plain.groups if plain else {}).items():
        right: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
        for (task, length, index, method), record in sorted(run.records.items()):
            if method == BASELINE and group_of(task, length) == group and is_in(half, index):
                right[task, length].append(record["score"])
        names = tuple(dict.fromkeys(task for task, _ in right))
        if group in _ABOUT_A_TEXT:
            for task in names:
                scores = {length: 100 * statistics.fmean(right[one, length]) for one, length in right if one == task}
                found = ", ".join(f"{score:.0f}% at {length}" for length, score in scores.items())
                yield f"{task}, {found} tokens (greedy)"
            continue
        whole = [name for name, parts in GROUPS.items() if set(parts) <= set(names)]
        names = (*whole, *(task for task in names if not any(task in GROUPS[name] for name in whole)))
        lengths = ", ".join(map(str, sorted({length for _, length in right})))
        little = f", of which greedy gets {p.score:.1f}% right: harm cannot be told" if p.score < LEAST else ""
        yield f"{', '.join(names)} at {lengths} tokens, {p.n} questions{little}"
