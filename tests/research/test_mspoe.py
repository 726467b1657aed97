"""Ms-PoE's rows against the float64 reference with a ratio of positions for each head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from research.methods.heads import HeadRatios, head_counts
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


@contextlib.contextmanager
def ratios(llm: pypcd.Llama, low: float = 1.2, high: float = 1.8, first: int = 2) -> Iterator[HeadRatios]:
    """Those of order="static"."""
    with contextlib.closing(HeadRatios(llm, MsPoE(low, high, first)._static(llm))) as heads:
        yield heads
        heads.check()


@contextlib.contextmanager
def found_ratios(llm: pypcd.Llama, tokens: list[int], first: int = 2) -> Iterator[HeadRatios]:
    """A prompt that was evaluated with those of order="outlier"."""
    with ratios(llm, first=first) as heads:
        heads.find = MsPoE(first_layer=first, order="outlier").by_outliers
        llm.eval(tokens)
        heads.find = None
        heads.check()
        yield heads


def moved(path: Path, tokens: list[int], row: np.ndarray) -> float:
    return float(np.abs(reference(path).standard(tokens)[-1] - row).max())


# --- rows ---


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_static_heads_are_the_references(name: str, first: int, tiny: Tiny, load: Load) -> None:
    path = tiny(MODELS[name][0], **{"n_layer": 4, **MODELS[name][1]})
    llm, heads = load(path, False), Heads(first_layer=first)
    wanted = reference(path, cpu_rounding=True).with_heads(TOKENS, heads)
    with ratios(llm, first=first) as own:
        for a, b in (
            (0, 70),
            (70, N),
            (N, N + 1),
            (N + 1, N + 2),
        ):  # two batches, one in two micro-batches, and two steps
            llm.eval(TOKENS[a:b])
            close(native_row(llm), wanted[b - 1], tolerance(path))
    assert moved(path, TOKENS[: N + 2], wanted[N + 1]) > 0.05, "ratios must matter, or this test shows nothing"
    trace = reference(path).trace(TOKENS, heads)
    np.testing.assert_allclose(own.ratios, trace.ratios, rtol=1e-12)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*SLIDING, "hunyuan-dense")])
def test_heads_in_the_order_of_outliers_are_the_references(name: str, first: int, tiny: Tiny, load: Load) -> None:
    path = tiny(MODELS[name][0], **{"n_layer": 4, **MODELS[name][1]})
    llm, heads = load(path, False, n_batch=128, n_ubatch=128), Heads(first_layer=first, outliers=True)
    ref = reference(path, cpu_rounding=True)
    wanted, trace = ref.with_heads(TOKENS, heads, n_prompt=N), ref.trace(TOKENS[:N], heads)
    with found_ratios(llm, TOKENS[:N], first=first) as own:
        for il in (il for il in range(4) if ref._rope[il][0].any()):  # some of smollm3's layers do not rotate
            np.testing.assert_allclose(own.ratios[il], trace.ratios[il], rtol=1e-12)
        for i in range(N, N + 3):
            close(native_row(llm), wanted[i - 1], tolerance(path))
            llm.eval(TOKENS[i : i + 1])
    orders = {tuple(r) for r in trace.ratios[first:]}
    assert any(list(order) != sorted(order, reverse=True) for order in orders) or len(orders) > 1


def test_another_prompt_has_another_order_and_keeps_it_when_it_is_set_again(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=6)
    llm, heads = load(path, False, n_batch=128, n_ubatch=128), Heads(outliers=True)
    seen = set()
    for tokens in (TOKENS[:40], TOKENS[30:70], TOKENS[:40]):
        engine.clear(llm)
        with found_ratios(llm, tokens) as own:
            trace = reference(path).trace(tokens, heads)
            np.testing.assert_allclose(own.ratios, trace.ratios, rtol=1e-12)
        seen.add(tuple(np.concatenate(trace.ratios)))
    assert len(seen) == 2
    with contextlib.closing(HeadRatios(llm, own.ratios)):
        llm.eval(TOKENS[40:41])
        close(native_row(llm), reference(path).with_heads(TOKENS[:41], heads, 40)[40], tolerance(path))
    assert head_counts(llm) == [4] * 6


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("order", ["static", "outlier"])
def test_off_again_is_stock_to_the_bit(order: str, flash_attn: bool, tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    stock, llm = (load(path, False, flash_attn=flash_attn, f16=True) for _ in range(2))
    with found_ratios(llm, TOKENS[:50]) if order == "outlier" else ratios(llm):
        llm.eval(TOKENS[50:60])
    engine.clear(llm)
    for part in TOKENS[:50], TOKENS[50:51], TOKENS[51:52]:
        stock.eval(part)
        llm.eval(part)
        assert np.array_equal(native_row(stock), native_row(llm))


def test_ratios_near_1_are_nearly_the_model_and_of_1_the_model_to_the_bit(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4, rope_freqs=np.linspace(1, 3, 8))
    llm, stock = load(path, False), load(path, False)
    stock.eval(TOKENS[:50])
    for ratio in (1 + 1e-6, 1):
        engine.clear(llm)
        with ratios(llm, ratio, ratio, 0):
            llm.eval(TOKENS[:50])
        close(native_row(llm), reference(path).standard(TOKENS[:50])[-1], tolerance(path))
    assert np.array_equal(native_row(llm), native_row(stock))


def test_equal_ratios_are_a_scale_of_all_positions(tiny: Tiny, load: Load) -> None:
    path = tiny("qwen2", n_layer=4)
    llm, stock = load(path, False), load(path, False, rope_freq_scale=0.5)
    stock.eval(TOKENS[:60])
    with ratios(llm, 2, 2, 0):
        llm.eval(TOKENS[:60])
    close(native_row(llm), native_row(stock), rounding(path))


@pytest.mark.parametrize("kind", ["f16", "flash", "q8_0"])
def test_coarse_caches_hold_the_keys_as_they_were_rotated(kind: str, tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4, n_embd=128)
    keys = {"type_k": llama_cpp.GGML_TYPE_Q8_0} if kind == "q8_0" else {}
    llm = load(path, False, flash_attn=kind == "flash", f16=True, **keys)
    with ratios(llm):
        llm.eval(TOKENS[:60])
    wanted = reference(path).with_heads(TOKENS[:60], Heads())[-1]
    got = native_row(llm).astype(float)
    assert ((got - wanted) ** 2).mean() < (3e-3 if kind == "q8_0" else 1e-4) * (wanted**2).mean()
    assert moved(path, TOKENS[:60], wanted) > 0.3


def test_a_hybrid_model_has_ratios_where_it_attends(tiny: Tiny, load: Load) -> None:
    path = tiny("lfm2", n_layer=4)
    llm = load(path, False)
    with ratios(llm, first=2):
        llm.eval(TOKENS[:60])
    close(native_row(llm), reference(path).with_heads(TOKENS[:60], Heads())[-1], tolerance(path))
    assert "recurrent state" in (MsPoE(order="outlier").refusal(llm) or "")


# --- what is refused ---


@pytest.mark.parametrize(
    ("arch", "order", "named"),
    [
        *((arch, "static", "no rotary positions") for arch in ("gpt2", "bloom", "mamba")),
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


@pytest.mark.parametrize(
    ("arch", "name", "named"),
    [
        ("starcoder", "ms-poe:first_layer=0", "does not show them"),  # which rotates in name only
        ("hunyuan-dense", "ms-poe-outlier:first_layer=0", "changes its queries after their rotation"),  # by a norm
    ],
)
def test_what_only_a_graph_shows_is_said_at_the_first_prompt(
    arch: str, name: str, named: str, tiny: Tiny, load: Load
) -> None:
    llm = load(tiny(arch), "paper" if arch == "hunyuan-dense" else False, n_batch=64, n_ubatch=64)
    before = llm.pcd
    with pytest.raises(pypcd.UnsupportedError, match=f"head by head: .*{named}"):
        decode.parse(name).generate(llm, "one two three", max_tokens=2)
    assert llm.pcd == before


def test_queries_are_not_turned_without_their_keys(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an architecture whose keys have another name in the graph."""
    llm, tap = load(tiny("llama", n_layer=4), False), engine.tap
    monkeypatch.setattr(engine, "tap", lambda llm, names, look: tap(llm, names[:1], look))
    with pytest.raises(pypcd.UnsupportedError, match="of layer 2, .* shows only the tensors Q"), ratios(llm):
        llm.eval(TOKENS[:20])


def test_values_need_flash_attention_if_they_are_quantised(tiny: Tiny, load: Load) -> None:
    q8 = {"type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}
    llm = load(tiny("llama", n_embd=128), False, flash_attn=True, **q8)
    assert "needs flash attention" in (MsPoE().refusal(llm) or "")


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
    HeadRatios(llm, MsPoE(1.2, 3)._static(llm)).close()
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
