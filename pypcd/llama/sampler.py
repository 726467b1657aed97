"""PCD as a llama.cpp sampler, for a sampler chain of your own."""

from __future__ import annotations

from typing import Any

from pypcd import engine, llama
from pypcd.errors import PCDError

__all__ = ["pcd_sampler"]


def pcd_sampler(llm: llama.Llama, row: int = -1) -> Any:
    """A `llama_sampler *` that contrasts the candidates; add it first to a chain, which then owns it.

    From now on the context keeps its standard logits, so that the contrast is applied once, by the sampler.
    llm.generate(), and everything built on it, raises PCDError until `llm.pcd` is assigned again, which gives the
    contrast back to the context.

    A sampler cannot raise an exception. Where the row has no contrast (PCD is off for its sequence, or its logits were
    not requested), the chain samples the token -1, llama.cpp's "no token", and the log says why. llama_decode refuses
    that token, so llm.eval([-1]) raises PCDError. With PCD off for the whole model the sampler changes nothing.

    Args:
        llm: a model with PCD on.
        row: which logits the chain will sample from, as llama_sampler_sample takes it: their token's index in the batch,
            or negative, counted back over those requested.

    Returns:
        The sampler, as llama_cpp.llama_sampler_chain_add takes it.

    Raises:
        PCDError: PCD is off.
        UnsupportedError: the engine is the stock one.
    """
    if llm.pcd is None:
        raise PCDError('a PCD sampler needs the local pass; turn PCD on first, such as llm.pcd = "unsure"')
    llm._apply(llm.pcd, combine=False)
    return engine.pcd(llm).init_sampler(row)
