"""A ratio of positions for each attention head: a head with the ratio r sees position t as t / r.

llama.cpp rotates all heads alike. A tap hands over what was rotated, each head is turned by the difference here, in float64, and put back
before anything reads it. So evaluation waits for numpy at each layer: slow, and enough for a study.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.engine import Tensor
from pypcd.errors import UnsupportedError
from pypcd.gguf import read_gguf
from research.tensors import tap

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["HeadRatios", "head_counts", "refusal"]

Array = npt.NDArray[np.float64]

_NEOX, _SECTIONS = 2, 8  # of ggml's modes of a rotation
_DEPTH = 12  # from a rotation back to the weights of its layer


def head_counts(llm: Llama) -> list[int]:
    """How many query heads each layer has."""
    file, n_layer = read_gguf(llm.model_path), engine.n_layer(llm)
    count = file.metadata.get(f"{file.architecture}.attention.head_count", 0)
    return [int(n) for n in count][:n_layer] if isinstance(count, list) else [int(count)] * n_layer


def refusal(llm: Llama) -> str | None:
    """Why this model's heads cannot have ratios, as far as its file says; None if they can."""
    file = read_gguf(llm.model_path)
    if not engine.rotates(llm):
        return "it has no rotary positions to scale"
    if llama_cpp.llama_model_rope_type(llm.model) & _SECTIONS:
        return "it has positions of several sections (M-RoPE), which one ratio does not scale"
    if f"{file.architecture}.attention.kv_lora_rank" in file.metadata:
        return "it has one latent key for all heads (MLA), which cannot be rotated for each of them"
    return None


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """What ggml's rope did: angles [n_tokens, n_dims / 2], then a magnitude; pairs of neighbours, or of halves."""

    angles: Array
    magnitude: float
    is_neox: bool

    def turned(self, x: Array, share: npt.ArrayLike) -> Array:
        """x [n_tokens, n_heads, d], turned by a share of these angles that each head has."""
        half = self.angles.shape[1]
        first, second = (
            (slice(half), slice(half, 2 * half)) if self.is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        )
        angle = self.angles[:, None] * np.reshape(share, (-1, 1))
        result = x.copy()
        result[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
        result[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
        return result

    def undone(self, x: Array) -> Array:
        """x as it was before."""
        n_dims = 2 * self.angles.shape[1]
        result = self.turned(x, -1.0)
        result[..., :n_dims] /= self.magnitude
        return result


@dataclasses.dataclass
class _Queries:
    """Those of a layer whose ratios are still looked for: as they were, and the tensor that attention will read."""

    before: Array
    rotation: _Rotation
    tensor: int
    now: Array


class HeadRatios:
    """From now on, the heads of a model have ratios of their own; until close(). PCD is off meanwhile.

    Keys in the cache were computed with the ratios in force at the time: clear it after a change, and do not move them.
    A layer whose ratios are all 1 is left as it is. The keys of a group of query heads have the ratio of its first one.

    Attributes:
        ratios: those of each layer's query heads.
        find: if not None, called while a text is evaluated, with the index of each layer that has ratios, its queries
            [n_tokens, n_heads, d] and keys [n_tokens, n_heads_kv, d], both before rotation; gives other ratios of its query heads.

    Raises:
        UnsupportedError: the context is watched already.
    """

    find: Callable[[int, Array, Array], Array] | None = None

    def __init__(self, llm: Llama, ratios: Sequence[npt.ArrayLike]) -> None:
        self.ratios = [np.asarray(own, np.float64) for own in ratios]
        self._base = engine.ggml
        self._queries: dict[int, _Queries] = {}
        self._turned: dict[int, set[str]] = {}  # of each layer, how the names begin of what was turned
        self._reason: str | None = None
        # hybrid models leave these tensors without names, and ggml numbers them
        names = ["Qcur", "Kcur", *(["node_"] if engine.is_recurrent(llm) else [])]
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(tap(llm, names, self._look))

    def close(self) -> None:
        self._stack.close()

    def check(self) -> None:
        """After an evaluation.

        Raises:
            UnsupportedError: its heads could not be turned.
        """
        if self._reason is None and not self._turned and any((own != 1).any() for own in self.ratios):
            self._reason = "llama.cpp's graph does not show them"
        for il, kinds in self._turned.items():
            if self._reason is None and kinds not in ({"Q", "K"}, {"n"}):
                self._reason = f"of layer {il}, llama.cpp's graph shows only the tensors {', '.join(sorted(kinds))}…"
        if self._reason is not None:
            raise UnsupportedError(f"the queries and keys of this model cannot be rotated head by head: {self._reason}")

    def _look(self, name: str, array: npt.NDArray[np.float32], tensor: int) -> None:
        if self._reason is None:
            node = Tensor.from_address(tensor)
            op = self._base.ggml_op_name(node.op)
            if op == b"ROPE":
                il = self._layer(tensor)
                self._reason = self._refusal(il, node, tensor)
                if self._reason is None and (self.ratios[il] != 1).any():
                    self._rotated(name, il, np.asarray(array[0], np.float64), node, tensor)
            elif name.startswith("Q"):
                self._follow(name, np.asarray(array[0], np.float64), op, node, tensor)

    def _refusal(self, il: int, node: Tensor, tensor: int) -> str | None:
        positions = Tensor.from_address(node.src[1])
        if not 0 <= il < len(self.ratios):
            return "something is rotated that does not belong to a layer"
        if node.type or not self._base.ggml_is_contiguous(tensor) or node.op_params[15]:
            return f"layer {il} rotates a part of a tensor"
        if node.op_params[2] & _SECTIONS or positions.ne[0] != node.ne[2] or len(self.ratios[il]) % max(node.ne[1], 1):
            return f"layer {il} rotates something else than the queries and keys of its heads"
        return None

    def _rotated(self, name: str, il: int, x: Array, node: Tensor, tensor: int) -> None:
        rotation = self._rotation(node)
        if self.find is None:
            self._turn(name, il, x, rotation, tensor)
        elif name.startswith("Q"):
            self._queries[il] = _Queries(rotation.undone(x), rotation, tensor, x)
        elif il in self._queries:
            queries = self._queries.pop(il)
            self.ratios[il] = self.find(il, queries.before, rotation.undone(x))
            self._turn("Q", il, queries.now, queries.rotation, queries.tensor)
            self._turn(name, il, x, rotation, tensor)

    def _follow(self, name: str, x: Array, op: bytes, node: Tensor, tensor: int) -> None:
        """Queries that wait for their layer's keys may be scaled meanwhile, which is as good before a turn as after it."""
        for il, queries in self._queries.items():
            if op == b"SCALE" and node.src[0] == queries.tensor:
                queries.tensor, queries.now = tensor, x
            elif name.endswith(f"-{il}"):
                self._reason = f"layer {il} changes its queries after their rotation, before its keys are known"

    def _turn(self, name: str, il: int, x: Array, rotation: _Rotation, tensor: int) -> None:
        ratios = self.ratios[il]
        own = ratios[:: len(ratios) // x.shape[1]]
        turned = rotation.turned(x, 1 / own - 1).astype(np.float32)
        self._base.ggml_backend_tensor_set(tensor, turned.ctypes.data, 0, turned.nbytes)
        self._turned.setdefault(il, set()).add(name[0])

    def _rotation(self, node: Tensor) -> _Rotation:
        """As ggml_rope_ext does it, from its parameters."""
        numbers = np.frombuffer(node.op_params, np.int32)
        n_dims, mode, n_ctx_orig = (int(n) for n in numbers[[1, 2, 4]])
        base, scale, extrapolated, magnitude, fast, slow = (float(x) for x in numbers.view(np.float32)[5:11])
        pairs = np.arange(n_dims // 2)
        theta = base ** (-2 * pairs / n_dims) / self._numbers(node.src[2], np.float32, n_dims // 2, 1.0)
        frequencies = theta * scale
        if extrapolated:  # YaRN
            low, high = (
                n_dims * math.log(n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)
            )
            low, high = max(0, math.floor(low)), min(n_dims - 1, math.ceil(high))
            kept = extrapolated * (1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1))
            frequencies = frequencies * (1 - kept) + theta * kept
            magnitude *= 1 + 0.1 * math.log(1 / scale)
        positions = self._numbers(node.src[1], np.int32, node.ne[2], 0)
        return _Rotation(np.multiply.outer(positions, frequencies), magnitude, bool(mode & _NEOX))

    def _numbers(self, tensor: int | None, dtype: Any, n: int, default: float) -> Array:
        """The first n of a tensor's; defaults if there is no tensor."""
        if not tensor:
            return np.full(n, default)
        found = np.empty(n, dtype)
        self._base.ggml_backend_tensor_get(tensor, found.ctypes.data, 0, found.nbytes)
        return found.astype(np.float64)

    def _layer(self, tensor: int | None, depth: int = _DEPTH) -> int:
        """The layer whose weights a tensor was made with; -1: it is not found."""
        if not tensor or not depth:
            return -1
        if found := re.match(rb"blk\.(\d+)\.", self._base.ggml_get_name(tensor)):
            return int(found[1])
        sources = (self._layer(source, depth - 1) for source in Tensor.from_address(tensor).src if source)
        return next((il for il in sources if il >= 0), -1)
