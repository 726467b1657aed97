"""Functions in C (cpp/llama-pcd*.h) that pypcd itself never calls. The method: tests compare it with pypcd.settings.formula. And what
llama-server does with sequences: it gives each a setting, and reads its attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

from pypcd.engine import _bindings
from pypcd.engine._bindings import bind, ctx_p, float_p
from pypcd.engine._calls import call

i32, f32 = ctypes.c_int32, ctypes.c_float
i32_p, f64_p = ctypes.POINTER(i32), ctypes.POINTER(ctypes.c_double)
pcd_default_params = bind("llama_pcd_default_params", _bindings.Params)
pcd_rho = bind("llama_pcd_rho", None, i32, f32, f32, i32, f64_p)
pcd_contrast = bind(
    "llama_pcd_contrast", i32, float_p, float_p, i32, ctypes.POINTER(_bindings.Params), f32, float_p, float_p
)
pcd_entropy = bind("llama_pcd_entropy", f32, float_p, i32)
said = ctypes.c_char_p, ctypes.c_size_t
pcd_get = bind("llama_pcd_get", ctypes.c_bool, ctx_p, ctypes.POINTER(_bindings.Params))
pcd_set_seq = bind("llama_pcd_set_seq", i32, ctx_p, i32, ctypes.POINTER(_bindings.Params), *said)
pcd_unset_seq = bind("llama_pcd_unset_seq", None, ctx_p, i32)
pcd_attention = bind("llama_pcd_attention", i32, ctx_p, i32, i32_p, i32, i32, i32_p, i32, f64_p, *said)


def attention(llm: llama_cpp.Llama, n_past: int, tokens: Sequence[int], heads: Sequence[tuple[int, int]]) -> np.ndarray:
    """What tokens behind the first n_past of sequence 0 pay to each position, averaged over them and summed over (layer, head);
    float64[n_past + len(tokens)]."""
    pays = (ctypes.c_double * (n_past + len(tokens)))()
    flat = [number for pair in heads for number in pair]
    numbers = [(i32 * len(some))(*some) for some in (tokens, flat)]
    call(pcd_attention, llm, 0, numbers[0], len(tokens), n_past, numbers[1], len(heads), pays)
    return np.array(pays)
