"""Long use of one context: shifts and other settings, against a fresh evaluation, and the memory of the process."""

from __future__ import annotations

import os
import random
from pathlib import Path

import llama_cpp
import pytest
from conftest import SANITIZED, Load, Tiny, close, rounding


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is counted as Linux tells it")
@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("cache", ["rerotated", "shared"])
def test_a_context_in_long_use_gives_the_rows_of_a_fresh_one(
    cache: str, evaluation: str, tiny: Tiny, load: Load
) -> None:
    """With one layer keys do not depend on earlier tokens, so a fresh evaluation of the shifted text gives the same. Memory may grow during
    the first quarter, while buffers find their size."""
    path, rng, setting = tiny("llama", n_layer=1), random.Random(5), f"paper:cache={cache}:evaluation={evaluation}"
    llm, fresh, text, at_first = load(path, setting), load(path, setting), [1], 0
    memory = llama_cpp.llama_get_memory(llm.ctx)
    llm.eval(text)
    for step in range(1000):
        if len(text) > 240:  # as chat programs do: keep the beginning, drop a half, move the rest
            n = (len(text) - 8) // 2
            llama_cpp.llama_memory_seq_rm(memory, 0, 8, 8 + n)
            llama_cpp.llama_memory_seq_add(memory, 0, 8 + n, len(text), -n)
            text = text[:8] + text[8 + n :]
            llm.n_tokens = len(text)
        if step % 50 == 0:
            llm.pcd = rng.choice([False, "paper:alpha=0.4", setting])
        token = rng.randrange(3, 384)
        llm.eval([token])
        text.append(token)
        if step == 250:
            at_first = resident_bytes()
        if step % 250 == 249:
            llm.pcd = setting
            llm.eval([7])
            text.append(7)
            fresh.reset()
            fresh.eval(text)
            got, wanted = llm.pcd_logits(), fresh.pcd_logits()
            close(got.standard, wanted.standard, rounding(path))
            close(got.local, wanted.local, rounding(path))
            assert abs(got.standard - got.local).max() > 0.05
    assert SANITIZED or resident_bytes() - at_first < 8 << 20
