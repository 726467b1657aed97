"""The method in C (cpp/llama-pcd*.h), which pypcd itself never calls: tests compare it with pypcd.settings.formula."""

from __future__ import annotations

import ctypes

from pypcd.engine import _bindings
from pypcd.engine._bindings import bind, float_p

pcd_default_params = bind("llama_pcd_default_params", _bindings.Params)
pcd_rho = bind(
    "llama_pcd_rho",
    None,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_float,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_double),
)
pcd_noise = bind(
    "llama_pcd_noise",
    None,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_int32,
    float_p,
    float_p,
)
pcd_offset = bind("llama_pcd_offset", ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
pcd_contrast = bind(
    "llama_pcd_contrast",
    ctypes.c_int32,
    float_p,
    float_p,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_float,
    float_p,
)
pcd_strength = bind(
    "llama_pcd_strength", ctypes.c_float, float_p, float_p, ctypes.c_int32, ctypes.c_float, ctypes.c_int32
)
pcd_entropy = bind("llama_pcd_entropy", ctypes.c_float, float_p, ctypes.c_int32)
