"""Ms-PoE's rows against the float64 reference with a ratio of positions for each head."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Tiny, close, native_row, reference, rounding, tolerance
from reference import Heads
from tiny_gguf import ROPE_ARCHS

import pypcd
from pypcd import decode, engine
from pypcd.decode import Method, Session
from pypcd.engine import _bindings as _native
from pypcd.engine import tap
from research.methods.mspoe import MsPoE

Load = Callable[..., pypcd.Llama]

N = 100  # tokens of a prompt

# head counts: groups of two, no groups, one key for all; then what else a rotation may have
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in ROPE_ARCHS if arch != "qwen2vl"},
    **{f"{arch}-mha": (arch, {"n_head_kv": 4}) for arch in ("llama", "qwen3", "phi3")},
    **{f"{arch}-mqa": (arch, {"n_head_kv": 1}) for arch in ("llama", "qwen2")},
    "llama-6-heads": ("llama", {"n_head": 6, "n_embd": 96, "n_head_kv": 3}),
    "llama-factors": ("llama", {"rope_freqs": np.linspace(1, 8, 8)}),
    "llama-yarn": ("llama", {"yarn": (4.0, 64)}),
    "qwen2-yarn": ("qwen2", {"yarn": (4.0, 64)}),
    "qwen2-linear": ("qwen2", {"linear_scale": 4.0}),
}
SLIDING = {"gemma2", "gemma3"}


def set_ratios(llm: pypcd.Llama, low: float = 1.2, high: float = 1.8, first: int = 2) -> None:
    """Those of order="static"."""
    engine.set_head_ratios(llm, MsPoE(low, high, first)._static(llm))


def find_ratios(llm: pypcd.Llama, tokens: list[int], low: float = 1.2, high: float = 1.8, first: int = 2) -> None:
    """Evaluate a prompt, with those of order="outlier"."""
    rows = MsPoE(low, high, first, "outlier")
    engine.set_head_ratios(llm, rows._static(llm))
    engine.evaluate_with_ratios(llm, lambda: llm.eval(tokens), rows.by_outliers)


def take_off(llm: pypcd.Llama) -> None:
    engine.unset_head_ratios(llm)


def ratios(llm: pypcd.Llama, il: int) -> np.ndarray:
    out = (ctypes.c_float * 64)()
    return np.array(out[: _native.pcd_get_head_ratios(llm.ctx, il, out, len(out))])


def clear(llm: pypcd.Llama) -> None:
    llm.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)


def moved(path: Path, tokens: list[int], row: np.ndarray) -> float:
    return float(np.abs(reference(path).standard(tokens)[-1] - row).max())


# --- rows ---


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_static_heads_are_the_references(name: str, first: int, tiny: Tiny, load: Load) -> None:
    path = tiny(MODELS[name][0], **{"n_layer": 4, **MODELS[name][1]})
    llm, heads = load(path, False), Heads(first_layer=first)
    set_ratios(llm, first=first)
    wanted = reference(path, cpu_rounding=True).with_heads(TOKENS, heads)
    for a, b in ((0, 70), (70, N), (N, N + 1), (N + 1, N + 2)):  # two batches, one in two micro-batches, and two steps
        llm.eval(TOKENS[a:b])
        close(native_row(llm), wanted[b - 1], tolerance(path))
    assert moved(path, TOKENS[: N + 2], wanted[N + 1]) > 0.05, "ratios must matter, or this test shows nothing"
    trace = reference(path).trace(TOKENS, heads)
    for il in range(4):
        np.testing.assert_allclose(ratios(llm, il), trace.ratios[il], rtol=1e-6)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SLIDING])
def test_heads_in_the_order_of_outliers_are_the_references(name: str, first: int, tiny: Tiny, load: Load) -> None:
    path = tiny(MODELS[name][0], **{"n_layer": 4, **MODELS[name][1]})
    llm, heads = load(path, False, n_batch=128, n_ubatch=128), Heads(first_layer=first, outliers=True)
    ref = reference(path, cpu_rounding=True)
    wanted, trace = ref.with_heads(TOKENS, heads, n_prompt=N), ref.trace(TOKENS[:N], heads)
    find_ratios(llm, TOKENS[:N], first=first)
    for il in (il for il in range(4) if ref._rope[il][0].any()):  # some of smollm3's layers do not rotate
        np.testing.assert_allclose(ratios(llm, il), trace.ratios[il], rtol=1e-6)
    for i in range(N, N + 3):
        close(native_row(llm), wanted[i - 1], tolerance(path))
        llm.eval(TOKENS[i : i + 1])
    orders = {tuple(r) for r in trace.ratios[first:]}
    assert any(list(order) != sorted(order, reverse=True) for order in orders) or len(orders) > 1


def test_another_prompt_has_another_order(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=6)
    llm = load(path, False, n_batch=128, n_ubatch=128)
    seen = set()
    for tokens in (TOKENS[:40], TOKENS[30:70], TOKENS[:40]):
        clear(llm)
        find_ratios(llm, tokens)
        trace = reference(path).trace(tokens, Heads(outliers=True))
        np.testing.assert_allclose([ratios(llm, il) for il in range(6)], trace.ratios, rtol=1e-6)
        seen.add(tuple(np.concatenate(trace.ratios)))
        llm.eval(tokens[:5])  # steps leave it
        np.testing.assert_allclose(ratios(llm, 3), trace.ratios[3], rtol=1e-6)
    assert len(seen) == 2
    take_off(llm)
    assert all((ratios(llm, il) == 1).all() for il in range(6)) and engine.head_counts(llm) == [4] * 6


def test_ratios_that_are_set_again_are_those_of_the_cache(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    llm, heads = load(path, False, n_batch=128, n_ubatch=128), Heads(outliers=True)
    find_ratios(llm, TOKENS[:N])
    found = [ratios(llm, il) for il in range(4)]
    take_off(llm)
    engine.set_head_ratios(llm, found)
    llm.eval(TOKENS[N : N + 1])
    close(native_row(llm), reference(path).with_heads(TOKENS, heads, N)[N], tolerance(path))


def test_layers_before_the_first_are_untouched_to_the_bit(tiny: Tiny, load: Load) -> None:
    path = tiny("qwen3", n_layer=4)
    stock, llm = load(path, False), load(path, False)
    set_ratios(llm)
    with tap(stock, ["l_out", "kq_soft_max"]) as a, tap(llm, ["l_out", "kq_soft_max"]) as b:
        stock.eval(TOKENS[:60])
        llm.eval(TOKENS[:60])
    for il in range(4):
        for name in f"l_out-{il}", f"kq_soft_max-{il}":
            assert np.array_equal(a[name], b[name]) == (il < 2)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("order", ["static", "outlier"])
def test_off_again_is_stock_to_the_bit(order: str, flash_attn: bool, tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    stock, llm = (load(path, False, flash_attn=flash_attn, f16=True) for _ in range(2))
    if order == "outlier":
        find_ratios(llm, TOKENS[:50])
    else:
        set_ratios(llm)
        llm.eval(TOKENS[:50])
    take_off(llm)
    clear(llm)
    for part in TOKENS[:50], TOKENS[50:51], TOKENS[51:52]:
        stock.eval(part)
        llm.eval(part)
        assert np.array_equal(native_row(stock), native_row(llm))


def test_ratios_near_1_are_nearly_the_model_and_of_1_the_model_to_the_bit(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4, rope_freqs=np.linspace(1, 3, 8))
    llm, stock = load(path, False), load(path, False)
    stock.eval(TOKENS[:50])
    for ratio in (1 + 1e-6, 1):
        clear(llm)
        set_ratios(llm, ratio, ratio, 0)
        llm.eval(TOKENS[:50])
        close(native_row(llm), reference(path).standard(TOKENS[:50])[-1], tolerance(path))
    assert np.array_equal(native_row(llm), native_row(stock))


def test_equal_ratios_are_a_scale_of_all_positions(tiny: Tiny, load: Load) -> None:
    path = tiny("qwen2", n_layer=4)
    llm, stock = load(path, False), load(path, False, rope_freq_scale=0.5)
    set_ratios(llm, 2, 2, 0)
    for model in llm, stock:
        model.eval(TOKENS[:60])
    close(native_row(llm), native_row(stock), rounding(path))


@pytest.mark.parametrize("kind", ["f16", "flash", "q8_0"])
def test_coarse_caches_hold_the_keys_as_they_were_rotated(kind: str, tiny: Tiny, load: Load) -> None:
    path, flash = tiny("llama", n_layer=4, n_embd=128), kind != "f16"
    q8 = {"type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}
    llm = load(path, False, flash_attn=flash, f16=kind != "q8_0", **(q8 if kind == "q8_0" else {}))
    set_ratios(llm)
    llm.eval(TOKENS[:60])
    wanted = reference(path).with_heads(TOKENS[:60], Heads())[-1]
    got = native_row(llm).astype(float)
    assert ((got - wanted) ** 2).mean() < (3e-3 if kind == "q8_0" else 1e-4) * (wanted**2).mean()
    assert moved(path, TOKENS[:60], wanted) > 0.3


def test_a_hybrid_model_has_ratios_where_it_attends(tiny: Tiny, load: Load) -> None:
    path = tiny("lfm2", n_layer=4)
    llm = load(path, False)
    set_ratios(llm, first=2)
    llm.eval(TOKENS[:60])
    close(native_row(llm), reference(path).with_heads(TOKENS[:60], Heads())[-1], tolerance(path))
    assert "recurrent state" in (MsPoE(order="outlier").refusal(llm) or "")


def test_exits_of_scaled_heads_are_theirs(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    llm = load(path, False)
    array = (ctypes.c_int32 * 1)(3)
    set_ratios(llm)
    assert _native.pcd_set_exits(llm.ctx, array, 1, None, 0) == _native.OK
    llm.eval(TOKENS[:60])
    got = np.ctypeslib.as_array(_native.pcd_get_exit_logits(llm.ctx, 0, -1), shape=(llm.n_vocab(),))
    ref = reference(path)
    wanted = ref._head(ref.trace(TOKENS[:60], Heads()).hidden[3][-1:])[0]
    close(got, wanted, tolerance(path, of=wanted))


# --- what is refused ---


def test_values_out_of_range_are_named(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    for values, named in (
        ([0.0] * 12, "a ratio is 0"),
        ([1.0] * 11 + [1001.0], "a ratio is 1001"),
        ([float("nan")] * 12, "a ratio is nan"),
        ([1.0] * 11, "11 ratios are given; allowed: 12"),
    ):
        with pytest.raises(ValueError, match=named):
            engine.set_head_ratios(llm, [values])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arch", "order", "named"),
    [
        *((arch, "static", "no rotary positions") for arch in ("gpt2", "bloom", "mamba", "starcoder")),
        ("qwen2vl", "static", "M-RoPE"),
        ("deepseek2", "static", "MLA"),
        ("gemma3", "outlier", "sliding-window"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(arch: str, order: str, named: str, tiny: Tiny, load: Load) -> None:
    stock, other = load(tiny(arch), False), load(tiny(arch), False)
    assert named in (MsPoE(1.2, 1.8, 0, order).refusal(other) or "")
    for model in other, stock:
        model.eval(TOKENS[:20])
    assert np.array_equal(native_row(other), native_row(stock))


def test_ratios_of_one_layer_are_changed_in_place(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    error = ctypes.create_string_buffer(200)

    def change(il: int, *values: float) -> str:
        array = (ctypes.c_float * len(values))(*values)
        status = _native.pcd_set_layer_ratios(llm.ctx, il, array, len(values), error, 200)
        assert (status == _native.OK) == (not error.value)
        return error.value.decode()

    assert "layer 2" in change(2, 1, 2, 3, 4)  # nothing has been set yet
    set_ratios(llm)
    for il in (1, 3):
        assert f"layer {il} has no ratios" in change(il, 1, 2, 3, 4)
    assert "3 ratios are given; allowed: 4" in change(2, 1, 2, 3) and "a ratio is -4" in change(2, 1, 2, 3, -4)
    assert change(2, 1, 2, 3, 4) == "" and ratios(llm, 2).tolist() == [1, 2, 3, 4]
    other = load(tiny("llama"), False)
    engine.set_head_ratios(other, [np.ones(8), np.arange(1, 5)])
    for model in llm, other:
        model.eval(TOKENS[:30])
    assert np.array_equal(native_row(llm), native_row(other))


def test_ratios_and_pcd_exclude_each_other(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper")
    with pytest.raises(pypcd.UnsupportedError, match="PCD is on, and over-rotates"):
        set_ratios(llm)
    llm.pcd = False
    set_ratios(llm)
    with pytest.raises(pypcd.UnsupportedError, match="have ratios of their own .Ms-PoE.*llama_pcd_set_head_ratios"):
        llm.pcd = "paper"
    take_off(llm)
    llm.pcd = "paper"
    llm.eval(TOKENS[:5])
    assert llm.pcd_logits().local is not None


def test_keys_of_scaled_heads_are_not_shifted(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_can_shift(memory)
    set_ratios(llm, first=0)
    assert not llama_cpp.llama_memory_can_shift(memory)
    llm.eval(TOKENS[:20])
    llama_cpp.llama_memory_seq_rm(memory, 0, 0, 5)
    llama_cpp.llama_memory_seq_add(memory, 0, 5, -1, -5)
    llm.n_tokens -= 5
    with pytest.raises(pypcd.PCDError, match="cannot move to other positions; clear the memory"):
        llm.eval(TOKENS[20:21])
    clear(llm)
    llm.eval(TOKENS[:20])
    take_off(llm)
    assert llama_cpp.llama_memory_can_shift(memory)


# --- the method ---


@pytest.mark.parametrize("name", ["ms-poe", "ms-poe-outlier", "ms-poe:first_layer=0:max_ratio=2.5"])
def test_the_method_answers_as_the_reference(name: str, tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    llm, method = load(path, False), decode.parse(name)
    assert isinstance(method.rows, MsPoE)
    rows = method.rows
    heads = Heads(rows.min_ratio, rows.max_ratio, rows.first_layer, rows.order == "outlier")
    session, ref, text = Session(llm), reference(path), "tell me rather more of it"
    tokens = llm.tokenize(text.encode(), special=False)
    n_prompt = len(tokens)

    seen: list[tuple[int, np.ndarray]] = []
    answer = method.generate(session, text, max_tokens=6, look=lambda token, row: seen.append((token, row)))
    for token, row in seen:
        close(row, ref.with_heads(tokens, heads, n_prompt)[-1], tolerance(path))
        tokens.append(token)
    assert answer.n_evaluated == n_prompt

    again: list[np.ndarray] = []
    second = method.generate(session, text, max_tokens=6, look=lambda token, row: again.append(row))
    assert second.n_evaluated == 0, "the same prompt under the same ratios is in the cache"
    assert np.array_equal(again, [row for _, row in seen])
    plain = Method("greedy").generate(session, text, max_tokens=6)
    assert plain.n_evaluated == n_prompt, "under other ratios it is another prompt"
    third = method.generate(session, text, max_tokens=6)
    assert third.n_evaluated == n_prompt and third.tokens == answer.tokens


def test_a_prompt_in_the_cache_keeps_its_order_whatever_is_set_meanwhile(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    llm, method = load(path, False), decode.parse("ms-poe-outlier")
    session = Session(llm)
    first = method.generate(session, "one two three", max_tokens=4)
    set_ratios(llm, high=3)
    take_off(llm)
    again = method.generate(session, "one two three", max_tokens=4)
    assert again.n_evaluated == 0 and again.tokens == first.tokens
    other = method.generate(Session(llm), "three two one", max_tokens=4)
    assert other.n_evaluated > 0
    again = method.generate(session, "one two three", max_tokens=4)
    assert again.n_evaluated == first.n_evaluated and again.tokens == first.tokens


@pytest.mark.parametrize("name", ["ms-poe", "ms-poe-outlier"])
def test_beams_share_the_prompt_and_its_order(name: str, tiny: Tiny, load: Load) -> None:
    """The best of two beams is at least as probable as the greedy answer, according to the reference."""
    path = tiny("llama", n_layer=4)
    llm = load(path, False, n_seq_max=5)
    greedy, beam = (
        decode.parse(name + search).generate(llm, "one two three", max_tokens=4) for search in ("", "+beam:2")
    )
    tokens = llm.tokenize(b"one two three", special=False)
    heads = Heads(outliers=name.endswith("outlier"))

    def score(answer: tuple[int, ...]) -> float:
        rows = reference(path).with_heads([*tokens, *answer], heads, len(tokens))[len(tokens) - 1 : -1]
        logs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        return float(logs[np.arange(len(answer)), answer].sum()) / len(answer)

    assert score(beam.tokens) >= score(greedy.tokens) - 1e-4


@pytest.mark.parametrize(
    ("name", "arch", "error", "named"),
    [
        ("ms-poe-outlier", "llama", ValueError, "at most 16 .*n_ubatch"),
        ("ms-poe", "gpt2", pypcd.UnsupportedError, "no rotary"),
        ("ms-poe:first_layer=9", "llama", pypcd.UnsupportedError, "first_layer is 9, allowed: 0 to 3"),
        ("ms-poe:min_ratio=0", "llama", ValueError, "min_ratio is 0"),
        ("ms-poe:max_ratio=1", "llama", ValueError, "max_ratio is 1; .* min_ratio"),
        ("ms-poe:first_layer=-1", "llama", ValueError, "first_layer is -1"),
        ("ms-poe:order=outlier", "llama", ValueError, "'order'"),
        ("ms-poe:ratio=2", "llama", ValueError, "did you mean"),
    ],
)
def test_the_method_says_what_it_cannot_do(
    name: str, arch: str, error: type[Exception], named: str, tiny: Tiny, load: Load
) -> None:
    llm, text = load(tiny(arch, n_layer=4), False, n_batch=64, n_ubatch=16), "a b c d e f g h i j k l m n o p q r s"
    with pytest.raises(error, match=named):
        decode.parse(name).generate(llm, text)
    if arch == "llama":  # a prompt of several batches is no matter with the static order
        decode.parse("ms-poe").generate(llm, text, max_tokens=2)


def test_an_order_is_static_or_of_outliers() -> None:
    with pytest.raises(ValueError, match="'static', 'outlier'"):
        MsPoE(order="random")
