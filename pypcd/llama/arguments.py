"""Arguments of llama_cpp.Llama that llama.cpp takes unseen, checked.

Names are checked because llama_cpp ignores a misspelt one; of values, those that users get wrong and at which llama.cpp ends the
process.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import llama_cpp

from pypcd.errors import ArgumentError, InputError, did_you_mean
from pypcd.gguf import read_gguf
from pypcd.settings.ranges import Integer, OrNone

__all__ = ["N_BATCH", "check_keywords", "check_opening", "response_format", "unknown_keywords"]

# arguments that llama_cpp's server and LangChain still pass, though llama_cpp.Llama no longer has them: name -> values
# that change nothing
_FORMER = {"mul_mat_q": (True, None), "n_parts": (-1, None), "f16_kv": (True, None)}

N_BATCH = inspect.signature(llama_cpp.Llama.__init__).parameters["n_batch"].default
_KEYWORDS = [name for name in inspect.signature(llama_cpp.Llama.__init__).parameters if name not in ("self", "kwargs")]

_OURS = ["pcd", "engine", "n_seq_max", "rpc_servers", "use_extra_bufts"]


def unknown_keywords(kwargs: dict[str, Any]) -> list[str]:
    """The keywords that Llama does not have. Those that it had, with a value that changes nothing, are removed."""
    for name, values in _FORMER.items():
        if kwargs.get(name) in values:
            kwargs.pop(name, None)
    return [name for name in kwargs if name not in _KEYWORDS and name not in _OURS]


def check_keywords(kwargs: dict[str, Any]) -> None:
    for name in unknown_keywords(kwargs):
        raise ArgumentError(f"Llama has no argument {name!r}{did_you_mean(name, [*_KEYWORDS, *_OURS])}")


CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
UNBLOCKED = (0, 1, 30)  # f32, f16, bf16
_BLOCK = 32  # values, in all others
_OPENING: dict[str, Any] = {
    "n_batch": Integer(1, note="32 or more are usual"),
    "n_threads": OrNone(Integer(-1, 512)),  # more are an array's end in ggml
    "n_threads_batch": OrNone(Integer(-1, 512)),
}


def check_opening(path: str, kwargs: Mapping[str, Any], n_seq_max: int) -> None:
    """The keywords of llama_cpp.Llama(path, ...). llama.cpp wants room for a row of each sequence in a batch."""
    for name, check in _OPENING.items():
        if name in kwargs:
            check(name, kwargs[name])
    n_batch = kwargs.get("n_batch", N_BATCH)
    if n_seq_max > n_batch:
        raise InputError(f"n_seq_max is {n_seq_max}, and n_batch {n_batch}; allowed: n_seq_max of at most n_batch")
    file = read_gguf(path)
    most = -(-file.shape.n_ctx_train * n_seq_max // 256) * 256  # llama.cpp rounds a context up
    if "position_embd.weight" in file.tensors and kwargs["n_ctx"] > most:
        raise InputError(
            f"n_ctx is {kwargs['n_ctx']}, but this model has learned its positions, {file.shape.n_ctx_train} of them, and no others; "
            f"allowed: 0 to {most}"
        )
    for name in ("type_k", "type_v"):
        width = getattr(file.shape, f"n_embd_head_{name[-1]}")
        # of other widths llama.cpp would read across blocks, or end the process
        fitting = {kind: n for kind, n in CACHE_TYPES.items() if n in UNBLOCKED or width % _BLOCK == 0}
        if kwargs.get(name) not in (None, *fitting.values()):
            allowed = ", ".join(f"{number} ({kind})" for kind, number in fitting.items())
            raise InputError(f"{name} is {kwargs[name]!r}; allowed for heads of {width} values: {allowed}, or None")


def response_format(given: Any) -> Any:
    """A response_format in the form that llama_cpp reads: OpenAI's own form of a JSON schema it would pass over without a word."""
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InputError(
            f"response_format is {given!r}; allowed with json_schema: "
            '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
        )
    return {"type": "json_object", "schema": schema}
