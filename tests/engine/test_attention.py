"""How a token and its twin attend: to blocks of cells, by heads or by tokens, with flash attention and without."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import TOKENS, Load, Tiny, check_rows

import pypcd
from pypcd import engine

TEXT = (TOKENS * 9)[:1000]
MODES: dict[str, dict[str, Any]] = {
    "rerotated": {"evaluation": "fused"},
    "shared": {"evaluation": "fused", "cache": "shared"},
    "separate": {"evaluation": "fused", "cache": "separate"},
    "separate-alternate": {"evaluation": "alternate", "cache": "separate"},
    "window": {"evaluation": "fused", "perturbation": "none", "window": 9, "n_sink": 3},
    "window-all": {"evaluation": "fused", "perturbation": "none", "window": 9, "n_sink": 0},
    "turned-window": {"evaluation": "fused", "window": 9, "n_sink": 3},
}
HEADS = {"one-key-head": {"n_head_kv": 1}, "pairs": {"n_head_kv": 2}, "each-its-own": {"n_head_kv": 4}}


MODELS: list[tuple[str, dict[str, Any], str]] = [
    *(("llama", {"n_head_kv": n}, mode) for mode in MODES for n in (1, 4)),
    ("llama", {"n_head_kv": 2}, "rerotated"),
    ("bloom", {}, "window"),
    ("gemma3", {}, "turned-window"),
    ("gemma2", {}, "shared"),
    ("qwen2vl", {}, "separate-alternate"),
]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize(("arch", "kwargs", "mode"), MODELS, ids=str)
def test_rows_are_the_references_on_both_sides_of_a_block(
    arch: str, kwargs: dict[str, Any], mode: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    """Attention ends with a block of 64 cells. Those behind it hold other tokens, which were forgotten; a window begins in
    a block of its own, far behind its first positions."""
    path = tiny(arch, **kwargs)
    llm = load(path, MODES[mode], n_ctx=1024, flash_attn=flash_attn)
    llm.eval(TEXT[::-1][:400])
    llm.reset()
    for first in (63, 64 * 5 - 1):
        llm.eval(TEXT[llm.n_tokens : first - 1])
        for n in range(first, first + 4):
            llm.eval(TEXT[n - 1 : n])
            check_rows(llm, path, TEXT[:n])


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cache", ["rerotated", "shared", "separate"])
def test_several_rows_of_a_batch_are_the_references(
    cache: str, heads: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    """Two tokens and their twins, then five: heads of a group are the rows of a product where they are more, else tokens."""
    path = tiny("llama", **HEADS[heads])
    llm = load(path, {"cache": cache}, flash_attn=flash_attn, logits_all=True)
    n = 60
    llm.eval(TEXT[:n])
    for more in (2, 5):
        llm.eval(TEXT[n : n + more])
        n += more
        check_rows(llm, path, TEXT[:n])


def n_nodes(llm: pypcd.Llama, pcd: Any) -> int:
    """Of the graph of a step far into a text."""
    llm.pcd = pcd
    llm.reset()
    llm.eval(TEXT[:900])
    with engine.watch_graphs(llm) as graphs:
        llm.eval(TEXT[900:901])
    return int(graphs[-1].n_nodes)


def test_flash_attention_on_the_cpu_needs_no_operation_for_a_window(tiny: Tiny, load: Load) -> None:
    """It passes over hidden cells: nothing is copied or split."""
    llm = load(tiny("llama"), None, n_ctx=1024, flash_attn=True)
    assert n_nodes(llm, pypcd.PCDConfig(**MODES["window"])) == n_nodes(llm, None)


def test_a_token_and_its_twin_on_the_same_keys_attend_in_two_products(tiny: Tiny, load: Load) -> None:
    """As many as a plain step, with four more views a layer, and a mask for all layers."""
    n_layer = 6
    llm = load(tiny("llama", n_layer=n_layer, n_head_kv=1), None, n_ctx=1024)
    hidden_from_none = pypcd.PCDConfig(perturbation="none", window=10**6, evaluation="fused")
    assert n_nodes(llm, hidden_from_none) <= n_nodes(llm, None) + 5 * n_layer + 6


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_with_as_many_operations_as_the_last_one_is_laid_out_anew(mode: str, tiny: Tiny, load: Load) -> None:
    """A prompt's graph may have as many as a step's, of other kinds: ggml would put results where the prompt's were."""
    path = tiny("llama", n_head_kv=4)
    llm = load(path, {**MODES[mode], "evaluation": "fused"})
    for more in (20, 1, 20, 2, 20, 1):
        llm.eval(TEXT[llm.n_tokens : llm.n_tokens + more])
        check_rows(llm, path, TEXT[: llm.n_tokens])
