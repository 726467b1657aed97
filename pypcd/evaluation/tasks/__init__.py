"""The benchmarks by name: `_kv` (InfiniteBench), `_ruler` (RULER), `_longbench` (LongBench).

A benchmark is a `Task` (`_sample`): it makes questions of a length (`_size`) and scores their answers (`_metrics`).
Knows nothing of models except their tokenizer.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

from pypcd._errors import did_you_mean
from pypcd.evaluation.tasks._kv import KV_AUTHORS, KV_OFFICIAL, KV_SHORT
from pypcd.evaluation.tasks._longbench import LONGBENCH_TASKS, LongBench
from pypcd.evaluation.tasks._ruler import NIAH, VT, VTAuthors
from pypcd.evaluation.tasks._sample import Task

__all__ = ["TASKS", "task"]

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
    )
}

_WITH_DATA: dict[str, Callable[[str | pathlib.Path | None], Task]] = {
    f"longbench-{dataset}": functools.partial(LongBench, dataset) for dataset in LONGBENCH_TASKS
}

TASKS = (*_GENERATED, *_WITH_DATA)


def task(name: str, *, data: str | pathlib.Path | None = None) -> Task:
    """A benchmark by its name.

    Args:
        data: where the rows of a LongBench task are: its .jsonl file, a folder with it, or data.zip. None: they are
            downloaded from the Hugging Face hub.

    Raises:
        ValueError: there is no such task, or data is given for a task that generates its questions.
        FileNotFoundError: data does not contain the task.
    """
    if name in _WITH_DATA:
        return _WITH_DATA[name](data)
    if name not in _GENERATED:
        raise ValueError(f"there is no task {name!r}{did_you_mean(name, TASKS)}; there are: {', '.join(TASKS)}")
    if data is not None:
        raise ValueError(f"data is {str(data)!r}, but {name} generates its questions; leave data out")
    return _GENERATED[name]
