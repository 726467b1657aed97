"""Queries and keys of a model's layers before their rotation, for spectrum()."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.errors import InputError, UnsupportedError
from pypcd.gguf import read_gguf
from pypcd.settings.formula import frequencies
from research.tensors import tap

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["PAIRINGS", "Layer", "read_layers"]

PAIRINGS = ("norm", "neox")  # of the halves of a head that turn together

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's attention at the last token of a text.

    Attributes:
        q: float64[n_heads, d], the last token's queries before rotation.
        k: float64[n_tokens, n_heads_kv, d], all keys before rotation.
        theta: float64[n_rot / 2], the model's frequencies, radians per position.
        pairing: which two dimensions are rotated together: "norm" or "neox", as in block_scores().
    """

    q: Array
    k: Array
    theta: Array
    pairing: str


def read_layers(llm: Llama, tokens: Sequence[int]) -> dict[int, Layer]:
    """Evaluate a text in one micro-batch, and read the queries and keys of its layers.

    Which tensors are rotated, and how, is checked and not guessed: a tensor rotated by theta must equal another tensor of
    llama.cpp's graph.

    Raises:
        ValueError: the text does not fit in one micro-batch.
        UnsupportedError: no layer's rotation is found: there is none, or it does not use the plain frequencies of the
            model's base (scaled frequencies and sections are not handled here).
    """
    n_ubatch = min(llm.context_params.n_ubatch, llm.n_batch)
    if not 1 < len(tokens) <= n_ubatch:
        raise InputError(
            f"the text has {len(tokens)} tokens; allowed: 2 to {n_ubatch}, one micro-batch; load the model with a larger "
            "n_ubatch and n_batch"
        )
    engine.clear(llm)
    with llm._pcd_set_to(None), tap(llm, ["Qcur", "Kcur"]) as seen:
        llm.eval(tokens)
    engine.clear(llm)

    shape = read_gguf(llm.model_path).shape
    theta = frequencies(shape.n_rot, llm.context_params.rope_freq_base or shape.rope_freq_base)
    layers: dict[int, Layer] = {}
    for il in range(len(shape.n_head_kv)):
        queries, keys = ([*_named(seen, name, il)] for name in ("Qcur", "Kcur"))
        for pairing in PAIRINGS:
            q, k = _rotated(queries, theta, pairing), _rotated(keys, theta, pairing)
            if q is not None and k is not None and len(q) == len(k) == len(tokens):
                layers[il] = Layer(q[-1], k, theta, pairing)
                break
    if not layers:
        raise UnsupportedError(
            "none of this model's layers has queries and keys that are rotated by the plain frequencies of its base; use "
            "another model"
        )
    return layers


def _named(seen: Any, name: str, il: int) -> list[Array]:
    """The tensors of a layer whose name has this prefix, in the order of evaluation: [n_tokens, n_heads, d]."""
    return [
        np.asarray(array[0], np.float64)
        for key, arrays in seen.items()
        if key.startswith(name) and key.endswith(f"-{il}")
        for array in arrays
        if array.shape[0] == 1 and array.shape[1] > 1
    ]


def _rotated(candidates: Sequence[Array], theta: Array, pairing: str) -> Array | None:
    """The candidate that, rotated by its positions, equals another candidate."""
    for before in candidates:
        if before.shape[-1] < 2 * len(theta):
            continue
        turned = _turn(before, theta, pairing)
        for after in candidates:
            if after.shape == before.shape and after is not before:
                error = np.abs(turned - after).max()
                if error < 1e-3 * max(np.abs(after).max(), 1e-6):
                    return before
    return None


def _turn(x: Array, theta: Array, pairing: str) -> Array:
    half = len(theta)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if pairing == "norm" else (slice(half), slice(half, 2 * half))
    )
    angle = np.multiply.outer(np.arange(len(x)), theta)[:, None]
    result = x.copy()
    result[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    result[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
    return result
