"""Saved states of a context (llama_cpp.LlamaState): a seal that tells another model's before it is read.

llama.cpp reads a state's bytes as they are; another model's are nonsense, or end the process. save_state() puts a seal beside
them; a state without one, of stock llama_cpp, is read unseen.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.errors import ArgumentError, InputError
from pypcd.gguf import parts

__all__ = ["fingerprint", "fitted", "weights_id"]

_PARTS, _PART = 64, 65536  # of a file, and the bytes of each


def fingerprint(model_path: str | os.PathLike[str]) -> str:
    """What tells a model's file from others, 16 hexadecimal digits: of its size and of 64 parts of it, from the first to the last, so
    that a model whose weights were trained on has another. It is taken when the model is opened: later the file may be gone."""
    size = os.path.getsize(model_path)
    found = hashlib.blake2b(str(size).encode(), digest_size=8)
    with open(model_path, "rb") as file:
        for i in range(_PARTS):
            file.seek(max(size - _PART, 0) * i // (_PARTS - 1))
            found.update(file.read(_PART))
    return found.hexdigest()


def weights_id(model_path: str | os.PathLike[str]) -> str:
    """As fingerprint(), of all files of a model or a LoRA, and of when they were changed: for what can be made again."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts(model_path):
        found.update(f"{fingerprint(part)} {os.stat(part).st_mtime_ns} ".encode())
    return found.hexdigest()


def fitted(
    model_path: str, model: str, state: Any, n_ids: int, n_ctx: int, scores: npt.NDArray[np.float32]
) -> llama_cpp.LlamaState:
    """A state with arrays as large as those it is restored into, as llama_cpp.Llama.load_state needs them.

    Args:
        model: the fingerprint of model_path.
        n_ids: the length of the array of token ids.
        scores: that array; a row that the state does not have is NaN.

    Raises:
        TypeError: it is no state.
        ValueError: it is of another model, or longer than the context.
    """
    if not isinstance(state, llama_cpp.LlamaState):
        raise ArgumentError(f"the state is a {type(state).__name__}; allowed: what save_state() returned")
    n = int(state.n_tokens)
    # one of stock llama_cpp has no seal
    if getattr(state, "seal", {"weights": model}).get("weights", model) != model:
        raise InputError(f"the state is that of another model than {model_path}; allowed: one that this model saved")
    if n > n_ctx:
        raise InputError(f"the state has {n} tokens; allowed: {n_ctx}, the context; load the model with a larger n_ctx")
    ids = np.zeros(n_ids, np.intc)
    ids[:n] = state.input_ids[:n]
    rows = np.full((min(n, len(scores)), scores.shape[1]), np.nan, np.float32)
    kept = min(len(rows), len(state.scores))
    rows[:kept] = state.scores[:kept]
    return llama_cpp.LlamaState(ids, rows, n, state.llama_state, state.llama_state_size, state.seed)
