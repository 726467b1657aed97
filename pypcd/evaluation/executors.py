"""Where questions are answered: in this process, in several beside each other, or by the workers of a Dask cluster.

A plain map: of a question (and the methods that are to answer it) to its answers. What answers, a worker, is made where it is needed.
Knows nothing of models, tasks or files.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pypcd.errors import MENDABLE, PCDError, require
from pypcd.evaluation.plan import Key
from pypcd.llama import machine

if TYPE_CHECKING:
    from pypcd.evaluation.run import Worker

__all__ = ["Cluster", "Jobs", "Record", "Todo", "ask", "n_threads"]

T = TypeVar("T")
Record = dict[str, Any]
Todo = Mapping[tuple[str, int, int], list[str]]  # the methods that are to answer a question
Answer = tuple[Key, "Record | str"]  # a text: why the model cannot run the method
Make = Callable[[], "Worker"]  # called where the worker answers

_SECONDS = 5  # a scheduler has to answer
_OPTIONS = "--nthreads 1 --memory-limit 0"  # of `dask worker`: one question at a time, and weights may take all memory


class Cluster(contextlib.ExitStack):
    """A Dask cluster, which a block (with), or close(), leaves. Its workers may have other files, versions and devices than this process.

    Args:
        address: a scheduler's, such as 10.0.0.5:8786.

    Raises:
        PCDError: dask.distributed is not installed, or no scheduler answers.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self._dask = require("distributed", "a cluster")
        # Dask logs its own exceptions, where the run says in a sentence what happened
        self.enter_context(self._dask.utils.silence_logging_cmgr(logging.CRITICAL))
        try:
            self._client = self._dask.Client(address, timeout=_SECONDS, set_as_default=False, name="pypcd")
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            why = str(error) or type(error).__name__
        else:
            self.callback(self._client.close)
            return
        self.close()
        gc.collect()  # it closes the client that failed: both wait without an end if that happens while another one starts
        raise PCDError(
            f"no Dask scheduler answers at {address} ({why}); start one: dask scheduler; and workers: dask worker {address} {_OPTIONS}"
        )

    def everywhere(self, call: Callable[[], T]) -> dict[str, T]:
        """What a function returns in each worker, by its address.

        Raises:
            PCDError: there are no workers, or one has no pypcd. What the function raises is raised with the worker's address.
        """
        if not self._client.nthreads():
            raise PCDError(
                f"the Dask scheduler at {self.address} has no workers; start some: dask worker {self.address} {_OPTIONS}"
            )
        found = self._client.run(call, on_error="return")
        for worker, result in found.items():
            if isinstance(result, (*MENDABLE, OSError)):
                raise type(result)(f"{worker}: {result}") from None
            if isinstance(result, BaseException):  # Dask's own, if a worker cannot import what it is asked to call
                raise PCDError(
                    f"{worker} cannot do what it is asked ({result}); it has no pypcd, or another version: install the same one there"
                )
        return dict(found)

    def n_threads(self) -> int:
        cores = self.everywhere(machine.n_cores)
        hosts = {worker: urllib.parse.urlsplit(worker).hostname for worker in cores}
        beside = collections.Counter(hosts.values())
        return max(1, min(n // beside[hosts[worker]] for worker, n in cores.items()))

    def ask(self, make: Make, todo: Todo) -> Iterator[Answer]:
        workers = list(self._client.nthreads())
        try:
            yield from _map(self._client.get_executor(pure=False), make, todo)
        except self._dask.KilledWorker as error:
            raise PCDError(f"a question ended every worker that was asked it ({error}); their logs say why") from None
        except concurrent.futures.CancelledError as error:
            raise PCDError(
                f"the connection to the Dask scheduler at {self.address} was lost; what was answered is kept. Start the cluster "
                "again, and the same command goes on"
            ) from error
        finally:
            if self._client.status == "running":
                for worker in workers:  # each behind the question that it is answering
                    self._dask.fire_and_forget(self._client.submit(_close, workers=[worker], pure=False))


Jobs = int | Cluster  # a number of processes on this machine, or those of others


def n_threads(jobs: Jobs) -> int | None:
    """The threads that each worker's share of the cores allows; None: whatever is fastest."""
    if isinstance(jobs, Cluster):
        return jobs.n_threads()
    return max(1, machine.n_cores() // jobs) if jobs > 1 else None


def ask(jobs: Jobs, make: Make, todo: Todo) -> Iterator[Answer]:
    """The answers, question by question, in any order.

    Raises:
        PCDError: a process ended, or the cluster was lost. What was answered before is kept by whoever took it.
    """
    if not todo:
        return
    if isinstance(jobs, Cluster):
        yield from jobs.ask(make, todo)
    elif min(jobs, len(todo)) > 1:
        yield from _beside(min(jobs, len(todo)), make, todo)
    else:
        with contextlib.closing(make()) as worker:
            for question, methods in todo.items():
                yield from worker.answer(*question, methods)  # each is kept at once


def _beside(n: int, make: Make, todo: Todo) -> Iterator[Answer]:
    context = multiprocessing.get_context("spawn")  # a forked process would share llama.cpp's threads
    reader, writer = context.Pipe(duplex=False)
    pool = concurrent.futures.ProcessPoolExecutor(n, context, _end_with, (reader,))
    try:
        yield from _map(pool, make, todo)
    except concurrent.futures.BrokenExecutor as error:
        raise PCDError("a process of the evaluation ended early, such as for want of memory") from error
    finally:
        writer.close()  # which ends them, in the midst of a question too
        pool.shutdown(cancel_futures=True)


def _map(pool: Any, make: Make, todo: Todo) -> Iterator[Answer]:
    """What a pool (a concurrent.futures.Executor, or Dask's like one) answers, as it comes."""
    run = uuid.uuid4().hex
    with _without_ctrl_c():
        asked = [pool.submit(_answer, run, make, item) for item in todo.items()]
    try:
        for future in concurrent.futures.as_completed(asked):
            yield from future.result()
    finally:
        for future in asked:
            future.cancel()


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A block whose new processes do not hear Ctrl-C, from their first moment on: Python would print where it was. This one hears it later."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in another process -------------------------------------------------------------------------------------------------

_lock = threading.RLock()  # on the model, if a Dask worker has several threads
_open: tuple[str, Worker] | None = None  # the run whose model is open


def _answer(run: str, make: Make, item: tuple[tuple[str, int, int], list[str]]) -> list[Answer]:
    """The answers to a question. The model is opened by the first question of a run."""
    global _open
    question, methods = item
    with _lock:
        try:
            if _open is None or _open[0] != run:
                _close()
                _open = run, make()
            return list(_open[1].answer(*question, methods))
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
