"""Questions on a Dask cluster: a place whose workers are processes of any machines, and come and go.

A task is one question. There are as many tasks at a time as workers, so that a worker that dies takes one question with it,
which Dask gives to another one. A worker process has one model, opened by its first question of a run and closed at the end.

Needs dask.distributed. It knows nothing of models or files: what a run needs of another machine is checked by the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import logging
import pathlib
import pickle
import queue
import re
import threading
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from pypcd import machine
from pypcd.checks import Integer
from pypcd.errors import InputError, PCDError
from pypcd.evaluation.executors import (
    Answerer,
    Executor,
    Make,
    Todo,
    Work,
    dump_exception,
    failed_record,
    load_exception,
)
from pypcd.extras import require

__all__ = ["Cluster"]

T = TypeVar("T")
logger = logging.getLogger("pypcd")

_OPTIONS = "--nthreads 1 --memory-limit 0"  # of `dask worker`
# of local:N: Ctrl-C reaches all processes of a terminal, and this one ends the others
_NO_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
_MOST = 128  # workers of local:N
_SECONDS_TO_ANSWER = 5  # of a scheduler
_SECONDS_TO_COME = 60  # of a worker, where there is none: one that died may be started again
_CLOSED = (OSError, concurrent.futures.CancelledError, RuntimeError)  # what Dask raises once a scheduler is lost


class Cluster(Executor, contextlib.AbstractContextManager["Cluster"]):
    """A Dask cluster. It is connected to when it is first used; a block (with), or close(), ends that.

    Args:
        address: a scheduler's, such as tcp://10.0.0.5:8786; or the file that `dask scheduler --scheduler-file` writes
            (.json); or local:N, for N processes on this machine, which last as long as this object.

    Raises:
        ValueError: it is none of these.
        FileNotFoundError: there is no such file.
        PCDError: dask.distributed is not installed.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._n_local = 0
        if address.startswith("local:"):
            try:
                self._n_local = Integer(1, _MOST)("", int(address.removeprefix("local:")))
            except ValueError:
                raise InputError(f"cluster is {address!r}; allowed: local:1 to local:{_MOST}") from None
        elif address.endswith(".json"):
            if not pathlib.Path(address).is_file():
                raise FileNotFoundError(
                    f"there is no scheduler file {address}; `dask scheduler --scheduler-file {address}` writes it"
                )
        elif not re.fullmatch(r"(\w+://)?[^/\s]+:\d+", address):
            raise InputError(
                f"cluster is {address!r}; allowed: a Dask scheduler's address such as tcp://10.0.0.5:8786, the file (.json) "
                "that it wrote, or local:4 for four processes on this machine"
            )
        self.is_elsewhere = not self._n_local
        self._dask = require("distributed", "a cluster")
        self._closing = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cluster; that of local:N ends."""
        self._closing.close()
        self.__dict__.pop("_client", None)

    def n_workers(self) -> int:
        return len(self._workers())

    def n_threads(self) -> int:
        if self._n_local:
            return max(1, machine.n_cores() // self._n_local)
        cores = self.everywhere(machine.n_cores)
        beside = Counter(_host(worker) for worker in cores)
        return max(1, min(n // beside[_host(worker)] for worker, n in cores.items()))

    def everywhere(self, call: Callable[[], T]) -> dict[str, T]:
        found = dict(self._on(self._workers(), call))
        if not found:
            raise PCDError(
                f"every worker of the cluster at {self.address} ended before it answered; their logs say why"
            )
        return found

    def ask(self, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        if not todo:
            return
        run, workers = uuid.uuid4().hex, self._workers()[: len(todo)]
        try:
            opened = dict(self._on(workers, functools.partial(_prepare, run, make)))
            if not opened:
                raise PCDError(
                    f"every worker of the cluster at {self.address} ended while it opened the model; their logs say why, such as "
                    "too little memory"
                )
            for refusals in opened.values():
                refused.update(refusals)
            yield from self._answers(run, make, todo, refused)
        finally:
            self._stop(run)

    def _answers(self, run: str, make: Make, todo: Todo, refused: dict[str, str]) -> Work:
        waiting, workers = iter(todo.items()), _Workers(self)
        with contextlib.closing(_Tasks(self)) as tasks:
            while True:
                workers.look()
                while len(tasks.asked) < max(1, len(workers.now)) and (item := next(waiting, None)):
                    tasks.submit(functools.partial(_answer, run, make, item), item)
                if not tasks.asked:
                    return
                for (question, methods), result in tasks.done(timeout=1.0):
                    if isinstance(result, self._dask.KilledWorker):
                        why = f"every worker that was asked it ended ({result.allowed_failures + 1} of them); their logs say why"
                        yield from (
                            ((*question, method), failed_record((*question, method), why)) for method in methods
                        )
                    else:
                        refusals, answers = self._value(result)
                        refused.update(refusals)
                        yield from answers

    def _on(self, workers: Collection[str], call: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """What a function returns on each of these workers; nothing of those that end meanwhile."""
        with contextlib.closing(_Tasks(self)) as tasks:
            for worker in workers:
                tasks.submit(call, worker, on=worker)
            while tasks.asked:
                for worker, result in tasks.done(timeout=1.0):
                    if not isinstance(result, self._dask.KilledWorker):
                        yield worker, self._value(result, worker)
                tasks.forget_others(self._workers(least=0))

    def _value(self, result: Any, worker: str = "") -> Any:
        """What a task returned.

        Raises:
            Exception: that of the task, with its worker's name.
        """
        if isinstance(result, (ImportError, AttributeError)):  # it does not know the function that it is to call
            raise PCDError(
                f"worker {worker or 'that came later'} cannot do what it is asked ({result}); it has no pypcd or another "
                "version: install the same one there"
            )
        if isinstance(result, BaseException):
            raise PCDError(
                f"the cluster at {self.address} cannot do what it is asked: {result!r}; its logs may say more"
            )
        who, error, value = result
        if error is not None:
            raise load_exception(error, f"worker {who}")
        return value

    # -- the scheduler ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def _client(self) -> Any:
        """The connection.

        Raises:
            PCDError: there is no scheduler.
        """
        # Dask logs its own exceptions, where the run says in a sentence what happened
        self._closing.enter_context(self._dask.utils.silence_logging_cmgr(logging.CRITICAL))
        how: dict[str, Any] = {"timeout": _SECONDS_TO_ANSWER, "set_as_default": False, "name": "pypcd"}
        if self._n_local:
            local = self._dask.LocalCluster(
                n_workers=self._n_local,
                threads_per_worker=1,
                memory_limit=0,
                host="127.0.0.1",
                # not on port 8787, and with no version of Dask on other addresses of this machine
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
                worker_dashboard_address="127.0.0.1:0",
                preload=_NO_CTRL_C,
                silence_logs=logging.CRITICAL,
            )
            self._closing.callback(local.close)
            how["address"] = local
        try:
            if not self._n_local:
                how["address"] = self._scheduler()
            client = self._dask.Client(**how)
        except (OSError, ValueError, KeyError, asyncio.TimeoutError) as error:
            raise PCDError(
                f"no Dask scheduler answers at {self.address} ({str(error) or type(error).__name__}); start one: dask scheduler; "
                f"and workers: dask worker {self.address} {_OPTIONS}"
            ) from None
        self._closing.callback(client.close)
        return client

    def _scheduler(self) -> str:
        """The scheduler's address, once it has answered: Dask's client would wait for ever for something else that listens.

        Raises:
            OSError, TimeoutError: it does not answer.
            ValueError, KeyError: this cannot be a scheduler's address.
        """
        address = self.address
        if address.endswith(".json"):
            address = json.loads(pathlib.Path(address).read_text(encoding="utf-8"))["address"]

        async def greet() -> None:
            how = self._dask.Security().get_connection_args("client")
            connection = await asyncio.wait_for(self._dask.core.connect(address, **how), _SECONDS_TO_ANSWER)
            connection.abort()

        with concurrent.futures.ThreadPoolExecutor(1) as beside:  # a notebook's thread has an event loop already
            beside.submit(asyncio.run, greet()).result()
        return address

    def _workers(self, least: int = 1) -> list[str]:
        """The addresses of the workers there are.

        Raises:
            PCDError: within a minute there are fewer than `least`, or one has several threads.
        """
        deadline = time.monotonic() + _SECONDS_TO_COME
        client = self._client
        while True:
            with self._connected():
                threads = client.nthreads()
            several = sorted(worker for worker, n in threads.items() if n != 1)
            if several:
                raise PCDError(
                    f"worker {several[0]} has {threads[several[0]]} threads; allowed: 1, since a model answers one question at a "
                    f"time. Start workers with {_OPTIONS}, and --nworkers for several on one machine"
                )
            if len(threads) >= least:
                return sorted(threads)
            if time.monotonic() > deadline:
                raise PCDError(
                    f"the cluster at {self.address} has had no workers for {_SECONDS_TO_COME} s; start some: "
                    f"dask worker {client.scheduler.address} {_OPTIONS}; a run goes on with the same command"
                )
            time.sleep(0.5)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """A block that asks the scheduler.

        Raises:
            PCDError: it is lost.
        """
        try:
            yield
        except _CLOSED as error:
            raise self._lost() from error

    def _lost(self) -> PCDError:
        return PCDError(
            f"the connection to the Dask scheduler at {self.address} was lost; what was answered is kept. Start the cluster "
            "again, and the same command goes on"
        )

    def _stop(self, run: str) -> None:
        """Let the workers close the model of a run, each when its question has ended."""
        with contextlib.suppress(*_CLOSED):
            if self._client.status == "running":
                self._client.run(pickle.loads, _called(functools.partial(_end, run)), on_error="ignore")


class _Tasks:
    """What the cluster was asked, until it is done. Closing it cancels the rest.

    Attributes:
        asked: of each task, what it is for.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.asked: dict[Any, Any] = {}
        self._cluster = cluster
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def submit(self, call: Callable[[], Any], what: Any, on: str | None = None) -> None:
        call = functools.partial(_do, call)
        with self._cluster._connected():
            future = self._cluster._client.submit(
                pickle.loads, _called(call), key=f"pypcd-{uuid.uuid4().hex}", pure=False, workers=on and [on]
            )
        self.asked[future] = what
        future.add_done_callback(self._done.put)

    def done(self, timeout: float) -> Iterator[tuple[Any, Any]]:
        """What is done, with its results or the exception that Dask has for it; nothing, if nothing is done in time.

        Raises:
            PCDError: the scheduler is lost.
        """
        try:
            future = self._done.get(timeout=timeout)
        except queue.Empty:
            return
        if future not in self.asked:
            return
        with self._cluster._connected():
            error = future.exception()
            if isinstance(error, concurrent.futures.CancelledError):
                raise error
            result = error if error is not None else future.result()
        yield self.asked.pop(future), result

    def forget_others(self, there: Collection[Any]) -> None:
        """Forget tasks that are for something else than what there is."""
        gone = [future for future, what in self.asked.items() if what not in there]
        self._cancel(gone)
        for future in gone:
            del self.asked[future]

    def close(self) -> None:
        self._cancel(list(self.asked))
        self.asked = {}

    def _cancel(self, futures: list[Any]) -> None:
        with contextlib.suppress(*_CLOSED):
            if futures and self._cluster._client.status == "running":
                self._cluster._client.cancel(futures, force=True)


class _Workers:
    """The workers there are, looked up once a second; those that are lost are told of."""

    def __init__(self, cluster: Cluster) -> None:
        self.now: frozenset[str] = frozenset()
        self._cluster, self._looked = cluster, 0.0

    def look(self) -> None:
        if time.monotonic() < self._looked + 1:
            return
        there = frozenset(self._cluster._workers(least=0))
        for worker in sorted(self.now - there):
            logger.warning("worker %s is gone; what it was asked is asked again elsewhere", worker)
        self.now = there or frozenset(self._cluster._workers())
        self._looked = time.monotonic()


def _host(worker: str) -> str | None:
    return urllib.parse.urlsplit(worker).hostname


class _Call:
    """A call as something to unpickle, so that a scheduler, which unpickles tasks, sees pickle.loads and bytes: it needs no
    pypcd, and loads no libllama."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, ()


def _called(function: Callable[[], Any]) -> bytes:
    """Bytes that, unpickled, are what a function returns there."""
    return pickle.dumps(_Call(function))


# -- in a worker's process ---------------------------------------------------------------------------------------------

_lock = threading.Lock()  # on the model: a question may still be answered when its run has ended
_open: tuple[str, Answerer] | None = None  # the run whose model is open
_ended = ""  # the last run that has ended


def _do(call: Callable[[], Any]) -> tuple[str, tuple[str, str] | None, Any]:
    """The worker's address, and what a function returns or (as text) raises."""
    import distributed  # type: ignore[import-not-found]

    worker = distributed.get_worker()
    try:
        limit = worker.memory_manager.memory_limit
        if limit:
            raise PCDError(
                f"its memory limit is {limit / 2**30:.1f} GiB, at which Dask ends it, and the weights of a model count; start it "
                f"with {_OPTIONS}"
            )
        return worker.address, None, call()
    except Exception as error:  # noqa: BLE001  any error must reach the run
        return worker.address, dump_exception(error), None


def _prepare(run: str, make: Make) -> dict[str, str]:
    with _lock:
        return _of(run, make).refused


def _answer(run: str, make: Make, item: tuple[tuple[str, int, int], list[str]]) -> tuple[dict[str, str], list[Any]]:
    (task, length, index), methods = item
    answers = []
    with _lock:
        worker = _of(run, make)
        for answered in worker.answer(task, length, index, methods):
            answers.append(answered)
            if _ended == run:
                break
    return worker.refused, answers


def _of(run: str, make: Make) -> Answerer:
    """What answers in a run; the model of another run is closed for it."""
    global _open
    if _open is None or _open[0] != run:
        _close()
        _open = run, make()
    return _open[1]


def _close() -> None:
    global _open
    if _open is not None:
        _open[1].close()
        _open = None


def _end(run: str) -> None:
    """Close the model of a run, once the question that is being answered is."""
    global _ended
    _ended = run

    def close() -> None:
        with _lock:
            if _open is not None and _open[0] == run:
                _close()

    threading.Thread(target=close, daemon=True).start()
