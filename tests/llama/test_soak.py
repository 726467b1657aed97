"""Long use of one context: shifts, prefixes reused, settings changed. scripts/soak runs it ten times as long."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import SANITIZED, Load, Tiny, close, rounding

import pypcd

N_TOKENS = int(os.environ.get("PYPCD_SOAK_TOKENS", "1000"))
CHECK_EVERY = 250


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def same_rows_afresh(llm: pypcd.Llama, fresh: pypcd.Llama, text: list[int], limit: float) -> None:
    fresh.pcd = llm.pcd
    fresh.reset()
    fresh._ctx.kv_cache_clear()
    fresh.eval(text)
    got, wanted = llm.pcd_logits(), fresh.pcd_logits()
    close(got.standard, wanted.standard, limit)
    assert got.local is not None and wanted.local is not None
    close(got.local, wanted.local, limit)
    assert np.abs(got.standard - got.local).max() > 0.05


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("cache", ["rerotated", "shared"])
def test_a_context_in_long_use_gives_the_rows_of_a_fresh_one(
    cache: str, evaluation: str, tiny: Tiny, load: Load
) -> None:
    """With one layer keys do not depend on earlier tokens, so a fresh evaluation of the shifted text gives the same.

    Memory may grow during the first quarter, while buffers find their size; after that it may not."""
    path, rng = tiny("llama", n_layer=1), random.Random(5)
    setting: dict[str, Any] = {"cache": cache, "evaluation": evaluation}
    llm, fresh = load(path, setting), load(path, setting)
    memory, text, at_first = llama_cpp.llama_get_memory(llm.ctx), [1], 0

    llm.eval(text)
    for step in range(1, N_TOKENS + 1):
        dice = rng.random()
        if len(text) > 240:  # as chat programs do: keep the beginning, drop a half, move the rest
            n_drop = (len(text) - 8) // 2
            llama_cpp.llama_memory_seq_rm(memory, 0, 8, 8 + n_drop)
            llama_cpp.llama_memory_seq_add(memory, 0, 8 + n_drop, len(text), -n_drop)
            text = text[:8] + text[8 + n_drop :]
            llm.n_tokens = len(text)
        elif dice < 0.005:  # another prompt with the same beginning
            text = text[: rng.randrange(1, len(text) + 1)]
            llm.n_tokens = len(text)
            more = [rng.randrange(3, 384) for _ in range(rng.randrange(1, 40))]
            llm.eval(more[: 250 - len(text)])
            text += more[: 250 - len(text)]
        elif dice < 0.01:  # one answer without PCD, or with another setting
            llm.pcd = rng.choice([False, "paper:alpha=0.4", "paper:cache=shared"])
        elif dice < 0.05:
            llm.pcd = pypcd.PCDConfig(**{**setting, "alpha": 0.2})
        token = rng.randrange(3, 384)
        llm.eval([token])
        text.append(token)
        if step % CHECK_EVERY == 0:
            llm.pcd = pypcd.PCDConfig(**{**setting, "alpha": 0.2})
            llm.eval([7])
            text.append(7)
            same_rows_afresh(llm, fresh, text, rounding(path))
        if step == N_TOKENS // 4:
            at_first = resident_bytes()
    assert SANITIZED or resident_bytes() - at_first < 8 * 2**20
