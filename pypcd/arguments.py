"""Arguments of llama_cpp.Llama that llama.cpp takes unseen, checked: those of opening a model, and those of a call.

Names are checked because llama_cpp ignores a misspelt one; of values, those at which llama.cpp ends the process, or at which an
answer would be nonsense without a word.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import llama_cpp

from pypcd.checks import Integer, Number, OrNone
from pypcd.errors import ArgumentError, InputError, did_you_mean
from pypcd.gguf import check_lora, check_projector, read_gguf

__all__ = ["N_BATCH", "check_call", "check_keywords", "check_opening", "unknown_keywords"]

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
    """
    Raises:
        TypeError: Llama does not have one of them.
    """
    for name in unknown_keywords(kwargs):
        raise ArgumentError(f"Llama has no argument {name!r}{did_you_mean(name, [*_KEYWORDS, *_OURS])}")


CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
UNBLOCKED = (0, 1, 30)  # f32, f16, bf16
_BLOCK = 32  # values, in all others
_OPENING: dict[str, Any] = {
    "n_batch": Integer(1, note="32 or more are usual"),
    "n_ubatch": Integer(0),
    "n_threads": OrNone(Integer(-1, 512)),  # more are an array's end in ggml
    "n_threads_batch": OrNone(Integer(-1, 512)),
    "pooling_type": Integer(-1, 4),
    "last_n_tokens_size": Integer(-1),
    "lora_scale": Number(-math.inf),
}


def check_opening(path: str, kwargs: Mapping[str, Any], n_seq_max: int) -> None:
    """The keywords of llama_cpp.Llama(path, ...), and the files among them. llama.cpp wants room for a row of each sequence in a batch.

    Raises:
        ValueError: a value is out of range.
        FileNotFoundError: there is no LoRA or projector file of that name.
        ModelError: it is not one, or not one for this model.
    """
    for name, check in _OPENING.items():
        if name in kwargs:
            check(name, kwargs[name])
    n_batch = kwargs.get("n_batch", N_BATCH)
    if n_seq_max > n_batch:
        raise InputError(f"n_seq_max is {n_seq_max}, and n_batch {n_batch}; allowed: n_seq_max of at most n_batch")
    for name in ("type_k", "type_v"):
        if kwargs.get(name) not in (None, *CACHE_TYPES.values()):
            allowed = ", ".join(f"{number} ({kind})" for kind, number in CACHE_TYPES.items())
            raise InputError(f"{name} is {kwargs[name]!r}; allowed: {allowed}, or None")
        width = getattr(read_gguf(path).shape, f"n_embd_head_{name[-1]}")
        # llama.cpp would read across blocks, or end the process
        if kwargs.get(name) not in (None, *UNBLOCKED) and width % _BLOCK:
            raise InputError(
                f"{name} is {kwargs[name]}, whose blocks have {_BLOCK} values, but this model's heads have {width}; allowed: "
                f"{', '.join(map(str, UNBLOCKED))}, or None"
            )
    if kwargs.get("lora_path"):
        check_lora(kwargs["lora_path"], path, read_gguf(path))
    projector = getattr(kwargs.get("chat_handler"), "clip_model_path", None)
    if projector is not None:
        check_projector(projector)


class _Both(llama_cpp.LogitsProcessorList):
    """Processors that a bias is added to: llama_cpp uses what extend() returns, which of a list is None."""

    def extend(self, others: Any) -> Any:
        return _Both([*self, *others])


def _response_format(given: Any) -> Any:
    """A response_format in the one form that llama_cpp reads; OpenAI's own form of a schema it passes over without a word."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InputError(
                f"response_format is {given!r}; allowed with json_schema: "
                '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
            )
        return {"type": "json_object", "schema": schema}
    if kind not in ("text", "json_object"):
        raise InputError(
            f"response_format is {given!r}; allowed: None, or a mapping whose type is text, json_object or json_schema"
        )
    return given


def check_call(n_vocab: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a completion, as they can be passed on.

    Raises:
        ValueError: a value is one that llama_cpp would ignore, or that makes every answer empty.
    """
    stop = kwargs.get("stop")
    if stop == "" or (isinstance(stop, (list, tuple)) and "" in stop):
        raise InputError(
            f"stop is {stop!r}; allowed: texts that are not empty, since every answer contains the empty one"
        )
    bias = kwargs.get("logit_bias")
    if bias:
        for token in bias:
            Integer(0, n_vocab - 1, note="the ids of tokens")("logit_bias's token", int(token))
        if kwargs.get("logits_processor") is not None:
            kwargs["logits_processor"] = _Both(kwargs["logits_processor"])
    if kwargs.get("response_format") is not None:
        kwargs["response_format"] = _response_format(kwargs["response_format"])
    return kwargs
