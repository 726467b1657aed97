"""min_context: plain decoding, and no twin, until there are so many tokens of context; contrast as ever from there on.

Plain rows are held to the library with PCD off, to the bit where a batch has no twin; contrasted ones to the reference."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Callable

import llama_cpp
import numpy as np
import pytest
from batches import SHORT_SLIDING, Native, Setting, check_seen, decode_batch, decode_in, read, same_rows, set_seq
from conftest import TOKENS, Tiny, check_rows, close, greedy, native_row, rounding
from hypothesis import given, settings
from hypothesis import strategies as st

import pypcd
from pypcd import engine
from pypcd.engine import _bindings as _native

Load = Callable[..., pypcd.Llama]

CACHES = ["rerotated", "shared", "separate"]
WAYS = ["fused", "alternate", "auto"]
FLOOR = 24


def check_plain(context: Any, seen: np.ndarray, i: int = -1) -> None:
    """Row i is L, and says so."""
    standard, over, contrasted = (_native.pcd_get_logits_ith(context.ctx, i, which) for which in range(3))
    n = len(seen)
    assert np.array_equal(read(standard, n), seen) and np.array_equal(read(contrasted, n), seen) and not over
    assert math.isnan(_native.pcd_get_strength_ith(context.ctx, i))


def check_plain_as(stock: pypcd.Llama, llm: pypcd.Llama) -> None:
    """Plain, and stock's to the bit; but for rounding if a second stream was evaluated beside it."""
    check_plain(llm, native_row(llm))
    if llm.pcd.cache == "separate":
        close(native_row(llm), native_row(stock), rounding(Path(llm.model_path)))
    else:
        assert np.array_equal(native_row(llm), native_row(stock))


# -- one sequence ------------------------------------------------------------------------------------------------------


# separate is refused beside recurrent layers; with sliding ones it has a test of its own
@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize(
    ("arch", "cache"), [*(("llama", cache) for cache in CACHES), *itertools.product(("gemma3", "lfm2"), CACHES[:2])]
)
def test_rows_are_plain_to_the_bit_before_and_the_references_after(
    arch: str, cache: str, evaluation: str, tiny: Tiny, load: Load
) -> None:
    """A token's position, counted from 1, is what counts: that of the row at FLOOR - 1 is enough."""
    path = tiny(arch)
    llm, stock = load(path, {"cache": cache, "evaluation": evaluation, "min_context": FLOOR}), load(path, False)
    for end in range(10, FLOOR):
        for other in (llm, stock):
            other.eval(TOKENS[other.n_tokens : end])
        check_plain_as(stock, llm)
        rows = llm.pcd_logits()
        assert rows.local is None and rows.beta is None
    stats = llm.pcd_stats()
    assert stats.n_twins == stats.n_caught_up == stats.n_fallbacks == 0
    assert stats.n_tokens == stats.n_skipped == FLOOR - 10
    for end in (FLOOR, FLOOR + 1, FLOOR + 8):
        llm.eval(TOKENS[llm.n_tokens : end])
        check_rows(llm, path, TOKENS[:end])
    assert llm.pcd_stats().n_twins == 3 and llm.pcd_stats().n_skipped == FLOOR - 10
    assert llm.pcd_stats().n_caught_up == 0


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_that_crosses_it(cache: str, evaluation: str, tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    for n_batch in (64, 16):
        llm = load(
            path, {"cache": cache, "evaluation": evaluation, "min_context": FLOOR}, logits_all=True, n_batch=n_batch
        )
        stock = load(path, False, logits_all=True, n_batch=n_batch)
        for other in (llm, stock):
            other.eval(TOKENS[:40])
        for i in range(-8, 0):  # of the last batch
            check_rows(llm, path, TOKENS[:40], i, 40 + i)
        if n_batch == 64:
            for i in range(FLOOR - 1):
                check_plain(llm, native_row(llm, i), i)
        close(np.array(llm.scores)[: FLOOR - 1], np.array(stock.scores)[: FLOOR - 1], rounding(path))
        assert llm.pcd_stats().n_skipped == FLOOR - 1 and llm.pcd_stats().n_tokens == 40


@pytest.mark.parametrize("cache", CACHES)
def test_a_short_answer_is_plain_decoding(cache: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {"cache": cache, "min_context": 61})
    assert greedy(llm) == greedy(load(tiny("llama"), False))
    assert llm.pcd_stats().n_twins == 0
    llm.pcd = {"min_context": 50}
    llm.reset()
    assert greedy(llm) != greedy(load(tiny("llama"), False)) and llm.pcd_stats().n_twins > 0


def test_a_rewind_goes_back_below_it(tiny: Tiny, load: Load) -> None:
    for cache in CACHES:
        llm, stock = (load(tiny("llama"), pcd) for pcd in ({"cache": cache, "min_context": FLOOR}, False))
        llm.eval(TOKENS[:30])
        check_rows(llm, tiny("llama"), TOKENS[:30])
        for other in (llm, stock):
            engine.rewind(other, 0)
            other.n_tokens = 0
            other.eval(TOKENS[:20])
        assert np.array_equal(native_row(llm), native_row(stock))
        llm.eval(TOKENS[20:40])
        check_rows(llm, tiny("llama"), TOKENS[:40])


@pytest.mark.parametrize("cache", CACHES)
def test_a_state_saved_before_it_is_contrasted_after(cache: str, tiny: Tiny, load: Load) -> None:
    setting = {"cache": cache, "min_context": FLOOR}
    llm, other = load(tiny("llama"), setting), load(tiny("llama"), setting)
    llm.eval(TOKENS[:20])
    other.load_state(llm.save_state())
    for end in (22, 30):
        other.eval(TOKENS[other.n_tokens : end])
        if end < FLOOR:
            check_plain(other, native_row(other))
    check_rows(other, tiny("llama"), TOKENS[:30])


@pytest.mark.parametrize("cache", CACHES)
def test_drafted_tokens_change_nothing(cache: str, tiny: Tiny, load: Load) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    setting = {"cache": cache, "min_context": 50}
    wanted = greedy(load(tiny("llama"), setting), 30)
    drafted = load(tiny("llama"), setting, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=3))
    assert greedy(drafted, 30) == wanted
    assert wanted[:9] == greedy(load(tiny("llama"), False), 9)


@settings(max_examples=15)
@given(
    floor=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 17), min_size=2, max_size=6),
    cache=st.sampled_from(CACHES),
    evaluation=st.sampled_from(WAYS),
)
def test_however_a_text_is_cut_into_batches(
    floor: int, sizes: list[int], cache: str, evaluation: str, path_and_load: tuple[Any, Load]
) -> None:
    path, load_once = path_and_load
    llm, stock = load_once({"cache": cache, "evaluation": evaluation, "min_context": floor}), load_once(False)
    ends = list(itertools.accumulate(sizes))
    for begin, end in zip([0, *ends], ends):
        for other in (llm, stock):
            other.eval(TOKENS[begin:end])
        if end < floor:
            check_plain_as(stock, llm)
        else:
            check_rows(llm, path, TOKENS[:end], moved=0.0)


@pytest.fixture(scope="module")
def path_and_load(tiny: Tiny) -> Any:
    from conftest import F32, SMALL

    path, opened = tiny("llama"), {}

    def of(setting: Any) -> pypcd.Llama:
        if not opened:
            opened.update({on: pypcd.Llama(path, pcd=on, **{**SMALL, **F32}) for on in (True, False)})
        llm = opened[bool(setting)]
        llm.pcd = pypcd.PCDConfig(**setting) if setting else False
        llm.reset()
        llm._ctx.kv_cache_clear()
        return llm

    yield path, of
    for llm in opened.values():
        llm.close()


# -- where twins cannot wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_tokens_that_are_left_plain_have_a_second_stream(arch: str, evaluation: str, native: Native) -> None:
    setting = {"cache": "separate", "evaluation": evaluation}
    params = SHORT_SLIDING if arch == "gemma3" else {}
    context, other, stock = (native(arch, s, **params) for s in ({**setting, "min_context": FLOOR}, setting, None))
    decode_in((context, other, stock), TOKENS[:10])
    check_plain(context, context.seen())
    close(context.seen(), stock.seen(), context.limit)
    decode_in((context, other), TOKENS[10:60])
    same_rows(context, other)
    stats, expected = (_native.pcd_get_stats(each.ctx) for each in (context, other))
    assert (stats.n_skipped, stats.n_caught_up, stats.n_fallbacks) == (1, 0, expected.n_fallbacks)


def test_embeddings_that_are_left_plain_have_a_second_stream(native: Native) -> None:
    """Of a picture, say: only tokens are written down, so it could not be made later."""
    setting = {"cache": "separate", "min_context": FLOOR}
    context, other = native("llama", setting), native("llama", {"cache": "separate"})
    embeddings = np.random.default_rng(1).normal(0, 0.1, (8, context.n_embd)).astype(np.float32)
    for part in (TOKENS[:5], embeddings, TOKENS[5:8]):
        decode_in((context, other), part)
        check_plain(context, context.seen())
    stats = _native.pcd_get_stats(context.ctx)
    assert (stats.n_fallbacks, stats.n_caught_up) == (0, 0)
    decode_in((context, other), TOKENS[8:30])
    same_rows(context, other)


# -- several sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_each_sequence_has_its_own(cache: str, evaluation: str, native: Native) -> None:
    base: Setting = {"cache": cache, "evaluation": evaluation}
    together, alone, stock = native("llama", base, n_seq_max=4), native("llama", base), native("llama", n_seq_max=4)
    floors = [0, 8, 11, 100]
    for seq, floor in enumerate(floors):
        assert set_seq(together, seq, {**base, "min_context": floor, "beta": 1.0}) == (0, "")
    texts = [[TOKENS[(11 * seq + 7 * i) % 120] for i in range(12)] for seq in range(4)]
    parts = [range(9), range(9, 10), range(10, 11), range(11, 12)]
    for part in parts:
        entries = [(texts[s][p], p, [s], p == part[-1]) for s in range(4) for p in part]
        assert decode_batch(together, entries) == decode_batch(stock, entries) == 0
        wanted = [i for i, entry in enumerate(entries) if entry[3]]
        for seq, i in enumerate(wanted):
            if part[-1] + 1 < floors[seq]:
                check_plain(together, together.seen(i), i)
                check_plain(together, together.seen(i), seq - 4)
                close(together.seen(i), stock.seen(i), together.limit)
                continue
            llama_cpp.llama_memory_clear(alone.memory, True)
            decode_in([alone], texts[seq][: part[-1] + 1])
            same_rows(together, alone.rows(), i)
            check_seen(together, i, {"beta": 1.0})


def test_a_sequences_setting_follows_its_copy(native: Native) -> None:
    context, stock = native("llama", {}, n_seq_max=2), native("llama", n_seq_max=2)
    assert set_seq(context, 0, {"min_context": 20}) == (0, "")
    decode_in((context, stock), TOKENS[:10], out=[])
    for other in (context, stock):
        llama_cpp.llama_memory_seq_cp(other.memory, 0, 1, -1, -1)
    decode_in((context, stock), TOKENS[10:12], seq=1)
    assert np.array_equal(context.seen(), stock.seen())
    check_plain(context, stock.seen())


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_that_are_not_allowed() -> None:
    with pytest.raises(ValueError, match="min_context is -1; allowed: an integer of at least 0"):
        pypcd.PCDConfig(min_context=-1)
    assert pypcd.PCDConfig.resolve("window:min_context=400").describe().endswith("min_context=400")


def test_the_library_refuses_them_too(native: Native) -> None:
    import ctypes

    context, params, error = native("llama"), _native.pcd_default_params(), ctypes.create_string_buffer(500)
    params.min_context = -1
    assert _native.pcd_set(context.ctx, ctypes.byref(params), error, 500) == _native.INVALID
    assert error.value.decode() == "min_context is -1, allowed: at least 0"


def test_after_a_decode_that_failed_there_are_no_rows(native: Native) -> None:
    context = native("llama", {"min_context": 30})
    decode_in([context], TOKENS[:5])
    assert _native.pcd_get_logits_ith(context.ctx, -1, 0)
    assert context.decode([10**6]) != 0  # no such token
    assert not _native.pcd_get_logits_ith(context.ctx, -1, 0)
