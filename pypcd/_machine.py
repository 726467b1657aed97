"""What the machine under us suggests: threads, memory for a context, AMX. Knows nothing of PCD."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import llama_cpp

from pypcd import _log
from pypcd._shape import Shape, read_metadata


def n_cores() -> int:
    """The cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def default_threads() -> int:
    """All cores up to four, else half of them: beyond that they are mostly hyper-threads."""
    n = n_cores()
    return n if n <= 4 else n // 2


def has_gpu() -> bool:
    return bool(llama_cpp.llama_supports_gpu_offload())


@functools.cache
def has_amx() -> bool:
    """Whether the CPU has AMX and the library was compiled to use it (GCC 12 miscompiles ggml's AMX set-up)."""
    try:
        in_cpu = " amx_tile" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False  # AMX needs a kernel interface that only Linux has in use here
    in_library = "AMX_INT8 = 1" in llama_cpp.llama_print_system_info().decode()
    return in_cpu and in_library


def total_memory() -> int:
    """Bytes of main memory this process may use; 16 GiB where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = 16 * 2**30
    try:  # a container may have less
        return min(total, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return total


def backends() -> list[str]:
    """Names of ggml's backends; empty where they cannot be asked."""
    try:
        registries = [_handle(_ggml("reg_get", _handle, _size(i))) for i in range(_ggml("reg_count", _size))]
        return [_ggml("reg_name", _text, registry).decode() for registry in registries]
    except AttributeError:  # Windows finds a symbol only in the library that defines it
        return []


def devices() -> list[dict[str, Any]]:
    """ggml's devices: name, description, memory and free memory in bytes, is_gpu; empty where they cannot be asked."""
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


_text, _handle, _size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t


def _ggml(name: str, restype: Any, *args: Any) -> Any:
    """One of ggml_backend_*; llama_cpp has no names for these functions."""
    function = getattr(llama_cpp.llama_cpp._lib, "ggml_backend_" + name)
    function.restype = restype
    return function(*args)


def checked_n_ctx(path: str, kwargs: Mapping[str, Any]) -> int:
    """The context to open a model with: what was asked for, or the model's own, or what fits in a quarter of memory.

    llama.cpp rounds a context up to a multiple of 256; llama_cpp.Llama's own arrays have to follow.

    Args:
        kwargs: those of llama_cpp.Llama.

    Raises:
        ValueError: no machine has room for it, or not this one.
    """
    n_ctx = kwargs.get("n_ctx") or 0
    if not 0 <= n_ctx < 2**31:
        raise ValueError(f"n_ctx is {n_ctx}; allowed: 0 (the model's own, or what fits) to {2**31 - 1}")

    shape = Shape.from_metadata(*read_metadata(path))
    kv = shape.key_bytes + shape.value_bytes
    gpus = [device for device in devices() if device["is_gpu"]] if kwargs.get("n_gpu_layers") != 0 else []

    if n_ctx:
        memory = total_memory() + sum(device["memory"] for device in gpus)
        if n_ctx * kv // 16 > memory:  # quantised keys and values, windows and latent attention take less than f16
            raise ValueError(
                f"n_ctx is {n_ctx}: keys and values would take some {n_ctx * kv / 2**30:,.0f} GiB, and this machine has "
                f"{memory / 2**30:,.0f}; the model was trained for {shape.n_ctx_train}"
            )
    else:
        budget = total_memory() // 4
        free = sum(device["free"] for device in gpus) - os.path.getsize(path)
        if gpus and free > 0:
            budget = min(budget, free * 3 // 4)
        per_token = kv + shape.key_bytes  # second keys
        if not kwargs.get("flash_attn"):
            per_token += 4 * shape.n_head * kwargs.get("n_ubatch", 512)  # attention scores
        if kwargs.get("logits_all"):
            per_token += 4 * shape.n_vocab
        n_ctx = min(shape.n_ctx_train, max(2048, budget // max(per_token, 1) // 1024 * 1024))
        if n_ctx < shape.n_ctx_train:
            text = "n_ctx is %d, not the model's %d, to fit in memory; set n_ctx to have another"
            _log.logger.info(text, n_ctx, shape.n_ctx_train)
    return -(-n_ctx // 256) * 256
