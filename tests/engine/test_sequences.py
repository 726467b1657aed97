"""Several sequences in one context; the second keys, which twins see with cache="rerotated" (the first keys, turned), and the
second stream, the keys and values that they have with cache="separate": when they are made again, and the memory that they take.

Batches are passed to llama_decode directly."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import (
    EVALUATIONS,
    OK,
    SHORT_SLIDING,
    Context,
    Native,
    Setting,
    check_row,
    decode_batch,
    decode_in,
    same_rows,
    set_seq,
    turn_off,
    turn_on,
)
from conftest import SANITIZED, TOKENS, Tiny, close, run_python

from pypcd.engine import _bindings as _native
from pypcd.engine import _log

# --- several sequences ---


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("cache", ["rerotated", "separate"])
def test_a_sequence_that_gets_pcd_later_has_its_second_keys_or_stream_then(
    cache: str, evaluation: str, native: Native
) -> None:
    setting = {"cache": cache, "evaluation": evaluation}
    together, stock = native("llama", setting, n_seq_max=2), native("llama", n_seq_max=2)
    alone, texts = native("llama", setting), [TOKENS[:30], TOKENS[30:60]]
    assert set_seq(together, 1, None) == OK
    for context in (together, stock):
        assert decode_batch(context, [(t, p, [s], p == 29) for s in range(2) for p, t in enumerate(texts[s])]) == 0
    _native.pcd_unset_seq(together.ctx, -1)
    decode_in((together, stock), TOKENS[100:101], seq=1)
    decode_in([alone], texts[1])
    decode_in([alone], TOKENS[100:101])
    check_row(together, stock, alone)


# --- the second stream ---


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
def test_after_a_state_was_loaded_the_second_stream_needs_to_know_the_tokens(
    seq: int | None, later: bool, native: Native
) -> None:
    """They are unknown, not 0; with PCD turned on before the state was loaded, and after."""
    setting = {"cache": "separate"}
    context, fresh, stock = native("llama", None if later else setting), native("llama", setting), native("llama")
    decode_in((context, fresh, stock), TOKENS[:30])
    context.restore(stock.save(seq), seq)
    turn_on(context, setting)
    _log.clear_errors()
    assert context.decode(TOKENS[30:31]) == -1
    assert "position 0 of sequence 0 again, but does not know its token" in _log.last_errors()
    tokens = (ctypes.c_int32 * 30)(*TOKENS[:30])
    assert _native.pcd_set_tokens(context.ctx, 1, tokens, 30) == 0  # another sequence
    assert _native.pcd_set_tokens(context.ctx, 0, tokens, 30) == 30
    decode_in((context, fresh, stock), TOKENS[30:31])
    check_row(context, stock, fresh)
    assert context.stats.n_caught_up == 30


def test_a_row_that_needs_no_twin_has_a_second_stream_too(native: Native) -> None:
    setting = {"cache": "separate", "relative_top": 1.0}
    context, other = native("llama", setting), native("llama", {"cache": "separate"})
    decode_in((context, other), TOKENS[:40])
    for n in range(40, 50):
        decode_in((context, other), TOKENS[n : n + 1])
    stats = context.stats
    assert (stats.n_twins, stats.n_skipped, stats.n_caught_up) == (11, 0, 0)
    turn_on(context, {**setting, "relative_top": 0})
    decode_in((context, other), TOKENS[50:51])
    same_rows(context, other)
    stats = context.stats
    assert (stats.n_twins, stats.n_caught_up) == (12, 0)


@pytest.mark.parametrize("moved", [True, False], ids=["shifted", "gap"])
@pytest.mark.parametrize(
    "setting",
    [
        {"evaluation": "fused"},
        {"evaluation": "alternate"},
        {"evaluation": "fused", "min_context": 42},
        {"evaluation": "alternate", "min_context": 42},
        {"evaluation": "alternate", "relative_top": 1.0},
    ],
    ids=str,
)
def test_the_second_stream_is_what_stock_makes_of_the_same_edits_at_its_frequencies(
    setting: Setting, moved: bool, native: Native
) -> None:
    """Tokens that are taken out of a text have left their trace in the keys behind them: in L's and in L*'s."""
    base, ratio = 2e5, 0.01
    over = {"cache": "separate", "transition": "none", "base_ratio": ratio}
    context = native("llama", {**over, **setting}, rope_freq_base=base)
    plain, local = native("llama", rope_freq_base=base), native("llama", rope_freq_base=ratio * base)
    each = (context, plain, local)
    decode_in(each, TOKENS[:30])
    decode_in(each, TOKENS[30:40], out=[])
    for one in each:
        assert llama_cpp.llama_memory_seq_rm(one.memory, 0, 5, 15)
        if moved:
            llama_cpp.llama_memory_seq_add(one.memory, 0, 15, -1, -10)
    for n in range(40, 60):
        decode_in(each, TOKENS[n : n + 1])
    if "relative_top" in setting:
        turn_on(context, over)
    decode_in(each, TOKENS[60:61])
    close(context.rows(), (plain.seen(), local.seen()), context.limit)
    assert np.abs(plain.seen() - local.seen()).max() > 0.05


def test_a_second_stream_is_not_made_up_where_a_short_cache_has_wrapped(native: Native) -> None:
    """Once the text's end is removed its cells are in order again, but those before them are gone."""
    context, tokens = native("gemma3", **SHORT_SLIDING), (TOKENS * 6)[:512]
    for i in range(0, 512, 32):
        decode_in([context], tokens[i : i + 32])
    assert llama_cpp.llama_memory_seq_rm(context.memory, 0, 468, -1)
    turn_on(context, {"cache": "separate"})
    _log.clear_errors()
    assert context.decode(tokens[468:469]) == -1
    assert "sliding-window layers may have forgotten" in _log.last_errors()


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_another_sequences_edits_cost_no_second_stream(evaluation: str, native: Native) -> None:
    setting, params = {"cache": "separate", "evaluation": evaluation}, {"n_seq_max": 2, "swa_full": True}
    context, alone = native("gemma3", setting, **params), native("gemma3", setting)
    decode_in([context], TOKENS[:40], out=[])
    decode_in([context], TOKENS[40:80], out=[], seq=1)
    decode_in([alone], TOKENS[40:80], out=[])
    llama_cpp.llama_memory_seq_rm(context.memory, 0, 30, -1)
    decode_in([context], TOKENS[80:81], seq=1)
    decode_in([alone], TOKENS[80:81])
    same_rows(context, alone)


@pytest.mark.parametrize("setting", [{}, {"cache": "separate"}, {"evaluation": "alternate"}], ids=str)
@pytest.mark.parametrize("n", [10, 20, 31])
def test_a_batch_that_fits_a_short_cache_only_dealt_out_anew_has_the_rows_of_a_long_one(
    n: int, setting: Setting, native: Native
) -> None:
    """Cells shared by two sequences are not freed, so there is no room for a twin next to its token."""
    tokens, params = (TOKENS * 3)[:300], {"n_ctx": 1024, "n_ubatch": 32, "n_batch": 256, "n_seq_max": 2}
    short, stock = (native("gemma3", on, swa_full=False, **params) for on in (setting, None))
    full = native("gemma3", setting, swa_full=True, **params)
    shared = 256 - 15 - n
    for context in (short, stock, full):
        for i in range(0, shared, 32):
            decode_in([context], tokens[i : min(i + 32, shared)], out=[])
        llama_cpp.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
        decode_in([context], tokens[shared : shared + 15], out=[])
    decode_in((short, stock, full), tokens[shared + 15 : shared + 15 + n])
    check_row(short, stock, full)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_picture_seen_as_a_whole_is_not_cut_into_parts(arch: str, native: Native) -> None:
    """An image's patches attend to each other, so they and their twins must be in one micro-batch."""
    setting, patches = {"cache": "separate"}, np.random.default_rng(4).standard_normal((12, 64)).astype(np.float32)
    stock, roomy = native(arch), native(arch, setting, n_ubatch=32)
    narrow = native(arch, setting, n_ubatch=16)
    for context in (stock, roomy, narrow):
        decode_in([context], TOKENS[:10])
        llama_cpp.llama_set_causal_attn(context.ctx, False)
    _log.clear_errors()
    assert narrow.decode(patches, out=[]) == -1
    assert "the 12 embeddings of this picture and their twins at once; create the context with n_ubatch = 24" in (
        _log.last_errors()
    )
    assert narrow.span() == (0, 9)
    decode_in((stock, roomy), patches, out=[])
    for context in (stock, roomy):
        llama_cpp.llama_set_causal_attn(context.ctx, True)
    decode_in((stock, roomy), TOKENS[10:12])
    close(roomy.rows()[0], stock.seen(), roomy.limit)


SEQUENCES = {"n_seq_max": 4, "n_ctx": 1024, "n_batch": 1024, "n_ubatch": 64}


def derived(context: Context) -> int:
    """Of how many cells the second keys were derived so far."""
    return context.stats.n_derived_cells


# --- which cells are derived ---


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_token_decoded_with_pcd_off_costs_one_cell(arch: str, native: Native) -> None:
    context, fresh, stock = native(arch, {}), native(arch, {}), native(arch)
    n_caches = 2 if arch == "gemma3" else 1
    decode_in((context, fresh, stock), TOKENS[:60])
    for n in (60, 62):
        turn_off(context)
        decode_in((context, fresh, stock), TOKENS[n : n + 1])
        turn_on(context)
        before = derived(context)
        decode_in((context, fresh, stock), TOKENS[n + 1 : n + 2])
        assert derived(context) - before == n_caches
        check_row(context, stock, fresh)
    assert context.stats.n_derived == 2
    assert derived(fresh) == 0


def test_what_is_no_part_of_the_table_derives_nothing(native: Native) -> None:
    context = native("llama", {"alpha": 0.3}, **SEQUENCES)
    decode_in([context], TOKENS[:50])
    turn_on(context, {"alpha": 0.3, "beta": 1.0, "gamma": 5, "window": 20, "evaluation": "alternate"})
    decode_in([context], TOKENS[50:51])
    assert derived(context) == 0


# --- memory ---


def bytes_of(context: Context) -> tuple[int, int]:
    """Of the second keys and values, and of the first."""
    stats = context.stats
    return stats.second_bytes, stats.kv_bytes


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek2"])
def test_a_setting_keeps_what_it_needs_and_frees_the_rest(arch: str, native: Native) -> None:
    context = native(arch)
    decode_in([context], TOKENS[:20])
    first = bytes_of(context)[1]
    turn_on(context)
    keys = bytes_of(context)[0]
    assert keys == (first if arch == "deepseek2" else first // 2)  # whose values are a part of its keys
    for setting, before_trim, after in (
        ({"cache": "separate"}, first, first),
        ({}, keys, keys),  # the second stream is lost, so its values are freed at once
        ({"alpha": 0.3}, keys, keys),
        ({"perturbation": "none", "window": 8}, keys, 0),
        ({}, keys, keys),
        ({"window": 8}, keys, keys),
        ({"type_k_over": "f16"}, keys // 2, keys // 2),
        ({"cache": "shared"}, keys // 2, 0),
        ({"cache": "separate"}, first, first),
        ({"cache": "shared"}, first, 0),
        ({}, keys, keys),
    ):
        turn_on(context, setting)
        assert bytes_of(context) == (before_trim, first)
        _native.pcd_trim(context.ctx)
        assert bytes_of(context) == (after, first)
    turn_off(context)
    assert bytes_of(context) == (keys, first)
    turn_on(context)
    assert bytes_of(context) == (keys, first)
    turn_off(context)
    _native.pcd_trim(context.ctx)
    assert bytes_of(context) == (0, first)


@pytest.mark.parametrize("cache", ["rerotated", "separate"])
def test_a_setting_in_between_costs_only_its_own_tokens(cache: str, native: Native) -> None:
    context, fresh, stock = native("llama", {"cache": cache}), native("llama", {"cache": cache}), native("llama")
    decode_in((context, fresh, stock), TOKENS[:40])
    for n, between in enumerate((None, {"cache": "shared"}, {"perturbation": "none", "window": 8, "alpha": 0.4})):
        turn_off(context) if between is None else turn_on(context, between)
        decode_in((context, fresh, stock), TOKENS[40 + 3 * n : 42 + 3 * n])
        turn_on(context, {"cache": cache})
        decode_in((context, fresh, stock), TOKENS[42 + 3 * n : 43 + 3 * n])
        check_row(context, stock, fresh)
    stats = context.stats
    assert (stats.n_derived_cells, stats.n_caught_up) == ((6, 0) if cache == "rerotated" else (0, 6))


def test_assigning_a_setting_frees_what_it_does_not_need(tiny: Tiny, load: Any) -> None:
    llm = load(tiny("llama"))
    llm.eval(TOKENS[:20])
    second = llm.pcd_stats().second_bytes
    assert second > 0
    llm("x", max_tokens=2, pcd={"cache": "shared"})  # for this call alone
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = None
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = "paper:cache=shared"
    assert llm.pcd_stats().second_bytes == 0


# --- twins that are not turned beside others ---


def decode_each(context: Context, tokens: dict[int, int], at: dict[int, int]) -> None:
    """One token of each of these sequences, in one batch."""
    assert decode_batch(context, [(token, at[seq], [seq], True) for seq, token in tokens.items()]) == 0


def test_a_twin_that_is_not_turned_costs_no_graph(native: Native) -> None:
    """The graph is used again while as many twins are turned, whichever ones."""
    context = native("llama", {"evaluation": "fused"}, **SEQUENCES)
    at = dict.fromkeys(range(4), 0)
    for seq in (1, 3):
        assert set_seq(context, seq, {"perturbation": "none", "window": 12, "evaluation": "fused"}) == OK

    def built(steps: list[list[int]]) -> int:
        before = context.n_reused
        for seqs in steps:
            decode_each(context, {seq: TOKENS[at[seq]] for seq in seqs}, at)
            for seq in seqs:
                at[seq] += 1
        return len(steps) - (context.n_reused - before)

    assert built([[0, 1], [0, 1], [2, 3], [1, 2], [3, 0]]) == 1
    assert built([[0, 2], [1, 3], [0, 1]]) == 3


# --- too little memory ---

SQUEEZED = """
import re, resource, sys
import numpy as np
import pypcd

llm = pypcd.Llama(sys.argv[1], pcd="paper:type_k_over=f16", n_ctx=65536, n_batch=2, n_threads=1, n_threads_batch=1,
                  flash_attn=False, type_k=0, type_v=0, n_gpu_layers=0)
text = list(range(3, 23))
llm.eval(text)

def attempt(type_k_over, spare, off=False):
    used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
    before = llm.pcd_stats().n_derived_cells
    resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, resource.RLIM_INFINITY))
    if off:
        llm.pcd = False
    try:
        llm.pcd = "paper:type_k_over=" + type_k_over
    except pypcd.UnsupportedError as error:
        parts = str(error).split("cannot run here:", 1)[1].split(";")
        print(parts[0].strip(), "|", *(part.strip() for part in parts[1:] if "turn PCD off" in part))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # ggml aborts if a scheduler does not fit
    stats = llm.pcd_stats()
    text.append(len(text))
    llm.eval(text[-1:])
    print(stats.second_bytes // 2**20, "MiB", end=" ")
    if not stats.second_bytes:
        print("plain")
        return
    rows = llm.pcd_logits().local
    print(llm.pcd_stats().n_derived_cells - before, "derived", end=" ")
    llm.reset()
    llm.eval(text)
    fresh = llm.pcd_logits()
    print("right" if abs(rows - fresh.local).max() < abs(fresh.standard - rows).max() / 20 else "wrong")

attempt("f32", 180)
attempt("f32", 180, off=True)
attempt("f16", 150)
attempt("f32", 50)
attempt("f32", 20, off=True)
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer's allocator ends a process that runs out of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the process's memory, and reads it in /proc")
def test_second_keys_of_another_type_fit_beside_the_former_ones_or_these_stay(tiny: Tiny) -> None:
    """Unless PCD is off: then the former ones are freed first, and a failure leaves it off."""
    result = run_python(SQUEEZED, tiny("llama", n_embd=512))  # 3 layers, 65536 cells, 2 heads of 128
    assert result.returncode == 0, result.stdout + result.stderr
    refused = "the second keys need another 192 MiB"
    beside = f"{refused} beside those in force | turn PCD off before this change, which then frees them"
    assert result.stdout.splitlines() == [
        beside,
        "96 MiB 0 derived right",
        "192 MiB 21 derived right",
        "96 MiB 22 derived right",
        beside,
        "96 MiB 0 derived right",
        f"{refused} |",
        "0 MiB plain",
    ], result.stdout
