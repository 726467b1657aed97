"""llama.cpp's log: quiet unless asked for, and remembered for error messages."""

from __future__ import annotations

import collections
import ctypes
import logging
import sys
from typing import Any

import llama_cpp
from llama_cpp._logger import llama_log_callback

__all__ = ["clear_errors", "install", "last_errors", "logger", "reason"]

logger = logging.getLogger("pypcd")

_WARN, _ERROR, _CONT = 3, 4, 5  # enum ggml_log_level (llama_cpp._logger has an older one)

_errors: collections.deque[str] = collections.deque(maxlen=20)
_last_level = 0


@llama_cpp.llama_log_callback
def _callback(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    global _last_level
    _last_level = level if level != _CONT else _last_level
    line = text.decode("utf-8", "replace")
    if _last_level == _ERROR and line.strip():
        _errors.append(line.strip())
    if logging.getLogger("llama-cpp-python").level <= logging.DEBUG:  # what verbose=True sets
        print(line, end="", flush=True, file=sys.stderr)
    elif _last_level == _WARN and line.startswith("PCD: "):  # of ours: something is not as it was asked for
        logger.warning("%s", line.rstrip())
    elif line.strip():
        logger.debug("%s", line.rstrip())


def install() -> None:
    logging.getLogger("llama-cpp-python").setLevel(
        logging.ERROR
    )  # as llama_cpp.Llama(verbose=False) does, but from the start
    in_force, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(in_force), ctypes.byref(data))
    if _address(in_force) == _address(llama_log_callback):  # else the program has set one of its own
        llama_cpp.llama_log_set(_callback, ctypes.c_void_p(0))


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def clear_errors() -> None:
    _errors.clear()


def last_errors() -> str:
    """The errors that llama.cpp logged since clear_errors(), the first one first, in one line; empty if none."""
    return "; ".join(dict.fromkeys(_errors))


def reason() -> str:
    """last_errors(), or a text saying that there are none."""
    return last_errors() or "llama.cpp gave no reason"
