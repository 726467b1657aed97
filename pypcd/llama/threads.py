"""The number of threads for a model, measured on this machine as it is now, in a few hundredths of a second.

ggml's threads wait for each other after every product of a step, and spin meanwhile. So a thread without a core to itself
holds up all: on a busy machine two can be twenty times slower than one. On an idle one the usual guess is nearly always
right. Which it is may change in seconds, so nothing is written to a file. What was measured counts for a minute, in this
process; a model that gets a prompt later asks again. Knows nothing of PCD.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from pypcd import engine
from pypcd.gguf import read_gguf
from pypcd.llama import machine

__all__ = ["Threads", "best_threads", "choose", "width_of"]

_GAIN = 1.2  # another number than the usual one has to be this many times as fast
_FAR = 10  # times as long, beyond which a figure says no more: threads wait for a core that another program has
_SECONDS = 60.0  # that a measurement counts
_TOKENS = 8  # of a prompt, for its measurement
_EACH = 0.008  # seconds, for each number of threads

_lock = threading.Lock()
_measured: dict[tuple[int, int], tuple[float, Threads]] = {}


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


def width_of(path: str, options: Mapping[str, Any] | None = None) -> int:
    """The side of a model's matrices, about: a power of two; 0 where no number of threads is to be measured.

    That is where a GPU computes, and with flash attention on the CPU: there rows depend on the number of threads, since each
    takes a share of the keys. So it must not follow what else the machine does.

    Args:
        options: those of pypcd.Llama.
    """
    options = options or {}
    on_gpu = machine.has_gpu(options) and options.get("n_gpu_layers") != 0
    if on_gpu or options.get("flash_attn"):
        return 0
    shape = read_gguf(path).shape
    return 1 << min(max(round(shape.n_head * shape.n_embd_head_k).bit_length() - 1, 6), 12)


def choose(width: int, decode: int | None = None, batch: int | None = None, now: Threads | None = None) -> Threads:
    """The numbers of threads that are given, else the best ones.

    Args:
        width: as width_of() says; 0 takes the usual numbers and measures nothing.
        decode: given by the caller, if he did; so is `batch`.
        now: what the model uses; see best_threads().
    """
    if decode is not None:
        return Threads(decode, batch or decode, "given")
    best = best_threads(width, now) if width else _usual()
    return best if batch is None else best._replace(batch=batch)


def best_threads(width: int, now: Threads | None = None) -> Threads:
    """The numbers of threads for a model of this width on the CPU.

    Args:
        now: what the model uses; it stays, and without it the usual guess, unless another number is 20% faster.
    """
    n = machine.n_cores()
    if n == 1:
        return Threads(1, 1, "one core")
    with _lock:  # two measurements at the same time would measure each other
        when, known = _measured.get((n, width), (0.0, None))
        if known is None or time.monotonic() - when > _SECONDS:
            known = _measure(n, width, now or _usual())
            _measured[n, width] = time.monotonic(), known
    return known


def _usual() -> Threads:
    return Threads(machine.default_threads(), machine.n_cores(), "the usual number")


def _measure(n: int, width: int, usual: Threads) -> Threads:
    numbers = sorted({1, n // 2, n, usual.decode, usual.batch})
    steps, prompts = (engine.step_times(numbers, width, n_tokens, _EACH) for n_tokens in (1, _TOKENS))
    if not steps:  # nobody can tell
        return usual
    decode, why = _choose(steps, usual.decode)
    batch, _ = _choose(prompts, usual.batch)
    return Threads(decode, batch, why)


def _choose(times: Mapping[int, float], usual: int) -> tuple[int, str]:
    """The usual number or a much faster one, and why."""
    fastest = min(times, key=lambda number: times[number])
    ratio = times[usual] / times[fastest]
    if ratio <= _GAIN:
        return usual, f"measured: no other number is {_GAIN - 1:.0%} faster"
    if ratio < _FAR:
        return fastest, f"measured: with {usual} a step would take {ratio:.1f} times as long now"
    return (
        fastest,
        f"measured: {usual} would take more than {_FAR} times as long; they wait for each other, and the cores are busy",
    )
