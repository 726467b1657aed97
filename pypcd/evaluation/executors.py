"""Where questions are answered: in this process, or in several beside each other on this machine.

An Executor makes what answers (a worker) where it answers, hands out questions, and gives back what comes. It knows nothing of
models, tasks or files. A place of other machines is in cluster.
"""

from __future__ import annotations

import abc
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from pypcd import machine
from pypcd.errors import ArgumentError, InputError, ModelError, PCDError, UnsupportedError
from pypcd.evaluation.plan import Key

__all__ = [
    "Executor",
    "InProcess",
    "Jobs",
    "ProcessPool",
    "Record",
    "Todo",
    "Work",
    "dump_exception",
    "executor_of",
    "failed_record",
    "load_exception",
]

T = TypeVar("T")
Record = dict[str, Any]
Todo = Mapping[tuple[str, int, int], list[str]]  # the methods that are to answer a question
Work = Iterator[tuple[Key, "Record | None"]]  # None: the method is refused


class Answerer(Protocol):
    """What answers questions: run.Worker."""

    refused: dict[str, str]

    def answer(self, name: str, length: int, index: int, methods: list[str]) -> Work: ...

    def close(self) -> None: ...


Make = Callable[[], Answerer]


class Executor(abc.ABC):
    """Where questions are answered.

    Attributes:
        is_elsewhere: whether its workers may have other files, versions and devices than this process.
    """

    is_elsewhere = False

    @abc.abstractmethod
    def n_workers(self) -> int:
        """How many questions are answered at the same time."""

    @abc.abstractmethod
    def n_threads(self) -> int | None:
        """The threads that each worker's share of the cores allows; None: whatever is fastest."""

    @abc.abstractmethod
    def everywhere(self, call: Callable[[], T]) -> dict[str, T]:
        """What a function returns in each process that answers, or in one of them where all are alike; by its name."""

    @abc.abstractmethod
    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        """Answer questions, in any order; all answers to a question come from one worker, in their order.

        Args:
            make: makes a worker; called where it answers.
            refused: is filled with the methods that the workers refuse, with the reason.
        """


class InProcess(Executor):
    """This process."""

    def n_workers(self) -> int:
        return 1

    def n_threads(self) -> int | None:
        return None

    def everywhere(self, call: Callable[[], T]) -> dict[str, T]:
        return {"": call()}

    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        if not todo:
            return
        worker = make()
        try:
            refused.update(worker.refused)
            for item, methods in todo.items():
                yield from worker.answer(*item, methods)
        finally:
            worker.close()


class ProcessPool(InProcess):
    """Several processes on this machine, each with a worker; they last as long as the questions."""

    def __init__(self, n: int) -> None:
        self._n = n

    def n_workers(self) -> int:
        return self._n

    def n_threads(self) -> int | None:
        return max(1, machine.n_cores() // self._n)

    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        n = min(self._n, len(todo))
        if n < 2:
            yield from super().ask(make, todo, refused)
            return
        context = multiprocessing.get_context("spawn")  # a forked process would share llama.cpp's threads
        tasks, results = context.Queue(), context.Queue()
        for item in todo.items():
            tasks.put(item)
        for _ in range(n):
            tasks.put(None)
        processes = [context.Process(target=_serve, args=(make, tasks, results), daemon=True) for _ in range(n)]
        for process in processes:
            process.start()
        try:
            running = n
            while running:
                # what one said before it ended is found below
                n_alive = sum(process.is_alive() for process in processes)
                try:
                    kind, value = results.get(timeout=1)
                except queue.Empty:
                    if n_alive < running:
                        codes = [process.exitcode for process in processes if process.exitcode is not None]
                        status = next((code for code in codes if code), 0)
                        raise PCDError(f"a process of the evaluation ended early, with status {status}") from None
                    continue
                if kind == "error":
                    raise load_exception(value)
                if kind == "refused":
                    refused.update(value)
                elif kind == "done":
                    running -= 1
                else:
                    yield value
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()


Jobs = int | Executor  # a number of processes on this machine, or another place


def executor_of(jobs: Jobs) -> Executor:
    if isinstance(jobs, Executor):
        return jobs
    return ProcessPool(jobs) if jobs > 1 else InProcess()


def failed_record(key: Key, why: str) -> Record:
    """The record of a question without an answer: it counts as wrong, and is asked again when the run is continued."""
    names = dict(zip(("task", "length", "index", "method"), key))
    empty: Record = {"prompt_sha256": None, "depth": None, "answers": []}  # not known where no worker lived to say it
    return {**names, **empty, "error": why, "score": 0.0, "salience": None, "n_tokens": 0}


# -- errors cross to another process as text: not every exception can be pickled --------------------------------------

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        PCDError,
        InputError,
        ArgumentError,
        OSError,
        FileNotFoundError,
        MemoryError,
        ModelError,
        UnsupportedError,
    )
}


def dump_exception(error: Exception) -> tuple[str, str]:
    """An exception as text; of a fault of pypcd's own, where it is."""
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS), None)
    if kind is not None:
        return kind, str(error) or repr(error)
    return "", "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def load_exception(text: tuple[str, str], who: str = "") -> Exception:
    """The exception that dump_exception() made a text of, of a kind that is known here; who: where it was raised."""
    name, message = text
    if name not in _ERRORS:
        return RuntimeError(f"{who or 'a process of the evaluation'} failed:\n{message}")
    return _ERRORS[name](f"{who}: {message}" if who else message)


# -- in a process beside ------------------------------------------------------------------------------------------------


def _serve(make: Make, tasks: Any, results: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        worker = make()
        results.put(("refused", worker.refused))
        while (item := tasks.get()) is not None:
            (task, length, index), methods = item
            for answered in worker.answer(task, length, index, methods):
                results.put(("answer", answered))
        results.put(("done", None))
    except KeyboardInterrupt:
        pass  # the parent process gets it too
    except Exception as error:  # noqa: BLE001  any error must reach the parent process, which waits for an answer
        results.put(("error", dump_exception(error)))


def _end_with_parent() -> None:
    """End this process when its parent has ended: a killed parent does not end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
