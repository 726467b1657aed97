"""PCD with and without the KV cache gives the same rows, and the check would notice if it did not."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TOKENS, rounding

import pypcd
from pypcd.decode import Session
from research.nocache import METHODS, check_cache


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_the_cache_changes_nothing(arch: str, tiny, load) -> None:
    path = tiny(arch)
    llm = load(path, pcd=None, n_ctx=256)
    results = check_cache(llm, [TOKENS[:90], TOKENS[:7]], n_tokens=3)
    assert [r.method for r in results] == list(METHODS)
    for r in results:
        assert r.refusal is None and r.n_steps <= 6 and r.is_same, r
        assert r.standard < rounding(path), r
        if r.method == "greedy":
            assert r.local is None and r.effect is None
        else:
            assert r.local < rounding(path) and r.effect > 100 * r.local, r
    assert llm.pcd is None


def test_a_broken_cache_is_noticed(tiny, load, monkeypatch) -> None:
    llm = load(tiny("llama"), pcd=None, n_ctx=256)
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self, tokens: step(self, {s: t ^ 1 for s, t in tokens.items()}))
    [result] = check_cache(llm, [TOKENS[:30]], {"pcd": pypcd.PCDConfig()}, n_tokens=4)
    assert result.standard > 0.1 and result.local > 0.1


def test_a_method_that_a_model_cannot_run_is_named(tiny, load) -> None:
    llm = load(tiny("bloom"), pcd=None, n_ctx=256)
    by_name = {r.method: r for r in check_cache(llm, [TOKENS[:20]], n_tokens=2)}
    assert "bloom" in by_name["pcd"].refusal and by_name["pcd"].n_steps == 0
    assert by_name["pcd:window"].refusal is None and by_name["pcd:window"].is_same


def test_wrong_arguments(tiny, load) -> None:
    llm = load(tiny("llama"), pcd=None, n_ctx=256)
    with pytest.raises(ValueError, match="there are no prompts"):
        check_cache(llm, [])
    with pytest.raises(ValueError, match="255 tokens and 4 steps"):
        check_cache(llm, [np.ones(255, int).tolist()])
