"""How long products in the shape of a model's step take on the CPU, by number of threads; with any libllama."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pypcd.engine import _bindings
from pypcd.engine._tensors import InitParams
from pypcd.errors import PCDError

__all__ = ["MOST_THREADS", "step_times"]

MOST_THREADS = 512  # GGML_MAX_N_THREADS: ggml has no room for more, and would end the process
# a model's matrices are read once a step, from memory: so many bytes that caches hold few of them; fewer for more tokens
_BYTES = 16 << 20
_PRODUCTS = 16  # at most: after each the threads wait for each other, for milliseconds on a busy machine
_TURNS = 4
_CPU, _F32, _Q8_0 = 0, 0, 8  # enum ggml_backend_dev_type, enum ggml_type
_pointer, _size, _int, _int64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_set_n_threads = ctypes.CFUNCTYPE(None, _pointer, _int)


def _call(name: str, restype: Any, *args: Any) -> Any:
    """Call ggml_<name>; pointers are c_void_p."""
    function = getattr(_bindings.lib, "ggml_" + name)
    function.restype = restype
    made = function(*args)
    if restype is not _pointer:
        return made
    if not made:
        raise PCDError(f"the threads cannot be timed: ggml_{name} failed")
    return _pointer(made)


@contextlib.contextmanager
def _freed(name: str, made: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    try:
        yield made
    finally:
        _call(name, None, made)


@contextlib.contextmanager
def _step(n_embd: int, n_tokens: int) -> Iterator[tuple[ctypes.c_void_p, ctypes.c_void_p]]:
    """A chain of matrix products, which is most of a step: the CPU's backend and the graph."""
    side = max(1, n_embd // 32) * 32  # a block of the type
    n = max(1, min(_BYTES // (_call("row_size", _size, _int(_Q8_0), _int64(side)) * side * n_tokens), _PRODUCTS))
    room = (2 * n + 1) * _call("tensor_overhead", _size) + _call("graph_overhead", _size)
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(_freed("free", _call("init", _pointer, InitParams(room, None, True))))
        device = _call("backend_dev_by_type", _pointer, _int(_CPU))
        backend = _call("backend_dev_init", _pointer, device, None)
        stack.enter_context(_freed("backend_free", backend))

        def matrix(kind: int, rows: int) -> ctypes.c_void_p:
            return _call("new_tensor_2d", _pointer, ctx, _int(kind), _int64(side), _int64(rows))

        graph, at = _call("new_graph", _pointer, ctx), matrix(_F32, n_tokens)
        for _ in range(n):
            at = _call("mul_mat", _pointer, ctx, matrix(_Q8_0, side), at)
        _call("build_forward_expand", None, graph, at)
        buffer = _call("backend_alloc_ctx_tensors", _pointer, ctx, backend)
        stack.enter_context(_freed("backend_buffer_free", buffer))
        _call("backend_buffer_clear", None, buffer, ctypes.c_uint8(0))
        yield backend, graph


@dataclasses.dataclass
class _Candidate:
    n_threads: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    is_warm: bool = False

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def step_times(n_threads: Sequence[int], n_embd: int, n_tokens: int, seconds: float) -> dict[int, float]:
    """Seconds by number of threads; empty if the library does not export ggml's functions (Windows).

    Args:
        n_threads: each 1 to MOST_THREADS.
        n_embd: the side of the matrices.
        n_tokens: how many tokens they are multiplied with.
        seconds: to spend on each number, about.

    Raises:
        PCDError: ggml's CPU backend does not start, or does not multiply.
    """
    candidates = [_Candidate(n) for n in n_threads]
    try:
        with _step(n_embd, n_tokens) as (backend, graph):
            device = _call("backend_get_device", _pointer, backend)
            registry = _call("backend_dev_backend_reg", _pointer, device)
            function = _call("backend_reg_get_proc_address", _pointer, registry, b"ggml_backend_set_n_threads")
            set_n_threads = _set_n_threads(function.value)
            for turn in range(_TURNS):  # what else runs comes and goes: no candidate gets a quiet moment for itself
                best = min(one.mean for one in candidates) if turn else 0.0
                for one in candidates:
                    if turn and one.mean > 2 * best:
                        continue  # it has lost
                    set_n_threads(backend, one.n_threads)
                    _run(one, backend, graph, seconds)
    except AttributeError:
        return {}
    return {one.n_threads: one.mean for one in candidates}


def _run(one: _Candidate, backend: ctypes.c_void_p, graph: ctypes.c_void_p, seconds: float) -> None:
    """A candidate's turn."""
    left = seconds / _TURNS
    while left > 0 or not one.seconds:
        started = time.perf_counter()
        if _call("backend_graph_compute", _int, backend, graph):
            raise PCDError("the threads cannot be timed: ggml's CPU backend does not multiply")
        took = time.perf_counter() - started
        left -= took
        if one.is_warm or took > seconds:  # the first pass starts threads, which matters if it is short
            one.seconds.append(took)
        one.is_warm = True
