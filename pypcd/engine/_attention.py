"""How much attention tokens pay to each position before them, for chosen heads, beside any kind of attention.

Flash attention leaves no weights to read. But its operation has its sources: the queries, the cached keys and the mask. So the
scheduler's callback (llama_context_params.cb_eval), which sees each operation, computes softmax(scale q K + mask) from them for the heads
that are asked for; without flash attention the weights themselves are there. A column of the mask is a cell of the KV cache. Which position
a cell holds is what the head of the sequence's state says.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.engine._calls import call, context, positions_by_cell, stock
from pypcd.engine._context import decode
from pypcd.engine._handles import is_open
from pypcd.engine._rotation import watch_of
from pypcd.engine._tensors import TYPES, Tensor, contents, ggml, op_number, raw, strided
from pypcd.errors import UnsupportedError

__all__ = ["attention", "show_operations", "shows_operations", "watched"]

Floats = npt.NDArray[np.float32]
_Callback = Callable[[int, bool, Any], bool]

_CELLS = 4096  # that are read at once: 8 MiB of keys in a model with 1,024 numbers a cell


def attention(
    llm: llama_cpp.Llama,
    past: Sequence[int],
    tokens: Sequence[int],
    weights: Sequence[float],
    heads: Mapping[int, Sequence[int]] | None = None,
) -> dict[int, Floats]:
    """Evaluate tokens behind others, and read how much attention they pay to each position.

    Args:
        past: what sequence 0 holds, and no more.
        tokens: they are evaluated as far as it takes. The sequence has to be rewound to `past` before anything else.
        weights: of each token; 0 leaves it out.
        heads: by layer, both counted from 0; layers without attention are not counted. None: all heads of all layers that see all
            positions.

    Returns:
        layer -> float32[n_heads, len(past) + len(tokens)], the sum over the tokens of their weight times what they pay.

    Raises:
        UnsupportedError: the attention of a layer that is asked for, or of all layers, cannot be read.
        PCDError: llama_decode failed, or has no room.
    """
    n_past, size = len(past), min(llm.n_batch, int(llama_cpp.llama_n_ubatch(context(llm))))
    found: dict[int, Floats] = {}
    for i in range(0, len(tokens), size):
        part = tokens[i : i + size]
        reader = _Reader(np.asarray(weights[i : i + size], np.float32), heads, _has_experts(llm))
        with watched(llm, reader):
            if not decode(llm, [(token, n_past + i + j, 0, False) for j, token in enumerate(part)]):
                raise UnsupportedError("the context has no room for the question, whose attention would be read")
        n = n_past + i + len(part)
        for il, sums in reader.by_position(llm, n).items():
            total = found.setdefault(il, np.zeros((len(sums), n_past + len(tokens)), np.float32))
            total[:, :n] += sums
    if not found or (heads is not None and set(heads) - set(found)):
        raise UnsupportedError("the attention of this model cannot be read in this context")
    return found


def _has_experts(llm: llama_cpp.Llama) -> bool:
    return any(key.endswith(".expert_count") and number != "0" for key, number in llm.metadata.items())


class _Reader:
    """What the callback does with the operations of one evaluation.

    Args:
        to_end: whether layers behind the last one that is read are evaluated too. To stop leaves out the rest of this device's
            operations, not those of others: experts on another device would be chosen by numbers that were not computed.
    """

    def __init__(self, weights: Floats, heads: Mapping[int, Sequence[int]] | None, to_end: bool) -> None:
        self.weights, self.heads = weights, heads
        self.last = math.inf if heads is None or to_end else max(heads)
        self.n_seen = 0  # layers with attention
        # sums, the mask's address, the cells that are seen
        self.found: dict[int, tuple[Floats, int, npt.NDArray[np.intp]]] = {}
        self.failed: BaseException | None = None

    def __call__(self, tensor: int, is_asking: bool, _: Any) -> bool:
        try:
            node = Tensor.from_address(tensor)
            is_flash = node.op == op_number(b"FLASH_ATTN_EXT")
            if not is_flash and not (
                node.op == op_number(b"SOFT_MAX") and node.src[1]
            ):  # a softmax of experts has no mask
                return not is_asking
            if is_asking:
                self.n_seen += 1
                return self.heads is None or self.n_seen - 1 in self.heads
            if self.failed is None:
                self._read(self.n_seen - 1, node, tensor, is_flash)
            return self.n_seen <= self.last  # no layer behind the last one is needed
        except BaseException as error:  # noqa: BLE001  it cannot pass through the library
            self.failed = self.failed or error
        return True

    def _read(self, il: int, node: Tensor, tensor: int, is_flash: bool) -> None:
        address, n = node.src[3 if is_flash else 1], len(self.weights)
        if not address:
            return  # it sees all, such as an encoder
        if Tensor.from_address(address).ne[2] != 1 or Tensor.from_address(node.src[0]).ne[3] != 1:
            return  # heads that each see another choice of cells (MiniMax M3)
        mask = _rows(address, 0, n)
        n_heads = Tensor.from_address(node.src[0]).ne[2]
        chosen = range(n_heads) if self.heads is None else self.heads[il]
        if not all(0 <= head < n_heads for head in chosen):
            raise UnsupportedError(
                f"layer {il} of this model has {n_heads} heads, so its heads {list(chosen)} cannot be read"
            )
        if is_flash:
            each = [_softmax(x) for x in _scores(node, mask, n, chosen)]
        else:
            each = [_rows(tensor, head, n) for head in chosen]
        sums = np.stack([self.weights @ row for row in each])
        self.found[il] = sums, address, np.flatnonzero(np.isfinite(mask[-1]))

    def by_position(self, llm: llama_cpp.Llama, n: int) -> dict[int, Floats]:
        """What was found of the layers that see all n positions of sequence 0, with a column for each position."""
        if self.failed is not None:
            raise self.failed
        whole = {il: one for il, one in self.found.items() if len(one[2]) == n}
        if not whole:
            return {}
        order = positions_by_cell(context(llm), 0, range(n))
        # layers with a window order their cells by themselves
        has_windows = len({address for _, address, _ in whole.values()}) > 1
        if has_windows and not np.array_equal(order, positions_by_cell(context(llm), 0, range(n), of_window=True)):
            raise UnsupportedError("the attention of a model with sliding windows cannot be read beside this text")
        return {il: sums[:, cells[np.argsort(order)]] for il, (sums, _, cells) in whole.items()}


def _scores(node: Tensor, mask: Floats, n: int, heads: Sequence[int]) -> Iterator[tuple[Floats, float | None]]:
    """The logits of each head's attention, float32[n, n_cells], and of its sink."""
    q = contents(node.src[0])[0]  # [n_heads, n, head_dim]
    keys = Tensor.from_address(node.src[1])
    n_cells, n_heads, n_kv = mask.shape[1], q.shape[0], keys.ne[2]
    scale, max_bias, cap = np.array(list(node.op_params[:3]), np.int32).view(np.float32).tolist()
    sinks = contents(node.src[4]).ravel() if node.src[4] else None
    x = np.empty((len(heads), n, n_cells), np.float32)
    for begin in range(0, n_cells, _CELLS):
        k = _keys(node.src[1], begin, min(begin + _CELLS, n_cells))  # [n_kv, cells, head_dim]
        for i, head in enumerate(heads):
            x[i, :, begin : begin + _CELLS] = q[head, :n] @ k[head * n_kv // n_heads].T
    for i, head in enumerate(heads):
        scores = x[i] * (scale / cap if cap else scale)
        if cap:
            scores = np.tanh(scores) * cap
        yield scores + _slope(max_bias, head, n_heads) * mask, None if sinks is None else float(sinks[head])


def _softmax(scores: tuple[Floats, float | None]) -> Floats:
    x, sink = scores
    top = x.max(axis=1, keepdims=True) if sink is None else np.maximum(x.max(axis=1, keepdims=True), sink)
    e = np.exp(x - top)
    return np.asarray(e / (e.sum(axis=1, keepdims=True) + (0 if sink is None else np.exp(sink - top))), np.float32)


def _slope(max_bias: float, head: int, n_heads: int) -> float:
    """ALiBi's factor of the mask (arXiv 2108.12409), as ggml has it; 1 without ALiBi."""
    if not max_bias:
        return 1.0
    n = 2 ** int(math.log2(n_heads))
    return float(2 ** (-max_bias * (head + 1) / n) if head < n else 2 ** (-max_bias / 2 * (2 * (head - n) + 1) / n))


# -- tensors -----------------------------------------------------------------------------------------------------------


def _rows(address: int, i2: int, n: int) -> Floats:
    """The first n rows of one matrix of a tensor of floats, float32[n, ne[0]]."""
    head = Tensor.from_address(address)
    data = raw(address, i2 * head.nb[2], (n - 1) * head.nb[1] + head.ne[0] * head.nb[0])
    return strided(data, (n, head.ne[0]), (head.nb[1], head.nb[0]), TYPES[head.type])


def _keys(address: int, begin: int, end: int) -> Floats:
    """The keys of some cells, float32[n_head_kv, end - begin, head_dim]."""
    head = Tensor.from_address(address)
    n, n_kv, width = end - begin, head.ne[2], head.ne[0]
    if kind := TYPES.get(head.type):
        data = raw(address, begin * head.nb[1], (n - 1) * head.nb[1] + (n_kv - 1) * head.nb[2] + width * head.nb[0])
        return strided(data, (n_kv, n, width), (head.nb[2], head.nb[1], head.nb[0]), kind)
    traits = _Traits.from_address(ggml.ggml_get_type_traits(head.type))
    out = np.empty((n_kv, n, width), np.float32)
    size = width // traits.blck_size * traits.type_size  # of one head's key
    data = raw(address, begin * head.nb[1], (n - 1) * head.nb[1] + (n_kv - 1) * head.nb[2] + size)
    for i in range(n_kv):  # ggml converts what has no gaps
        rows = np.ndarray((n, size), np.uint8, data.data, i * head.nb[2], (head.nb[1], 1)).copy()
        traits.to_float(rows.ctypes.data, out[i].ctypes.data, n * width)
    return out


class _Traits(ctypes.Structure):
    """ggml_type_traits."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


# -- the callback ------------------------------------------------------------------------------------------------------


def shows_operations(llm: llama_cpp.Llama) -> bool:
    """Whether watched() need not open the context again, in which cells may have another order then, and rows other roundings."""
    twins = stock(llm)
    return twins is None or bool(twins.shows_operations)


def show_operations(llm: llama_cpp.Llama) -> None:
    """Make this context one that can be watched, as watched() does it too. Before a text is evaluated it costs no copy of that.

    Raises:
        UnsupportedError: it has a LoRA, a control vector or another callback, or there is no memory for it.
    """
    if twins := stock(llm):
        twins.show_operations()


@contextmanager
def watched(llm: llama_cpp.Llama, callback: _Callback, *, counts: bool = False) -> Iterator[None]:
    """A block in which a callback is called for each operation that this context computes, as ggml_backend_sched_eval_callback: with the
    tensor's address, and first with True, whether to wait for it; then with False, when it is computed, whether to go on.

    Args:
        counts: it looks at the operations, not at numbers; else the weights of attention are laid out as llama.cpp's own.

    Raises:
        UnsupportedError: the context has a callback already.
    """
    show_operations(llm)
    if stock(llm):
        watch = watch_of(llm)
        if watch.reader is not None:
            raise UnsupportedError("this context has a callback already, and it can have only one")
        watch.reader = callback
        try:
            yield
        finally:
            watch.reader = None
        return
    native = llama_cpp.ggml_backend_sched_eval_callback(callback)
    call(_bindings.pcd_set_eval_callback, llm, native, None, counts)
    try:
        yield
    finally:
        if is_open(llm):  # else the model was closed inside
            call(_bindings.pcd_set_eval_callback, llm, llama_cpp.ggml_backend_sched_eval_callback(), None, False)
