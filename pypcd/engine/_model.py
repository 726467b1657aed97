"""Properties of a loaded model, and its vocabulary: its tokens and their text."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import llama_cpp

from pypcd.engine._calls import context, model, vocabulary
from pypcd.errors import UnsupportedError

__all__ = [
    "check_decoder",
    "is_defined",
    "is_end",
    "is_recurrent",
    "n_bytes",
    "n_ctx_train",
    "n_layer",
    "n_parameters",
    "progress_callback",
    "rotates",
    "slides",
    "token_bytes",
    "token_text",
]


def progress_callback(go_on: Callable[[float], bool]) -> Any:
    """A callback for llama_model_params.progress_callback; keep it until the model is loaded.

    Args:
        go_on: called with the share that is loaded, 0 to 1; if it returns False, loading stops and fails.
    """
    return llama_cpp.llama_progress_callback(lambda done, _: go_on(done))


def check_decoder(llm: llama_cpp.Llama) -> None:
    """
    Raises:
        UnsupportedError: the model has an encoder, where llama.cpp would end the process; or it keeps no keys.
    """
    arch = llm.metadata.get("general.architecture")
    if not llama_cpp.llama_get_memory(context(llm)):
        raise UnsupportedError(
            f"the architecture {arch!r} keeps no keys and values, so it does not write token by token"
        )
    if llama_cpp.llama_model_has_encoder(model(llm)):
        raise UnsupportedError(f"the architecture {arch!r} has an encoder, which llama-cpp-python's Llama does not run")


def slides(llm: llama_cpp.Llama) -> bool:
    """Whether some layers see a window of the last positions alone."""
    return int(llama_cpp.llama_model_n_swa(model(llm))) > 0


def is_recurrent(llm: llama_cpp.Llama) -> bool:
    """Whether some layers have a recurrent state, which cannot go back to an earlier position."""
    if llama_cpp.llama_model_is_recurrent(model(llm)):
        return True
    if hasattr(llama_cpp, "llama_model_is_hybrid"):  # llama-cpp-python 0.3.17 and newer
        return bool(llama_cpp.llama_model_is_hybrid(model(llm)))
    return any(re.search(r"\.(ssm|shortconv|wkv|kda)\.", key) for key in llm.metadata)


def n_layer(llm: llama_cpp.Llama) -> int:
    return int(llama_cpp.llama_model_n_layer(model(llm)))


def n_ctx_train(llm: llama_cpp.Llama) -> int:
    """Positions the model was trained for."""
    return int(llama_cpp.llama_model_n_ctx_train(model(llm)))


def n_parameters(llm: llama_cpp.Llama) -> int:
    return int(llama_cpp.llama_model_n_params(model(llm)))


def n_bytes(llm: llama_cpp.Llama) -> int:
    """Bytes of all weights."""
    return int(llama_cpp.llama_model_size(model(llm)))


def rotates(llm: llama_cpp.Llama) -> bool:
    """Whether the model has rotary position embeddings (RoPE)."""
    return bool(llama_cpp.llama_model_rope_type(model(llm)) != llama_cpp.LLAMA_ROPE_TYPE_NONE)


# -- the vocabulary --------------------------------------------------------------------------------------------------


def is_end(llm: llama_cpp.Llama, token: int) -> bool:
    """Whether a token ends what is generated."""
    return bool(llama_cpp.llama_vocab_is_eog(vocabulary(llm), token))


def token_bytes(llm: llama_cpp.Llama, token: int) -> bytes:
    """A token's text, empty for control tokens; llama_cpp.Llama.detokenize drops pieces longer than 32 bytes."""
    size = 512
    buffer = ctypes.create_string_buffer(size)
    n = llama_cpp.llama_token_to_piece(vocabulary(llm), token, buffer, size, 0, False)
    return buffer.raw[: max(n, 0)]


def is_defined(llm: llama_cpp.Llama, token: int) -> bool:
    """Whether a token is read wherever its letters stand, as control tokens are not (llama.cpp's USER_DEFINED)."""
    attributes = llama_cpp.llama_vocab_get_attr(vocabulary(llm), token)
    return bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED)


def token_text(llm: llama_cpp.Llama, token: int) -> str:
    """A token as the vocabulary writes it, control tokens too; empty for -1, which means no token."""
    return str(llm._model.token_get_text(token)) if token != -1 else ""
