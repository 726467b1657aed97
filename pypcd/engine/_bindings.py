"""The declarations of cpp/llama-pcd*.h in ctypes: constants, structures, functions. The fields of a setting are pypcd/settings/fields.py's."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any, NoReturn

import llama_cpp

from pypcd import library
from pypcd.engine._results import PCDStats
from pypcd.errors import UnsupportedError
from pypcd.settings.fields import FIELDS

lib = llama_cpp.llama_cpp._lib

OK, INVALID, UNSUPPORTED, NO_MEMORY, DISABLED = 0, -1, -2, -3, -4
ROW_STANDARD, ROW_LOCAL, ROW_CONTRASTED = 0, 1, 2
COUNTED_HERE = "n_caught_up", "n_separate", "n_constrained"


class Params(ctypes.Structure):
    """struct llama_pcd_params"""

    _fields_ = [
        *((field.name, ctypes.c_float if field.is_float else ctypes.c_int32) for field in FIELDS.values()),
        ("combine", ctypes.c_bool),
    ]


class Stats(ctypes.Structure):
    """struct llama_pcd_stats: what PCDStats has, in its order, but for what Python counts itself"""

    _fields_ = [(one.name, ctypes.c_int64) for one in dataclasses.fields(PCDStats) if one.name not in COUNTED_HERE]


ctx_p = ctypes.c_void_p
float_p = ctypes.POINTER(ctypes.c_float)


def is_native() -> bool:
    """Whether the library of this process is pypcd's own."""
    return hasattr(lib, "llama_pcd_version")


def only_native(what: str) -> str:
    """The sentence for what any other libllama cannot do."""
    if library.why_stock():
        return f"{what} needs pypcd's own libllama, and this process has {lib._name}: {library.why_stock()}"
    return f'{what} needs the native engine; open the model without engine="stock"'


def bind(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of the library; in another library than pypcd's, one that says what it needs."""
    if not is_native():
        return functools.partial(_missing, name)
    function = getattr(lib, name)
    function.restype = restype
    function.argtypes = list(argtypes)
    return function


def _missing(name: str, *_: object) -> NoReturn:
    raise UnsupportedError(only_native(name))


pcd_set = bind("llama_pcd_set", ctypes.c_int32, ctx_p, ctypes.POINTER(Params), ctypes.c_char_p, ctypes.c_size_t)
pcd_trim = bind("llama_pcd_trim", None, ctx_p)
pcd_check = bind("llama_pcd_check", ctypes.c_int32, ctx_p, ctypes.POINTER(Params), ctypes.c_char_p, ctypes.c_size_t)
pcd_begin = bind("llama_pcd_begin", None, ctx_p, ctypes.c_int32, ctypes.c_int32)
pcd_suspend = bind("llama_pcd_suspend", None, ctx_p, ctypes.c_bool)
pcd_get_logits_ith = bind("llama_pcd_get_logits_ith", float_p, ctx_p, ctypes.c_int32, ctypes.c_int32)
pcd_get_strength_ith = bind("llama_pcd_get_strength_ith", ctypes.c_float, ctx_p, ctypes.c_int32)
pcd_get_stats = bind("llama_pcd_get_stats", Stats, ctx_p)
pcd_fallback_text = bind("llama_pcd_fallback_text", ctypes.c_char_p, ctypes.c_int32)
pcd_set_eval_callback = bind(
    "llama_pcd_set_eval_callback",
    ctypes.c_int32,
    ctx_p,
    llama_cpp.ggml_backend_sched_eval_callback,
    ctypes.c_void_p,
    ctypes.c_bool,
    ctypes.c_char_p,
    ctypes.c_size_t,
)
sampler_init_pcd = bind("llama_sampler_init_pcd", llama_cpp.llama_sampler_p_ctypes, ctx_p)
sampler_pcd_set_row = bind("llama_sampler_pcd_set_row", None, llama_cpp.llama_sampler_p_ctypes, ctypes.c_int32)
pcd_set_amx = bind("llama_pcd_set_amx", None, ctypes.c_bool)
