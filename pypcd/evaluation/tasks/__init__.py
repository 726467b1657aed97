"""The benchmarks by name: `kv` (InfiniteBench), `ruler` (RULER) and `graphwalks` (after OpenAI's), which are generated; `xquad` and
`kv-records`, which others wrote; `everyday`, `reading` and `chats` (ours).

A benchmark is a `Task` (`sample`): it makes questions of a length (`size`) and scores their answers (`metrics`).
Knows nothing of models except their tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable

from pypcd.errors import InputError, did_you_mean
from pypcd.evaluation.tasks.chats import CHATS
from pypcd.evaluation.tasks.everyday import EVERYDAY
from pypcd.evaluation.tasks.graphwalks import GRAPHWALKS
from pypcd.evaluation.tasks.kv import KV_OFFICIAL, KV_SHORT
from pypcd.evaluation.tasks.public import KV_RECORDS, XQuAD
from pypcd.evaluation.tasks.reading import READING
from pypcd.evaluation.tasks.ruler import CWE, FWE, NIAH, VT
from pypcd.evaluation.tasks.sample import Task

__all__ = ["GROUPS", "TASKS", "parts_of", "register", "task"]

RULER: tuple[Task, ...] = (
    NIAH("niah-single-1", "noise", "words", "numbers"),
    NIAH("niah-multikey-2", "needles", "words", "numbers"),
    NIAH("niah-multikey-3", "needles", "uuids", "uuids"),
    NIAH("niah-multivalue", "noise", "words", "numbers", n_values=4),
    NIAH("niah-multiquery", "noise", "words", "numbers", n_queries=4),
    VT(),
    CWE(),
    FWE(),
)
_ALL: tuple[Task, ...] = (
    KV_OFFICIAL,
    KV_SHORT,
    KV_RECORDS,
    XQuAD(),
    *RULER,
    *GRAPHWALKS,
    *EVERYDAY,
    *READING,
    *CHATS,
)
_TASKS = {made.name: made for made in _ALL}

TASKS = tuple(_TASKS)

GROUPS = {
    "ruler": tuple(made.name for made in RULER),
    "graphwalks": tuple(made.name for made in GRAPHWALKS),
    "everyday": tuple(made.name for made in EVERYDAY if not made.behind),
    "everyday-behind": tuple(made.name for made in EVERYDAY if made.behind),
    "reading": tuple(made.name for made in READING),
    "chats": tuple(made.name for made in CHATS),
}
"""Names that stand for several tasks, which are asked separately and also counted together."""

# what was a task, or begins the names of several, and where its questions are asked now
_HARNESS = "lm-evaluation-harness asks its questions: python -m pypcd.integrations.lm_eval --model pypcd --tasks"
_CLONE = "in a clone of pypcd's repository: python -m research.eval MODEL --task"
_MOVED = {
    "longbench-v2": f"{_HARNESS} longbench2",
    "longbench-": f"{_HARNESS} longbench",
    "ruler-": f"{_HARNESS} ruler",
    "constrained": "commit 23bc9434 of pypcd asks its questions",
    "mrcr": "commit 7d6ac68 of pypcd asks its questions",
    "nolima": "commit 2e7ce90 of pypcd asks its questions",
    "kv-authors": f"{_CLONE} kv-authors",
    "vt-authors": f"{_CLONE} vt-authors",
}


def parts_of(names: Iterable[str]) -> tuple[str, ...]:
    """The tasks that these names of tasks and groups stand for."""
    return tuple(part for name in names for part in GROUPS.get(name, (name,)))


def register(made: Task) -> None:
    """Add a benchmark to those that task() knows; one of the same name is replaced."""
    _TASKS[made.name] = made


def task(name: str) -> Task:
    """A benchmark by its name.

    Raises:
        ValueError: there is no such task, or it is a group.
    """
    if name in GROUPS:
        raise InputError(f"{name} is {len(GROUPS[name])} tasks; name one of them: {', '.join(GROUPS[name])}")
    if name not in _TASKS:
        for moved, where in _MOVED.items():
            if name.startswith(moved):
                raise InputError(f"{name} is no task of pypcd eval any more; {where}")
        grouped = parts_of(group for group in GROUPS if group != "ruler")
        there_are = ", ".join((*(one for one in _TASKS if one not in grouped), *GROUPS))
        raise InputError(f"there is no task {name!r}{did_you_mean(name, (*GROUPS, *_TASKS))}; there are: {there_are}")
    return _TASKS[name]
