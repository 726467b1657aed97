"""Where questions are answered: in this process, in several beside each other, or on a Dask cluster.

An Executor makes what answers (a worker) where it answers, hands out questions, and gives back what comes. It is a plain map over
questions. It knows nothing of models, tasks or files.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import logging
import multiprocessing
import os
import pathlib
import pickle
import platform
import signal
import threading
import traceback
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pypcd import files
from pypcd.errors import MENDABLE, InputError, PCDError, require
from pypcd.evaluation.plan import Key
from pypcd.llama import machine

if TYPE_CHECKING:
    from pypcd.evaluation.run import Worker

__all__ = [
    "Cluster",
    "Executor",
    "Jobs",
    "Processes",
    "Record",
    "Todo",
    "Work",
    "executor_of",
    "failed_record",
]

T = TypeVar("T")
Record = dict[str, Any]
Todo = Mapping[tuple[str, int, int], list[str]]  # the methods that are to answer a question
Work = Iterator[tuple[Key, "Record | None"]]  # None: the method is refused


Make = Callable[[], "Worker"]


class Executor(abc.ABC):
    """Where questions are answered."""

    @abc.abstractmethod
    def n_threads(self) -> int | None:
        """The threads that each worker's share of the cores allows; None: whatever is fastest."""

    @abc.abstractmethod
    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        """Answer questions, in any order; all answers to a question come from one worker, in their order.

        Args:
            make: makes a worker; called where it answers.
            refused: is filled with the methods that the workers refuse, with the reason.
        """


class Processes(Executor):
    """Processes of this machine, each with a worker, which last as long as the questions; one is this process."""

    def __init__(self, n: int) -> None:
        self._n = n

    def n_threads(self) -> int | None:
        return max(1, machine.n_cores() // self._n) if self._n > 1 else None

    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        n = min(self._n, len(todo))
        if n > 1:
            yield from self._beside(n, make, todo, refused)
        elif todo:
            with contextlib.closing(make()) as worker:
                refused.update(worker.refused)
                for item, methods in todo.items():
                    yield from worker.answer(*item, methods)

    def _beside(self, n: int, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        context = multiprocessing.get_context("spawn")  # a forked process would share llama.cpp's threads
        reader, writer = context.Pipe(duplex=False)
        pool = concurrent.futures.ProcessPoolExecutor(n, context, _end_with, (reader,))
        try:
            yield from _map(pool, make, todo, refused)
        except concurrent.futures.BrokenExecutor as error:
            raise PCDError("a process of the evaluation ended early, such as for want of memory") from error
        finally:
            writer.close()  # which ends them, in the midst of a question too
            pool.shutdown(cancel_futures=True)


class Cluster(Executor, contextlib.AbstractContextManager["Cluster"]):
    """A Dask cluster. It is connected to when it is first used; a block (with), or close(), ends that.

    Its workers may have other files, versions and devices than this process. A question whose workers die is given to others by Dask, a
    few times, and then counts as failed.

    Args:
        address: a scheduler's, such as tcp://10.0.0.5:8786; or the file that `dask scheduler --scheduler-file` writes (.json).

    Raises:
        ValueError: it is for processes of this machine.
        PCDError: dask.distributed is not installed.
    """

    def __init__(self, address: str) -> None:
        if address.startswith("local:"):
            raise InputError(f"cluster is {address!r}; processes of this machine are jobs: --jobs 4")
        self.address = address
        self._dask = require("distributed", "a cluster")
        self._closing = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cluster."""
        self._closing.close()
        self.__dict__.pop("_client", None)

    def n_threads(self) -> int:
        cores = self.everywhere(machine.n_cores)
        hosts = {worker: urllib.parse.urlsplit(worker).hostname for worker in cores}
        beside = collections.Counter(hosts.values())
        return max(1, min(n // beside[hosts[worker]] for worker, n in cores.items()))

    def everywhere(self, call: Callable[[], T]) -> dict[str, T]:
        """What a function returns in each worker, by its name."""
        with self._connected():
            asked = {
                worker: self._client.submit(pickle.loads, pickle.dumps(_Call(call)), workers=[worker], pure=False)
                for worker in self.workers()
            }
            return {worker: future.result() for worker, future in asked.items()}

    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        if not todo:
            return
        workers = self.workers()
        with self._connected():
            try:
                pool, there = self._client.get_executor(pure=False), functools.partial(_there, make)
                yield from _map(pool, there, todo, refused, self._dask.KilledWorker)
            finally:
                if self._client.status == "running":
                    for worker in workers:  # each behind the question that it is answering
                        self._dask.fire_and_forget(self._client.submit(_close, workers=[worker], pure=False))

    @functools.cached_property
    def _client(self) -> Any:
        # Dask logs its own exceptions, where the run says in a sentence what happened
        self._closing.enter_context(self._dask.utils.silence_logging_cmgr(logging.CRITICAL))
        try:
            client = self._dask.Client(self._scheduler(), timeout=_SECONDS, set_as_default=False, name="pypcd")
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError) as error:
            raise PCDError(
                f"no Dask scheduler answers at {self.address} ({str(error) or type(error).__name__}); start one: dask scheduler; "
                f"and workers: dask worker {self.address} {_OPTIONS}"
            ) from None
        self._closing.callback(client.close)
        return client

    def _scheduler(self) -> str:
        """The scheduler's address, once it has answered: Dask's client would wait for ever for a file, and for something else that
        listens."""
        address = self.address
        if address.endswith(".json"):
            address = files.parsed(pathlib.Path(address).read_bytes())["address"]

        async def greet() -> None:
            how = self._dask.Security().get_connection_args("client")
            connection = await asyncio.wait_for(self._dask.core.connect(address, **how), _SECONDS)
            connection.abort()

        with concurrent.futures.ThreadPoolExecutor(1) as beside:  # a notebook's thread has an event loop already
            beside.submit(asyncio.run, greet()).result()
        return address

    def workers(self) -> list[str]:
        """The addresses of the workers there are.

        Raises:
            PCDError: there are none.
        """
        found = sorted(self._client.nthreads())
        if not found:
            raise PCDError(
                f"the Dask scheduler at {self.address} has no workers; start some: dask worker {self._client.scheduler.address} "
                f"{_OPTIONS}"
            )
        return found

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """A block that asks the cluster.

        Raises:
            PCDError: the scheduler is lost, or a worker has no pypcd.
        """
        try:
            yield
        except (ImportError, AttributeError) as error:  # raised where a task is unpickled
            raise PCDError(
                f"a worker of the cluster at {self.address} cannot do what it is asked ({error}); it has no pypcd, or another version: "
                "install the same one there"
            ) from None
        except (OSError, concurrent.futures.CancelledError) as error:
            if self._client.status == "running" and not isinstance(error, concurrent.futures.CancelledError):
                raise
            raise PCDError(
                f"the connection to the Dask scheduler at {self.address} was lost; what was answered is kept. Start the cluster "
                "again, and the same command goes on"
            ) from error


_SECONDS = 5  # a scheduler has to answer
_OPTIONS = "--nthreads 1 --memory-limit 0"  # of `dask worker`: one question at a time, and weights may take all memory

Jobs = int | Executor  # a number of processes on this machine, or another place


def executor_of(jobs: Jobs) -> Executor:
    if isinstance(jobs, Executor):
        return jobs
    return Processes(jobs)


def _map(
    pool: Any,
    make: Make,
    todo: Todo,
    refused: dict[str, str],
    killed: tuple[type[Exception], ...] | type[Exception] = (),
) -> Work:
    """The answers of a pool, as they come.

    Questions that waited where another one ended its process are counted as having ended it too. So each one that seems to have ended
    all of its processes is asked again, alone, before it fails.

    Args:
        pool: a concurrent.futures.Executor, or Dask's like one.
        killed: what it raises for a question that ended every process that was asked it.
    """
    run = uuid.uuid4().hex
    asked = {pool.submit(_answer, run, make, item): item for item in todo.items()}
    suspects = {}
    try:
        for future in concurrent.futures.as_completed(asked):
            question, methods = asked[future]
            try:
                refusals, answers = future.result()
            except killed as error:
                suspects[question] = methods
                why = f"every worker that was asked it ended ({error}); their logs say why"
                continue
            except Exception as error:
                raise error from None  # a pool gives it the worker's traceback, which a fault's text has already
            refused.update(refusals)
            yield from answers
    finally:
        for future in asked:
            future.cancel()
    for question, methods in suspects.items():
        if len(todo) > 1:
            yield from _map(pool, make, {question: methods}, refused, killed)
        else:
            yield from (((*question, method), failed_record((*question, method), why)) for method in methods)


def failed_record(key: Key, why: str) -> Record:
    """The record of a question without an answer: it counts as wrong, and is asked again when the run is continued."""
    names = dict(zip(("task", "length", "index", "method"), key))
    empty: Record = {"prompt_sha256": None, "depth": None, "answers": []}  # not known where no worker lived to say it
    return {**names, **empty, "error": why, "score": 0.0, "salience": None, "n_tokens": 0}


# -- in another process -------------------------------------------------------------------------------------------------

_lock = threading.RLock()  # on the model, if a Dask worker has several threads
_open: tuple[str, Worker] | None = None  # the run whose model is open


def _answer(
    run: str, make: Make, item: tuple[tuple[str, int, int], list[str]]
) -> tuple[dict[str, str], list[tuple[Key, Record | None]]]:
    """What the worker refuses, and its answers to a question. Its model is opened by the first question of a run."""
    global _open
    question, methods = item
    with _lock:
        try:
            if _open is None or _open[0] != run:
                _close()
                _open = run, make()
            return _open[1].refused, list(_open[1].answer(*question, methods))
        except (*MENDABLE, OSError, MemoryError):
            raise
        except Exception:  # noqa: BLE001  not every exception can be pickled
            raise RuntimeError(f"a process of the evaluation failed:\n{traceback.format_exc()}") from None


def _close() -> None:
    global _open
    with _lock:
        if _open is not None:
            _open[1].close()
            _open = None


def _end_with(pipe: Any) -> None:
    """End this process when the other end of a pipe is closed, or the process that holds it has ended."""
    # Ctrl-C reaches all processes of a terminal, and that one ends the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# -- on another machine -------------------------------------------------------------------------------------------------


def _there(call: Callable[[], T]) -> T:
    """What a function returns there. What it says is wrong is said with the machine's name."""
    try:
        return call()
    except (*MENDABLE, OSError) as error:
        raise type(error)(f"{platform.node()}: {error}") from None


class _Call:
    """A call as something to unpickle. What cannot be imported there is then an error of the task, where Dask would wait for ever."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _there, (self._function,)
