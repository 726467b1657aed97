"""How much two results may differ by rounding alone: a few times the difference of stock llama.cpp's on this machine.

No limit here was measured on one CPU and written down. Stock llama.cpp is this library with PCD off (gate 0); it does
the same work in two shapes, and the difference of its rows is this machine's rounding. If rows are compared with a
float64 reference, it is the difference of stock's own rows from that reference. Knows nothing of PCD.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pypcd  # noqa: F401  it chooses the library that llama_cpp loads, so it comes first

# isort: split
import llama_cpp
import numpy as np

FACTOR = 8.0
FLOOR = 16.0
EPSILON = float(np.finfo(np.float32).eps)


def allowed(difference: float, scale: float) -> float:
    """The limit for the difference of two results, from the difference of stock's; `scale` is the size of the numbers.

    FACTOR: stock's difference is the largest of a hundred rows, but a test looks at thousands; a twin's row goes
    through two rotations and one more shape of attention, stock's through one. Of all differences in these tests the
    largest was 3 times stock's. FLOOR, in float32 epsilons of the scale: if a machine computes both shapes alike, the
    difference is 0, but a sum in another order is still right."""
    return FACTOR * max(difference, FLOOR * EPSILON * scale)


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    """The normalised mean squared error of a: mse(a, b) / mse(b, 0)."""
    return float(((a - b) ** 2).mean() / (b**2).mean())


def allowed_nmse(nmse: float) -> float:
    """The same for normalised mean squared errors, which are squares of differences on a scale of 1."""
    return allowed(nmse**0.5, 1.0) ** 2


def two_shapes(model: Any, tokens: Sequence[int], **params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Stock's rows, float32[n, n_vocab], of tokens that are decoded one at a time: alone, and each beside the same token
    of another sequence. Every matrix product has another shape, but each token sees the same as before.

    `model` is a llama_model, `params` are llama_context_params; raises RuntimeError if llama.cpp fails."""
    p = llama_cpp.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.kv_unified = 2 * len(tokens) + 16, 64, 64, 2, True
    p.n_threads = p.n_threads_batch = 1
    for name, value in params.items():
        assert hasattr(p, name), name
        setattr(p, name, value)
    return _rows(model, p, tokens, 1), _rows(model, p, tokens, 2)


def _rows(model: Any, params: Any, tokens: Sequence[int], n: int) -> np.ndarray:
    """The rows of the first of n sequences with the same text."""
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp makes no context")
    int32, rows = ctypes.c_int32, np.empty((len(tokens), n_vocab), np.float32)
    ids = [(int32 * 1)(i) for i in range(n)]
    sequences = (ctypes.POINTER(int32) * n)(*ids)
    try:
        for i, token in enumerate(tokens):
            arrays = (int32 * n)(*[token] * n), None, (int32 * n)(*[i] * n), (int32 * n)(*[1] * n)
            batch = llama_cpp.llama_batch(n, *arrays, sequences, (ctypes.c_int8 * n)(*[1] * n))
            status = llama_cpp.llama_decode(context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returns {status}")
            rows[i] = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, 0), shape=(n_vocab,))
    finally:
        llama_cpp.llama_free(context)
    return rows
