"""Batches straight through llama_decode, as C callers make them: odd models, odd batches, contexts changed in between.

What must come out is known from the same library with PCD off, from a float32 cache, or from an exact identity.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import llama_cpp
import numpy as np
import pytest
from conftest import F32, TOKENS, Tiny, check_contrast, close, contrasted, native_row, rounding
from tiny_gguf import write_tiny_gguf

import pypcd
from pypcd._engine import _bindings as _native
from pypcd._engine import _log
from pypcd._engine._pcd import native_params

Setting = dict[str, Any]
Rows = tuple[np.ndarray, np.ndarray]
Load = Callable[..., pypcd.Llama]

TWINS = range(192, 256)  # their sequence ids
SMALL_CONTEXT: dict[str, Any] = {
    **F32,
    **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), 256),
    **dict.fromkeys(("n_threads", "n_threads_batch"), 1),
    "kv_unified": True,
    "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
SHORT_SLIDING: dict[str, Any] = {"swa_full": False, "n_ctx": 1024, "n_ubatch": 32}  # a cache that forgets
# the ways of evaluating twins: architecture, setting, context
WAYS: dict[str, tuple[str, Setting, dict[str, Any]]] = {
    "fused": ("llama", {}, {}),
    "alternate": ("llama", {"evaluation": "alternate"}, {}),
    "sequential": ("gemma3", {}, {**SHORT_SLIDING, "n_ubatch": 2}),
    "streams": ("llama", {"cache": "separate"}, {}),
    "streams-in-parts": ("llama", {"cache": "separate"}, {"n_ubatch": 5}),
    "streams-alternate": ("llama", {"cache": "separate", "evaluation": "alternate"}, {}),
    "streams-sliding": ("gemma3", {"cache": "separate"}, SHORT_SLIDING),
}


class Context:
    """A llama_context whose batches are made by hand; pcd=None is the stock library."""

    def __init__(self, model: Any, path: Path, pcd: Setting | None, **params: Any) -> None:
        self.path = path
        p = llama_cpp.llama_context_default_params()
        for name, value in {**SMALL_CONTEXT, **params}.items():
            assert hasattr(p, name), name
            setattr(p, name, value)
        self.ctx = llama_cpp.llama_init_from_model(model, p)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.n_embd = llama_cpp.llama_model_n_embd(model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        if pcd is not None:
            assert ask(self, pcd) == (_native.OK, "")

    @property
    def limit(self) -> float:
        """What its rows may differ by from those of the same work in another shape."""
        return rounding(self.path)

    def decode(self, tokens: Any, at: Any = None, *, out: Any = None, seq: int = 0, call: Any = None) -> int:
        """Tokens or embeddings from position `at` on, by default behind all others and for the last one's logits."""
        n, embedded = len(tokens), isinstance(tokens, np.ndarray)
        first = self.span(seq)[1] + 1 if at is None else at
        positions = first if isinstance(first, np.ndarray) else np.arange(first, first + n)
        out = [n - 1] if out is None else out
        int32, seqs = ctypes.c_int32, (ctypes.c_int32 * 1)(seq)
        batch = llama_cpp.llama_batch(
            n,
            None if embedded else (int32 * n)(*tokens),
            tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if embedded else None,
            (int32 * positions.size)(*positions.ravel().tolist()),
            (int32 * n)(*[1] * n),
            (ctypes.POINTER(int32) * n)(*[seqs] * n),
            (ctypes.c_int8 * n)(*(i in out for i in range(n))),
        )
        return (call or llama_cpp.llama_decode)(self.ctx, batch)

    def rows(self, i: int = -1) -> Rows:
        """L and L*."""
        standard, over = (read(_native.pcd_get_logits_ith(self.ctx, i, which), self.n_vocab) for which in range(2))
        assert standard is not None and over is not None
        return standard, over

    def seen(self, i: int = -1) -> np.ndarray | None:
        return read(llama_cpp.llama_get_logits_ith(self.ctx, i), self.n_vocab)

    def embedding(self, i: int) -> np.ndarray | None:
        return read(llama_cpp.llama_get_embeddings_ith(self.ctx, i), self.n_embd)

    def span(self, seq: int = 0) -> tuple[int, int]:
        """The first and the last position in memory, -1 where there is none."""
        ends = llama_cpp.llama_memory_seq_pos_min, llama_cpp.llama_memory_seq_pos_max
        return ends[0](self.memory, seq), ends[1](self.memory, seq)


def read(pointer: Any, n: int) -> np.ndarray | None:
    return np.ctypeslib.as_array(pointer, shape=(n,)).copy() if pointer else None


def decode_in(contexts: Sequence[Context], *args: Any, **kwargs: Any) -> None:
    for context in contexts:
        assert context.decode(*args, **kwargs) == 0


def ask(context: Context | pypcd.Llama, setting: Setting, call: Any = _native.pcd_set) -> tuple[int, str]:
    error, params = ctypes.create_string_buffer(500), native_params(pypcd.PCDConfig(**setting))
    return call(context.ctx, ctypes.byref(params), error, 500), error.value.decode()


Native = Callable[..., Context]


@pytest.fixture
def native(tiny: Tiny) -> Iterator[Native]:
    """native(arch, setting or None, **llama_context_params)"""
    models, opened = {}, []

    def make(arch: str, pcd: Setting | None = None, **params: Any) -> Context:
        if arch not in models:
            p = llama_cpp.llama_model_default_params()
            p.n_gpu_layers = 0
            models[arch] = llama_cpp.llama_model_load_from_file(str(tiny(arch)).encode(), p)
        assert models[arch], arch
        opened.append(Context(models[arch], tiny(arch), pcd, **params))
        return opened[-1]

    yield make
    for context in opened:
        llama_cpp.llama_free(context.ctx)
    for model in models.values():
        llama_cpp.llama_model_free(model)


def same_rows(a: Context, b: Context | Rows, i: int = -1) -> None:
    """L and L* of row i as another context with PCD has them, or as they were."""
    rows = a.rows(i)
    close(rows, b.rows(i) if isinstance(b, Context) else b, a.limit)
    assert np.abs(rows[0] - rows[1]).max() > 0.05, "the twin must differ, or this test shows nothing"


def check_row(context: Context, stock: Context, other: Context, i: int = -1) -> None:
    """L as stock has it, L* as another context with PCD."""
    close(context.rows(i)[0], stock.seen(i), context.limit)
    same_rows(context, other, i)


# --- odd models ---


@pytest.mark.parametrize("turned_on", ["first", "later"])
def test_latent_keys_in_a_quantised_cache_turn_as_float_ones_do(turned_on: str, native: Native) -> None:
    """128 dimensions could be stored Hadamard-rotated, but latent keys are not."""

    def rows(type_kv: int, turned_on: str) -> Rows:
        flash = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = native("deepseek2", type_k=type_kv, type_v=type_kv, flash_attn_type=flash)
        for tokens, when in ((TOKENS[:99], "first"), (TOKENS[99:100], "later")):
            if turned_on == when:
                assert ask(context, {}) == (_native.OK, "")
            assert context.decode(tokens) == 0
        return context.rows()

    exact = rows(llama_cpp.GGML_TYPE_F32, "first")
    effect = np.abs(exact[0] - exact[1]).max()
    assert effect > 5
    for got, row in zip(rows(llama_cpp.GGML_TYPE_Q8_0, turned_on), exact):
        close(got, row, effect / 20)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("cache", ["rerotated", "separate"])
def test_latent_second_keys_may_be_coarser(cache: str, flash: bool, native: Native) -> None:
    """In a second stream they are its values too."""
    types = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    exact, coarse = (
        native("deepseek2", {"cache": cache, "type_k_over": name}, flash_attn_type=types[flash])
        for name in ("f32", "q8_0")
    )
    decode_in((exact, coarse), TOKENS[:60])
    decode_in((exact, coarse), TOKENS[60:61])
    effect = np.abs(exact.rows()[0] - exact.rows()[1]).max()
    assert effect > 1
    close(coarse.rows()[0], exact.rows()[0], coarse.limit)
    close(coarse.rows()[1], exact.rows()[1], effect / 10)


@pytest.mark.parametrize("before", [{"perturbation": "none", "window": 9}, False], ids=["window", "off"])
def test_a_model_that_rotates_in_name_only_is_refused_and_nothing_changes(before: Any, tiny: Tiny, load: Load) -> None:
    """Only a graph shows it."""
    asked, never = (load(tiny("starcoder"), before) for _ in range(2))
    for llm in (asked, never):
        llm.eval(TOKENS[:20])
    for setting in ({"cache": "rerotated"}, {"cache": "shared"}, {"cache": "shared", "perturbation": "noise"}):
        with pytest.raises(pypcd.UnsupportedError, match="'starcoder' has no rotary positions.*with a window"):
            asked.pcd = pypcd.PCDConfig(**setting)
    assert asked.pcd == never.pcd
    assert asked.pcd_stats().second_bytes == 0
    for llm in (asked, never):
        llm.eval(TOKENS[20:21])
    assert np.array_equal(native_row(asked), native_row(never))
    if before:
        rows = asked.pcd_logits()
        assert asked.pcd is not None and np.abs(rows.standard - rows.over_rotated).max() > 0.05
        check_contrast(rows, asked.pcd, native_row(asked))


def test_a_layer_without_attention_has_no_keys_to_derive(native: Native) -> None:
    stock, first, later = native("deci"), native("deci", {}), native("deci")
    decode_in((stock, first, later), TOKENS[:40])
    assert ask(later, {}) == (_native.OK, "")
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


def decode_image_in(contexts: Sequence[Context], out: Sequence[int]) -> None:
    decode_in(contexts, TOKENS[:10])
    decode_in(contexts, IMAGE, PLACES, out=out)


@pytest.mark.parametrize(
    ("cache", "evaluation"), [("rerotated", "fused"), ("rerotated", "alternate"), ("separate", "fused")]
)
def test_without_over_rotation_the_twins_of_patches_are_the_patches(
    cache: str, evaluation: str, native: Native
) -> None:
    stock = native("qwen2vl")
    context = native("qwen2vl", {"base_ratio": 1, "cache": cache, "evaluation": evaluation})
    decode_image_in((stock, context), range(12))
    for i in range(12):
        for row in context.rows(i):
            close(row, stock.seen(i), stock.limit)
    decode_in((stock, context), TOKENS[10:12], 14)
    for row in context.rows():
        close(row, stock.seen(), stock.limit)


def test_text_after_an_image_has_one_over_rotated_row_however_it_is_made(native: Native) -> None:
    stock, stored, derived = native("qwen2vl"), native("qwen2vl", {}), native("qwen2vl")
    alternate = native("qwen2vl", {"evaluation": "alternate"})
    decode_image_in((stock, stored, derived, alternate), [])
    decode_in((stock, stored, derived, alternate), TOKENS[10:19], 14)
    assert ask(derived, {}) == (_native.OK, "")
    decode_in((stock, stored, derived, alternate), TOKENS[19:20], 23)
    check_row(derived, stock, stored)
    check_row(alternate, stock, stored)


def test_an_image_in_the_second_stream_cannot_be_evaluated_again(native: Native) -> None:
    """Its embeddings are gone; and in a window without rotation they are what the first stream has."""
    context = native("qwen2vl", {"cache": "separate"})
    decode_image_in([context], [])
    decode_in([context], TOKENS[10:12], 14)
    assert context.rows()
    assert ask(context, {"cache": "separate", "alpha": 0.3}) == (_native.OK, "")
    _log.clear_errors()
    assert context.decode(TOKENS[12:13], 16) == -1
    assert re.search("position 1[0-3] of sequence 0 again, but does not know its token.*image", _log.last_errors())
    assert context.span() == (0, 15)
    assert ask(context, {"cache": "rerotated", "alpha": 0.3}) == (_native.OK, "")
    decode_in([context], TOKENS[12:13], 16)
    assert context.rows()


# --- batches that cannot be decoded ---


@pytest.mark.parametrize(
    "setting", [{}, {"cache": "separate"}, {"cache": "separate", "evaluation": "alternate"}], ids=str
)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_batch_that_does_not_fit_changes_nothing(arch: str, setting: Setting, native: Native) -> None:
    tokens, params = (TOKENS * 5)[:513], {"n_ctx": 512, "n_batch": 512, "n_ubatch": 16, "swa_full": False}
    stock, asked, never = native(arch, **params), native(arch, setting, **params), native(arch, setting, **params)
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


@pytest.mark.parametrize("cache", ["rerotated", "separate"])
@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_an_invalid_batch_is_refused_and_changes_nothing(
    arch: str, evaluation: str, cache: str, native: Native
) -> None:
    params, setting = {"n_ctx": 1024, "n_seq_max": 2, "swa_full": False}, {"evaluation": evaluation, "cache": cache}
    stock, asked = native(arch, **params), native(arch, setting, **params)
    decode_in((stock, asked), TOKENS[:20])
    decode_in((stock, asked), TOKENS[20:32], seq=1)
    for context in (stock, asked):
        # before the end, behind it, in sequences that cannot be, a twin's among them, and tokens that are none
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


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cache", ["rerotated", "separate"])
@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
def test_a_limit_on_outputs_counts_the_callers_rows_alone(evaluation: str, cache: str, n: int, native: Native) -> None:
    limited = native("llama", {"evaluation": evaluation, "cache": cache}, n_outputs_max=n)
    free = native("llama", {"evaluation": evaluation, "cache": cache})
    for start, stop in ((0, 10), (10, 10 + n), (10 + n, 20)):
        out = range(stop - start - n, stop - start)
        decode_in((limited, free), TOKENS[start:stop], out=out)
        for i in out if start else out[-1:]:
            same_rows(limited, free, i)
            close(limited.seen(i), free.seen(i), contrasted(free.limit, pypcd.PCDConfig().beta))


@pytest.mark.parametrize("out", [[19], [3, 10, 19], range(20)], ids=["last", "some", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_stock_for_every_token(way: str, out: Sequence[int], native: Native) -> None:
    arch, setting, params = WAYS[way]
    stock, context = native(arch, embeddings=True, **params), native(arch, setting, embeddings=True, **params)
    without = native(arch, setting, **params)
    decode_in((stock, context, without), TOKENS[:20], out=out)
    for i in range(20):
        close(context.embedding(i), stock.embedding(i), context.limit)
    for i in out:
        if i > 2:  # the first tokens have little behind them
            check_row(context, stock, without, i)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_may_be_turned_on_and_off(way: str, first: bool, native: Native) -> None:
    arch, setting, params = WAYS[way]
    stock, context = native(arch, embeddings=first, **params), native(arch, setting, embeddings=first, **params)
    without = native(arch, setting, **params)
    for k, on in enumerate((first, not first, first)):
        llama_cpp.llama_set_embeddings(stock.ctx, on)
        llama_cpp.llama_set_embeddings(context.ctx, on)
        decode_in((stock, context, without), TOKENS[10 * k : 10 * k + 10], out=[3, 9])
        for i in range(10):
            assert (context.embedding(i) is not None) == (stock.embedding(i) is not None) == on
            if on:
                close(context.embedding(i), stock.embedding(i), context.limit)
        for i in (3, 9):
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
    left = [0]

    @llama_cpp.ggml_abort_callback
    def abort(_: Any) -> bool:
        left[0] -= 1
        return left[0] < 0

    def prompted() -> Context:
        left[0] = 10**6
        context = native(arch, None if derived else setting, **params)
        llama_cpp.llama_set_abort_callback(context.ctx, abort, None)
        assert context.decode(TOKENS[:20]) == 0
        assert ask(context, setting) == (_native.OK, "")
        return context

    context = prompted()
    before = left[0]
    assert context.decode(TOKENS[20:23], out=[0, 2]) == 0
    expected, n_steps = [context.rows(i) for i in (0, 2)], before - left[0]
    for at in (0, n_steps // 5, n_steps // 2, n_steps * 4 // 5, n_steps - 1):
        context = prompted()
        left[0], n_derived = at, _native.pcd_get_stats(context.ctx).n_derived
        assert context.decode(TOKENS[20:23], out=[0, 2]) == 2
        assert all(context.span(seq) == (-1, -1) for seq in TWINS)
        assert not _native.pcd_get_logits_ith(context.ctx, -1, 0)
        if at == 0:
            assert context.span() == (0, 19)
            assert _native.pcd_get_stats(context.ctx).n_derived == n_derived  # cut off in mid-derivation, if any
        left[0] = 10**6
        llama_cpp.llama_memory_seq_rm(context.memory, 0, 20, -1)  # finished parts stay in memory, as llama.h has it
        assert context.decode(TOKENS[20:23], out=[0, 2]) == 0
        for i, rows in zip((0, 2), expected):
            same_rows(context, rows, i)


def test_threads_with_contexts_of_their_own_give_the_same_rows(native: Native) -> None:
    kinds = [("llama", {}), ("llama", {"cache": "separate"}), ("gemma3", {"evaluation": "alternate"})] * 3
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


# what is done with 40 tokens, the sequence that goes on, and how many of its tokens are as they were
EDITS: dict[str, tuple[list[tuple[Any, ...]], int, int]] = {
    "copy": ([("cp", 0, 1, 0, 30)], 1, 30),
    "shift": ([("add", 0, 0, -1, 50)], 0, 40),
    "cut": ([("rm", 0, 10, 20), ("add", 0, 20, -1, -10)], 0, 0),
    "halve": ([("div", 0, 0, 40, 2)], 0, 0),
    "copy-and-shift": ([("cp", 0, 1, 0, 30), ("keep", 1), ("add", 1, 10, 30, 7)], 1, 0),
}


@pytest.mark.parametrize(
    ("edit", "cache", "arch"),
    [
        *itertools.product(EDITS, ["rerotated", "shared"], ["llama", "gemma3"]),
        # the tokens left by a cut, evaluated again, would know nothing of those cut out
        ("copy", "separate", "llama"),
        ("copy", "separate", "gemma3"),
        ("shift", "separate", "llama"),
    ],
)
def test_an_edited_memory_gives_the_rows_of_pcd_turned_on_later(
    edit: str, cache: str, arch: str, native: Native
) -> None:
    """And where its tokens are as they were, those of these tokens alone."""
    params, setting = {"n_seq_max": 2, "swa_full": True}, {"cache": cache}
    stock, first, later, alone = (native(arch, on, **params) for on in (None, setting, None, setting))
    calls, seq, n_same = EDITS[edit]
    decode_in((stock, first, later), TOKENS[:40])
    for context, (name, *args) in itertools.product((stock, first, later), calls):
        getattr(llama_cpp, f"llama_memory_seq_{name}")(context.memory, *args)
    assert ask(later, setting) == (_native.OK, "")
    decode_in((stock, first, later), TOKENS[40:45], seq=seq, out=[0, 4])
    if n_same:
        decode_in([alone], TOKENS[:n_same])
        decode_in([alone], TOKENS[40:45], out=[0, 4])
    for i in (0, 4):
        check_row(first, stock, later, i)
        if n_same and (edit, cache) != ("shift", "shared"):  # a shift changes the angles from q* to k
            check_row(first, stock, alone, i)


def test_a_second_stream_is_not_made_up_for_what_sliding_layers_forgot(native: Native) -> None:
    """A shift lets upstream reuse cells that fell out of the window, full-size cache or not."""
    setting, params = {"cache": "separate"}, {"n_seq_max": 2, "swa_full": True}
    first, later, alone = native("gemma3", setting, **params), native("gemma3", **params), native("gemma3", setting)
    decode_in((first, later, alone), TOKENS[:40])
    for context in (first, later):
        llama_cpp.llama_memory_seq_add(context.memory, 0, 0, -1, 50)
    assert ask(later, setting) == (_native.OK, "")
    _log.clear_errors()
    assert later.decode(TOKENS[40:45]) == -1
    assert "position 50 of sequence 0 again, but sliding-window layers may have forgotten" in _log.last_errors()
    decode_in((first, alone), TOKENS[40:45])
    same_rows(first, alone)
    llama_cpp.llama_memory_clear(later.memory, False)
    decode_in([later], TOKENS[:40])
    decode_in([later], TOKENS[40:45])
    same_rows(later, alone)


# --- several sequences ---


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("cache", ["rerotated", "shared", "separate"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_each_sequence_of_a_batch_has_its_own_twin(arch: str, cache: str, evaluation: str, native: Native) -> None:
    """Three texts in one batch, the first two with a common beginning, give the rows of three contexts."""
    texts = [TOKENS[:30], TOKENS[:20] + TOKENS[60:75], TOKENS[80:117]]
    setting, params = {"cache": cache, "evaluation": evaluation}, {"n_seq_max": 3, "n_ctx": 512}
    together, stock = native(arch, setting, **params), native(arch, **params)
    alone = [native(arch, setting) for _ in texts]
    for context in (together, stock):
        assert decode_batch(context, [(t, p, [0, 1], False) for p, t in enumerate(texts[0][:20])]) == 0
        batch = [(t, p, [s], False) for s, text in enumerate(texts) for p, t in enumerate(text) if s == 2 or p >= 20]
        assert decode_batch(context, batch) == 0
    for context, text in zip(alone, texts):
        decode_in([context], text)
    for step in range(3):  # a batching server's: one token each
        batch = [(TOKENS[40 + 9 * s + step], len(text) + step, [s], True) for s, text in enumerate(texts)]
        assert decode_batch(together, batch) == decode_batch(stock, batch) == 0
        for s, context in enumerate(alone):
            decode_in([context], [batch[s][0]])
            check_row_at(together, s, stock, context)


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("cache", ["rerotated", "separate"])
def test_pcd_is_on_for_some_sequences_and_off_for_others(cache: str, evaluation: str, native: Native) -> None:
    setting, params = {"cache": cache, "evaluation": evaluation}, {"n_seq_max": 3, "n_ctx": 512}
    together, stock, alone = native("llama", setting, **params), native("llama", **params), native("llama", setting)
    texts = [TOKENS[:30], TOKENS[30:60], TOKENS[60:90]]
    set_seq(together, 1, None)
    set_seq(together, 2, {"beta": 1.0, "gamma": 5, "relative_top": 0.0})
    for step in range(2):
        for context in (together, stock):
            assert decode_batch(context, batch_of(texts, 0 if step == 0 else 25, 25 if step == 0 else 30)) == 0
    assert np.array_equal(together.seen(9), stock.seen(9))  # of sequence 1: plain
    assert not _native.pcd_get_logits_ith(together.ctx, 9, 0)
    decode_in([alone], texts[2])
    check_row_at(together, 14, stock, alone)
    rows = together.rows(14)
    wanted = pypcd.contrast(*rows, beta=1.0, gamma=5)
    kept = np.isfinite(wanted)
    np.testing.assert_allclose(together.seen(14)[kept], wanted[kept], rtol=1e-4, atol=1e-4)
    assert kept.sum() == 5 and together.seen(14)[~kept].max() < -1000

    _native.pcd_unset_seq(together.ctx, -1)  # its second keys, or its second stream, are made now
    for context in (together, stock):
        assert decode_batch(context, [(TOKENS[100], 30, [1], True)]) == 0
    other = native("llama", setting)
    decode_in([other], texts[1])
    decode_in([other], TOKENS[100:101])
    check_row_at(together, 0, stock, other)


def test_a_sequence_that_cannot_be_is_refused(native: Native) -> None:
    context = native("llama", {})
    for seq, change, message in (
        (-1, {}, "seq_id is -1, allowed: 0 to 191"),
        (192, {}, "seq_id is 192"),
        (0, {"gamma": 0}, "gamma is 0"),
        (0, {"beta": -1.0}, "beta is -1"),
    ):
        assert message in set_seq(
            context, seq, {"beta": 1.0, "gamma": 5, "relative_top": 0.0, **change}, _native.INVALID
        )
    assert "never turned on" in set_seq(native("llama"), 0, None, _native.INVALID)


def batch_of(texts: Sequence[list[int]], start: int, stop: int) -> list[tuple[int, int, list[int], bool]]:
    return [
        (t, start + p, [s], p == stop - start - 1)
        for s, text in enumerate(texts)
        for p, t in enumerate(text[start:stop])
    ]


def decode_batch(context: Context, entries: Sequence[tuple[int, int, list[int], bool]]) -> int:
    """(token, position, sequences, whether its logits are wanted)"""
    n, int32 = len(entries), ctypes.c_int32
    tokens, positions, sequences, wanted = zip(*entries)
    batch = llama_cpp.llama_batch(
        n,
        (int32 * n)(*tokens),
        None,
        (int32 * n)(*positions),
        (int32 * n)(*map(len, sequences)),
        (ctypes.POINTER(int32) * n)(*((int32 * len(s))(*s) for s in sequences)),
        (ctypes.c_int8 * n)(*wanted),
    )
    return llama_cpp.llama_decode(context.ctx, batch)


def check_row_at(context: Context, i: int, stock: Context, alone: Context) -> None:
    close(context.rows(i)[0], stock.seen(i), context.limit)
    same_rows(context, alone.rows(), i)


def set_seq(context: Context, seq: int, contrast: Setting | None, status: int = _native.OK) -> str:
    params = None
    if contrast is not None:
        params = native_params(pypcd.PCDConfig())
        for name, value in contrast.items():
            setattr(params, name, value)
    error = ctypes.create_string_buffer(500)
    assert _native.pcd_set_seq(context.ctx, seq, params and ctypes.byref(params), error, 500) == status
    return error.value.decode()


# --- the second stream ---


def test_after_a_state_was_loaded_the_second_stream_needs_to_know_the_tokens(native: Native) -> None:
    setting = {"cache": "separate"}
    context, fresh, stock = native("llama", setting), native("llama", setting), native("llama")
    decode_in((context, fresh, stock), TOKENS[:30])
    size = llama_cpp.llama_state_get_size(stock.ctx)
    state = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_get_data(stock.ctx, state, size) == size
    assert llama_cpp.llama_state_set_data(context.ctx, state, size) == size
    _log.clear_errors()
    assert context.decode(TOKENS[30:31]) == -1
    assert "position 0 of sequence 0 again, but does not know its token" in _log.last_errors()
    tokens = (ctypes.c_int32 * 30)(*TOKENS[:30])
    assert _native.pcd_set_tokens(context.ctx, 1, tokens, 30) == 0  # another sequence
    assert _native.pcd_set_tokens(context.ctx, 0, tokens, 30) == 30
    decode_in((context, fresh, stock), TOKENS[30:31])
    check_row(context, stock, fresh)
    assert _native.pcd_get_stats(context.ctx).n_caught_up == 30


def test_alternate_evaluation_catches_up_only_when_a_row_needs_it(native: Native) -> None:
    setting = {"cache": "separate", "evaluation": "alternate", "relative_top": 1.0}
    context, other = native("llama", setting), native("llama", {"cache": "separate"})
    decode_in((context, other), TOKENS[:40])
    for n in range(40, 50):
        decode_in((context, other), TOKENS[n : n + 1])
    stats = _native.pcd_get_stats(context.ctx)
    assert (stats.n_twins, stats.n_skipped, stats.n_caught_up) == (0, 11, 0)
    assert ask(context, {**setting, "relative_top": 0}) == (_native.OK, "")
    decode_in((context, other), TOKENS[50:51])
    same_rows(context, other)
    stats = _native.pcd_get_stats(context.ctx)
    assert (stats.n_twins, stats.n_caught_up) == (1, 50)


def test_the_tokens_of_a_loaded_sequence_are_unknown_not_zero(native: Native) -> None:
    """With PCD turned on before the state was loaded, and after."""
    for later in (False, True):
        setting = {"cache": "separate"}
        stock, context = native("llama"), native("llama", None if later else setting)
        decode_in([stock], TOKENS[:30])
        size = llama_cpp.llama_state_seq_get_size(stock.ctx, 0)
        state = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(stock.ctx, state, size, 0) == size
        assert llama_cpp.llama_state_seq_set_data(context.ctx, state, size, 0) == size
        assert ask(context, setting) == (_native.OK, "")
        _log.clear_errors()
        assert context.decode(TOKENS[30:31]) == -1
        assert "does not know its token" in _log.last_errors()


def test_a_second_stream_is_not_made_up_where_a_short_cache_has_wrapped(native: Native) -> None:
    """Its cells are in order again once the end of the text was removed; what was before them is gone all the same."""
    context, tokens = native("gemma3", **SHORT_SLIDING), (TOKENS * 6)[:512]
    for i in range(0, 512, 32):
        decode_in([context], tokens[i : i + 32])
    assert llama_cpp.llama_memory_seq_rm(context.memory, 0, 468, -1)
    assert ask(context, {"cache": "separate"}) == (_native.OK, "")
    _log.clear_errors()
    assert context.decode(tokens[468:469]) == -1
    assert "sliding-window layers may have forgotten" in _log.last_errors()


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
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
    """Cells that two sequences share are not given away, so there is no room for a twin beside its token."""
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
    """Its patches attend to each other, so they and their twins have to be one micro-batch."""
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


@pytest.mark.parametrize(("type_k", "type_k_over"), [("Q8_0", "q4_0"), ("Q8_0", "f16"), ("F16", "q8_0")])
def test_layers_that_do_not_rotate_have_second_keys_of_another_type_too(
    type_k: str, type_k_over: str, tmp_path: Path
) -> None:
    """smollm3's fourth; derived from the first, with PCD turned on later."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "smollm3", n_embd=128)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    context = Context(model, path, None, type_k=getattr(llama_cpp, f"GGML_TYPE_{type_k}"))
    decode_in([context], TOKENS[:40])
    assert ask(context, {"type_k_over": type_k_over}) == (_native.OK, "")
    decode_in([context], TOKENS[40:41])
    standard, over = context.rows()
    assert np.isfinite(over).all() and np.abs(standard - over).max() > 0.05
    llama_cpp.llama_free(context.ctx)
    llama_cpp.llama_model_free(model)
