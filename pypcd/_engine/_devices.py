"""What the library was built for and what it found: ggml's backends and devices, the CPU's instruction sets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp

from pypcd._engine import _bindings
from pypcd._errors import PCDError

__all__ = ["backends", "cpu_features", "devices", "idle_backends", "library_path", "step_times", "supports_gpu"]


def library_path() -> str:
    return str(_bindings.lib._name)


def supports_gpu() -> bool:
    return bool(llama_cpp.llama_supports_gpu_offload())


def cpu_features() -> str:
    """The instruction sets it was compiled to use, such as "CPU : SSE3 = 1 | AVX = 1"."""
    return str(llama_cpp.llama_print_system_info().decode().strip(" |\n"))


def backends() -> list[str]:
    """Names of ggml's backends; empty if the library does not export their functions."""
    try:
        return [_ggml("reg_name", _text, registry).decode() for registry in _registries()]
    except AttributeError:  # Windows finds a symbol only in the library that defines it
        return []


def idle_backends() -> list[str]:
    """Those that found no device here, such as CUDA without a GPU or its driver. RPC has none until servers are named."""
    try:
        idle = [registry for registry in _registries() if _ggml("reg_dev_count", _size, registry) == 0]
        return [name for name in (_ggml("reg_name", _text, registry).decode() for registry in idle) if name != "RPC"]
    except AttributeError:
        return []


def _registries() -> list[ctypes.c_void_p]:
    return [_handle(_ggml("reg_get", _handle, _size(i))) for i in range(_ggml("reg_count", _size))]


def devices() -> list[dict[str, Any]]:
    """ggml's devices: name, description, memory and free (bytes), is_gpu; empty if their functions are not exported."""
    try:
        return [_device(_handle(_ggml("dev_get", _handle, _size(i)))) for i in range(_ggml("dev_count", _size))]
    except AttributeError:
        return []


def _device(device: ctypes.c_void_p) -> dict[str, Any]:
    free, total = _size(), _size()
    _ggml("dev_memory", None, device, ctypes.byref(free), ctypes.byref(total))
    name, what = (_ggml(f, _text, device).decode("utf-8", "replace") for f in ("dev_name", "dev_description"))
    is_gpu = _ggml("dev_type", ctypes.c_int, device) == 1  # GGML_BACKEND_DEVICE_TYPE_GPU
    return {"name": name, "description": what, "memory": total.value, "free": free.value, "is_gpu": is_gpu}


def step_times(n_threads: Sequence[int], n_embd: int, n_tokens: int, microseconds: int) -> dict[int, float]:
    """Microseconds that products in the shape of a model's step take on the CPU, by number of threads.

    Args:
        n_embd: the side of the matrices.
        n_tokens: how many tokens they are multiplied with.
        microseconds: to spend on each number, about.
    """
    n, error = len(n_threads), ctypes.create_string_buffer(256)
    numbers, times = (ctypes.c_int32 * n)(*n_threads), (ctypes.c_double * n)()
    if _bindings.pcd_step_times(numbers, n, n_embd, n_tokens, microseconds, times, error, len(error)) != _bindings.OK:
        raise PCDError(f"the threads cannot be timed: {error.value.decode()}")
    return dict(zip(n_threads, times))


_text, _handle, _size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t


def _ggml(name: str, restype: Any, *args: Any) -> Any:
    """Call ggml_backend_<name>; llama_cpp has no bindings for these functions."""
    function = getattr(_bindings.lib, "ggml_backend_" + name)
    function.restype = restype
    return function(*args)
