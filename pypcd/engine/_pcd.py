"""PCD in a context: putting a setting in force, the logits behind a contrast, and the contrast as a sampler.

The twin of a token is the same token evaluated a second time, in a sequence of its own; its logits are L*.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.config import PCDConfig
from pypcd.engine import _bindings
from pypcd.engine._calls import ask, call, context
from pypcd.errors import InputError, PCDError, UnsupportedError, rename
from pypcd.fields import FIELDS

__all__ = [
    "N_SEQUENCES",
    "PCDLogits",
    "PCDStats",
    "begin_answer",
    "in_force",
    "init_sampler",
    "native_params",
    "pcd_logits",
    "pcd_refusal",
    "pcd_stats",
    "set_pcd",
    "set_sequence_pcd",
    "set_tokens",
    "suspended",
    "trim_pcd",
    "unset_sequence_pcd",
]

N_SEQUENCES = 192  # sequences for callers; higher ids are for twins


@dataclasses.dataclass(frozen=True)
class PCDLogits:
    """The logits behind one contrasted distribution, each float32[n_vocab].

    Attributes:
        standard: L.
        local: L*, the twin's; None if it could not change the result and was not evaluated.
        contrasted: L~ (Eq. 6), -inf outside the plausible tokens; L where a floor leaves the token plain.
        beta: the strength of this contrast, PCDConfig.beta or what `adaptive` made of it; None if nothing was contrasted,
            since only one token is plausible, or a floor (min_context, min_entropy, min_first_entropy) leaves it plain.
    """

    standard: npt.NDArray[np.float32]
    local: npt.NDArray[np.float32] | None
    contrasted: npt.NDArray[np.float32]
    beta: float | None = None


@dataclasses.dataclass(frozen=True)
class PCDStats:
    """What PCD has done in a context so far. Second keys and values are those that only twins see (PCDConfig.cache).

    Attributes:
        n_tokens: tokens whose logits were requested while PCD was on.
        n_twins: twins evaluated for them.
        n_skipped: twins that were not needed, since only one token was plausible, or a floor (min_context, min_entropy,
            min_first_entropy) left the token plain.
        n_derived: how many times the second keys were computed again from the first.
        n_caught_up: tokens whose second keys and values were evaluated later than the token (cache="separate").
        second_bytes: memory of the second keys and values.
        kv_bytes: memory of the model's own keys and values.
        n_derived_cells: of how many tokens, counted in each cache; a model with sliding-window layers has two caches.
        n_fused: batches that were evaluated together with their twins, as evaluation="fused" asks. A batch that was
            evaluated in parts counts once for each part, here and below.
        n_alternate: batches whose twins were evaluated after them, as evaluation="alternate" asks.
        n_sequential: batches whose twins were evaluated one at a time, each before its token.
        n_separate: batches evaluated with cache="separate".
        n_fallbacks: how many of all these were evaluated in another way than `evaluation` asks for.
        last_fallback: why the last of them was, in a sentence; empty if there was none.
        state_bytes: memory of the states that recurrent layers of hybrid models keep for twins.
        graph_bytes: compute memory of the graphs of twins that are evaluated after their tokens.
        row_bytes: memory of the rows L, L* and L~ of the last evaluation; freed by the next one, if that is plain.
        n_constrained: answers of generate() that were left plain since they are under a grammar, a JSON schema or a forced tool,
            and their call did not ask for PCD.
    """

    n_tokens: int
    n_twins: int
    n_skipped: int
    n_derived: int
    n_caught_up: int
    second_bytes: int
    kv_bytes: int
    n_derived_cells: int
    n_fused: int
    n_alternate: int
    n_sequential: int
    n_separate: int
    n_fallbacks: int
    last_fallback: str
    state_bytes: int
    graph_bytes: int
    row_bytes: int
    n_constrained: int = 0


rename(PCDLogits, {"over_rotated": "local"})
rename(PCDStats, {"n_streams": "n_separate"})


# -- the setting -----------------------------------------------------------------------------------------------------


def native_params(config: PCDConfig, *, combine: bool = True) -> _bindings.Params:
    """A setting as the library's struct; combine=False leaves the contrast to a sampler."""
    params = _bindings.Params(combine=combine)
    for field in FIELDS.values():
        setattr(params, field.name, field.to_number(getattr(config, field.name)))
    return params


def set_pcd(llm: llama_cpp.Llama, config: PCDConfig | None, *, combine: bool = True) -> str | None:
    """Put a setting in force, or (None) turn PCD off.

    Returns:
        None; or why PCD stays off, if an environment variable turns it off.

    Raises:
        ValueError: a value is out of range.
        UnsupportedError: this model or context cannot run it, or there is no memory for it; the previous setting stays.
        PCDError: the model is closed.
    """
    params = None if config is None else ctypes.byref(native_params(config, combine=combine))
    status, text = ask(_bindings.pcd_set, llm, params)
    if status == _bindings.DISABLED:
        return text
    if status == _bindings.INVALID:
        raise InputError(text)
    if status != _bindings.OK:
        assert config is not None  # turning PCD off cannot fail
        raise UnsupportedError(f"PCD ({config.describe()}) cannot run here: {text}")
    return None


def trim_pcd(llm: llama_cpp.Llama) -> None:
    """Free the second keys and values that the setting in force does not need: all of them while PCD is off."""
    _bindings.pcd_trim(context(llm))


def pcd_refusal(llm: llama_cpp.Llama, config: PCDConfig | None) -> str | None:
    """Why a model or context cannot run a setting, in a sentence; None if it can. Nothing changes; memory is not asked for."""
    if config is None:
        return None
    status, text = ask(_bindings.pcd_check, llm, ctypes.byref(native_params(config)))
    return None if status == _bindings.OK else text


def _numbers(params: _bindings.Params) -> list[float]:
    return [getattr(params, field.name) for field in FIELDS.values()]


def in_force(llm: llama_cpp.Llama, *known: PCDConfig | None) -> tuple[PCDConfig | None, bool]:
    """What the library has in force: the setting, None while PCD is off, and whether rows are contrasted (or left to a
    sampler). If it is one of `known`, that one is returned, since the library has floats of 32 bits."""
    params = _bindings.Params()
    if not _bindings.pcd_get(context(llm), ctypes.byref(params)):
        return None, True
    for config in known:
        if config is not None and _numbers(native_params(config)) == _numbers(params):
            return config, params.combine
    values = {field.name: field.to_value(getattr(params, field.name)) for field in FIELDS.values()}
    floats = {name: float(str(np.float32(value))) for name, value in values.items() if isinstance(value, float)}
    return PCDConfig(**{**values, **floats}), params.combine


@contextlib.contextmanager
def suspended(llm: llama_cpp.Llama) -> Iterator[None]:
    """A block without twins, for the parts of a prompt whose logits are not read."""
    _bindings.pcd_suspend(context(llm), True)
    try:
        yield
    finally:
        _bindings.pcd_suspend(context(llm), False)


def set_sequence_pcd(llm: llama_cpp.Llama, seq_id: int, config: PCDConfig | None) -> None:
    """Give one sequence a setting of its own, or (None) no twins for its tokens. See cpp/llama-pcd.h for the rules.

    Raises:
        ValueError: the setting has a value that only the context can change.
        UnsupportedError: the sequence has a backend sampler.
        PCDError: the model is closed.
    """
    call(_bindings.pcd_set_seq, llm, seq_id, None if config is None else ctypes.byref(native_params(config)))


def unset_sequence_pcd(llm: llama_cpp.Llama, seq_id: int) -> None:
    """Let a sequence follow its context's setting again."""
    _bindings.pcd_unset_seq(context(llm), seq_id)


def begin_answer(llm: llama_cpp.Llama, pos: int, seq_id: int = 0) -> None:
    """Tell the library that an answer begins at this position, where the rows of a prompt are asked for too
    (min_first_entropy)."""
    _bindings.pcd_begin(context(llm), seq_id, pos)


def set_tokens(llm: llama_cpp.Llama, tokens: Sequence[int], seq_id: int = 0) -> None:
    """Tell the library the tokens of a sequence: a saved state does not have them, and cache="separate" needs them."""
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    _bindings.pcd_set_tokens(context(llm), seq_id, array, len(tokens))


# -- looking inside --------------------------------------------------------------------------------------------------


def pcd_logits(llm: llama_cpp.Llama, i: int) -> PCDLogits:
    """The logits of entry i of the last batch, before and after the contrast, copied.

    Raises:
        PCDError: the last evaluation was without PCD, or there was none.
    """
    standard, local, contrasted = (
        _row(llm, i, which) for which in (_bindings.ROW_STANDARD, _bindings.ROW_LOCAL, _bindings.ROW_CONTRASTED)
    )
    if standard is None or contrasted is None:
        raise PCDError(
            f"there are no PCD logits for row {i}: evaluate tokens first, with pcd=True; of a batch, only tokens whose "
            "logits were requested have them"
        )
    beta = float(_bindings.pcd_get_strength_ith(context(llm), i))
    return PCDLogits(standard, local, contrasted, None if math.isnan(beta) else beta)


def _row(llm: llama_cpp.Llama, i: int, which: int) -> npt.NDArray[np.float32] | None:
    pointer = _bindings.pcd_get_logits_ith(context(llm), i, which)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy() if pointer else None


def pcd_stats(llm: llama_cpp.Llama) -> PCDStats:
    stats = _bindings.pcd_get_stats(context(llm))
    values = {name: getattr(stats, name) for name, *_ in _bindings.Stats._fields_}
    values["last_fallback"] = _bindings.pcd_fallback_text(stats.last_fallback).decode()
    return PCDStats(**values)


def init_sampler(llm: llama_cpp.Llama, row: int) -> Any:
    """A llama_sampler that contrasts the candidates of a row; a chain that it is added to owns it."""
    sampler = _bindings.sampler_init_pcd(context(llm))
    _bindings.sampler_pcd_set_row(sampler, row)
    return sampler
