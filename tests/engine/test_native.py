"""Batches passed to llama_decode directly, as by C callers: unusual models and batches, contexts changed in between."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import EVALUATIONS, TWINS, WAYS, Abort, Context, Native, ask, check_row, decode_in, same_rows, turn_on
from conftest import TOKENS, Load, Tiny, check_contrast, close, flash, native_row

import pypcd
from pypcd.engine import _bindings as _native

# --- odd models ---


@pytest.mark.parametrize("is_flash", [False, True])
def test_latent_second_keys_may_be_coarser(is_flash: bool, native: Native) -> None:
    exact, coarse = (
        native("deepseek2", {"type_k_over": name, "evaluation": "fused"}, **flash(is_flash)) for name in ("f32", "q8_0")
    )
    decode_in((exact, coarse), TOKENS[:60])
    decode_in((exact, coarse), TOKENS[60:61])
    effect = np.abs(exact.rows()[0] - exact.rows()[1]).max()
    assert effect > 1
    close(coarse.rows()[0], exact.rows()[0], coarse.limit)
    close(coarse.rows()[1], exact.rows()[1], effect / 10)


@pytest.mark.parametrize(
    "before", [{"perturbation": "none", "window": 9, "evaluation": "fused"}, False], ids=["window", "off"]
)
def test_a_model_that_rotates_in_name_only_is_refused_and_nothing_changes(before: Any, tiny: Tiny, load: Load) -> None:
    """This shows only when a graph is built."""
    asked, never = (load(tiny("starcoder"), before) for _ in range(2))
    for llm in (asked, never):
        llm.eval(TOKENS[:20])
    for setting in ({"cache": "rerotated"}, {"cache": "shared"}):
        for ask_for in (asked.check_pcd, lambda config: setattr(asked, "pcd", config)):
            with pytest.raises(pypcd.UnsupportedError, match="'starcoder' has no rotary positions.*with a window"):
                ask_for(pypcd.PCDConfig(**setting))
    assert asked.pcd == never.pcd
    assert asked.pcd_stats().second_bytes == 0
    for llm in (asked, never):
        llm.eval(TOKENS[20:21])
    assert np.array_equal(native_row(asked), native_row(never))
    if before:
        rows = asked.pcd_logits()
        assert asked.pcd is not None and np.abs(rows.standard - rows.local).max() > 0.05
        check_contrast(rows, asked.pcd, native_row(asked))


def test_a_layer_without_attention_has_no_keys_to_derive(native: Native) -> None:
    stock, first, later = native("deci"), native("deci", {}), native("deci")
    decode_in((stock, first, later), TOKENS[:40])
    turn_on(later, {})
    decode_in((stock, first, later), TOKENS[40:41])
    check_row(later, stock, first)


def test_a_decoder_with_an_encoder_is_refused_and_decodes_on_without(native: Native) -> None:
    asked, never = native("t5"), native("t5")
    decode_in((asked, never), TOKENS[:20], 0, out=range(20), call=llama_cpp.llama_encode)
    decode_in((asked, never), TOKENS[:10])
    status, text = ask(asked, {"perturbation": "none", "window": 8})
    assert status == _native.UNSUPPORTED
    assert text == "the architecture 't5' has an encoder, and a twin cannot attend to it"
    decode_in((asked, never), TOKENS[10:11])
    assert np.array_equal(asked.seen(), never.seen())


# --- images: positions in time, height and width; a 3 x 4 image takes positions 10 to 13 ---

IMAGE = np.random.default_rng(3).standard_normal((12, 64)).astype(np.float32)
PLACES = np.array([(10, 10 + y, 10 + x, 0) for y in range(3) for x in range(4)]).T


def test_text_after_an_image_has_one_over_rotated_row_however_it_is_made(native: Native) -> None:
    stock, stored, derived = native("qwen2vl"), native("qwen2vl", {}), native("qwen2vl")
    alternate = native("qwen2vl", {"evaluation": "alternate"})
    every = stock, stored, derived, alternate
    decode_in(every, TOKENS[:10])
    decode_in(every, IMAGE, PLACES, out=[])
    decode_in(every, TOKENS[10:19], 14)
    turn_on(derived, {})
    decode_in(every, TOKENS[19:20], 23)
    check_row(derived, stock, stored)
    check_row(alternate, stock, stored)


# --- batches that cannot be decoded ---


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_batch_that_does_not_fit_changes_nothing(arch: str, native: Native) -> None:
    tokens, params = (TOKENS * 5)[:513], {"n_ctx": 512, "n_batch": 512, "n_ubatch": 16, "swa_full": False}
    stock, asked, never = native(arch, **params), native(arch, {}, **params), native(arch, {}, **params)
    decode_in((stock, asked, never), tokens[:262])
    for context in (stock, asked):
        before = context.span()
        for n in (251, 260, 512):
            assert context.decode(tokens[:n], 262, out=[n - 11, n - 1]) == 1
            assert context.span() == before
    for n in (1, 249):  # up to the last cell
        decode_in((stock, asked, never), tokens[asked.span()[1] + 1 :][:n], out=[0, n - 1])
        assert asked.span() == never.span() and asked.span()[1] == stock.span()[1]
        for i in (0, n - 1):
            check_row(asked, stock, never, i)


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_an_invalid_batch_is_refused_and_changes_nothing(arch: str, evaluation: str, native: Native) -> None:
    params, setting = {"n_ctx": 1024, "n_seq_max": 2, "swa_full": False}, {"evaluation": evaluation}
    stock, asked = native(arch, **params), native(arch, setting, **params)
    decode_in((stock, asked), TOKENS[:20])
    decode_in((stock, asked), TOKENS[20:32], seq=1)
    for context in (stock, asked):
        # before the end, after it, in invalid sequences (a twin's among them), and invalid tokens
        for at, seq, token in zip((5, 30, 5, 0, 0, 0, 20, 20), (0, 0, -1, 2, 192, 10**6, 0, 0), [9] * 6 + [384, -1]):
            assert context.decode([token] * 4, at, seq=seq, out=[1, 3]) == -1, (at, seq, token)
            assert (context.span(0), context.span(1)) == ((0, 19), (0, 11)), (at, seq, token)
        assert context.decode([], 20) == -1
    decode_in((stock, asked), TOKENS[40:44], seq=1, out=[1, 3])
    fresh = native(arch, setting, **params)
    decode_in([fresh], TOKENS[20:32])
    decode_in([fresh], TOKENS[40:44], out=[1, 3])
    for i in (1, 3):
        check_row(asked, stock, fresh, i)


# --- limits and outputs of a context ---


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_stock_for_every_token_and_may_be_turned_on_and_off(
    way: str, first: bool, native: Native
) -> None:
    arch, setting, params = WAYS[way]
    stock, context = native(arch, embeddings=first, **params), native(arch, setting, embeddings=first, **params)
    without = native(arch, setting, **params)
    for k, out in enumerate(([3, 9], [9], range(10))):
        on = first == (k != 1)
        llama_cpp.llama_set_embeddings(stock.ctx, on)
        llama_cpp.llama_set_embeddings(context.ctx, on)
        decode_in((stock, context, without), TOKENS[10 * k : 10 * k + 10], out=out)
        for i in range(10):
            assert (context.embedding(i) is not None) == (stock.embedding(i) is not None) == on
            if on:
                close(context.embedding(i), stock.embedding(i), context.limit)
        for i in out:
            check_row(context, stock, without, i)


def test_attention_that_is_no_longer_causal_is_an_error_until_it_is_again(native: Native) -> None:
    asked, never = native("llama", {}), native("llama", {})
    decode_in((asked, never), TOKENS[:20])
    llama_cpp.llama_set_causal_attn(asked.ctx, False)
    assert asked.decode(TOKENS[20:23]) == -1
    assert asked.span() == (0, 19)
    assert ask(asked, {}, _native.pcd_check)[0] == _native.UNSUPPORTED
    llama_cpp.llama_set_causal_attn(asked.ctx, True)
    decode_in((asked, never), TOKENS[20:23])
    same_rows(asked, never)


# --- interruptions, threads, edited memory ---


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_aborted_decode_leaves_no_twin_and_can_be_retried(way: str, derived: bool, native: Native) -> None:
    arch, setting, params = WAYS[way]

    def prompted() -> Abort:
        context = native(arch, None if derived else setting, **params)
        assert context.decode(TOKENS[:20]) == 0
        turn_on(context, setting)
        return Abort(context)

    abort = prompted()
    assert abort.decode(sys.maxsize, TOKENS[20:23], out=[0, 2]) == 0
    expected, n = [abort.context.rows(i) for i in (0, 2)], abort.n
    for at in (0, n // 5, n // 2, n * 4 // 5, n - 1):
        abort = prompted()
        context, n_derived = abort.context, abort.context.stats.n_derived
        assert abort.decode(at, TOKENS[20:23], out=[0, 2]) == 2
        assert all(context.span(seq) == (-1, -1) for seq in TWINS)
        assert context.row() is None
        if at == 0:
            assert context.span() == (0, 19)
            assert context.stats.n_derived == n_derived  # cut off in mid-derivation, if any
        # parts that were finished stay in memory, as llama.h has it: they are taken back, or built upon
        kept = 20 if at in (0, n // 5) else min(context.span()[1] + 1, 22)
        llama_cpp.llama_memory_seq_rm(context.memory, 0, kept, -1)
        assert context.decode(TOKENS[kept:23], out=range(23 - kept)) == 0
        for p, rows in zip((20, 22), expected):
            if p >= kept:
                same_rows(context, rows, p - kept)


def test_threads_with_contexts_of_their_own_give_the_same_rows(native: Native) -> None:
    kinds = [
        ("llama", {"evaluation": "fused"}),
        ("llama", {"cache": "shared"}),
        ("gemma3", {"evaluation": "alternate"}),
    ] * 3
    contexts = [native(arch, setting, n_ctx=512, swa_full=False) for arch, setting in kinds]

    def work(context: Context) -> None:
        for a, b in ((0, 40), *((i, i + 1) for i in range(40, 60))):
            decode_in([context], TOKENS[a:b])

    for context in contexts[:3]:
        work(context)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, contexts[3:]))
    for i, context in enumerate(contexts[3:]):
        assert np.array_equal(context.rows(), contexts[i % 3].rows())
        assert np.array_equal(context.seen(), contexts[i % 3].seen())
