"""llama.cpp's log: quiet unless asked for, and remembered for error messages.

llama.cpp logs a call's errors in the thread that calls, so what is remembered is each thread's own.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import llama_cpp
from llama_cpp._logger import llama_log_callback

__all__ = ["clear_errors", "last_errors", "logger", "reason"]

logger = logging.getLogger("pypcd")

_WARN, _ERROR, _CONT = 3, 4, 5  # enum ggml_log_level (llama_cpp._logger has an older one)


class _Thread(threading.local):
    """What is remembered of a thread's calls."""

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=20)
        self.last_level = 0
        self.is_silent = False
        self.lines: list[str] | None = None  # while they are collected


_here = _Thread()


@llama_cpp.llama_log_callback
def _callback(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if _here.is_silent:
        return
    _here.last_level = level if level != _CONT else _here.last_level
    line = text.decode("utf-8", "replace")
    if _here.lines is not None:
        _here.lines.append(line)
    if _here.last_level == _ERROR and line.strip():
        _here.errors.append(line.strip())
    if logging.getLogger("llama-cpp-python").level <= logging.DEBUG:  # what verbose=True sets
        print(line, end="", flush=True, file=sys.stderr)
    elif _here.last_level == _WARN and line.startswith("PCD: "):  # of ours: something is not as it was asked for
        logger.warning("%s", line.rstrip())
    elif line.strip():
        logger.debug("%s", line.rstrip())


def install() -> None:
    # as llama_cpp.Llama(verbose=False) does, but from the start
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    in_force, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    if hasattr(llama_cpp, "llama_log_get"):  # llama-cpp-python 0.3.17 and newer
        llama_cpp.llama_log_get(ctypes.byref(in_force), ctypes.byref(data))
        is_own = _address(in_force) != _address(llama_log_callback)
    else:
        is_own = False
    if not is_own:  # else the program has set one of its own
        llama_cpp.llama_log_set(_callback, ctypes.c_void_p(0))


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A block in which this thread's calls fail on purpose."""
    _here.is_silent = True
    try:
        yield
    finally:
        _here.is_silent = False


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """A block, and the lines that this thread's calls log in it."""
    lines: list[str] = []
    _here.lines = lines
    try:
        yield lines
    finally:
        _here.lines = None


def clear_errors() -> None:
    _here.errors.clear()


def last_errors() -> str:
    """The errors that llama.cpp logged in this thread since clear_errors(), the first one first, in one line; empty if none."""
    return "; ".join(dict.fromkeys(_here.errors))


def reason() -> str:
    """last_errors(), or a text saying that there are none."""
    return last_errors() or "llama.cpp gave no reason"
