"""Intermediate tensors of an evaluation, by their names in llama.cpp's graph.

pypcd's own libllama reads them in any context (tap). Any libllama calls a function for each tensor that it has computed, if the context was
opened with one, which costs time at every step. So read_tensors() opens a context for it there, and gives it a copy of the keys.
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

from pypcd.engine import _bindings, _log
from pypcd.engine._calls import batch_of, call, context, model, stock
from pypcd.engine._context import decode
from pypcd.engine._handles import is_open
from pypcd.engine._model import slides
from pypcd.errors import InputError, PCDError, UnsupportedError
from pypcd.library import ggml

__all__ = ["Tensor", "contents", "ggml_base", "read_tensors", "tap"]

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


def read_tensors(llm: llama_cpp.Llama, names: Sequence[str], past: Sequence[int], tokens: Sequence[int]) -> Tapped:
    """Collect tensors of the evaluation of some tokens behind others, which sequence 0 holds. Whether it then holds these too is not said.

    Args:
        names: as in tap().
        past: the tokens that the sequence holds, and no others.

    Raises:
        UnsupportedError: this context cannot work without flash attention, or has a LoRA adapter and another libllama than pypcd's own.
        PCDError: there is no memory for another context, or llama_decode failed.
    """
    n_past, n_batch = len(past), llm.n_batch
    if stock(llm):
        return _read_in_another(llm, names, past, tokens)
    with tap(llm, names) as seen:
        for i in range(0, len(tokens), n_batch):
            part = tokens[i : i + n_batch]
            decode(llm, [(token, n_past + i + j, 0, True) for j, token in enumerate(part)])
    return seen


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


def _read_in_another(llm: llama_cpp.Llama, names: Sequence[str], past: Sequence[int], tokens: Sequence[int]) -> Tapped:
    if getattr(llm, "lora_path", None):
        raise UnsupportedError("tensors of a model with a LoRA adapter are read by pypcd's own libllama alone")
    base = ggml_base()
    seen: Tapped = {}
    failed: list[BaseException] = []
    wanted = tuple(name.encode() for name in names)
    is_past = True  # what comes before the tokens is not collected

    def look(tensor: int, is_asking: bool, user_data: Any) -> bool:
        try:
            name = base.ggml_get_name(tensor)
            if is_past or not name.startswith(wanted) or b" (" in name:  # a view of it
                return not is_asking
            if not is_asking:
                seen.setdefault(name.decode(), []).append(contents(tensor))
        except BaseException as error:  # noqa: BLE001  it cannot pass through the library
            failed.append(error)
        return True

    params = type(llm.context_params).from_buffer_copy(llm.context_params)
    callback = llama_cpp.ggml_backend_sched_eval_callback(look)
    params.cb_eval, params.n_seq_max = callback, 1
    params.n_ctx = -(-(len(past) + len(tokens)) // 256) * 256
    name = "flash_attn_type" if hasattr(params, "flash_attn_type") else "flash_attn"
    setattr(params, name, 0)  # which has no attention weights
    _log.clear_errors()
    other = llama_cpp.llama_init_from_model(model(llm), params)
    if not other:
        raise PCDError(f"there is no room for a second context, in which tensors are read: {_log.reason()}")
    try:
        begin = len(past) if _copied(llm, other) else 0
        text = [*past, *tokens]
        for is_past, first, last in ((True, begin, len(past)), (False, len(past), len(text))):
            for i in range(first, last, llm.n_batch):
                part = text[i : min(i + llm.n_batch, last)]
                with batch_of([(token, i + j, [0], True) for j, token in enumerate(part)]) as batch:
                    status = llama_cpp.llama_decode(other, batch)
                if status:
                    raise PCDError(f"llama_decode returned {status}: {_log.reason()}")
    finally:
        llama_cpp.llama_free(other)
    if failed:
        raise failed[0]
    return seen


def _copied(llm: llama_cpp.Llama, other: Any) -> bool:
    """Whether another context has got the keys of sequence 0: not if one of the two stores values for flash attention. Layers with a
    sliding window give only what is in it, so that a cell would no longer tell its position."""
    if slides(llm):
        return False
    size = llama_cpp.llama_state_seq_get_size(context(llm), 0)
    buffer = (ctypes.c_uint8 * size)()
    n = llama_cpp.llama_state_seq_get_data(context(llm), buffer, size, 0)
    return bool(n and llama_cpp.llama_state_seq_set_data(other, buffer, n, 0))


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
    base.ggml_get_name.restype, base.ggml_nelements.restype = ctypes.c_char_p, ctypes.c_int64
    base.ggml_is_contiguous.restype = ctypes.c_bool
    for function in (base.ggml_backend_tensor_get, base.ggml_backend_tensor_set):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        function.restype = None
    return base
