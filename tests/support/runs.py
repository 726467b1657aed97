"""What the tests of evaluations share: a small run of the demo model and its records, the command that makes the same run, and
what a command that was stopped has left behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pypcd.evaluation import Directory, Paired, Plan, evaluate, markdown, paired

Records = dict[Any, dict[str, Any]]

DEMO = Plan("demo", ("kv-short",), ("greedy", "pcd", "control"), (180, 280), n=4)
ONE = {"n_threads": 1, "n_threads_batch": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Directory, Records]:
    """The run of DEMO in one process."""
    directory = Directory(tmp_path_factory.mktemp("run") / "finished")
    return directory, evaluate(DEMO, directory, options=ONE).records


def without_time(records: Records) -> Records:
    return {key: {k: v for k, v in record.items() if k != "seconds"} for key, record in records.items()}


def tables(plan: Plan, records: Mapping[Any, Any]) -> str:
    return markdown(plan, records, {})


def lines(directory: Directory) -> list[Any]:
    """The answers as they are on disk."""
    return [json.loads(line) for line in directory.samples.read_text().splitlines()]


def cut_copy(directory: Directory, path: Path, share: float) -> Directory:
    """A copy of a run of which this share of the answers' bytes was written."""
    copy, data = Directory(path), directory.samples.read_bytes()
    copy.path.mkdir()
    (copy.path / "run.json").write_bytes((directory.path / "run.json").read_bytes())
    copy.samples.write_bytes(data[: int(share * len(data))])
    return copy


def python_path(**more: str) -> dict[str, str]:
    """The environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}


def command(out: Path, *more: str, n: int = DEMO.n) -> list[str]:
    """`pypcd eval`, which makes the run of DEMO with n questions."""
    words = ["eval", "demo", "--task", "kv-short", "--method", "pcd,control", "--length", "180,280", "--n", str(n)]
    return [sys.executable, "-m", "pypcd", *words, "--threads", "1", "--out", str(out), *more]


def processes_of(mark: str, loaded: str = "") -> list[str]:
    """The processes, by number, that have this text in their environment, and a library of such a name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and loaded in (folder / "maps").read_text():
                found.append(folder.name)
        except OSError:  # ended meanwhile
            continue
    return found


def pairs(wins: int, losses: int, n: int) -> Paired:
    """A comparison; on all other questions both are right."""
    both = [1.0] * (n - wins - losses)
    return paired([1.0] * wins + [0.0] * losses + both, [0.0] * wins + [1.0] * losses + both)


def made_up(plan: Plan, score: Callable[[str, int], float]) -> dict[Any, dict[str, Any]]:
    """A record for each of a plan's answers: its score by method and question, its depth by the question."""
    return {key: {"score": score(key[3], key[2]), "n_tokens": 4, "depth": key[2] / plan.n} for key in plan.everything()}
