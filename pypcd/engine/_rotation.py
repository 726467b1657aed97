"""Over-rotation in any libllama: the callback of a context gives each rotation another table of frequency factors.

The scheduler shows every operation to llama_context_params.cb_eval before it is computed, and a rotation divides its frequencies by
what its third source holds (for most models there is none). So a table `own factors / rho` there rotates by theta* = rho theta,
whatever else the model does to its frequencies. Once over-rotation is on, each rotation has a table of ours, which holds the model's
own factors but for the local pass: where a backend keeps a graph to run it again, only contents change, and no pointer does.
"""

from __future__ import annotations

import ctypes
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine._tensors import OF_TENSORS, InitParams, Tensor, ggml, op_number
from pypcd.errors import UnsupportedError

__all__ = ["Memory", "Rotation", "Watch", "eval_callback", "unknown_layout", "watch_of"]

_F32 = 0  # enum ggml_type
_WEIGHTS = 1  # enum ggml_backend_buffer_usage
_COPY = re.compile(rb"[^#]+#(.+)#\d+")  # DEVICE#NAME#NUMBER
_UNREAD = 'this model\'s frequency factors cannot be read here; use engine="native"'
_OP, _op_of = Tensor.op.offset, ctypes.c_int.from_address  # read for every operation
_FACTORS, _pointer_at = Tensor.src.offset + 2 * ctypes.sizeof(ctypes.c_void_p), ctypes.c_void_p.from_address

Rho = Callable[[int], npt.NDArray[np.float64]]
Factors = npt.NDArray[np.float32]


class Watch:
    """The callback that a context of the stock engine is opened with. It hands each operation on, to whom it concerns."""

    def __init__(self) -> None:
        self.rotation: Rotation | None = None
        self.see: Callable[[int, int], None] | None = None  # what second keys do with each operation
        self.reader: Callable[[int, bool, Any], bool] | None = None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._called)
        self._rope = op_number(b"ROPE")
        self._interrupt: BaseException | None = None

    def check(self) -> None:
        """After an evaluation: raises what fell into the callback and is no error of its own, such as Ctrl-C."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _called(self, tensor: int, is_asking: bool, data: Any) -> bool:
        try:
            if is_asking and self.rotation is not None:
                op = _op_of(tensor + _OP).value
                if op == self._rope:
                    self.rotation.give_table(tensor)
                if self.see is not None:
                    self.see(tensor, op)
            return not is_asking if self.reader is None else self.reader(tensor, is_asking, data)
        except BaseException as error:  # noqa: BLE001  it cannot pass through the library
            self._interrupt = self._interrupt or error
            return not is_asking


_watches: weakref.WeakKeyDictionary[llama_cpp.Llama, Watch] = weakref.WeakKeyDictionary()


def watch_of(llm: llama_cpp.Llama) -> Watch:
    return _watches.setdefault(llm, Watch())


def eval_callback(llm: llama_cpp.Llama) -> Any:
    """What llama_context_params.cb_eval has to be for attention() and over-rotation."""
    return watch_of(llm).callback


class Memory:
    """Tensors of ours, in the memory of any device. They are freed by close()."""

    def __init__(self) -> None:
        self._opened: list[tuple[int, int]] = []
        self.n_bytes = 0

    def tensor(self, kind: int, type_: int, n0: int, n1: int = 1) -> int:
        """The address of a new one, which holds zeros, in a buffer of this type."""
        ctx = ggml.ggml_init(InitParams(ggml.ggml_tensor_overhead(), None, True))
        address = int(ggml.ggml_new_tensor_3d(ctx, type_, n0, n1, 1))
        buffer, n_bytes = ggml.ggml_backend_alloc_ctx_tensors_from_buft(ctx, kind), ggml.ggml_nbytes(address)
        if not buffer:
            ggml.ggml_free(ctx)
            raise UnsupportedError(f"there is no memory for another {n_bytes} bytes; use a smaller n_ctx")
        ggml.ggml_backend_buffer_clear(buffer, 0)
        self._opened.append((ctx, buffer))
        self.n_bytes += n_bytes
        return address

    def close(self) -> None:
        for ctx, buffer in self._opened:
            ggml.ggml_backend_buffer_free(buffer)
            ggml.ggml_free(ctx)
        self._opened, self.n_bytes = [], 0


class Rotation:
    """The tables of one context: frequency factors in the memory of each device. They are freed by close()."""

    def __init__(self) -> None:
        # the tensor's address and the model's factors, by the type of its buffer, those factors' name, and their number
        self._tables: dict[tuple[int, bytes, int], tuple[int, Factors]] = {}
        self._own: dict[tuple[bytes, int], Factors] = {}  # by name and number
        self._ours = set[int]()  # addresses of these tensors
        self._memory = Memory()
        self._rho: Rho | None = None
        self._n_seen = 0
        self._failed: BaseException | None = None

    def turn(self, ctx: Any, rho: Rho | None) -> None:
        """Rotate by theta* = rho theta from here on, or (None) as the model does."""
        llama_cpp.llama_synchronize(ctx)
        self._rho, self._n_seen = rho, 0 if rho else self._n_seen
        for table in self._tables.values():
            self._write(*table)

    def check(self) -> None:
        """After an evaluation that was to be over-rotated.

        Raises:
            UnsupportedError: it was not, or not in all layers.
        """
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        if not self._n_seen:
            raise UnsupportedError("this model's layers rotate nothing; use perturbation=none with a window")

    def close(self) -> None:
        self._memory.close()
        self._tables.clear()

    def give_table(self, tensor: int) -> None:
        """To a rotation that is computed next."""
        self._n_seen += 1
        own = _pointer_at(tensor + _FACTORS).value or 0
        if own in self._ours:  # this graph has been here before
            return
        try:
            node = Tensor.from_address(tensor)
            key = ggml.ggml_backend_buffer_get_type(node.buffer), _name(own), node.op_params[1] // 2
            if key not in self._tables:
                self._tables[key] = self._make_table(own, *key)
                self._write(*self._tables[key])
            node.src[2] = self._tables[key][0]
        except Exception as error:  # noqa: BLE001  it cannot pass through the library
            self._failed = self._failed or error

    def _write(self, address: int, own: Factors) -> None:
        factors = own if self._rho is None else (own / self._rho(2 * len(own))).astype(np.float32)
        ggml.ggml_backend_tensor_set(address, factors.ctypes.data, 0, factors.nbytes)

    def _make_table(self, own: int, kind: int, name: bytes, n: int) -> tuple[int, Factors]:
        factors = np.ones(n, np.float32)
        if own and (name, n) not in self._own:
            if Tensor.from_address(own).type != _F32:
                raise UnsupportedError(_UNREAD)
            # a copy is complete if it is of the CPU's memory; another device's factors were seen before their copy
            ggml.ggml_backend_tensor_get(own, factors.ctypes.data, 0, factors.nbytes)
        factors = self._own.setdefault((name, n), factors)
        address = self._memory.tensor(kind, _F32, n)
        self._ours.add(address)
        return address, factors


def _name(factors: int) -> bytes:
    """The name of the model's factors, also of a copy that the scheduler makes of them for another device; empty: none.

    Raises:
        UnsupportedError: these are computed.
    """
    if not factors:
        return b""
    name = ggml.ggml_get_name(factors)
    if ggml.ggml_backend_buffer_get_usage(Tensor.from_address(factors).buffer) == _WEIGHTS:
        return bytes(name)
    if not (copied := _COPY.fullmatch(name)):
        raise UnsupportedError(_UNREAD)
    return copied[1]


@functools.lru_cache(maxsize=1)
def unknown_layout() -> str | None:
    """Why rotations cannot be changed in this ggml, in a sentence; None if one that it makes has all in the known places."""
    try:
        for name in OF_TENSORS:
            getattr(ggml, name)
    except AttributeError as error:
        return f"this ggml is another than those that over-rotation is known to work with ({error})"
    ctx = ggml.ggml_init(InitParams(8 * ggml.ggml_tensor_overhead() + 4096, None, False))
    try:
        x, positions, factors = (
            ggml.ggml_new_tensor_3d(ctx, kind, *shape)
            for kind, shape in ((0, (12, 2, 3)), (26, (3, 1, 1)), (0, (5, 1, 1)))
        )
        node = Tensor.from_address(
            ggml.ggml_rope_ext_inplace(ctx, x, positions, factors, 10, 2, 77, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
        )
        seen = node.op, list(node.ne), list(node.src[:4]), node.op_params[1], node.op_params[4]
        view, at = (node.view_src, node.view_offs, node.data), ggml.ggml_get_data(x)
    finally:
        ggml.ggml_free(ctx)
    if seen == (op_number(b"ROPE"), [12, 2, 3, 1], [x, positions, factors, None], 10, 77) and view == (x, 0, at):
        return None
    return "this ggml lays out its tensors in another way than those that over-rotation is known to work with"
