"""ggml's tensors, and the functions that read and write them."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.library import ggml

__all__ = ["Tensor", "contents", "ggml_base"]

TYPES: dict[int, Any] = {0: np.float32, 1: np.float16}  # ggml's numbers of types; others are converted by ggml


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Tensor(ctypes.Structure):
    """How ggml's tensors begin, by an address: Tensor.from_address(). What is behind `nb` is so in the ggml that pypcd's own libllama needs."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """In numpy's order."""
        return tuple(self.ne[i] for i in (3, 2, 1, 0))


@functools.lru_cache(maxsize=1)
def ggml_base() -> ctypes.CDLL:
    """The ggml that this process has: llama_cpp's. The functions that tensors are read and written with are ready to be called."""
    base = ctypes.CDLL(str(ggml.base_of(pathlib.Path(llama_cpp.__file__).parent / "lib")))
    for function in (base.ggml_get_name, base.ggml_nelements, base.ggml_is_contiguous):
        function.argtypes = [ctypes.c_void_p]
    base.ggml_nbytes.argtypes, base.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
    base.ggml_op_name.restype, base.ggml_get_type_traits.restype = ctypes.c_char_p, ctypes.c_void_p
    base.ggml_get_name.restype, base.ggml_nelements.restype = ctypes.c_char_p, ctypes.c_int64
    base.ggml_is_contiguous.restype = ctypes.c_bool
    for function in (base.ggml_backend_tensor_get, base.ggml_backend_tensor_set):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        function.restype = None
    return base


@functools.cache
def op_number(name: bytes) -> int:
    """ggml's number of an operation; its versions differ in them."""
    return next(i for i in range(512) if ggml_base().ggml_op_name(i) == name)


def raw(address: int, offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Some bytes of a tensor."""
    data = np.empty(size, np.uint8)
    ggml_base().ggml_backend_tensor_get(address, data.ctypes.data, offset, size)
    return data


def strided(
    data: npt.NDArray[np.uint8], shape: Sequence[int], strides: Sequence[int], kind: Any
) -> npt.NDArray[np.float32]:
    return np.asarray(np.ndarray(shape, kind, data.data, 0, strides), np.float32)


def contents(address: int) -> npt.NDArray[np.float32]:
    """A tensor of floats with any strides, in numpy's order."""
    head = Tensor.from_address(address)
    data = raw(address, 0, ggml_base().ggml_nbytes(address))
    return strided(data, head.shape, [head.nb[i] for i in (3, 2, 1, 0)], TYPES[head.type])
