"""The number of threads for a model on this machine as it is now.

ggml's threads wait for each other after every product of a step, and spin meanwhile. So a thread without a core to itself holds up
all: on a busy machine two can be twenty times slower than one. Knows nothing of PCD.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from pypcd.llama import machine

__all__ = ["Threads", "choose"]

_STATE = pathlib.Path("/proc/loadavg")  # its fourth word: how many threads of all programs run now, of how many
_OWN = pathlib.Path("/proc/self/task")
_LOOKS, _SECONDS = 3, 0.001  # what runs for a moment only is not counted


class Threads(NamedTuple):
    """
    Attributes:
        decode: for one token at a time.
        batch: for prompts.
        why: in a few words.
    """

    decode: int
    batch: int
    why: str


def choose(options: Mapping[str, Any], decode: int | None = None, batch: int | None = None) -> Threads:
    """The numbers of threads that are given, else the usual ones, or as many as there are cores that nobody uses now.

    Where a GPU computes these do not count, nor with flash attention on the CPU: there rows depend on the number of threads, since each
    takes a share of the keys. So it must not follow what else the machine does.

    Args:
        options: those of pypcd.Llama.
        decode: given by the caller, if he did; so is `batch`.
    """
    if decode is not None:
        return Threads(decode, batch or decode, "given")
    decode, most, why = machine.default_threads(), machine.n_cores(), "the usual number"
    on_gpu = machine.has_gpu(options) and options.get("n_gpu_layers") != 0
    if not on_gpu and not options.get("flash_attn"):
        free = max(1, (os.cpu_count() or 1) - _busy())
        if free < most:
            decode, most, why = min(decode, free), free, f"other programs leave {free} of {os.cpu_count()} cores"
    return Threads(decode, batch or most, why)


def _busy() -> int:
    """How many threads of other programs run; 0 where the system does not say, as only Linux does."""
    n = 0
    for look in range(_LOOKS):
        try:
            running = int(_STATE.read_text(encoding="ascii").split()[3].partition("/")[0]) - _own()
        except (OSError, ValueError, IndexError):
            return 0
        n = running if look == 0 else min(n, running)
        if n <= 0:
            return 0
        time.sleep(_SECONDS)
    return n


def _own() -> int:
    """How many threads of this process run: this one, and those that spin for a while after a step."""
    states = [one.read_text(encoding="ascii", errors="replace") for one in _OWN.glob("*/stat")]
    return sum(state.rpartition(")")[2].split()[0] == "R" for state in states)
