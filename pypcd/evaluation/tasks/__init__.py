"""The benchmarks by name: `kv` (InfiniteBench), `ruler` and `ruler_files` (RULER), `longbench` (LongBench and its v2), `mrcr` and
`graphwalks` (after OpenAI's), `nolima` (NoLiMa), `everyday`, `constrained`, `reading` and `chats` (ours).

A benchmark is a `Task` (`sample`): it makes questions of a length (`size`) and scores their answers (`metrics`).
Knows nothing of models except their tokenizer.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable

from pypcd.errors import InputError, did_you_mean
from pypcd.evaluation.tasks.chats import CHATS
from pypcd.evaluation.tasks.constrained import CONSTRAINED, Objects
from pypcd.evaluation.tasks.everyday import EVERYDAY
from pypcd.evaluation.tasks.graphwalks import GRAPHWALKS
from pypcd.evaluation.tasks.kv import KV_AUTHORS, KV_OFFICIAL, KV_SHORT
from pypcd.evaluation.tasks.longbench import LONGBENCH_TASKS, LongBench, LongBenchV2
from pypcd.evaluation.tasks.mrcr import MRCR
from pypcd.evaluation.tasks.nolima import NoLiMa
from pypcd.evaluation.tasks.reading import READING
from pypcd.evaluation.tasks.ruler import CWE, FWE, NIAH, VT, VTAuthors
from pypcd.evaluation.tasks.ruler_files import RULER_TASKS, RulerFile
from pypcd.evaluation.tasks.sample import Task

__all__ = ["FROM_FILES", "GROUPS", "TASKS", "parts_of", "task"]

_GENERATED: dict[str, Task] = {
    made.name: made
    for made in (
        KV_OFFICIAL,
        KV_AUTHORS,
        KV_SHORT,
        VT(),
        VTAuthors(),
        NIAH("niah-single-1", "noise", "words", "numbers"),
        NIAH("niah-multikey-2", "needles", "words", "numbers"),
        NIAH("niah-multikey-3", "needles", "uuids", "uuids"),
        NIAH("niah-multivalue", "noise", "words", "numbers", n_values=4),
        NIAH("niah-multiquery", "noise", "words", "numbers", n_queries=4),
        CWE(),
        FWE(),
        *GRAPHWALKS,
    )
}

_WITH_DATA: dict[str, Callable[[str | pathlib.Path | None], Task]] = {
    **{f"longbench-{dataset}": functools.partial(LongBench, dataset) for dataset in LONGBENCH_TASKS},
    **{f"ruler-{ruler_task}": functools.partial(RulerFile, ruler_task) for ruler_task in RULER_TASKS},
    LongBenchV2.name: LongBenchV2,
    MRCR.name: MRCR,
    NoLiMa.name: NoLiMa,
}

_GENERATED.update((made.name, made) for made in EVERYDAY)
_GENERATED.update((made.name, made) for made in CONSTRAINED)
_GENERATED.update((made.name, made) for made in (*READING, *CHATS))

TASKS = (*_GENERATED, *_WITH_DATA)

FROM_FILES = tuple(_WITH_DATA)
"""The tasks that take data."""

GROUPS = {
    "ruler": (
        "niah-single-1",
        "niah-multikey-2",
        "niah-multikey-3",
        "niah-multivalue",
        "niah-multiquery",
        "vt",
        "cwe",
        "fwe",
    ),
    "ruler-files": tuple(f"ruler-{ruler_task}" for ruler_task in RULER_TASKS),
    "graphwalks": tuple(made.name for made in GRAPHWALKS),
    "everyday": tuple(made.name for made in EVERYDAY if made.way == "shots"),
    "everyday-behind": tuple(made.name for made in EVERYDAY if made.way == "behind"),
    "constrained": tuple(made.name for made in CONSTRAINED if isinstance(made, Objects) and not made.shown),
    "constrained-shown": tuple(made.name for made in CONSTRAINED if isinstance(made, Objects) and made.shown),
    "reading": tuple(made.name for made in READING),
    "chats": tuple(made.name for made in CHATS),
}
"""Names that stand for several tasks, which are asked separately and also counted together."""


def parts_of(names: Iterable[str]) -> tuple[str, ...]:
    """The tasks that these names of tasks and groups stand for."""
    return tuple(part for name in names for part in GROUPS.get(name, (name,)))


def task(name: str, *, data: str | pathlib.Path | None = None) -> Task:
    """A benchmark by its name.

    Args:
        data: where the rows of a LongBench task are: its .jsonl file, a folder with it, or data.zip. None: they are
            downloaded from the Hugging Face hub. For every other task that takes data: its file, or a folder with it.

    Raises:
        ValueError: there is no such task, it is a group, data is given for a task that generates its questions, or it
            is None for a task that needs some.
        FileNotFoundError: data does not contain the task.
    """
    if name in _WITH_DATA:
        return _WITH_DATA[name](data)
    if name in GROUPS:
        raise InputError(f"{name} is {len(GROUPS[name])} tasks; name one of them: {', '.join(GROUPS[name])}")
    if name not in _GENERATED:
        grouped = parts_of(group for group in GROUPS if not group.startswith("ruler"))
        there_are = ", ".join((*(one for one in TASKS if one not in grouped), *GROUPS))
        raise InputError(f"there is no task {name!r}{did_you_mean(name, (*GROUPS, *TASKS))}; there are: {there_are}")
    if data is not None:
        raise InputError(f"data is {str(data)!r}, but {name} generates its questions; leave data out")
    return _GENERATED[name]
