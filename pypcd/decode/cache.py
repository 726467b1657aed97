"""The types of a KV cache's keys and values: a part of a method that a context is opened for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pypcd.errors import InputError
from pypcd.llama.arguments import CACHE_TYPES, UNBLOCKED
from pypcd.settings.ranges import Choice, check

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["KVTypes", "parse"]


@dataclasses.dataclass(frozen=True)
class KVTypes:
    """The types that a context keeps keys and values in, by ggml's names; llama.cpp's own are f16."""

    k: str = "f16"
    v: str = "f16"

    def __post_init__(self) -> None:
        check(self, k=Choice(tuple(CACHE_TYPES)), v=Choice(tuple(CACHE_TYPES)))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of pypcd.Llama. Values in blocks need flash attention."""
        blocks = {} if CACHE_TYPES[self.v] in UNBLOCKED else {"flash_attn": True}
        return {"type_k": CACHE_TYPES[self.k], "type_v": CACHE_TYPES[self.v], **blocks}

    def refusal(self, llm: Llama) -> str | None:
        """Why a context is not of these types, in a sentence; None if it is."""
        params = llm.context_params
        if (params.type_k, params.type_v) == (CACHE_TYPES[self.k], CACHE_TYPES[self.v]):
            return None
        wanted = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"its context has keys or values of other types; open the model with {wanted}"


def parse(words: Sequence[str]) -> KVTypes:
    """From the words behind the name: kv:q8_0, kv:q8_0:q4_0."""
    if not 1 <= len(words) <= 2:
        raise InputError(
            f"kv has {len(words)} values; allowed: the type of the keys and, if not f16, that of the values"
        )
    return KVTypes(*words)
