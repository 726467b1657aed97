"""What a GGUF file says about its model, and which file a user's name for a model means.

Reads only the header: metadata and the names of tensors. Knows nothing of the library, machines or PCD.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import mmap
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

from pypcd.errors import InputError, ModelError

__all__ = [
    "DEMO_MODEL",
    "GGUF",
    "Shape",
    "explained",
    "parts",
    "read_gguf",
    "resolve_model",
]

DEMO_MODEL = pathlib.Path(__file__).parent / "models" / "demo.gguf"

PART = re.compile(r"-(\d{5})-of-\d{5}$")  # at the end of the name of a part of a model
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # those llama.cpp reads; version 1 had shorter length fields
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_NUMBERS = 4096  # longer arrays are not kept; one number for each layer is far fewer
_MAX_LAYERS = 1024  # more than llama.cpp loads


def parts(model: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files of a model: one, or those that it is split into, as llama.cpp names them."""
    path = pathlib.Path(model)
    part = PART.search(path.stem)
    if part is None:
        return [path]
    return sorted(path.parent.glob(glob.escape(path.stem[: part.start()]) + "-*-of-*.gguf"))


def resolve_model(model: str | os.PathLike[str]) -> str:
    """The path of a GGUF file; "demo" is the model that comes with pypcd, unless a file has that name.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: it is a folder, or not a GGUF file.
    """
    if not str(model):
        raise ModelError("the model's name is empty; give the path of a .gguf file, or 'demo'")
    path = pathlib.Path(model).expanduser()
    if str(model) == "demo" and not path.exists():
        path = DEMO_MODEL
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(found[:3])}" if found else ""
        raise ModelError(f"{path} is a folder, not a GGUF file{hint}")
    if not path.exists():
        raise FileNotFoundError(
            f"there is no model file {path}; give the path of a .gguf file, or 'demo' for the model that comes with pypcd. Models "
            "in GGUF are found at https://huggingface.co/models?library=gguf; SmolLM2-135M-Instruct and Gemma 3 270M are tested"
        )
    if path.is_fifo():  # which would be waited for
        raise ModelError(f"{path} is a pipe, not a GGUF file; give a file's path")
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if not magic:
        raise ModelError(f"{path} is empty; download the model again")
    if magic != _MAGIC:
        raise ModelError(
            f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}; convert the model with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    return str(path)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's dimensions; those of a 7B Llama where the file does not say.

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

    @property
    def key_bytes(self) -> int:
        """Keys of one position in all layers, f16."""
        return 2 * sum(self.n_head_kv) * self.n_embd_head_k

    @property
    def value_bytes(self) -> int:
        """Values of one position in all layers, f16."""
        return 2 * sum(self.n_head_kv) * self.n_embd_head_v


@dataclasses.dataclass(frozen=True)
class GGUF:
    """The header of a file.

    Attributes:
        metadata: texts, numbers and lists of numbers by key. Lists of texts, and long ones, are left out.
        n_vocab: tokens of the vocabulary.
        tensors: their names.
    """

    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    n_vocab: int = 0
    tensors: frozenset[str] = frozenset()

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @functools.cached_property
    def shape(self) -> Shape:
        def numbers(key: str, default: float) -> list[float]:
            """One number, or in some models one for each layer."""
            value = self.metadata.get(f"{self.architecture}.{key}")
            values = value if isinstance(value, list) else [value]
            valid = [v for v in values if isinstance(v, (int, float)) and 0 <= v < 2**53]
            return valid if valid and len(valid) == len(values) else [default]

        n_layer = min(int(numbers("block_count", 32)[0]), _MAX_LAYERS)
        n_head = int(max(numbers("attention.head_count", 32)))
        n_head_kv = [int(n) for n in numbers("attention.head_count_kv", n_head)]
        head_k = int(numbers("attention.key_length", numbers("embedding_length", 4096)[0] // max(n_head, 1))[0])
        return Shape(
            n_ctx_train=int(numbers("context_length", 4096)[0]),
            n_vocab=self.n_vocab,
            n_head=n_head,
            n_head_kv=tuple((n_head_kv * n_layer)[:n_layer]),
            n_embd_head_k=head_k,
            n_embd_head_v=int(numbers("attention.value_length", head_k)[0]),
            n_rot=int(numbers("rope.dimension_count", head_k)[0]),
            rope_freq_base=numbers("rope.freq_base", 10000.0)[0],
        )

    def rope_factors(self, n_ctx: int) -> str | None:
        """Which RoPE table a LongRoPE model uses in a context of n_ctx, "long" or "short"; None if it has only one."""
        trained = self.metadata.get(f"{self.architecture}.rope.scaling.original_context_length")
        if not isinstance(trained, int) or "rope_factors_long.weight" not in self.tensors:
            return None
        return "long" if n_ctx > trained else "short"


def read_gguf(path: str | os.PathLike[str]) -> GGUF:
    """The header of a GGUF file; empty if it is damaged, since llama.cpp's own error explains that better.

    The gguf package is not used: it reads the whole vocabulary into Python objects, which takes seconds if it is large.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).gguf()
    except (struct.error, ValueError, KeyError, OverflowError):  # an empty file cannot be mapped: a ValueError too
        return GGUF()


_CUT = ("not within the file bounds", "failed to read key-value pairs", "exceeds remaining file size")
_NOISE = ("failed to read header", "GGUF file is version", "but must be in")


def explained(said: str) -> str:
    """What llama.cpp says of a file that it cannot load, behind what a person can do about it if it is broken."""
    if any(words in said for words in _CUT):
        return f"the file is incomplete or damaged, download it again; {said}"
    if any(words in said for words in _NOISE):
        return f"the file is damaged, download it again, or of a newer GGUF; {said}"
    return said


class _Reader:
    """Reads one value after the other; raises one of several errors if the file ends early or a type is unknown."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, len(_MAGIC)

    def gguf(self) -> GGUF:
        if self._number("I") not in _VERSIONS:
            raise InputError("another version")
        n_tensors, n_pairs = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        n_tokens: Any = None
        for _ in range(n_pairs):
            key = self._text()
            kind = self._number("I")
            value: Any
            if kind == _ARRAY:
                value, n = self._array()
                n_tokens = n if key == "tokenizer.ggml.tokens" else n_tokens
            else:
                value = self._text() if kind == _TEXT else self._number(_SCALARS[kind])
            if value is not None:
                metadata[key] = value
        tensors = []
        for _ in range(n_tensors):
            tensors.append(self._text())
            self._skip(8 * self._number("I") + struct.calcsize("<IQ"))  # dimensions, type, offset
        if n_tokens is None:
            n_tokens = metadata.get(f"{metadata.get('general.architecture')}.vocab_size", 0)
        return GGUF(metadata, n_tokens if isinstance(n_tokens, int) else 0, frozenset(tensors))

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _text(self) -> str:
        n = self._number("Q")
        start = self._at
        self._skip(n)
        return self._data[start : self._at].decode("utf-8", "replace")

    def _array(self) -> tuple[list[Any] | None, int]:
        """The values of an array and their number; None for the values if they are texts or too many."""
        kind, n = self._number("I"), self._number("Q")
        if kind == _TEXT:
            length, at = struct.Struct("<Q"), self._at
            for _ in range(n):
                at += length.size + length.unpack_from(self._data, at)[0]
            self._at = at
            return None, n
        code = _SCALARS[kind]
        start = self._at
        self._skip(n * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{n}{code}", self._data, start)) if n <= _MAX_NUMBERS else None, n

    def _skip(self, n: int) -> None:
        if n > len(self._data) - self._at:
            raise InputError("the file ends early")
        self._at += n
