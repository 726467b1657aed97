"""ggml's functions, as pypcd calls them, and its tensors: what they hold, and how that is read."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.library.ggml import base_of

__all__ = ["Tensor", "contents", "ggml"]

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


_pointer, _text, _size, _int, _bool = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_bool
_some_bytes = (None, _pointer, _pointer, _size, _size)
# by name: what a function returns, and what it is given
OF_TENSORS: dict[str, tuple[Any, ...]] = {
    # contexts, and tensors in them
    "ggml_init": (_pointer, InitParams),
    "ggml_free": (None, _pointer),
    "ggml_tensor_overhead": (_size,),
    "ggml_new_tensor_3d": (_pointer, _pointer, _int, *[ctypes.c_int64] * 3),
    "ggml_rope_ext_inplace": (_pointer, *[_pointer] * 4, *[_int] * 3, *[ctypes.c_float] * 6),
    "ggml_get_data": (_pointer, _pointer),
    "ggml_get_name": (_text, _pointer),
    "ggml_nelements": (ctypes.c_int64, _pointer),
    "ggml_nbytes": (_size, _pointer),
    "ggml_is_contiguous": (_bool, _pointer),
    "ggml_op_name": (_text, _int),
    "ggml_op_desc": (_text, _pointer),
    "ggml_get_type_traits": (_pointer, _int),
    # their memory
    "ggml_backend_tensor_get": _some_bytes,
    "ggml_backend_tensor_set": _some_bytes,
    "ggml_backend_alloc_ctx_tensors_from_buft": (_pointer, _pointer, _pointer),
    "ggml_backend_buffer_get_type": (_pointer, _pointer),
    "ggml_backend_buffer_get_usage": (_int, _pointer),
    "ggml_backend_buffer_name": (_text, _pointer),
    "ggml_backend_buffer_is_host": (_bool, _pointer),
    "ggml_backend_buffer_clear": (None, _pointer, ctypes.c_uint8),
    "ggml_backend_buffer_free": (None, _pointer),
}
_OF_DEVICES: dict[str, tuple[Any, ...]] = {
    "ggml_backend_load": (_pointer, _text),
    "ggml_backend_reg_count": (_size,),
    "ggml_backend_reg_get": (_pointer, _size),
    "ggml_backend_reg_by_name": (_pointer, _text),
    "ggml_backend_reg_name": (_text, _pointer),
    "ggml_backend_reg_dev_count": (_size, _pointer),
    "ggml_backend_reg_dev_get": (_pointer, _pointer, _size),
    "ggml_backend_reg_get_proc_address": (_pointer, _pointer, _text),
    "ggml_backend_dev_count": (_size,),
    "ggml_backend_dev_get": (_pointer, _size),
    "ggml_backend_dev_by_name": (_pointer, _text),
    "ggml_backend_dev_by_type": (_pointer, _int),
    "ggml_backend_dev_name": (_text, _pointer),
    "ggml_backend_dev_description": (_text, _pointer),
    "ggml_backend_dev_memory": (None, _pointer, *[ctypes.POINTER(_size)] * 2),
    "ggml_backend_dev_type": (_int, _pointer),
}


class _GGML:
    """The ggml that this process has, llama_cpp's: its functions by their names in C, ready to be called.

    One that it does not export is an AttributeError, as those of devices are on Windows: they are in another of its libraries.
    """

    def __getattr__(self, name: str) -> Any:
        if (signature := OF_TENSORS.get(name) or _OF_DEVICES.get(name)) is None:  # such as Python's own questions
            raise AttributeError(name)
        returned, *given = signature
        function = getattr(_base(), name, None) or getattr(_bindings.lib, name)
        function.restype, function.argtypes = returned, given
        setattr(self, name, function)
        return function


ggml = _GGML()


@functools.cache
def _base() -> ctypes.CDLL:
    return ctypes.CDLL(str(base_of(pathlib.Path(llama_cpp.__file__).parent / "lib")))


@functools.cache
def op_number(name: bytes) -> int:
    """ggml's number of an operation; its versions differ in them."""
    return next(i for i in range(512) if ggml.ggml_op_name(i) == name)


def raw(address: int, offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Some bytes of a tensor."""
    data = np.empty(size, np.uint8)
    ggml.ggml_backend_tensor_get(address, data.ctypes.data, offset, size)
    return data


def strided(
    data: npt.NDArray[np.uint8], shape: Sequence[int], strides: Sequence[int], kind: Any
) -> npt.NDArray[np.float32]:
    return np.asarray(np.ndarray(shape, kind, data.data, 0, strides), np.float32)


def contents(address: int) -> npt.NDArray[np.float32]:
    """A tensor of floats with any strides, in numpy's order."""
    head = Tensor.from_address(address)
    data = raw(address, 0, ggml.ggml_nbytes(address))
    return strided(data, head.shape, [head.nb[i] for i in (3, 2, 1, 0)], TYPES[head.type])
