"""The dimensions of a model, as its GGUF's metadata says them. Knows nothing of machines or PCD."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Mapping

import llama_cpp

__all__ = ["Shape", "read_metadata"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions; where a file does not say, those of a 7B Llama.

    Attributes:
        n_head_kv: key-value heads of each layer.
        n_rot: rotated dimensions of a head.
        rope_freq_base: B.
    """

    n_ctx_train: int
    n_vocab: int
    n_head: int
    n_head_kv: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    rope_freq_base: float

    @classmethod
    def from_metadata(cls, meta: Mapping[str, str], n_vocab: int = 0) -> Shape:
        arch = meta.get("general.architecture", "")

        def numbers(key: str, default: float) -> list[float]:
            """One number, or in some models one for each layer."""
            text = meta.get(f"{arch}.{key}", "")
            try:
                return [float(value) for value in text.strip("[]").split(",") if value.strip()] or [default]
            except ValueError:  # a long list comes abridged
                return [default]

        n_layer = int(numbers("block_count", 32)[0])
        n_head = int(max(numbers("attention.head_count", 32)))
        n_head_kv = [int(n) for n in numbers("attention.head_count_kv", n_head)]
        head_k = int(numbers("attention.key_length", numbers("embedding_length", 4096)[0] // max(n_head, 1))[0])
        return cls(
            n_ctx_train=int(numbers("context_length", 4096)[0]),
            n_vocab=n_vocab,
            n_head=n_head,
            n_head_kv=tuple((n_head_kv * n_layer)[:n_layer]),
            n_embd_head_k=head_k,
            n_embd_head_v=int(numbers("attention.value_length", head_k)[0]),
            n_rot=int(numbers("rope.dimension_count", head_k)[0]),
            rope_freq_base=numbers("rope.freq_base", 10000.0)[0],
        )

    @property
    def key_bytes(self) -> int:
        """Keys of one position in all layers, f16."""
        return 2 * sum(self.n_head_kv) * self.n_embd_head_k

    @property
    def value_bytes(self) -> int:
        """Values of one position in all layers, f16."""
        return 2 * sum(self.n_head_kv) * self.n_embd_head_v


def read_metadata(path: str) -> tuple[dict[str, str], int]:
    """A GGUF's metadata and the size of its vocabulary, without loading weights; {} and 0 if it cannot be read."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        return {}, 0
    try:
        buffer = ctypes.create_string_buffer(2**16)
        result = {}
        for i in range(llama_cpp.llama_model_meta_count(model)):
            llama_cpp.llama_model_meta_key_by_index(model, i, buffer, len(buffer))
            key = buffer.value.decode("utf-8", "replace")
            llama_cpp.llama_model_meta_val_str_by_index(model, i, buffer, len(buffer))
            result[key] = buffer.value.decode("utf-8", "replace")
        return result, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    finally:
        llama_cpp.llama_model_free(model)
