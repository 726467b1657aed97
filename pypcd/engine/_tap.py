"""Intermediate tensors of an evaluation, by their names in llama.cpp's graph."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.engine._calls import call
from pypcd.engine._handles import is_open
from pypcd.errors import InputError, UnsupportedError

__all__ = ["Tapped", "tap"]

Tapped = dict[str, list[npt.NDArray[np.float32]]]

_open: dict[int, Any] = {}  # id of a model -> its callback, kept alive while the library may call it


@contextlib.contextmanager
def tap(
    llm: llama_cpp.Llama, names: Sequence[str], look: Callable[[str, npt.NDArray[np.float32]], object] | None = None
) -> Iterator[Tapped]:
    """Collect tensors of everything that is evaluated in the block.

        with tap(llm, ["kq_soft_max"]) as seen:
            llm.eval(tokens)
        seen["kq_soft_max-0"][0]   # float32[1, n_head, n_tokens, n_cells]: layer 0, the first micro-batch

    Args:
        names: prefixes of names, such as "kq_soft_max" for attention weights or "l_out" for the output of each block
            ("l_out-3" is block 3 alone). Names are llama.cpp's own and may differ between architectures.
        look: called with each name and array, in place of collecting them; evaluation goes on when it returns.

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

    def keep(name: bytes, ne: Any, data: Any, user_data: Any) -> None:
        try:
            if not failed:  # an exception cannot pass through the library
                if look:
                    look(name.decode(), _copy(ne, data))
                else:
                    seen.setdefault(name.decode(), []).append(_copy(ne, data))
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


def _copy(ne: Any, data: Any) -> npt.NDArray[np.float32]:
    return np.ctypeslib.as_array(data, shape=tuple(ne[i] for i in (3, 2, 1, 0))).copy()
