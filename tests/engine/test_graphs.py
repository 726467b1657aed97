"""Graphs of steps: how often one is used again, and what it copies."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import TOKENS
from steps import fill_cells, graph_stats, timed_steps
from test_masks import SETTINGS

import pypcd


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Any:
    llm = pypcd.Llama(str(tiny("llama")), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("name", [None, *SETTINGS])
def test_a_graph_is_used_again_until_a_block_of_cells_is_full(name: str | None, llm: Any) -> None:
    llm.pcd = None if name is None else pypcd.PCDConfig(**SETTINGS[name]).repeatable()
    fill_cells(llm, 400)
    steps = timed_steps(llm, TOKENS[:120])[2:]
    assert all(step.n_graphs == 1 for step in steps)
    crossed = [i for i, step in enumerate(steps, 402) if not step.n_reused]
    window = SETTINGS[name].get("window", 0) if name else 0
    block = 64 if name else 256  # llama.cpp's own is 256; with twins, on the CPU, attention ends with a smaller one
    blocks = {
        i
        for i in range(402, 520)
        if i // block != (i - 1) // block or (window and (i - window) // block != (i - window - 1) // block)
    }
    assert len(crossed) <= len(blocks) + 1 and all(min(abs(i - b) for b in blocks) <= 2 for i in crossed), (
        crossed,
        blocks,
    )


def test_a_twin_adds_a_row_to_what_is_copied(llm: Any) -> None:
    stats = {}
    for name in (None, "shared"):
        llm.pcd = None if name is None else pypcd.PCDConfig(**SETTINGS[name]).repeatable()
        fill_cells(llm, 300)
        timed_steps(llm, TOKENS[:2])
        stats[name] = graph_stats(llm)
    plain, twin = stats[None], stats["shared"]
    assert plain.bytes_out == 4 * llm.n_vocab() and twin.bytes_out == 2 * plain.bytes_out
    assert twin.n_nodes > plain.n_nodes and twin.n_splits == plain.n_splits == 1
    assert plain.bytes_in < twin.bytes_in < 3 * plain.bytes_in
