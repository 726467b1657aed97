"""The contrast as a sampler, in chains built by callers."""

from __future__ import annotations

import itertools
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import OK, decode_batch, set_seq
from conftest import TOKENS, Load, Tiny, follow, native_row

import pypcd
from pypcd import engine
from pypcd.engine import _bindings as _native


def chain_of(*samplers: Any) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


def decode_with(llm: pypcd.Llama, chain: Any, prompt: list[int], n: int) -> list[int]:
    """Greedy decoding by a caller with llama_decode and a sampler chain."""
    tokens = [*prompt]
    llm.eval(prompt)
    for _ in range(n):
        tokens.append(llama_cpp.llama_sampler_sample(chain, llm.ctx, -1))
        llm.eval(tokens[-1:])
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"relative_top": 0.5, "evaluation": "alternate"},
        {"cache": "shared", "min_entropy": 5.5},
        {"min_context": 50},
    ],
    ids=str,
)
def test_the_sampler_chooses_the_tokens_of_a_contrasting_context(
    setting: dict[str, Any], tiny: Tiny, load: Load
) -> None:
    path = tiny("llama")
    wanted = list(itertools.islice(load(path, setting).generate(TOKENS[:40], temp=0), 20))
    llm = load(path, setting)
    chain = chain_of(pypcd.pcd_sampler(llm), llama_cpp.llama_sampler_init_greedy())
    assert decode_with(llm, chain, TOKENS[:40], 20) == wanted
    copy = llama_cpp.llama_sampler_clone(chain)
    llama_cpp.llama_sampler_free(chain)
    llm.reset()
    assert decode_with(llm, copy, TOKENS[:40], 20) == wanted
    llama_cpp.llama_sampler_free(copy)


@pytest.mark.parametrize("setting", ["paper", {"beta": 1}], ids=["same", "other"])
def test_the_context_leaves_its_rows_plain_until_pcd_is_assigned_anew(setting: Any, tiny: Tiny, load: Load) -> None:
    """To the same setting or another one. Generation refuses to be plain meanwhile, but a call may have its own setting."""
    llm = load(tiny("llama"), "paper")
    llama_cpp.llama_sampler_free(pypcd.pcd_sampler(llm))
    with pytest.raises(pypcd.PCDError, match="assign llm.pcd again"):
        next(llm.generate(TOKENS[:5]))
    next(llm.generate(TOKENS[:5], pcd={"beta": 1}))
    llm.reset()
    llm.eval(TOKENS[:40])
    assert np.array_equal(native_row(llm), llm.pcd_logits().standard)
    llm.pcd = setting
    follow(llm, tiny("llama"), TOKENS, 41)  # which looks at what a caller sees
    next(llm.generate(TOKENS[:5]))


def test_without_pcd_there_is_no_sampler(tiny: Tiny, load: Load) -> None:
    with pytest.raises(pypcd.PCDError, match="turn PCD on first, such as llm.pcd"):
        pypcd.pcd_sampler(load(tiny("llama"), False))


def test_a_sampler_without_a_row_samples_no_token_and_says_so(tiny: Tiny, load: Load) -> None:
    """Its sequence has PCD off, or its logits were not asked for: plain logits would pass for contrasted ones."""
    llm = load(tiny("llama"), "paper", n_seq_max=2)
    assert set_seq(llm, 1, None) == OK
    entries = [(token, i, seq, i == 9) for seq in range(2) for i, token in enumerate(TOKENS[:10])]
    for row, message in ((-1, "row -1"), (19, "row 19"), (3, "row 3"), (-5, "row -5"), (9, None), (-2, None)):
        others = llama_cpp.llama_sampler_init_top_k(5), llama_cpp.llama_sampler_init_temp(0.7)
        for last in (greedy := llama_cpp.llama_sampler_init_greedy(), llama_cpp.llama_sampler_init_dist(1)):
            chain = chain_of(pypcd.pcd_sampler(llm, row), *map(llama_cpp.llama_sampler_clone, others), last)
            assert engine.decode(llm, entries)
            engine.clear_errors()
            logits = 9 if row in (3, -5) else row  # llama.cpp itself refuses to sample from what was not asked for
            token = llama_cpp.llama_sampler_sample(chain, llm.ctx, logits)
            if message is None:
                row_9 = llm.pcd_logits(9).contrasted
                assert np.isfinite(row_9[token]) and not engine.last_errors()
                assert token == row_9.argmax() or last is not greedy
            else:
                assert token == llama_cpp.LLAMA_TOKEN_NULL
                assert f"{message} of the last batch has no contrast to sample from" in engine.last_errors()
            llama_cpp.llama_sampler_free(chain)
            engine.clear(llm)
            assert set_seq(llm, 1, None) == OK
        for sampler in others:
            llama_cpp.llama_sampler_free(sampler)
    llm.reset()
    with pytest.raises(pypcd.PCDError, match="llama_decode returned -1"):
        llm.eval([llama_cpp.LLAMA_TOKEN_NULL])


def test_one_sequence_may_leave_its_contrast_to_a_sampler(native: Any) -> None:
    context = native("llama", {}, n_seq_max=2)
    assert set_seq(context, 1, {"combine": False})[0] == 0
    batch = [(t, p, [s], p == 9) for s in range(2) for p, t in enumerate(TOKENS[:10])]
    assert decode_batch(context, batch) == 0
    for row in (9, 19, -1, -2):
        sampler = _native.sampler_init_pcd(context.ctx)
        _native.sampler_pcd_set_row(sampler, row)
        chain = chain_of(sampler, llama_cpp.llama_sampler_init_greedy())
        engine.clear_errors()
        contrasted = _native.pcd_get_logits_ith(context.ctx, row, _native.ROW_CONTRASTED)
        wanted = np.ctypeslib.as_array(contrasted, shape=(context.n_vocab,)).argmax()
        assert llama_cpp.llama_sampler_sample(chain, context.ctx, row) == wanted
        already = row in (9, -2)
        assert (f"the context has contrasted row {row} already" in (engine.last_errors() or "")) == already
        llama_cpp.llama_sampler_free(chain)
