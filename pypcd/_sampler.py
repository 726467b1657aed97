"""PCD as a llama.cpp sampler, for callers who build their own sampler chain."""

from __future__ import annotations

import ctypes
from typing import Any

from pypcd import _llama, _native
from pypcd._errors import PCDError

__all__ = ["pcd_sampler"]


def pcd_sampler(llm: _llama.Llama, row: int = -1) -> Any:
    """A `llama_sampler *` that contrasts the candidates; add it first to a chain, which then owns it.

    From here on the context leaves its standard logits in place, so that the contrast is applied once, by the sampler.
    Assigning `llm.pcd` anew gives the work back to the context.

    Args:
        llm: a model with PCD on.
        row: the logits row the chain will sample from: its index in the batch, or negative, from the end.

    Returns:
        The sampler, as llama_cpp.llama_sampler_chain_add takes it.

    Raises:
        PCDError: PCD is off.
    """
    if llm.pcd is None:
        raise PCDError("a PCD sampler needs the over-rotated logits; set llm.pcd = True first")
    params = _llama._native_params(llm.pcd)
    params.combine = False
    error = ctypes.create_string_buffer(1024)
    if _native.pcd_set(llm._ctx.ctx, ctypes.byref(params), error, len(error)) != _native.OK:
        raise PCDError(error.value.decode())
    llm._combines = False
    llm._requires_eval = True
    sampler = _native.sampler_init_pcd(llm._ctx.ctx)
    _native.sampler_pcd_set_row(sampler, row)
    return sampler
