"""Intermediate tensors of an evaluation, by their names in llama.cpp's graph.

pypcd's own libllama reads them in any context. Attention weights are in _attention.py, for any libllama.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.engine._calls import call
from pypcd.engine._handles import is_open
from pypcd.errors import InputError, UnsupportedError
from pypcd.library import ggml

__all__ = ["Tensor", "contents", "ggml_base", "tap"]

Tapped = dict[str, list[npt.NDArray[np.float32]]]

_open: dict[int, Any] = {}  # id of a model -> its callback, kept alive while the library may call it


@contextlib.contextmanager
def tap(
    llm: llama_cpp.Llama,
    names: Sequence[str],
    look: Callable[[str, npt.NDArray[np.float32], int], object] | None = None,
) -> Iterator[Tapped]:
    """Collect tensors of everything that is evaluated in the block.

        with tap(llm, ["kq_soft_max"]) as seen:
            llm.eval(tokens)
        seen["kq_soft_max-0"][0]   # float32[1, n_head, n_tokens, n_cells]: layer 0, the first micro-batch

    Args:
        names: prefixes of names, such as "kq_soft_max" for attention weights or "l_out" for the output of each block
            ("l_out-3" is block 3 alone). Names are llama.cpp's own and may differ between architectures.
        look: called with each name, its array and the address of the tensor itself (see Tensor), in place of collecting them.
            Evaluation goes on when it returns, with the numbers that are in the tensor then.

    Yields:
        Name -> one array for each micro-batch, in the order of evaluation, with all four dimensions in numpy's order:
        ggml's first dimension, which is contiguous, comes last. The last dimension of attention weights is the cells of
        the cache, padded to whole blocks; cells that a token does not see have weight 0.

    Inside the block, flash attention is off (it has no attention weights), and evaluation waits for each tensor.

    Raises:
        UnsupportedError: this context cannot work without flash attention, or is tapped already.
        ValueError: no name is given, or an empty one.
        BaseException: an error while tensors were copied is raised again at the end.
    """
    if isinstance(names, str) or not names:
        raise InputError(f"names is {names!r}; allowed: one or more prefixes of tensor names, such as ['kq_soft_max']")
    if id(llm) in _open:
        raise UnsupportedError("this model is tapped already; give all names in one call")
    seen: Tapped = {}
    failed: list[BaseException] = []

    base = ggml_base()

    def keep(tensor: int, data: Any, user_data: Any) -> None:
        try:
            if not failed:  # an exception cannot pass through the library
                name, array = base.ggml_get_name(tensor).decode(), _copy(tensor, data)
                if look:
                    look(name, array, tensor)
                else:
                    seen.setdefault(name, []).append(array)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    callback = _bindings.tap_callback(keep)
    _set(llm, names, callback)
    _open[id(llm)] = callback
    try:
        yield seen
    finally:
        if is_open(llm):  # else the model was closed inside
            _set(llm, (), _bindings.tap_callback())
        del _open[id(llm)]
    if failed:
        raise failed[0]


def _set(llm: llama_cpp.Llama, names: Sequence[str], callback: Any) -> None:
    prefixes = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
    call(_bindings.pcd_set_tap, llm, prefixes, len(names), callback, None)


def _copy(tensor: int, data: Any) -> npt.NDArray[np.float32]:
    return np.ctypeslib.as_array(data, shape=Tensor.from_address(tensor).shape).copy()


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
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """In numpy's order."""
        return tuple(self.ne[i] for i in (3, 2, 1, 0))


def contents(tensor: int) -> npt.NDArray[np.float32]:
    """The numbers of a tensor that was computed.

    Raises:
        UnsupportedError: they are not float32 without gaps.
    """
    base, head = ggml_base(), Tensor.from_address(tensor)
    shape = head.shape
    if head.type != 0 or base.ggml_nelements(tensor) != math.prod(shape) or not base.ggml_is_contiguous(tensor):
        raise UnsupportedError(
            "this llama.cpp lays out the tensors that are read in another way; use pypcd's own libllama"
        )
    found = np.empty(shape, np.float32)
    base.ggml_backend_tensor_get(tensor, found.ctypes.data, 0, found.nbytes)
    return found


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
