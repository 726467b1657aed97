"""The engine against the float64 reference (both rows, in every mode), against stock llama.cpp, and against itself; and how a token
and its twin attend: to blocks of cells, by heads or by tokens, with flash attention and without."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import CACHES, EVALUATIONS
from conftest import (
    TOKENS,
    Load,
    Tiny,
    check_contrast,
    check_rows,
    close,
    contrasted,
    expected,
    follow,
    native_row,
    rounding,
    tolerance,
)
from tiny_gguf import ATTENTION_ARCHS, HYBRID_ARCHS, ROPE_ARCHS

import pypcd
from pypcd import engine

LAST = len(TOKENS) - 1
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_freqs": ("llama", {"rope_freqs": (1, 2, 3, 4, 5, 6, 7, 8)}),
    "yarn": ("llama", {"yarn": (4.0, 64)}),
    "yarn-neox": ("qwen2", {"yarn": (4.0, 64)}),
    "linear": ("qwen2", {"linear_scale": 4.0}),
    "linear-swa": ("gemma3", {"linear_scale": 4.0, "rope_freq_base": 1e6}),
    "linear-swa2": ("gemma2", {"linear_scale": 4.0, "sliding_window": 40}),
    "one-key-head": ("llama", {"n_head_kv": 1}),
    "seed": ("llama", {"seed": 5, "n_layer": 5}),
}

# --- both rows, in every mode ---

# which hide the middle from the twin
WINDOWS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"window": 20}) for name in (*ROPE_ARCHS, *HYBRID_ARCHS, *SCALED)),
    *((arch, {"perturbation": "none", "window": 10, "n_sink": 3}) for arch in ATTENTION_ARCHS),
    *(
        (arch, setting)
        for arch in ("llama", "gemma3")
        for setting in (
            {"window": 20, "cache": "shared"},
            {"window": 1, "n_sink": 1},
            {"window": 7, "n_sink": 0, "cache": "shared"},
            {"window": 500},
            {"window": 3, "n_sink": 0, "perturbation": "none"},
        )
    ),
]
ROWS: list[tuple[str, dict[str, Any], bool]] = [
    *((name, {"cache": cache}, False) for name in (*ROPE_ARCHS, *SCALED) for cache in CACHES),
    *((name, setting, flash_attn) for name, setting in WINDOWS for flash_attn in (False, True)),
]


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(("name", "setting", "flash_attn"), ROWS, ids=str)
def test_both_rows_are_the_references(
    name: str, setting: dict[str, Any], flash_attn: bool, evaluation: str, tiny: Tiny, load: Load
) -> None:
    """After a prompt of four batches, and after each of two single tokens that follow it. A model's own frequencies are
    multiplied, not replaced."""
    arch, kwargs = SCALED.get(name, (name, {}))
    path = tiny(arch, **kwargs)
    llm = load(path, {**setting, "evaluation": evaluation}, n_batch=32, flash_attn=flash_attn)
    follow(llm, path, TOKENS, 118, 119, 120, moved=0.0 if setting.get("window") == 500 else 0.05)


CONTEXT = {"rope_freq_base": 500.0, "rope_freq_scale": 0.5}
ROTATIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((arch, {}, CONTEXT) for arch in ("llama", "qwen2", "gemma3")),  # a base and a scale that the user sets
    *(
        ("qwen3", {"alpha": alpha, "base_ratio": base_ratio}, {})
        for alpha, base_ratio in ((0.05, 1e-4), (0.2, 0.5), (0.69, 1e-6), (2.0, 0.01), (10.0, 0.9))
    ),
    *((arch, {"transition": "none", "base_ratio": 0.01}, {}) for arch in ("llama", "stablelm", "gemma2")),
]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("arch", "setting", "context"), ROTATIONS, ids=str)
def test_any_rotation_is_the_references(
    arch: str, setting: dict[str, Any], context: dict[str, Any], cache: str, tiny: Tiny, load: Load
) -> None:
    llm = load(tiny(arch), {**setting, "cache": cache}, **context)
    follow(llm, tiny(arch), TOKENS, len(TOKENS), moved=0.01, **context)


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"cache": "shared"},
        {"perturbation": "none", "window": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", HYBRID_ARCHS)
def test_beside_recurrent_layers_a_twin_goes_on_from_their_state_before_its_token(
    arch: str, setting: dict[str, Any], evaluation: str, tiny: Tiny, load: Load
) -> None:
    """And leaves that state as it was for the token."""
    path = tiny(arch)
    llm = load(path, {**setting, "evaluation": evaluation}, n_batch=32)
    follow(llm, path, TOKENS, 100, 101, 102, 103)
    llm.pcd = False
    llm.eval(TOKENS[103:105])
    llm.pcd = pypcd.PCDConfig(**setting)
    follow(llm, path, TOKENS, 110)
    every = load(path, {**setting, "evaluation": evaluation}, logits_all=True)
    every.eval(TOKENS[:40])
    for row in (20, 30, 39):
        check_rows(every, path, TOKENS, row, row)


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("n_ubatch", [16, 128])
@pytest.mark.parametrize(
    ("arch", "cache"), [("llama", "rerotated"), ("llama", "shared"), ("qwen2vl", "rerotated"), ("gemma3", "rerotated")]
)
def test_every_row_of_a_batch_has_its_twin_and_no_twin_sees_another(
    arch: str, cache: str, n_ubatch: int, evaluation: str, tiny: Tiny, load: Load
) -> None:
    """100 rows: more than the 64 twins of a pass, and (16) more than an ubatch; 20: all in one pass."""
    llm = load(tiny(arch), {"cache": cache, "evaluation": evaluation}, logits_all=True, n_batch=128, n_ubatch=n_ubatch)
    for start, stop in ((0, 20), (20, 120)):
        llm.eval(TOKENS[start:stop])
        for row in sorted({*range(0, stop - start, 9), stop - start - 1}):
            check_rows(llm, tiny(arch), TOKENS, row, start + row)
            assert np.array_equal(llm.scores[start + row], native_row(llm, row))
    assert llm.pcd_stats().n_twins == llm.pcd_stats().n_tokens == 120


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(512, 16), (240, 240), (48, 16)])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(
    ("arch", "setting"),
    [
        ("gemma3", {}),
        ("gemma2", {"cache": "shared"}),
        ("gemma3", {"window": 20}),
        ("gemma2", {"perturbation": "none", "window": 7, "n_sink": 0}),
    ],
    ids=str,
)
def test_rows_far_apart_keep_their_own_view_of_a_short_sliding_cache(
    arch: str, setting: dict[str, Any], evaluation: str, n_batch: int, n_ubatch: int, tiny: Tiny, load: Load
) -> None:
    """256 cells with a window of 16, which 720 tokens overwrite: when the last ubatch of a batch is stored, the first tokens'
    window is gone. Then two steps."""
    tokens, first = (TOKENS * 7)[:722], 720 - n_batch
    size: dict[str, Any] = {"n_ctx": 1024, "n_batch": n_batch, "n_ubatch": n_ubatch}
    llm = load(tiny(arch), {**setting, "evaluation": evaluation}, **size, swa_full=False, logits_all=True)
    llm.eval(tokens[:first])
    llm.eval(tokens[first:720])
    for row in range(0, n_batch, max(5, n_batch // 8)):
        check_rows(llm, tiny(arch), tokens, row, first + row)
    follow(llm, tiny(arch), tokens, 721, 722)


@pytest.mark.parametrize(
    ("n_embd", "type_k"),
    [(128, llama_cpp.GGML_TYPE_Q8_0), (256, llama_cpp.GGML_TYPE_Q8_0), (256, llama_cpp.GGML_TYPE_Q4_0)],
)
def test_quantised_keys_turn_as_float_ones_do(n_embd: int, type_k: int, tiny: Tiny, load: Load) -> None:
    """Heads of 32 dimensions are stored as they are, of 64 Hadamard-rotated."""
    path = tiny("llama", n_embd=n_embd)
    for turned_on in ("first", "later"):  # second keys stored beside the first, or derived from them
        llm = load(path, turned_on == "first", type_k=type_k)
        llm.eval(TOKENS[:-1])
        llm.pcd = "paper"
        llm.eval(TOKENS[-1:])
        rows, wanted = llm.pcd_logits(), expected(path, TOKENS, LAST, llm.pcd)
        coarse = 0.01 if type_k == llama_cpp.GGML_TYPE_Q8_0 else 0.35
        for got, row in zip((rows.standard, rows.local), wanted):
            assert ((got - row) ** 2).mean() < coarse * (row**2).mean(), turned_on
        assert ((wanted[0] - wanted[1]) ** 2).mean() > 1.0 * coarse * (wanted[0] ** 2).mean()


# --- second keys in a coarser type ---

COARSE = {"f32": 0.0, "bf16": 3e-5, "q8_0": 4e-4, "q4_0": 0.04}


@pytest.mark.parametrize(("arch", "type_k_over"), [*(("llama", name) for name in COARSE), ("smollm3", "q4_0")])
def test_second_keys_may_be_coarser_than_the_first(arch: str, type_k_over: str, tiny: Tiny, load: Load) -> None:
    """The standard row does not change; the other one changes by the type's rounding: twice its normalised squared error.
    smollm3's fourth layer does not rotate: its second keys are copies of the first."""
    path = tiny(arch, n_embd=128)
    setting = {"type_k_over": type_k_over}
    for flash_attn, later in ((False, False), (True, False), (False, True)):
        exact, plain, llm = (load(path, pcd, flash_attn=flash_attn) for pcd in ({}, False, False if later else setting))
        for each in (exact, plain, llm):
            each.eval(TOKENS[:100])
        llm.pcd = pypcd.PCDConfig(**setting)
        for each in (exact, plain, llm):
            each.eval(TOKENS[100:101])
        close(llm.pcd_logits().standard, native_row(plain), tolerance(path, flash_attn=flash_attn))
        wanted = exact.pcd_logits().local
        error = ((llm.pcd_logits().local - wanted) ** 2).mean() / (wanted**2).mean()
        assert error < COARSE[type_k_over] + (rounding(path) / wanted.std()) ** 2
        keys = exact.pcd_stats().kv_bytes / 2
        bits = {"f32": 32, "bf16": 16, "q8_0": 8.5, "q4_0": 4.5}
        assert llm.pcd_stats().second_bytes == pytest.approx(keys * bits[type_k_over] / 32, rel=0.05)


def test_a_head_too_small_for_a_block_is_refused(tiny: Tiny, load: Load) -> None:
    with pytest.raises(pypcd.UnsupportedError, match="type_k_over is q8_0, .* 32, but a head has 16 dimensions"):
        load(tiny("llama"), {"type_k_over": "q8_0"})


@pytest.mark.parametrize("relative_top", [0.1, 0.3, 0.6])
def test_the_twin_is_skipped_exactly_where_a_single_token_is_plausible(
    relative_top: float, tiny: Tiny, load: Load
) -> None:
    setting = {"relative_top": relative_top, "gamma": 50}
    fused, alternate = (
        load(tiny("llama"), {**setting, "evaluation": e}, logits_all=True, n_batch=128) for e in EVALUATIONS
    )
    n_single = 0
    for llm in (fused, alternate):
        llm.eval(TOKENS[:60])
    for i in range(60):
        rows = fused.pcd_logits(i)
        check_contrast(rows, fused.pcd, native_row(fused, i))
        single = (rows.standard >= rows.standard.max() + np.log(relative_top)).sum() == 1
        n_single += single
        assert (alternate.pcd_logits(i).local is None) == single
        close(native_row(fused, i), native_row(alternate, i), contrasted(rounding(tiny("llama")), fused.pcd.beta))
    assert (fused.pcd_stats().n_skipped, fused.pcd_stats().n_twins) == (0, 60)
    assert alternate.pcd_stats().n_skipped == n_single > 0
    assert alternate.pcd_stats().n_twins == 60 - n_single


# --- the whole context is the user's ---


@pytest.mark.parametrize("logits_all", [False, True])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_n_ctx_is_usable_to_its_last_token(
    cache: str, evaluation: str, logits_all: bool, tiny: Tiny, load: Load
) -> None:
    path, tokens = tiny("llama"), (TOKENS * 3)[:256]
    llm = load(path, {"cache": cache, "evaluation": evaluation}, n_ctx=256, logits_all=logits_all)
    for pieces in ([253, 254, 255, 256], [256], [200, 256], [255, 256]):
        llm.reset()
        follow(llm, path, tokens, *pieces)
        with pytest.raises(ValueError, match="context of 256"):
            llm.eval([5])
        assert llm.n_tokens == 256
    batch = llm._batch
    batch.set_batch([5], 256, True)
    assert llama_cpp.llama_decode(llm.ctx, batch.batch) == 1  # as llama.h has it: no KV slot
    llm.n_tokens = 100
    follow(llm, path, tokens, 130)


# --- how a token and its twin attend ---

TEXT = (TOKENS * 9)[:1000]
MODES: dict[str, dict[str, Any]] = {
    "rerotated": {"evaluation": "fused"},
    "shared": {"evaluation": "fused", "cache": "shared"},
    "shared-alternate": {"evaluation": "alternate", "cache": "shared"},
    "window": {"evaluation": "fused", "perturbation": "none", "window": 9, "n_sink": 3},
    "window-all": {"evaluation": "fused", "perturbation": "none", "window": 9, "n_sink": 0},
    "turned-window": {"evaluation": "fused", "window": 9, "n_sink": 3},
}
MODELS: list[tuple[str, dict[str, Any], str]] = [
    *(("llama", {"n_head_kv": n}, mode) for mode in MODES for n in (1, 4)),
    ("llama", {"n_head_kv": 2}, "rerotated"),
    ("bloom", {}, "window"),
    ("gemma3", {}, "turned-window"),
    ("gemma2", {}, "shared"),
    ("qwen2vl", {}, "shared-alternate"),
]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize(("arch", "kwargs", "mode"), MODELS, ids=str)
def test_rows_are_the_references_on_both_sides_of_a_block(
    arch: str, kwargs: dict[str, Any], mode: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    """Attention ends with a block of 64 cells. Those behind it hold other tokens, which were forgotten; a window begins in
    a block of its own, far behind its first positions. Then two tokens with their twins, and five: heads of a group are the rows
    of a product where they are more, else tokens."""
    path = tiny(arch, **kwargs)
    llm = load(path, MODES[mode], n_ctx=1024, flash_attn=flash_attn, logits_all=True)
    llm.eval(TEXT[::-1][:400])
    llm.reset()
    for first in (63, 64 * 5 - 1):
        llm.eval(TEXT[llm.n_tokens : first - 1])
        follow(llm, path, TEXT, *range(first, first + 4), first + 5, first + 10)


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
    follow(llm, path, TEXT, 20, 21, 41, 43, 63, 64)
