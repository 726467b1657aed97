"""Who uses a pypcd.Llama: one thread at a time, and one text at a time.

    @lock.guarded                # all public methods but UNLOCKED: alone in the model, or PCDError
    class Llama(llama_cpp.Llama): ...

llama.cpp has no lock: two threads in one context end the process or mix their texts. Each model has a ModelLock, which a
public method holds while it runs, and generate() while it makes a token; what is streamed lies open between two tokens, so
generate() also sees whether somebody else has evaluated meanwhile. Knows nothing of the library.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from _thread import RLock
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pypcd.errors import InputError, PCDError

__all__ = ["UNLOCKED", "ModelLock", "Processors", "StreamGuard", "guarded", "steps"]

# methods that ask the vocabulary or plain Python data, which any number of threads may do
UNLOCKED = frozenset(
    ("tokenize", "detokenize", "tokenizer", "n_ctx", "n_embd", "n_vocab")
    + ("token_bos", "token_eos", "token_nl", "pooling_type", "set_cache", "set_seed")
)
_REMEDY = (
    "one pypcd.Llama answers one call at a time: use an object for each thread, a lock around every call and every "
    "stream, or `pypcd serve` for many at once"
)
_PATIENCE = 0.05  # seconds: another thread that only reads a counter is done by then
_T = TypeVar("_T", bound=type)
_Item = TypeVar("_Item")


class ModelLock(RLock):  # type: ignore[misc]  # final only for type checkers
    """Whose turn it is with one model; a with block holds it.

    A lock by inheritance, since what lets it go is then one step, which Ctrl-C cannot interrupt. Taking it can be interrupted, in a
    few of a thousand cases that hit the same microsecond: the thread that was interrupted goes on, others are then refused.

    Raises:
        PCDError: on entering, if another thread holds it.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = weakref.ref(llm)
        self.holder = ""  # the thread that held it last
        self.in_callback = ""  # the method that may call functions of the caller's at the moment: "generate", "sample"

    def __enter__(self) -> None:  # type: ignore[override]
        here = threading.current_thread().name
        if not self.acquire(timeout=_PATIENCE):
            _ = getattr(self._llm(), "ctx", None)  # if it is closed, or another process's, that says more
            raise PCDError(f"thread {here!r} calls a model that thread {self.holder!r} is using; {_REMEDY}")
        self.holder = here


def steps(
    lock: ModelLock, iterator: Iterator[_Item], during: Callable[[], contextlib.AbstractContextManager[None]]
) -> Generator[_Item, Any, None]:
    """The same iterator, each of whose steps holds the lock and is in the block of a with statement; nothing is held between them."""
    sent = None
    try:
        while True:
            with lock, during():
                try:
                    item = iterator.send(sent) if isinstance(iterator, Generator) else next(iterator)
                except StopIteration:
                    return
            sent = yield item
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


class StreamGuard:
    """Sees before each token of a generate() whether its text is still the one in the model."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._n_changes, self._n_tokens = llm, llm._n_changes, 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """
        Raises:
            PCDError: it is not; or a function that the model calls back asks it for this text.
        """
        llm, lock = self._llm, self._llm._lock
        _ = llm.ctx  # a closed model says so
        if lock.in_callback:
            raise PCDError(
                "a logits processor, stopping criterion or draft model asks the model that has called it for a text; "
                "open a second pypcd.Llama for that"
            )
        if self._n_changes != llm._n_changes or llm.n_tokens < self._n_tokens:
            raise PCDError(
                "this text cannot go on: since its last token the model was used by another call, or reset "
                f"(thread {lock.holder!r}); read a stream to its end, or close it, before the next call; {_REMEDY}"
            )
        lock.in_callback = "generate"
        try:
            yield
        finally:
            lock.in_callback, self._n_changes, self._n_tokens = "", llm._n_changes, 1


def guarded(cls: _T) -> _T:
    """A class decorator: each public method holds the model's ModelLock while it runs; those of UNLOCKED, and close(), do not."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if inspect.isfunction(function) and name not in UNLOCKED and name != "close":
            if not name.startswith("_") or name == "__call__":
                setattr(cls, name, _alone(function))
        elif isinstance(function, property) and function.fset is not None and name in vars(cls):
            setattr(cls, name, property(function.fget, _alone(function.fset), doc=function.__doc__))
    return cls


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return function(self, *args, **kwargs)

    return alone


class Processors:
    """A call's logits processors as one, for a sampler's callback, which drops exceptions: they are kept in `error`."""

    def __init__(self, processors: Sequence[Callable[..., Any]]) -> None:
        self._processors = processors
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield self

    def __call__(self, tokens: Any, scores: Any) -> Any:
        if self.error is None:
            try:
                for processor in self._processors:
                    scores[:] = processor(tokens, scores)  # here, where an array of another shape is seen
                if not scores.max() > -np.inf:  # NaN too
                    raise InputError(
                        "the logits processors left no token that is possible: all logits are -inf, or NaN"
                    )
            except BaseException as error:  # noqa: BLE001  check() raises it
                self.error = error
        return scores

    def check(self) -> None:
        """Raise what a processor has raised."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error
