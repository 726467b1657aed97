"""What the library was built for and what it found: ggml's backends and devices, the CPU's instruction sets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp

from pypcd.engine import _bindings
from pypcd.engine._tensors import ggml
from pypcd.errors import InputError, did_you_mean

__all__ = [
    "MOST_THREADS",
    "backends",
    "devices",
    "library_path",
    "supports_gpu",
]

MOST_THREADS = 512  # GGML_MAX_N_THREADS: ggml has no room for more, and would end the process
_CPU, _GPU, _IGPU = 0, 1, 2  # enum ggml_backend_dev_type


def library_path() -> str:
    return str(_bindings.lib._name)


def supports_gpu() -> bool:
    """Whether this machine has a GPU that the library can use; llama.cpp says so too where it only has RPC."""
    try:
        return bool(gpus())
    except AttributeError:
        return bool(llama_cpp.llama_supports_gpu_offload())


def backends() -> dict[str, int]:
    """Names of ggml's backends, and how many devices each found here; empty if the library does not export their functions."""
    try:
        found = [ggml.ggml_backend_reg_get(i) for i in range(ggml.ggml_backend_reg_count())]
    except AttributeError:  # Windows finds a symbol only in the library that defines it
        return {}
    return {ggml.ggml_backend_reg_name(one).decode(): ggml.ggml_backend_reg_dev_count(one) for one in found}


def devices() -> list[dict[str, Any]]:
    """ggml's devices, as described() has them; empty if their functions are not exported."""
    try:
        return [described(device) for device in _handles()]
    except AttributeError:
        return []


def _handles() -> list[int]:
    return [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]


def gpus() -> list[int]:
    """This machine's GPUs: those in the processor only if there are no others, as llama.cpp has it.

    Raises:
        AttributeError: the functions are not exported (Windows).
    """
    kinds = {device: ggml.ggml_backend_dev_type(device) for device in _handles()}
    kind = _GPU if _GPU in kinds.values() else _IGPU
    return [device for device in kinds if kinds[device] == kind]


def chosen(names: Sequence[str]) -> list[int]:
    """The devices with these names; without any, this machine's GPUs, or its CPU if there are none.

    Raises:
        ValueError: there is no such device.
    """
    if not names:
        return gpus() or [ggml.ggml_backend_dev_by_type(_CPU)]
    handles = [ggml.ggml_backend_dev_by_name(name.encode()) for name in names]
    for name, handle in zip(names, handles):
        if not handle:
            known = [device["name"] for device in devices()]
            raise InputError(f"there is no device {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    return handles


def described(device: int) -> dict[str, Any]:
    """A device's name, description, memory and free (bytes), is_gpu."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(device, free, total)
    return {
        "name": ggml.ggml_backend_dev_name(device).decode("utf-8", "replace"),
        "description": ggml.ggml_backend_dev_description(device).decode("utf-8", "replace"),
        "memory": total.value,
        "free": free.value,
        "is_gpu": ggml.ggml_backend_dev_type(device) == _GPU,
    }
