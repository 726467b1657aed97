"""Second keys that are made in the graph: where windows bound what twins see, none are kept.

Their rows are the float64 reference's, and those of a context that keeps second keys because a sequence without a window
may come."""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import Context, Native, Setting, ask, check_row, decode_batch, decode_in, same_rows, set_seq
from conftest import SANITIZED, TOKENS, Tiny, check_rows, close, rounding, run_python, tolerance, turn
from test_engine import EVALUATIONS, SCALED, Load
from test_second import breakdown, bytes_of, derived, restore, save, turn_off, turn_on
from tiny_gguf import HYBRID_ARCHS, ROPE_ARCHS

import pypcd
from pypcd._engine import _bindings as _native

WINDOW: Setting = {"window": 20}
OK = (_native.OK, "")
FLASH = {"flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED}
SEQUENCES = {"n_seq_max": 4, "n_ctx": 1024, "n_batch": 1024, "n_ubatch": 64}
WHOLE = 3  # a sequence of SEQUENCES that is given no window


def keep(context: Context, setting: Setting) -> Context:
    """Have second keys kept: one sequence sees everything."""
    assert set_seq(context, WHOLE, {**setting, "window": None}) == OK
    assert bytes_of(context)[0] > 0
    return context


# --- rows ---


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("name", [*ROPE_ARCHS, *HYBRID_ARCHS, *SCALED])
def test_the_rows_are_the_references_and_nothing_is_kept(
    name: str, evaluation: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    arch, kwargs = SCALED.get(name, (name, {}))
    path = tiny(arch, **kwargs)
    llm = load(path, {**WINDOW, "evaluation": evaluation}, n_batch=32, flash_attn=flash_attn)
    for first, last in ((0, 100), (100, 101), (101, 102)):
        llm.eval(TOKENS[first:last])
        check_rows(llm, path, TOKENS[:last])
    stats = llm.pcd_stats()
    assert (stats.second_bytes, stats.n_derived_cells) == (0, 0)


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("flash", [{}, FLASH], ids=["", "flash"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "smollm3", "deepseek2", "hunyuan-dense", "lfm2", "qwen2vl"])
def test_the_rows_are_those_of_kept_keys(arch: str, flash: dict[str, Any], evaluation: str, native: Native) -> None:
    """Far into a text, in a prompt of several micro-batches with many rows, and after a cut that moves what is behind it."""
    setting = {**WINDOW, "evaluation": evaluation}
    made, kept = native(arch, setting, **SEQUENCES, **flash), keep(native(arch, setting, **SEQUENCES, **flash), setting)

    def compare(i: int = -1) -> None:
        if not flash:
            same_rows(made, kept, i)
            return
        rows, exact = made.rows(i), kept.rows(i)  # keys are rounded to f16 before they are turned, or after
        close(rows[0], exact[0], rounding(made.path))
        close(rows[1], exact[1], np.abs(exact[0] - exact[1]).max() / 20)

    text = (TOKENS * 5)[:500]
    decode_in((made, kept), text[:300], out=[150, 151, 152, 299])
    for i in (150, 152, 299):
        compare(i)
    decode_in((made, kept), text[300:340], out=[])
    for token in text[340:344]:
        decode_in((made, kept), [token])
        compare()
    if arch not in ("lfm2", "gemma3", "qwen2vl"):  # these cannot move
        for each in (made, kept):
            assert llama_cpp.llama_memory_seq_rm(each.memory, 0, 310, 320)
            llama_cpp.llama_memory_seq_add(each.memory, 0, 320, -1, -10)
        decode_in((made, kept), text[344:346])
        compare()
    assert bytes_of(made)[0] == derived(made) == 0


def test_a_loaded_state_and_tokens_decoded_with_pcd_off_cost_nothing(native: Native) -> None:
    made, stock = native("llama", WINDOW, **SEQUENCES), native("llama", **SEQUENCES)
    kept = keep(native("llama", WINDOW, **SEQUENCES), WINDOW)
    decode_in((stock, kept), TOKENS[:60])
    restore(made, 0, save(stock, 0))
    for n in (60, 64):
        decode_in((made, stock, kept), TOKENS[n : n + 1])
        check_row(made, stock, kept)
        turn_off(made)
        decode_in((made, stock, kept), TOKENS[n + 1 : n + 4])
        turn_on(made, WINDOW)
    assert bytes_of(made)[0] == derived(made) == 0


@pytest.mark.parametrize("flash", [{}, FLASH], ids=["", "flash"])
def test_64_sequences_with_windows_of_their_own_have_the_rows_of_each_alone(
    flash: dict[str, Any], native: Native
) -> None:
    """One has no perturbation, one no PCD, and the cells of some lie between those of others."""
    sizes: dict[str, Any] = {"n_seq_max": 64, "n_ctx": 4096, "n_batch": 4096, "n_ubatch": 256, **flash}
    base: Setting = {"window": 9, "evaluation": "fused"}
    own = {seq: {**base, "window": 1 + 5 * seq, "n_sink": seq % 4} for seq in range(1, 64)}
    own[7] |= {"perturbation": "none"}
    together, alone = native("llama", base, **sizes), native("llama", base, **{**sizes, "n_seq_max": 1})
    text = {seq: [TOKENS[(7 * seq + i) % len(TOKENS)] for i in range(40)] for seq in range(64)}
    for seq, setting in own.items():
        assert set_seq(together, seq, None if seq == 11 else setting) == OK
    for i in range(37):
        assert decode_batch(together, [(text[seq][i], i, [seq], False) for seq in text]) == 0
    for i in range(37, 40):
        assert decode_batch(together, [(text[seq][i], i, [seq], True) for seq in text]) == 0
    assert bytes_of(together)[0] == 0
    # either may be as far from the exact rows as this
    limit = (
        2 * tolerance(together.path, 40, flash_attn=True) * turn(together.path, pypcd.PCDConfig())
        if flash
        else together.limit
    )
    for seq in text:
        if seq == 11:
            assert not _native.pcd_get_logits_ith(together.ctx, seq, 1)
            continue
        llama_cpp.llama_memory_clear(alone.memory, True)
        assert ask(alone, own.get(seq, base)) == OK
        decode_in([alone], text[seq][:39], out=[])
        decode_in([alone], text[seq][39:])
        close(together.rows(seq), alone.rows(), limit)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_made_keys_are_not_rounded_to_type_k_over(kind: str, tiny: Tiny, load: Load) -> None:
    """Which rounds those that are kept: the made ones have the first keys' rounding alone."""
    path = tiny("llama", n_embd=128)
    made = load(path, {**WINDOW, "type_k_over": kind})
    made.eval(TOKENS)
    check_rows(made, path, TOKENS)  # with the limit of float32
    kept = load(path, {**WINDOW, "type_k_over": kind}, n_seq_max=2)
    kept.pcd_for(1, {"window": None})
    kept.eval(TOKENS)
    exact = made.pcd_logits().over_rotated
    assert np.abs(kept.pcd_logits().over_rotated - exact).max() > rounding(path)


@pytest.mark.parametrize("n_embd", [128, 256])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_quantised_first_keys_are_turned_too(n_embd: int, flash_attn: bool, tiny: Tiny, load: Load) -> None:
    """From a head of 64 dimensions on llama.cpp stores them Hadamard-rotated."""
    q8 = dict.fromkeys(("type_k", "type_v") if flash_attn else ("type_k",), llama_cpp.GGML_TYPE_Q8_0)
    path, rows = tiny("llama", n_embd=n_embd), []
    for whole in (False, True):
        llm = load(path, WINDOW, flash_attn=flash_attn, n_seq_max=2, **q8)
        if whole:
            llm.pcd_for(1, {"window": None})
        llm.eval(TOKENS)
        assert (llm.pcd_stats().second_bytes > 0) == whole
        rows.append(llm.pcd_logits())
    made, kept = rows
    close(made.standard, kept.standard, rounding(path, **q8, **(FLASH if flash_attn else {})))
    assert np.abs(made.over_rotated - kept.over_rotated).max() < np.abs(kept.standard - kept.over_rotated).max() / 20


# --- the rule ---


@pytest.mark.skipif(sys.platform != "linux", reason="reads a std::map as libstdc++ lays it out")
@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek2", "lfm2"])
def test_none_are_kept_up_to_an_eighth_of_the_context(arch: str, native: Native) -> None:
    """256 cells: 28 positions and 4 at the beginning."""
    context = native(arch)
    own = breakdown(context)
    for window, n_sink, keeps in ((28, 4, False), (29, 4, True), (32, 0, False), (33, 0, True), (None, 4, True)):
        turn_on(context, {"window": window, "n_sink": n_sink})
        _native.pcd_trim(context.ctx)
        states = int(_native.pcd_get_stats(context.ctx).state_bytes)
        assert (bytes_of(context)[0] > 0) == keeps, window
        assert breakdown(context) == own + bytes_of(context)[0] + states


def test_a_sequence_without_a_window_has_second_keys_kept_while_it_is_there(native: Native) -> None:
    context, window, whole = (native("llama", on, **SEQUENCES) for on in (WINDOW, WINDOW, {}))
    decode_in((context, window), TOKENS[:50])
    decode_in([context, whole], TOKENS[10:60], seq=1)
    same_rows(context, context.rows())
    assert bytes_of(context)[0] == 0
    assert set_seq(context, 1, {}) == OK
    kept = bytes_of(context)[0]
    assert kept == bytes_of(context)[1] // 2
    for n in range(3):
        decode_in([context, window], TOKENS[60 + n : 61 + n])
        same_rows(context, window)
        decode_in([context, whole], TOKENS[70 + n : 71 + n], seq=1)
        same_rows(context, whole)
    assert derived(context) == 100
    assert set_seq(context, 2, {"window": 5}) == OK
    llama_cpp.llama_memory_seq_cp(context.memory, 1, 2, -1, -1)  # its copy has none either
    assert llama_cpp.llama_memory_seq_rm(context.memory, 1, -1, -1)
    _native.pcd_trim(context.ctx)
    assert bytes_of(context)[0] == kept
    assert llama_cpp.llama_memory_seq_rm(context.memory, 2, -1, -1)
    assert bytes_of(context)[0] == kept, "until it is asked to"
    decode_in([context, window], TOKENS[65:66])
    same_rows(context, window)
    _native.pcd_trim(context.ctx)
    assert bytes_of(context)[0] == 0
    decode_in([context, window], TOKENS[66:67])
    same_rows(context, window)


@pytest.mark.parametrize("first", ["sequence", "context"])
def test_a_sequence_given_before_counts(first: str, native: Native) -> None:
    context = native("llama", n_seq_max=2)
    calls = {"sequence": lambda: set_seq(context, 1, {}), "context": lambda: ask(context, WINDOW)}
    for name in sorted(calls, key=lambda name: name != first):
        assert calls[name]() == OK
    assert bytes_of(context)[0] > 0
    for other in ({"perturbation": "none", "window": 200}, WINDOW, None):  # none of these needs kept ones
        assert set_seq(context, 1, other) == OK
        _native.pcd_trim(context.ctx)
        assert bytes_of(context)[0] == 0


def test_the_context_of_a_call_with_a_window_keeps_what_it_has(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"))
    llm.eval(TOKENS[:20])
    second = llm.pcd_stats().second_bytes
    assert second > 0
    llm("x", max_tokens=2, pcd=WINDOW)
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = {**WINDOW}
    assert llm.pcd_stats().second_bytes == 0
    llm.pcd = {"window": None}
    assert llm.pcd_stats().second_bytes == second


SQUEEZED = """
import re, resource, sys
import pypcd

llm = pypcd.Llama(sys.argv[1], pcd={"window": 20}, n_ctx=65536, n_batch=8, n_threads=1, n_threads_batch=1, n_seq_max=2,
                  flash_attn=False, type_k=0, type_v=0, n_gpu_layers=0)
llm.eval(list(range(3, 30)))
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 50 * 2**20, resource.RLIM_INFINITY))
try:
    llm.pcd_for(1, {"window": None})
except pypcd.UnsupportedError as error:
    print(error)
llm.eval([30])
print(llm.pcd_stats().second_bytes, llm.pcd_logits().over_rotated is not None)
llm.pcd_for(1, {"window": 64})
print("as before")
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer's allocator ends a process that runs out of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the process's memory, and reads it in /proc")
def test_a_sequence_that_second_keys_have_no_room_for_is_refused(tiny: Tiny) -> None:
    result = run_python(SQUEEZED, tiny("llama", n_embd=512))
    assert result.returncode == 0, result.stderr
    said, *rest = result.stdout.splitlines()
    assert (
        "sequence 1 sees too much for second keys to be made as they are needed: the second keys need another 192"
        in said
    )
    assert "a window for every sequence (window + n_sink at most 8192)" in said
    assert rest == ["0 True", "as before"]


def test_a_window_costs_no_graph_while_it_moves(native: Native) -> None:
    """It lies in as many blocks of cells, or in fewer; the standard tokens' cells end with another block of 64 twice."""
    context = native("llama", {**WINDOW, "evaluation": "fused"}, n_ctx=1024, n_batch=512)
    decode_in([context], (TOKENS * 3)[:300], out=[])
    decode_in([context], TOKENS[:1])
    before = llama_cpp.llama_perf_context(context.ctx).n_reused
    for n in range(100):
        decode_in([context], TOKENS[n : n + 1])
    assert llama_cpp.llama_perf_context(context.ctx).n_reused - before == 98
