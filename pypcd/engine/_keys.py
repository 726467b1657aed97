"""Second keys in any libllama (PCDConfig.cache="rerotated"): the cached keys, turned from theta to theta*.

R*(n) k = R(n (theta* - theta)) R(n) k: a cached key is turned once more by its position n, and kept in a tensor of ours beside the
cache's. While twins are evaluated, each operation that writes or views a layer's keys is given that tensor in place of the cache's, before
it is computed; afterwards it gets the cache's back. The mask says which cells a twin sees, and the sequence's state which positions these
have. A second key is turned when a twin sees it for the first time, and again once its cell holds another key: the callback sees what is
written, and Stock is told of states that are loaded.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine._calls import positions_by_cell
from pypcd.engine._rotation import Memory, Rho
from pypcd.engine._tensors import TYPES, Tensor, contents, ggml, op_number, raw
from pypcd.errors import UnsupportedError

__all__ = ["SecondKeys"]

_OTHER = 'use cache=shared, or engine="native"'
_UNREAD = f"the attention of this model reads its cached keys in a way that second keys cannot follow; {_OTHER}"
_MULTI, _HALVES, _INTERLEAVED = 8, 2 | 8, 32  # bits of a rotation's mode
_INDICES = {26: np.int32, 27: np.int64}  # enum ggml_type
_PIECE = 2048  # cells that are turned at once
# read for many operations
_SOURCES, _VIEW, _POINTER = Tensor.src.offset, Tensor.view_src.offset, ctypes.sizeof(ctypes.c_void_p)
_pointer_at = ctypes.c_void_p.from_address

Cells = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]


class SecondKeys:
    """The second keys of a handle's context. They are freed by close()."""

    def __init__(self, handle: Any, model: Any) -> None:
        self._handle, self.memory = handle, Memory()
        self._slides = int(llama_cpp.llama_model_n_swa(model)) > 0
        self._layers: dict[int, _Layer | None] = {}  # by the address of the cache's tensor; None: it is not rotated
        self._rotating: dict[int, _Layer] = {}  # by that of the second keys
        self._rho: Rho | None = None  # while twins are evaluated
        self._table: Any = None
        # of each twin: the positions that it sees, in the order of their cells, of all layers and of those with a sliding window
        self._orders: list[tuple[Positions, Positions]] = []
        self._seen: dict[int, tuple[Cells, Positions]] = {}  # by the address of the mask
        self._given: list[tuple[int, int, int, int]] = []  # operations that have ours, and what they had
        self._is_rotated = False  # something is, since the last attention
        self._read: _Layer | None = None  # whose keys were read last
        self._done = set[int]()  # layers' tensors
        self._failed: BaseException | None = None
        names = "ROPE SET_ROWS MUL CONCAT SOFT_MAX FLASH_ATTN_EXT MUL_MAT CPY CONT DUP"
        numbers = [op_number(name.encode()) for name in names.split()]
        self._rope, self._set_rows, self._mul, self._concat, self._softmax, self._flash, *_ = numbers
        self._readers = {*numbers[5:]}
        self._views = {op_number(name) for name in (b"VIEW", b"RESHAPE", b"PERMUTE", b"TRANSPOSE")}
        # what a key may go through between its rotation and the cache
        followed = "CPY CONT DUP REPEAT SCALE RMS_NORM L2_NORM"
        self._followed = self._views | {op_number(name.encode()) for name in followed.split()}

    def close(self) -> None:
        self._layers.clear()
        self._rotating.clear()
        self.memory.close()

    def forget(self) -> None:
        """The cache has other keys now."""
        for layer in self._rotating.values():
            layer.turned[:] = -1

    def begin(self, rho: Rho, table: Any, twins: Sequence[tuple[int, Sequence[range]]]) -> None:
        """Twins are evaluated from here on, in one graph.

        Args:
            table: an equal one means the same rho.
            twins: the sequence of each, and the positions in it.
        """
        none = np.zeros(0, np.int32)
        try:
            self._orders = [
                (
                    positions_by_cell(self._handle.ctx, seq, known),
                    positions_by_cell(self._handle.ctx, seq, known, of_window=True) if self._slides else none,
                )
                for seq, parts in twins
                for first in [self._first(seq)]
                for known in [np.concatenate([np.arange(max(part.start, first), part.stop) for part in parts])]
            ]
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}; {_OTHER}") from error
        if table != self._table:
            for layer in self._rotating.values():
                layer.rotate(rho)
        self._rho, self._table = rho, table
        self._is_rotated, self._read, self._failed = False, None, None
        self._seen.clear()
        self._done.clear()

    def _first(self, seq: int) -> int:
        """The first position of a twin, whose text may have been moved; behind all if it is empty. With a sliding window nobody tells."""
        memory = llama_cpp.llama_get_memory(self._handle.ctx)
        if llama_cpp.llama_memory_seq_pos_max(memory, seq) < 0:
            return 2**31 - 1
        return 0 if self._slides else int(llama_cpp.llama_memory_seq_pos_min(memory, seq))

    def end(self) -> None:
        for tensor, *had in self._given:
            node = Tensor.from_address(tensor)
            node.view_src, node.buffer, node.data = had
        self._given.clear()
        self._rho = None

    def check(self) -> None:
        """After an evaluation of twins.

        Raises:
            UnsupportedError: they did not see second keys in all layers that rotate.
        """
        if self._failed is not None:
            raise self._failed
        if not self._done or self._done != self._rotating.keys():
            raise UnsupportedError(_UNREAD)

    # -- operations, before they are computed --------------------------------------------------------------------------

    def see(self, tensor: int, op: int) -> None:
        try:
            if op == self._set_rows:
                self._see_written(tensor)
            if self._rho is None or self._failed is not None:
                return
            if op == self._rope:
                self._is_rotated = True
            elif op in self._views:
                if layer := self._layers.get(_view_of(tensor)):
                    self._give(tensor, layer)
            elif op in self._readers:
                source = _pointer_at(tensor + _SOURCES + (_POINTER if op == self._flash else 0)).value
                self._read = self._rotating.get(_view_of(source or tensor)) or self._read
            if self._read and op in (self._softmax, self._flash):
                mask = Tensor.from_address(tensor).src[3 if op == self._flash else 1]
                if mask:
                    self._read.turn(*self._cells(mask, self._read.own))
                    self._done.add(self._read.second)
                    self._read, self._is_rotated = None, False
        except BaseException as error:
            self.forget()
            if not isinstance(error, Exception):
                raise
            self._failed = error  # it cannot pass through the library

    def _see_written(self, tensor: int) -> None:
        source = _view_of(tensor)
        if self._rho and source not in (0, *self._layers) and ggml.ggml_get_name(source).startswith(b"cache_k_l"):
            self._layers[source] = self._open(source, tensor, self._rho)
        if layer := self._layers.get(source):
            cells = _indices(tensor)
            layer.turned[cells] = -1
            if self._rho:
                layer.own = cells
                self._give(tensor, layer)
        self._is_rotated &= source not in self._layers

    def _give(self, tensor: int, layer: _Layer) -> None:
        node, second = Tensor.from_address(tensor), Tensor.from_address(layer.second)
        self._given.append((tensor, node.view_src, node.buffer, node.data))
        node.view_src, node.buffer, node.data = layer.second, second.buffer, second.data + node.view_offs

    def _cells(self, mask: int, own: Cells) -> tuple[Cells, Positions]:
        """The cells that twins see, but for those that they are written to, and the positions there."""
        while (node := Tensor.from_address(mask)).op in self._followed:  # made from the input
            mask = node.src[0]
        if node.op or node.ne[2] != 1:
            raise UnsupportedError(_UNREAD)
        if mask not in self._seen:
            rows, found = contents(mask)[0, 0], []
            for row, cell, orders in zip(rows, own, self._orders):
                cells = np.flatnonzero(np.isfinite(row))
                found.append((cells := cells[cells != cell], _order(*orders, len(cells))))
            cells, positions = (np.concatenate(parts) for parts in zip(*found))
            if len(found) > 1:
                cells, order = np.unique(cells, return_index=True)
                positions = positions[order]
            self._seen[mask] = cells, positions
        return self._seen[mask]

    def _open(self, first: int, tensor: int, rho: Rho) -> _Layer | None:
        """The second keys of a layer, whose keys are written by this operation; None if it does not rotate."""
        head, found = Tensor.from_address(first), self._rotation_of(Tensor.from_address(tensor).src[0])
        if found is None and not self._is_rotated:
            return None
        if found is None or head.type not in TYPES or head.ne[2] != 1 or head.ne[0] % found.width:
            raise UnsupportedError(
                f"this model rotates or stores keys in a way that second keys cannot follow; {_OTHER}"
            )
        kind = ggml.ggml_backend_buffer_get_type(head.buffer)
        second = self.memory.tensor(kind, head.type, head.ne[0], head.ne[1])
        layer = _Layer(first, second, found, rho)
        self._rotating[second] = layer
        return layer

    def _rotation_of(self, tensor: int) -> _Rotated | None:
        """The rotation behind a key, if what comes after it moves numbers, or multiplies a head by one number or by weights."""
        node = Tensor.from_address(tensor)
        if node.op == self._rope:
            return _Rotated(tensor, node.ne[0], node.op_params[15])
        if node.op == self._concat and node.op_params[0] == 0:
            for source, before in (node.src[0], 0), (node.src[1], Tensor.from_address(node.src[0]).ne[0]):
                if found := self._rotation_of(source):
                    return found._replace(width=node.ne[0], offset=found.offset + before)
        elif node.op in self._followed:
            return self._rotation_of(node.src[0])
        elif node.op == self._mul and not (weights := Tensor.from_address(node.src[1])).op and weights.type in TYPES:
            found = self._rotation_of(node.src[0])
            return found and found._replace(weights=contents(node.src[1]).ravel())
        return None


class _Rotated(NamedTuple):
    """How the heads of a key are rotated.

    Attributes:
        tensor: the address of the operation.
        width: of a head.
        offset: where the rotated dimensions begin in it.
        weights: it is multiplied by them afterwards.
    """

    tensor: int
    width: int
    offset: int
    weights: Floats | None = None


class _Layer:
    """The keys of a layer.

    Attributes:
        second: the address of the tensor of second keys.
        turned: the position that each cell's second key was turned by; -1: it was not.
        own: the cells that twins are written to.
    """

    def __init__(self, first: int, second: int, rotated: _Rotated, rho: Rho) -> None:
        self.first, self.second, self._width = first, second, rotated.width
        self.turned = np.full(Tensor.from_address(first).ne[1], -1, np.int32)
        self.own: Cells = np.zeros(0, np.intp)
        rope = Tensor.from_address(rotated.tensor)
        params, n = list(rope.op_params), rope.op_params[1] // 2
        self._theta = _frequencies(params, contents(rope.src[2]).ravel() * rho(2 * n))  # it has factors / rho now
        stride, apart = (1, n) if params[2] & _HALVES else (2, 1)
        begins = rotated.offset, rotated.offset + apart
        self._pairs = [slice(begin, begin + stride * n, stride) for begin in begins]
        weights = np.ones(rotated.width, np.float32) if rotated.weights is None else rotated.weights
        a, b = (weights[part] for part in self._pairs)
        self._ratios = [np.divide(x, y, out=np.zeros_like(x), where=y != 0) for x, y in ((a, b), (b, a))]
        self.rotate(rho)

    def rotate(self, rho: Rho) -> None:
        """The frequencies from here on."""
        self._difference = self._theta * (rho(2 * len(self._theta)) - 1)
        self.turned[:] = -1

    def turn(self, cells: Cells, positions: Positions) -> None:
        """The second keys of these cells, ascending, are those of their keys, at these positions."""
        stale = np.flatnonzero(self.turned[cells] != positions)
        if len(stale):
            cells, positions = cells[stale], positions[stale]
            ends = [*(np.flatnonzero(cells[1:] != cells[:-1] + 1) + 1).tolist(), len(cells)]
            for begin, end in zip([0, *ends], ends):
                for at in range(begin, end, _PIECE):
                    self._turn(int(cells[at]), positions[at : min(at + _PIECE, end)])
            self.turned[cells] = positions

    def _turn(self, cell: int, positions: Positions) -> None:
        """The same for neighbours, from this cell on."""
        head = Tensor.from_address(self.first)
        data = raw(self.first, cell * head.nb[1], len(positions) * head.nb[1])
        keys = data.view(TYPES[head.type]).reshape(len(positions), -1, self._width)
        a, b = (keys[..., part].astype(np.float32) for part in self._pairs)
        cos, sin = _angles(self._difference.tobytes(), positions.tobytes())
        keys[..., self._pairs[0]] = a * cos - b * (sin * self._ratios[0])
        keys[..., self._pairs[1]] = a * (sin * self._ratios[1]) + b * cos
        ggml.ggml_backend_tensor_set(self.second, data.ctypes.data, cell * head.nb[1], data.nbytes)


@functools.lru_cache(maxsize=4)  # many layers have the same
def _angles(difference: bytes, positions: bytes) -> tuple[Floats, Floats]:
    angle = np.frombuffer(positions, np.int32)[:, None, None] * np.frombuffer(difference, np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _frequencies(params: list[int], factors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What a rotation of ggml turns each pair by at position 1."""
    n, mode, n_ctx = params[1], params[2], params[4]
    base, scale, mix, _, fast, slow = np.array(params[5:11], np.int32).view(np.float32).astype(float).tolist()
    j = np.arange(n // 2)
    theta = base ** (-2.0 * j / n) / factors
    low, high = (
        n * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base)) if mix else 0 for turns in (fast, slow)
    )
    low, high = max(0, math.floor(low)), min(n - 1, math.ceil(high))
    kept = mix * (1 - np.clip((j - low) / max(0.001, high - low), 0, 1))
    theta *= scale * (1 - kept) + kept
    if mode & _MULTI:  # the last section has a position of its own, which is 0
        sections = np.array(params[11:15])
        sector = j % sections.sum()
        inside = sector < 3 * sections[sector % 3] if mode & _INTERLEAVED else sector < sections[:3].sum()
        theta[~inside] = 0
    return theta


def _order(full: Positions, sliding: Positions, n: int) -> Positions:
    """The n positions that a twin sees of those that layers with or without a sliding window have: the last ones."""
    if n == 0 or (n == len(full) and (len(sliding) < n or np.array_equal(full, sliding))):
        return full[:n]
    if n < len(full) and n <= len(sliding):
        return sliding[sliding >= np.sort(sliding)[-n]]
    raise UnsupportedError(
        f"the cells of this model's layers with a sliding window cannot be told from the others; {_OTHER}"
    )


def _view_of(tensor: int) -> int:
    """The address of what a tensor is a view of; 0: of nothing."""
    return _pointer_at(tensor + _VIEW).value or 0


def _indices(tensor: int) -> Cells:
    """The cells that an operation writes rows to."""
    source = Tensor.from_address(tensor).src[1]
    return raw(source, 0, ggml.ggml_nbytes(source)).view(_INDICES[Tensor.from_address(source).type]).astype(np.intp)
