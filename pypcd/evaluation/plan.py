"""The plan of an evaluation, and the directory that holds its answers.

A cell is one task at one length: its questions are answered by every method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from pypcd import files
from pypcd.errors import InputError
from pypcd.evaluation.tasks import parts_of
from pypcd.evaluation.tasks.sample import HALVES
from pypcd.settings.ranges import Choice, Integer, check

__all__ = ["BASELINE", "HALVES", "Directory", "Key", "Plan", "is_in"]

BASELINE = "greedy"
"""The method that all others are compared with: plain greedy decoding."""

Key = tuple[str, int, int, str]  # task, length, index of the sample, method

_UNFINISHED = ".run.json-"  # begins the name of one that was not written to its end
_FREE = ("tasks", "methods", "lengths")  # a run may be continued with other ones


@dataclasses.dataclass(frozen=True)
class Plan:
    """An evaluation: every method on n questions of every task at every length.

    Attributes:
        model: the GGUF file.
        tasks: names; that of a group (tasks.GROUPS) stands for its tasks.
        methods: names; "greedy", which the others are compared with, is always added.
        lengths: tokens of a prompt with its answer.
        n: questions in each cell; all of a task's questions if it has fewer.
        half: "first": only the questions with even numbers, by which tune() chooses; "second": only those with odd
            numbers, by which it judges. A run may have both.
        n_pool: number of other questions of the cell that some methods need (the method control); its pool.
        max_tokens: the longest answer; None: the task's own limit.
    """

    model: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    n: int = 300
    seed: int = 0
    chat: bool = False
    n_pool: int = 12
    max_tokens: int | None = None
    half: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", parts_of(self.tasks))
        for name in _FREE:
            values = tuple(dict.fromkeys(getattr(self, name)))
            if not values:
                raise InputError(f"{name} is empty; give at least one")
            object.__setattr__(self, name, values)
        if BASELINE not in self.methods:
            object.__setattr__(self, "methods", (BASELINE, *self.methods))
        check(self, n=Integer(1), seed=Integer(0), n_pool=Integer(1))
        if self.half is not None:
            check(self, half=Choice(HALVES))

    def indices(self, n: int) -> list[int]:
        """The numbers of the questions that are asked of n."""
        return [index for index in range(n) if is_in(self.half, index)]

    def everything(self, counts: Mapping[str, int] | None = None) -> Iterator[Key]:
        """The keys of all answers, cell by cell and sample by sample; counts: how many questions a task has, if not n."""
        for task in self.tasks:
            for length in self.lengths:
                for index in self.indices((counts or {}).get(task, self.n)):
                    for method in self.methods:
                        yield task, length, index, method


class Directory:
    """A run on disk: run.json has the plan, samples.jsonl one line for each sample and method.

    Lines are only appended, each in one write, so that a run killed at any point can continue: at most one line is cut
    off, and that one is dropped. The order of lines does not matter.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        self.samples, self._run = self.path / "samples.jsonl", self.path / "run.json"

    def open(self, plan: Plan, facts: dict[str, Any]) -> dict[Key, dict[str, Any]]:
        """Begin a run, or continue one. Returns the records it already has.

        Args:
            facts: facts about model and versions. They are kept with the run; it continues only if they are the same.

        Raises:
            ValueError: the directory holds another run, or something else.
        """
        record = json.loads(json.dumps({**dataclasses.asdict(plan), **facts}))
        del record["half"]  # a run may have both
        records: dict[Key, dict[str, Any]] = {}
        if self._run.exists():
            before, records = self.facts(), self.records()
            if records:  # a plan without any answer may be replaced
                for name in dict.fromkeys([*record, *before]):
                    # the weights stand for the model's path
                    if name not in (*_FREE, "model") and before.get(name) != record.get(name):
                        raise InputError(
                            f"{self.path} holds another run: {name} is {before.get(name, 'not known')!r} there and "
                            f"{record.get(name)!r} here; give the same value, or another directory"
                        )
                for name in _FREE:
                    record[name] = list(dict.fromkeys([*before[name], *record[name]]))
        elif self.path.exists() and not all(file.name.startswith(_UNFINISHED) for file in self.path.iterdir()):
            raise InputError(f"{self.path} is not empty and not a run of pypcd eval; give another directory")
        self.path.mkdir(parents=True, exist_ok=True)
        files.write(self._run, json.dumps(record, indent=2) + "\n")
        if self.samples.exists():
            os.truncate(self.samples, len(self._lines()))  # the next one begins where the last whole one ends
        return records

    def facts(self) -> dict[str, Any]:
        """The plan of the run and the facts it depends on, as run.json has them.

        Raises:
            ValueError: the directory holds no run.
        """
        if not self._run.exists():
            raise InputError(f"{self.path} has no run.json, so it is not a run of pypcd eval; give another directory")
        try:
            record = files.parsed(self._run.read_text(encoding="utf-8"))
        except ValueError:
            record = None
        if not isinstance(record, dict) or any(name not in record for name in _FREE):
            raise InputError(f"{self._run} was not written by pypcd eval; give another directory")
        return record

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A block in which no other process uses this directory (not on Windows).

        Raises:
            ValueError: another process uses it.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise InputError(
                f"{self.path} is in use by another evaluation; wait for it, or give another directory"
            ) from None
        finally:
            os.close(folder)

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
        with self.samples.open("ab") as file:
            file.write(line.encode("utf-8", "replace"))

    def records(self) -> dict[Key, dict[str, Any]]:
        """The answers so far; the run may still be going on.

        Raises:
            ValueError: a line is damaged.
        """
        records = {}
        for number, line in enumerate(self._lines().splitlines(), 1):
            try:
                record = files.parsed(line)
                key = record["task"], record["length"], record["index"], record["method"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{self.samples}, line {number}, is damaged; remove it and run again") from None
            records[key] = record
        return records

    def _lines(self) -> bytes:
        """The answers' lines, without a last one that was cut off."""
        data = self.samples.read_bytes() if self.samples.exists() else b""
        return data[: data.rfind(b"\n") + 1]


def is_in(half: str | None, index: int) -> bool:
    """Whether the question with this number is in a half; None: in any."""
    return half is None or index % 2 == HALVES.index(half)
