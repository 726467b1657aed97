"""Batches straight through llama_decode, as C callers make them: odd models, odd batches, contexts changed in between.

What must come out is known from the same library with PCD off, from a float32 cache, or from an exact identity.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import llama_cpp
import numpy as np
import pytest
from conftest import F32, TOKENS, Tiny, check_contrast, close, native_row

import pypcd
from pypcd import _native
from pypcd._llama import _native_params

Setting = dict[str, Any]
Rows = tuple[np.ndarray, np.ndarray]
Load = Callable[..., pypcd.Llama]

TWINS = range(192, 256)  # their sequence ids
ROUNDING = 1e-3  # a batch evaluated in other parts; a wrong angle, cell or mask moves rows by tenths
SMALL_CONTEXT: dict[str, Any] = {
    **F32,
    "n_ctx": 256,
    "n_batch": 256,
    "n_ubatch": 256,
    "n_threads": 1,
    "n_threads_batch": 1,
    "kv_unified": True,
    "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
SHORT_SLIDING: dict[str, Any] = {"swa_full": False, "n_ctx": 1024, "n_ubatch": 32}  # a cache that forgets
# the three ways of evaluating twins: architecture, setting, context
WAYS: dict[str, tuple[str, Setting, dict[str, Any]]] = {
    "fused": ("llama", {}, {}),
    "alternate": ("llama", {"evaluation": "alternate"}, {}),
    "sequential": ("gemma3", {}, SHORT_SLIDING),
}


class Context:
    """A llama_context whose batches are made by hand; pcd=None is the stock library."""

    def __init__(self, model: Any, pcd: Setting | None, **params: Any) -> None:
        p = llama_cpp.llama_context_default_params()
        for name, value in {**SMALL_CONTEXT, **params}.items():
            assert hasattr(p, name), name
            setattr(p, name, value)
        self.ctx = llama_cpp.llama_init_from_model(model, p)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.n_embd = llama_cpp.llama_model_n_embd(model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        if pcd is not None:
            assert self.set(pcd) == (_native.OK, "")

    def set(self, setting: Setting, call: Any = _native.pcd_set) -> tuple[int, str]:
        error = ctypes.create_string_buffer(500)
        params = _native_params(pypcd.PCDConfig(**setting))
        return call(self.ctx, ctypes.byref(params), error, 500), error.value.decode()

    def decode(
        self,
        tokens: Sequence[int] | np.ndarray,
        start: int | None = None,
        *,
        out: Sequence[int] | None = None,
        seq: int = 0,
        positions: np.ndarray | None = None,
        call: Any = llama_cpp.llama_decode,
    ) -> int:
        """Tokens or embeddings, by default behind all others and with logits for the last; the status."""
        n = len(tokens)
        if start is None:
            start = self.span(seq)[1] + 1
        if positions is None:
            positions = np.arange(start, start + n)
        out = [n - 1] if out is None else out
        int32, seqs = ctypes.c_int32, (ctypes.c_int32 * 1)(seq)
        ids = embeddings = None
        if isinstance(tokens, np.ndarray):
            embeddings = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        else:
            ids = (int32 * n)(*tokens)
        batch = llama_cpp.llama_batch(
            n,
            ids,
            embeddings,
            (int32 * positions.size)(*positions.ravel().tolist()),
            (int32 * n)(*[1] * n),
            (ctypes.POINTER(int32) * n)(*[seqs] * n),
            (ctypes.c_int8 * n)(*(i in out for i in range(n))),
        )
        return call(self.ctx, batch)

    def rows(self, i: int = -1) -> Rows:
        """L and L*."""
        pointers = [_native.pcd_get_logits_ith(self.ctx, i, which) for which in range(2)]
        assert all(pointers), "no such row"
        standard, over = (np.ctypeslib.as_array(p, shape=(self.n_vocab,)).copy() for p in pointers)
        return standard, over

    def seen(self, i: int = -1) -> np.ndarray:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.ctx, i), shape=(self.n_vocab,)).copy()

    def embedding(self, i: int) -> np.ndarray | None:
        pointer = llama_cpp.llama_get_embeddings_ith(self.ctx, i)
        return np.ctypeslib.as_array(pointer, shape=(self.n_embd,)).copy() if pointer else None

    def span(self, seq: int = 0) -> tuple[int, int]:
        """The first and the last position in memory, -1 where there is none."""
        return (
            llama_cpp.llama_memory_seq_pos_min(self.memory, seq),
            llama_cpp.llama_memory_seq_pos_max(self.memory, seq),
        )


Native = Callable[..., Context]


@pytest.fixture
def native(tiny: Tiny) -> Iterator[Native]:
    """native(arch, setting or None, **llama_context_params)"""
    models: dict[str, Any] = {}
    opened: list[Context] = []

    def make(arch: str, pcd: Setting | None = None, **params: Any) -> Context:
        if arch not in models:
            p = llama_cpp.llama_model_default_params()
            p.n_gpu_layers = 0
            models[arch] = llama_cpp.llama_model_load_from_file(str(tiny(arch)).encode(), p)
        assert models[arch], arch
        opened.append(Context(models[arch], pcd, **params))
        return opened[-1]

    yield make
    for context in opened:
        llama_cpp.llama_free(context.ctx)
    for model in models.values():
        llama_cpp.llama_model_free(model)


def same_rows(a: Rows, b: Rows) -> None:
    close(a[0], b[0], ROUNDING)
    close(a[1], b[1], ROUNDING)
    assert np.abs(a[0] - a[1]).max() > 0.05, "the twin must differ, or this test shows nothing"


# --- odd models ---


@pytest.mark.parametrize("turned_on", ["first", "later"])
def test_latent_keys_in_a_quantised_cache_turn_as_float_ones_do(turned_on: str, native: Native) -> None:
    """128 dimensions could be stored Hadamard-rotated, but latent keys are not."""

    def rows(type_kv: int, turned_on: str) -> Rows:
        flash = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = native("deepseek2", type_k=type_kv, type_v=type_kv, flash_attn_type=flash)
        for tokens, when in ((TOKENS[:99], "first"), (TOKENS[99:100], "later")):
            if turned_on == when:
                assert context.set({}) == (_native.OK, "")
            assert context.decode(tokens) == 0
        return context.rows()

    exact = rows(llama_cpp.GGML_TYPE_F32, "first")
    effect = np.abs(exact[0] - exact[1]).max()
    assert effect > 5
    for got, row in zip(rows(llama_cpp.GGML_TYPE_Q8_0, turned_on), exact):
        close(got, row, effect / 20)


@pytest.mark.parametrize("before", [{"cache": "shared"}, False], ids=["shared", "off"])
def test_keys_weighed_after_their_rotation_are_refused_and_nothing_changes(before: Any, tiny: Tiny, load: Load) -> None:
    asked, never = (load(tiny("hunyuan-dense"), before) for _ in range(2))
    for llm in (asked, never):
        llm.eval(TOKENS[:20])
    with pytest.raises(pypcd.UnsupportedError, match='weighs its keys after rotating them.*cache="shared"'):
        asked.pcd = {"cache": "rerotated"}
    assert asked.pcd == never.pcd
    assert asked.pcd_stats().second_key_bytes == 0
    for llm in (asked, never):
        llm.eval(TOKENS[20:21])
    assert np.array_equal(native_row(asked), native_row(never))
    if before:
        rows = asked.pcd_logits()
        assert asked.pcd is not None and np.abs(rows.standard - rows.over_rotated).max() > 0.05
        check_contrast(rows, asked.pcd, native_row(asked))
    rerotated, shared = (_native_params(pypcd.PCDConfig(cache=cache)) for cache in ("rerotated", "shared"))
    error = ctypes.create_string_buffer(500)
    assert _native.pcd_check(asked.ctx, ctypes.byref(rerotated), error, 500) == _native.UNSUPPORTED
    assert b"weighs its keys" in error.value
    assert _native.pcd_check(asked.ctx, ctypes.byref(shared), error, 500) == _native.OK


def test_a_layer_without_attention_has_no_keys_to_derive(native: Native) -> None:
    stock, first, later = native("deci"), native("deci", {}), native("deci")
    for context in (stock, first, later):
        assert context.decode(TOKENS[:40]) == 0
    assert later.set({}) == (_native.OK, "")
    for context in (stock, first, later):
        assert context.decode(TOKENS[40:41]) == 0
    same_rows(later.rows(), first.rows())
    close(first.rows()[0], stock.seen(), ROUNDING)


def test_a_decoder_with_an_encoder_is_refused_and_decodes_on_without(native: Native) -> None:
    asked, never = native("t5"), native("t5")
    for context in (asked, never):
        assert context.decode(TOKENS[:20], 0, out=range(20), call=llama_cpp.llama_encode) == 0
        assert context.decode(TOKENS[:10]) == 0
    status, text = asked.set({"perturbation": "none", "window": 8})
    assert status == _native.UNSUPPORTED
    assert text == "the architecture 't5' has an encoder, and a twin cannot attend to it"
    for context in (asked, never):
        assert context.decode(TOKENS[10:11]) == 0
    assert np.array_equal(asked.seen(), never.seen())


# --- images: positions in time, height and width; a 3 x 4 image takes positions 10 to 13 ---

IMAGE = np.random.default_rng(3).standard_normal((12, 64)).astype(np.float32)
PLACES = np.array([(10, 10 + y, 10 + x, 0) for y in range(3) for x in range(4)]).T


def decode_around_an_image(context: Context, out: Sequence[int] = ()) -> None:
    assert context.decode(TOKENS[:10]) == 0
    assert context.decode(IMAGE, positions=PLACES, out=out) == 0


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
def test_without_over_rotation_the_twins_of_patches_are_the_patches(evaluation: str, native: Native) -> None:
    stock = native("qwen2vl")
    context = native("qwen2vl", {"base_ratio": 1, "evaluation": evaluation})
    for c in (stock, context):
        decode_around_an_image(c, range(12))
    for i in range(12):
        close(context.rows(i)[0], stock.seen(i), ROUNDING)
        close(context.rows(i)[1], stock.seen(i), ROUNDING)
    for c in (stock, context):
        assert c.decode(TOKENS[10:12], 14) == 0
    close(context.rows()[0], stock.seen(), ROUNDING)
    close(context.rows()[1], stock.seen(), ROUNDING)


def test_text_after_an_image_has_one_over_rotated_row_however_it_is_made(native: Native) -> None:
    stock, stored, derived = native("qwen2vl"), native("qwen2vl", {}), native("qwen2vl")
    alternate = native("qwen2vl", {"evaluation": "alternate"})
    for context in (stock, stored, derived, alternate):
        decode_around_an_image(context)
        assert context.decode(TOKENS[10:19], 14) == 0
    assert derived.set({}) == (_native.OK, "")
    for context in (stock, stored, derived, alternate):
        assert context.decode(TOKENS[19:20], 23) == 0
    same_rows(derived.rows(), stored.rows())
    same_rows(alternate.rows(), stored.rows())
    close(stored.rows()[0], stock.seen(), ROUNDING)


# --- batches that cannot be decoded ---


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_batch_that_does_not_fit_changes_nothing(arch: str, native: Native) -> None:
    tokens, params = (TOKENS * 5)[:513], {"n_ctx": 512, "n_batch": 512, "n_ubatch": 16, "swa_full": False}
    stock, asked, never = native(arch, **params), native(arch, {}, **params), native(arch, {}, **params)
    for context in (stock, asked, never):
        assert context.decode(tokens[:262]) == 0
    for context in (stock, asked):
        before = context.span()
        for n in (251, 260, 512):
            assert context.decode(tokens[:n], 262, out=[n - 11, n - 1]) == 1
            assert context.span() == before
    for n in (1, 249):  # up to the last cell
        for context in (stock, asked, never):
            assert context.decode(tokens[context.span()[1] + 1 :][:n], out=[0, n - 1]) == 0
        assert asked.span() == never.span() and asked.span()[1] == stock.span()[1]
        for i in (0, n - 1):
            close(asked.rows(i)[0], stock.seen(i), ROUNDING)
            same_rows(asked.rows(i), never.rows(i))


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_an_invalid_batch_is_refused_and_changes_nothing(arch: str, evaluation: str, native: Native) -> None:
    params = {"n_ctx": 1024, "n_seq_max": 2, "swa_full": False}
    stock, asked = native(arch, **params), native(arch, {"evaluation": evaluation}, **params)
    for context in (stock, asked):
        assert context.decode(TOKENS[:20]) == context.decode(TOKENS[20:32], seq=1) == 0
        for start, seq, token in (
            (5, 0, 9),  # before the end of what is there
            (30, 0, 9),  # and behind it
            (5, -1, 9),
            (0, 2, 9),
            (0, 191, 9),
            (0, 192, 9),  # a twin's
            (0, 10**6, 9),
            (20, 0, 384),  # no such token
            (20, 0, -1),
        ):
            assert context.decode([token] * 4, start, seq=seq, out=[1, 3]) == -1, (start, seq, token)
        assert context.decode([], 20) == -1
        assert (context.span(0)[1], context.span(1)[1]) == (19, 11)
        assert context.decode(TOKENS[40:44], seq=1, out=[1, 3]) == 0
    fresh = native(arch, {"evaluation": evaluation}, **params)
    assert fresh.decode(TOKENS[20:32]) == fresh.decode(TOKENS[40:44], out=[1, 3]) == 0
    for i in (1, 3):
        close(asked.rows(i)[0], stock.seen(i), ROUNDING)
        same_rows(asked.rows(i), fresh.rows(i))


# --- limits and outputs of a context ---


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
def test_a_limit_on_outputs_counts_the_callers_rows_alone(evaluation: str, n: int, native: Native) -> None:
    limited = native("llama", {"evaluation": evaluation}, n_outputs_max=n)
    free = native("llama", {"evaluation": evaluation})
    for start, stop in ((0, 10), (10, 10 + n), (10 + n, 20)):
        out = range(stop - start - n, stop - start)
        for context in (limited, free):
            assert context.decode(TOKENS[start:stop], out=out) == 0
        for i in out if start else out[-1:]:
            same_rows(limited.rows(i), free.rows(i))
            close(limited.seen(i), free.seen(i), 2e-3)  # next to -10000 a float32 has few digits left


@pytest.mark.parametrize("out", [[19], [3, 10, 19], range(20)], ids=["last", "some", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_stock_for_every_token(way: str, out: Sequence[int], native: Native) -> None:
    arch, setting, params = WAYS[way]
    stock, context = native(arch, embeddings=True, **params), native(arch, setting, embeddings=True, **params)
    without = native(arch, setting, **params)
    for c in (stock, context, without):
        assert c.decode(TOKENS[:20], out=out) == 0
    for i in range(20):
        close(context.embedding(i), stock.embedding(i), ROUNDING)
    for i in out:
        close(context.rows(i)[0], stock.seen(i), ROUNDING)
        if i > 2:
            same_rows(context.rows(i), without.rows(i))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_may_be_turned_on_and_off(way: str, first: bool, native: Native) -> None:
    arch, setting, params = WAYS[way]
    stock, context = native(arch, embeddings=first, **params), native(arch, setting, embeddings=first, **params)
    without = native(arch, setting, **params)
    for k, on in enumerate((first, not first, first)):
        for c in (stock, context, without):
            if k and c is not without:
                llama_cpp.llama_set_embeddings(c.ctx, on)
            assert c.decode(TOKENS[10 * k : 10 * k + 10], out=[3, 9]) == 0
        for i in range(10):
            a, b = context.embedding(i), stock.embedding(i)
            assert (b is not None) == on
            assert a is None if b is None else a is not None
            if on:
                close(a, b, ROUNDING)
        for i in (3, 9):
            close(context.rows(i)[0], stock.seen(i), ROUNDING)
            same_rows(context.rows(i), without.rows(i))


def test_attention_that_is_no_longer_causal_is_an_error_until_it_is_again(native: Native) -> None:
    asked, never = native("llama", {}), native("llama", {})
    for context in (asked, never):
        assert context.decode(TOKENS[:20]) == 0
    llama_cpp.llama_set_causal_attn(asked.ctx, False)
    assert asked.decode(TOKENS[20:23]) == -1
    assert asked.span() == (0, 19)
    assert asked.set({}, _native.pcd_check)[0] == _native.UNSUPPORTED
    llama_cpp.llama_set_causal_attn(asked.ctx, True)
    for context in (asked, never):
        assert context.decode(TOKENS[20:23]) == 0
    same_rows(asked.rows(), never.rows())


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
        assert context.set(setting) == (_native.OK, "")
        return context

    context = prompted()
    before = left[0]
    assert context.decode(TOKENS[20:23], out=[0, 2]) == 0
    expected, n_steps = [context.rows(i) for i in (0, 2)], before - left[0]
    for at in (0, n_steps // 5, n_steps // 2, n_steps * 4 // 5, n_steps - 1):
        context = prompted()
        n_derived = _native.pcd_get_stats(context.ctx).n_derived
        left[0] = at
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
            same_rows(context.rows(i), rows)


def test_threads_with_contexts_of_their_own_give_the_same_rows(native: Native) -> None:
    kinds = [("llama", {}), ("llama", {"cache": "shared"}), ("gemma3", {"evaluation": "alternate"})] * 3
    contexts = [native(arch, setting, n_ctx=512, swa_full=False) for arch, setting in kinds]
    start = threading.Barrier(len(contexts) - 3)

    def work(context: Context, alone: bool = False) -> None:
        if not alone:
            start.wait()
        for a, b in ((0, 40), *((i, i + 1) for i in range(40, 60))):
            assert context.decode(TOKENS[a:b]) == 0

    for context in contexts[:3]:
        work(context, alone=True)
    threads = [threading.Thread(target=work, args=(context,)) for context in contexts[3:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, context in enumerate(contexts[3:]):
        assert np.array_equal(context.rows(), contexts[i % 3].rows())
        assert np.array_equal(context.seen(), contexts[i % 3].seen())


def _copy(memory: Any) -> None:
    llama_cpp.llama_memory_seq_cp(memory, 0, 1, 0, 30)


def _shift(memory: Any) -> None:
    llama_cpp.llama_memory_seq_add(memory, 0, 0, -1, 50)


def _cut(memory: Any) -> None:
    llama_cpp.llama_memory_seq_rm(memory, 0, 10, 20)
    llama_cpp.llama_memory_seq_add(memory, 0, 20, -1, -10)


def _halve(memory: Any) -> None:
    llama_cpp.llama_memory_seq_div(memory, 0, 0, 40, 2)


def _copy_and_shift(memory: Any) -> None:
    llama_cpp.llama_memory_seq_cp(memory, 0, 1, 0, 30)
    llama_cpp.llama_memory_seq_keep(memory, 1)
    llama_cpp.llama_memory_seq_add(memory, 1, 10, 30, 7)


@pytest.mark.parametrize("cache", ["rerotated", "shared"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("edit", "seq", "n_same"),
    [(_copy, 1, 30), (_shift, 0, 40), (_cut, 0, 0), (_halve, 0, 0), (_copy_and_shift, 1, 0)],
    ids=["copy", "shift", "cut", "halve", "copy-and-shift"],
)
def test_an_edited_memory_gives_the_rows_of_pcd_turned_on_behind_it(
    edit: Callable[[Any], None], seq: int, n_same: int, arch: str, cache: str, native: Native
) -> None:
    """Where it still holds the first n_same tokens, also those of these tokens alone."""
    params, setting = {"n_seq_max": 2, "swa_full": True}, {"cache": cache}
    stock, first, later, alone = (native(arch, on, **params) for on in (None, setting, None, setting))
    for context in (stock, first, later):
        assert context.decode(TOKENS[:40]) == 0
        edit(context.memory)
    assert later.set(setting) == (_native.OK, "")
    for context in (stock, first, later):
        assert context.decode(TOKENS[40:45], seq=seq, out=[0, 4]) == 0
    if n_same:
        assert alone.decode(TOKENS[:n_same]) == alone.decode(TOKENS[40:45], out=[0, 4]) == 0
    for i in (0, 4):
        close(first.rows(i)[0], stock.seen(i), ROUNDING)
        same_rows(first.rows(i), later.rows(i))
        if n_same and (edit is not _shift or cache == "rerotated"):  # else a shift changes the angles between q* and k
            same_rows(first.rows(i), alone.rows(i))
