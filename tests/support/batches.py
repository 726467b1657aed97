"""Contexts with batches made by hand, for tests of what C callers see; conftest's `native` makes them.

The expected rows come from the same library with PCD off, from a float32 cache, or from an exact identity."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import c_functions
import llama_cpp
import numpy as np
from conftest import F32, check_contrast, close, flash, rounding

import pypcd
from pypcd.engine import _bindings as _native
from pypcd.engine._calls import batch_of
from pypcd.engine._native import native_params

CACHES, EVALUATIONS = ["rerotated", "shared"], ["fused", "alternate"]
OK = (_native.OK, "")
Setting = dict[str, Any]
Rows = tuple[np.ndarray, np.ndarray]

TWINS = range(192, 256)  # their sequence ids
SMALL_CONTEXT: dict[str, Any] = {
    **F32,
    **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), 256),
    **dict.fromkeys(("n_threads", "n_threads_batch"), 1),
    "kv_unified": True,
    **flash(False),
}
SHORT_SLIDING: dict[str, Any] = {"swa_full": False, "n_ctx": 1024, "n_ubatch": 32}  # a cache that forgets
# each way of evaluating twins: architecture, setting, context
WAYS: dict[str, tuple[str, Setting, dict[str, Any]]] = {
    "fused": ("llama", {"evaluation": "fused"}, {}),
    "alternate": ("llama", {"evaluation": "alternate"}, {}),
    "alternate-sliding": ("gemma3", {"evaluation": "alternate", "cache": "shared"}, {}),
    "sequential": ("gemma3", {}, {**SHORT_SLIDING, "n_ubatch": 1}),
}


class Context:
    """A llama_context with batches made by hand; pcd=None is the stock library."""

    def __init__(self, model: Any, path: Path, pcd: Setting | None, **params: Any) -> None:
        self.path = path
        p = llama_cpp.llama_context_default_params()
        for name, value in {**SMALL_CONTEXT, **params}.items():
            assert hasattr(p, name), name
            setattr(p, name, value)
        self.ctx = llama_cpp.llama_init_from_model(model, p)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.n_embd = llama_cpp.llama_model_n_embd(model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        if pcd is not None:
            turn_on(self, pcd)

    @property
    def limit(self) -> float:
        """How much its rows may differ from those of the same work in another shape."""
        return rounding(self.path)

    @property
    def stats(self) -> Any:
        return _native.pcd_get_stats(self.ctx)

    @property
    def n_reused(self) -> int:
        """How often a graph was used again."""
        return int(llama_cpp.llama_perf_context(self.ctx).n_reused)

    def decode(self, tokens: Any, at: Any = None, *, out: Any = None, seq: int = 0, call: Any = None) -> int:
        """Tokens or embeddings from position `at` on, by default after all others, with the last one's logits."""
        n, embedded = len(tokens), isinstance(tokens, np.ndarray)
        first = self.span(seq)[1] + 1 if at is None else at
        positions = first if isinstance(first, np.ndarray) else np.arange(first, first + n)
        out = [n - 1] if out is None else out
        int32, seqs = ctypes.c_int32, (ctypes.c_int32 * 1)(seq)
        batch = llama_cpp.llama_batch(
            n,
            None if embedded else (int32 * n)(*tokens),
            tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if embedded else None,
            (int32 * positions.size)(*positions.ravel().tolist()),
            (int32 * n)(*[1] * n),
            (ctypes.POINTER(int32) * n)(*[seqs] * n),
            (ctypes.c_int8 * n)(*(i in out for i in range(n))),
        )
        return (call or llama_cpp.llama_decode)(self.ctx, batch)

    def rows(self, i: int = -1) -> Rows:
        """L and L*."""
        standard, over = (self.row(i, which) for which in (_native.ROW_STANDARD, _native.ROW_LOCAL))
        assert standard is not None and over is not None
        return standard, over

    def row(self, i: int = -1, which: int = _native.ROW_STANDARD) -> np.ndarray | None:
        return read(_native.pcd_get_logits_ith(self.ctx, i, which), self.n_vocab)

    def is_plain(self, i: int = -1) -> bool:
        """Row i has no contrast."""
        return math.isnan(_native.pcd_get_strength_ith(self.ctx, i))

    def seen(self, i: int = -1) -> np.ndarray | None:
        return read(llama_cpp.llama_get_logits_ith(self.ctx, i), self.n_vocab)

    def embedding(self, i: int) -> np.ndarray | None:
        return read(llama_cpp.llama_get_embeddings_ith(self.ctx, i), self.n_embd)

    def span(self, seq: int = 0) -> tuple[int, int]:
        """The first and the last position in memory; -1 if there are none."""
        ends = llama_cpp.llama_memory_seq_pos_min, llama_cpp.llama_memory_seq_pos_max
        return ends[0](self.memory, seq), ends[1](self.memory, seq)

    def save(self, seq: int | None = None) -> Any:
        """The state of a sequence, or of all of them."""
        sized, get, of = (
            (llama_cpp.llama_state_get_size, llama_cpp.llama_state_get_data, ())
            if seq is None
            else (llama_cpp.llama_state_seq_get_size, llama_cpp.llama_state_seq_get_data, (seq,))
        )
        size = sized(self.ctx, *of)
        state = (ctypes.c_uint8 * size)()
        assert get(self.ctx, state, size, *of) == size
        return state

    def restore(self, state: Any, seq: int | None = None) -> None:
        call, of = (llama_cpp.llama_state_set_data, ()) if seq is None else (llama_cpp.llama_state_seq_set_data, (seq,))
        assert call(self.ctx, state, len(state), *of) == len(state)


class Abort:
    """Stops evaluations of a context at a node of a graph, and counts the nodes until then."""

    def __init__(self, context: Context) -> None:
        self.n, self.stop_at, self.context = 0, sys.maxsize, context
        self.callback = llama_cpp.ggml_abort_callback(self._stops)
        llama_cpp.llama_set_abort_callback(context.ctx, self.callback, ctypes.c_void_p(0))

    def _stops(self, _: Any) -> bool:
        self.n += 1
        return self.n > self.stop_at

    def decode(self, stop_at: int, *args: Any, **kwargs: Any) -> int:
        self.n, self.stop_at = 0, stop_at
        status = self.context.decode(*args, **kwargs)
        self.stop_at = sys.maxsize
        return status


def read(pointer: Any, n: int) -> np.ndarray | None:
    return np.ctypeslib.as_array(pointer, shape=(n,)).copy() if pointer else None


def text_of(seq: int, n: int) -> list[int]:
    """Another text for each sequence."""
    return [int(t) for t in np.random.default_rng(seq).integers(3, 384, n)]


def decode_in(contexts: Sequence[Context], *args: Any, **kwargs: Any) -> None:
    for context in contexts:
        assert context.decode(*args, **kwargs) == 0


def ask(context: Context | pypcd.Llama, setting: Setting, call: Any = _native.pcd_set) -> tuple[int, str]:
    error, params = ctypes.create_string_buffer(500), native_params(pypcd.PCDConfig(**setting))
    return call(context.ctx, ctypes.byref(params), error, 500), error.value.decode()


def turn_on(context: Context, setting: Setting | None = None) -> None:
    assert ask(context, setting or {}) == OK


def turn_off(context: Context) -> None:
    assert _native.pcd_set(context.ctx, None, None, 0) == _native.OK


def set_seq(context: Context, seq: int, setting: Setting | None) -> tuple[int, str]:
    """llama_pcd_set_seq; a `combine` that is not in PCDConfig may be among the fields."""
    error, params = ctypes.create_string_buffer(500), None
    if setting is not None:
        fields = {"combine": True, **setting}
        combine = fields.pop("combine")
        params = ctypes.byref(native_params(pypcd.PCDConfig(**fields), combine=combine))
    return c_functions.pcd_set_seq(context.ctx, seq, params, error, 500), error.value.decode()


def decode_batch(context: Context | pypcd.Llama, entries: Sequence[tuple[int, int, list[int], bool]]) -> int:
    """(token, position, sequences, whether its logits are wanted)"""
    with batch_of(entries) as batch:
        return llama_cpp.llama_decode(context.ctx, batch)


def check_seen(context: Context, i: int, setting: Setting) -> None:
    """What callers read of row i is the contrast of L and L* with this setting, and behind it the other tokens."""
    rows = pypcd.PCDLogits(*context.rows(i), context.row(i, _native.ROW_CONTRASTED))
    check_contrast(rows, pypcd.PCDConfig(**setting), context.seen(i))


Native = Callable[..., Context]


def same_rows(a: Context, b: Context | Rows, i: int = -1, limit: float | None = None) -> None:
    """L and L* of row i equal those of another context with PCD, or earlier ones."""
    rows = a.rows(i)
    close(rows, b.rows(i) if isinstance(b, Context) else b, a.limit if limit is None else limit)
    assert np.abs(rows[0] - rows[1]).max() > 0.05, "the twin must differ, or this test shows nothing"


def check_row(context: Context, stock: Context, other: Context | Rows, i: int = -1) -> None:
    """L equals stock's, L* that of another context with PCD, or an earlier one."""
    close(context.rows(i)[0], stock.seen(i), context.limit)
    same_rows(context, other, i)
