"""PCD in a context by pypcd's own libllama (cpp/llama-pcd.h): llama_decode itself evaluates twins and contrasts rows."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _bindings
from pypcd.engine._calls import ask, context
from pypcd.engine._results import PCDLogits, PCDStats
from pypcd.errors import InputError, UnsupportedError
from pypcd.settings.config import PCDConfig
from pypcd.settings.fields import FIELDS

__all__ = ["Native", "native_params", "needs"]


def needs(config: PCDConfig) -> str | None:
    """What of a setting only the engine "stock" can do, in a few words; None if the native one can do it all."""
    return 'cache="separate"' if config.cache == "separate" else None


def native_params(config: PCDConfig, *, combine: bool = True) -> _bindings.Params:
    """A setting as the library's struct; combine=False leaves the contrast to a sampler."""
    params = _bindings.Params(combine=combine)
    for field in FIELDS.values():
        setattr(params, field.name, field.to_number(getattr(config, field.name)))
    return params


class Native:
    """PCD in the context of one model. It has no state of its own: the library has it all. Stock has the same functions.

    A closed model raises PCDError.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm

    def set(self, config: PCDConfig | None, combine: bool = True) -> str | None:
        """Put a setting in force, or (None) turn PCD off.

        Args:
            combine: False leaves the contrast to a sampler.

        Returns:
            None; or why PCD stays off, if an environment variable turns it off.

        Raises:
            ValueError: a value is out of range.
            UnsupportedError: this model or context cannot run it, or there is no memory for it; the previous setting stays.
        """
        params = None if config is None else ctypes.byref(native_params(config, combine=combine))
        status, text = ask(_bindings.pcd_set, self._llm, params)
        if status == _bindings.DISABLED:
            return text
        if status == _bindings.INVALID:
            raise InputError(text)
        if status != _bindings.OK:
            assert config is not None  # turning PCD off cannot fail
            raise UnsupportedError(f"PCD ({config.describe()}) cannot run here: {text}")
        return None

    def trim(self) -> None:
        """Free the second keys that the setting in force does not need: all of them while PCD is off."""
        _bindings.pcd_trim(context(self._llm))

    def refusal(self, config: PCDConfig) -> str | None:
        """Why this model or context cannot run a setting, in a sentence; None if it can. Nothing changes; memory is not asked for."""
        status, text = ask(_bindings.pcd_check, self._llm, ctypes.byref(native_params(config)))
        return None if status == _bindings.OK else text

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A block without twins, for the parts of a prompt whose logits are not read."""
        _bindings.pcd_suspend(context(self._llm), True)
        try:
            yield
        finally:
            _bindings.pcd_suspend(context(self._llm), False)

    def begin_answer(self, pos: int, seq_id: int = 0) -> None:
        """An answer begins at this position, where the rows of a prompt are asked for too (min_first_entropy)."""
        _bindings.pcd_begin(context(self._llm), seq_id, pos)

    def set_tokens(self, tokens: Sequence[int], seq_id: int = 0) -> None:
        """The tokens of a sequence that was restored: a saved state does not have them, nor where an answer began. Only Stock needs them."""

    def logits(self, i: int) -> PCDLogits | None:
        """The logits of entry i of the last batch, before and after the contrast, in memory that the next evaluation overwrites; None if
        that was without PCD, or the entry's logits were not requested."""
        standard, local, contrasted = (
            self._row(i, which) for which in (_bindings.ROW_STANDARD, _bindings.ROW_LOCAL, _bindings.ROW_CONTRASTED)
        )
        if standard is None or contrasted is None:
            return None
        beta = float(_bindings.pcd_get_strength_ith(context(self._llm), i))
        return PCDLogits(standard, local, contrasted, None if math.isnan(beta) else beta)

    def _row(self, i: int, which: int) -> npt.NDArray[np.float32] | None:
        pointer = _bindings.pcd_get_logits_ith(context(self._llm), i, which)
        return np.ctypeslib.as_array(pointer, shape=(self._llm.n_vocab(),)) if pointer else None

    def stats(self) -> PCDStats:
        """What PCD has done in this context so far."""
        stats = _bindings.pcd_get_stats(context(self._llm))
        values = {name: getattr(stats, name) for name, *_ in _bindings.Stats._fields_}
        values["last_fallback"] = _bindings.pcd_fallback_text(stats.last_fallback).decode()
        return PCDStats(**values)

    def init_sampler(self, row: int) -> Any:
        """A llama_sampler that contrasts the candidates of a row; a chain that it is added to owns it.

        Raises:
            UnsupportedError: the engine is "stock".
        """
        sampler = _bindings.sampler_init_pcd(context(self._llm))
        _bindings.sampler_pcd_set_row(sampler, row)
        return sampler
