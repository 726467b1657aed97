"""What the library was built for and what it found: ggml's backends and devices, the CPU's instruction sets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp

from pypcd.engine import _bindings
from pypcd.errors import InputError, did_you_mean

__all__ = [
    "backends",
    "devices",
    "library_path",
    "supports_gpu",
]

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
        found = [_handle(_ggml("reg_get", _handle, _size(i))) for i in range(_ggml("reg_count", _size))]
        return {_ggml("reg_name", _text, one).decode(): _ggml("reg_dev_count", _size, one) for one in found}
    except AttributeError:  # Windows finds a symbol only in the library that defines it
        return {}


def devices() -> list[dict[str, Any]]:
    """ggml's devices: name, description, memory and free (bytes), is_gpu; empty if their functions are not exported."""
    try:
        return [_device(_handle(_ggml("dev_get", _handle, _size(i)))) for i in range(_ggml("dev_count", _size))]
    except AttributeError:
        return []


def gpus() -> list[ctypes.c_void_p]:
    """This machine's GPUs, as llama.cpp takes them: those in the processor only if there are no others, none twice.

    Raises:
        AttributeError: the functions are not exported (Windows).
    """
    found = [_handle(_ggml("dev_get", _handle, _size(i))) for i in range(_ggml("dev_count", _size))]
    by_kind = {kind: [one for one in found if _ggml("dev_type", ctypes.c_int, one) == kind] for kind in (_GPU, _IGPU)}
    gpus, ids = [], set()
    for device in by_kind[_GPU] or by_kind[_IGPU]:
        what = _Properties()
        _ggml("dev_get_props", None, device, ctypes.byref(what))
        if what.device_id is None or what.device_id not in ids:  # two backends may know the same one
            ids.add(what.device_id)
            gpus.append(device)
    return gpus


def chosen(names: Sequence[str]) -> list[ctypes.c_void_p]:
    """The devices with these names; without any, this machine's GPUs, or its CPU if there are none.

    Raises:
        ValueError: there is no such device.
    """
    if not names:
        return gpus() or [_handle(_ggml("dev_by_type", _handle, ctypes.c_int(_CPU)))]
    handles = [_handle(_ggml("dev_by_name", _handle, name.encode())) for name in names]
    for name, handle in zip(names, handles):
        if not handle:
            known = [device["name"] for device in devices()]
            raise InputError(f"there is no device {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    return handles


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 8),  # five today
    ]


def _device(device: ctypes.c_void_p) -> dict[str, Any]:
    free, total = _size(), _size()
    _ggml("dev_memory", None, device, ctypes.byref(free), ctypes.byref(total))
    name, what = (_ggml(f, _text, device).decode("utf-8", "replace") for f in ("dev_name", "dev_description"))
    is_gpu = _ggml("dev_type", ctypes.c_int, device) == _GPU
    return {"name": name, "description": what, "memory": total.value, "free": free.value, "is_gpu": is_gpu}


_text, _handle, _size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t


def _ggml(name: str, restype: Any, *args: Any) -> Any:
    """Call ggml_backend_<name>; llama_cpp has no bindings for these functions."""
    function = getattr(_bindings.lib, "ggml_backend_" + name)
    function.restype = restype
    return function(*args)
