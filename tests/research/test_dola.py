"""Early exits against the float64 reference's hidden states, and DoLa against the same in numpy and by hand."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TOKENS, Tiny, close, native_row, reference, rounding, shape, tolerance
from limits import allowed_nmse, nmse
from tiny_gguf import ARCHS

import pypcd
from pypcd.decode import Greedy, Method, Session, parse
from pypcd.engine import _bindings as _native
from research.methods.dola import DoLa, candidate_layers, dola_contrast, premature_layer

Load = Callable[..., pypcd.Llama]

TIED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tied": True}),
    ("qwen2", {"tied": True}),
    ("gemma3", {"tied": False}),
]
CASES = [(arch, {}) for arch in ARCHS if arch != "mamba"] + TIED
IDS = ["-".join([arch, *(f"{k}={v}" for k, v in kw.items())]) for arch, kw in CASES]


def set_exits(llm: pypcd.Llama, layers: Sequence[int]) -> tuple[int, str]:
    error = ctypes.create_string_buffer(1024)
    array = (ctypes.c_int32 * len(layers))(*layers)
    return _native.pcd_set_exits(llm.ctx, array, len(layers), error, len(error)), error.value.decode()


def exit_row(llm: pypcd.Llama, layer: int, i: int = -1) -> np.ndarray | None:
    pointer = _native.pcd_get_exit_logits(llm.ctx, layer, i)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy() if pointer else None


def exit_rows(llm: pypcd.Llama, layers: Iterable[int], i: int = -1) -> np.ndarray:
    rows = [exit_row(llm, layer, i) for layer in layers]
    assert all(row is not None for row in rows)
    return np.stack([row for row in rows if row is not None])


def decode(llm: pypcd.Llama, entries: Sequence[tuple[int, int, int, bool]]) -> None:
    """One batch from tokens, positions, sequences and whether a row is wanted."""
    Session(llm).decode(entries)


# --- the exits ---


@pytest.mark.parametrize(("arch", "kwargs"), CASES, ids=IDS)
def test_exits_are_the_heads_view_of_hidden_states(arch: str, kwargs: dict[str, Any], tiny: Tiny, load: Load) -> None:
    path = tiny(arch, **kwargs)
    llm, layers = load(path, False), range(reference(path).n_layer)
    assert set_exits(llm, layers) == (_native.OK, "")
    llm.eval(TOKENS[:-1])
    llm.eval(TOKENS[-1:])  # a graph of another size
    wanted = reference(path, cpu_rounding=True).exits(TOKENS, layers)
    for at in -1, 0:
        got = exit_rows(llm, layers, at)
        close(got, wanted[:, -1], tolerance(path, of=wanted))
    assert np.abs(np.diff(wanted[:, -1], axis=0)).max() > 0.3, "layers must differ, or this test shows nothing"
    assert _native.pcd_has_tied_head(llm.ctx) == ("output.weight" not in reference(path)._w)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_every_row_that_was_asked_for_has_its_exits(flash_attn: bool, tiny: Tiny, load: Load) -> None:
    """Over several micro-batches, in any order of layers, by either way of counting."""
    path, layers = tiny("qwen3"), (2, 0)
    llm = load(path, False, n_ubatch=16, flash_attn=flash_attn, f16=flash_attn)
    assert set_exits(llm, layers) == (_native.OK, "")
    asked = [0, 5, 15, 16, 33, 34, 62]
    decode(llm, [(token, i, 0, i in asked) for i, token in enumerate(TOKENS[:63])])
    wanted = reference(path).exits(TOKENS[:63], layers)
    for nth, i in enumerate(asked):
        for at in i, nth - len(asked):
            close(exit_rows(llm, (0, 1), at), wanted[:, i], tolerance(path, of=wanted, **shape(llm)))
    for layer, at in (0, 1), (0, 63), (0, -8), (2, 0), (-1, 0):
        assert exit_row(llm, layer, at) is None


def test_rows_of_sequences_that_memory_deals_out_anew_are_the_right_ones(tiny: Tiny, load: Load) -> None:
    """With recurrent layers, the memory takes tokens in another order than the batch's."""
    path = tiny("lfm2")
    texts = TOKENS[:20], TOKENS[40:60]
    llm = load(path, False, n_seq_max=2)
    assert set_exits(llm, (1, 2)) == (_native.OK, "")
    decode(llm, [(texts[seq][i], i, seq, True) for i in range(20) for seq in (1, 0)])
    for seq in 0, 1:
        wanted = reference(path).exits(texts[seq], (1, 2))
        for i in 0, 7, 19:
            close(exit_rows(llm, (0, 1), 2 * i + 1 - seq), wanted[:, i], tolerance(path, of=wanted))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_the_models_own_rows_do_not_change_by_a_bit(arch: str, flash_attn: bool, tiny: Tiny, load: Load) -> None:
    stock, llm = (load(tiny(arch), False, flash_attn=flash_attn, f16=flash_attn) for _ in range(2))
    for i, layers in enumerate([(), (0,), (0, 1, 2), (), (2, 1)]):
        assert set_exits(llm, layers) == (_native.OK, "")
        for part in TOKENS[i * 20 : i * 20 + 19], TOKENS[i * 20 + 19 : i * 20 + 20]:
            stock.eval(part)
            llm.eval(part)
            assert np.array_equal(native_row(stock), native_row(llm))
        assert (exit_row(llm, 0) is not None) == bool(layers)


def test_exits_come_and_go_beside_pcd(tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    stock, llm = load(path, "paper"), load(path, "paper")
    for model in stock, llm:
        model.eval(TOKENS[:30])
    llm.pcd = False
    assert set_exits(llm, (1,)) == (_native.OK, "")
    llm.eval(TOKENS[30:31])
    wanted = reference(path).exits(TOKENS[:31], (1,))
    close(exit_rows(llm, (0,)), wanted[:, -1], tolerance(path, of=wanted))
    assert set_exits(llm, ()) == (_native.OK, "")
    llm.pcd = "paper"
    stock.eval(TOKENS[30:31])
    for model in stock, llm:
        model.eval(TOKENS[31:32])
    close(llm.pcd_logits().local, stock.pcd_logits().local, rounding(path))


def test_a_quantised_head_is_the_one_the_model_has(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", weight_type="Q8_0")
    llm = load(path, False)
    assert set_exits(llm, (0, 2)) == (_native.OK, "")
    llm.eval(TOKENS[:40])
    exact = reference(path, cpu_rounding=True)
    wanted, last = exact.exits(TOKENS[:40], (0, 2))[:, -1], exact.standard(TOKENS[:40])[-1]
    assert nmse(exit_rows(llm, (0, 1)), wanted) <= allowed_nmse(nmse(native_row(llm), last)) < 0.1


def test_refusals_leave_the_former_setting_and_name_the_value(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    for layers, named in (
        ((3,), "layer is 3, allowed: 0 .* to 2"),
        ((0, -1), "layer is -1"),
        ((0, 1, 2, 0), "4 exits"),
    ):
        status, text = set_exits(llm, layers)
        assert status == _native.INVALID and re.search(named, text), text
    assert set_exits(llm, (1,)) == (_native.OK, "")
    with pytest.raises(pypcd.UnsupportedError, match="llama_pcd_set_exits"):
        llm.pcd = "paper"
    assert set_exits(llm, (9,))[0] == _native.INVALID
    llm.eval(TOKENS[:5])
    assert exit_row(llm, 0) is not None
    assert set_exits(llm, ()) == (_native.OK, "")
    llm.pcd = "paper"
    for model, named in ((llm, "PCD is on"), (load(tiny("t5"), False), "'t5'")):
        status, text = set_exits(model, (0,))
        assert status == _native.UNSUPPORTED and named in text


# --- the method, by hand ---


def test_candidates_are_hugging_faces() -> None:
    def low(n: int, tied: bool) -> tuple[int, ...]:
        return candidate_layers("low", n, tied=tied)

    def high(n: int, tied: bool) -> tuple[int, ...]:
        return candidate_layers("high", n, tied=tied)

    assert low(32, False) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert high(32, False) == high(32, True) == (16, 18, 20, 22, 24, 26, 28, 30)
    assert low(16, True) == (2, 4, 6) and high(16, True) == (8, 10, 12, 14)
    assert low(40, False) == tuple(range(0, 20, 2)) and high(40, False) == tuple(range(20, 40, 2))
    assert low(41, True) == tuple(range(2, 20, 2)) and high(41, False) == tuple(range(21, 41, 2))
    assert low(80, False) == tuple(range(0, 20, 2)) and high(80, False) == tuple(range(60, 80, 2))
    assert low(1, False) == low(1, True) == (0,)
    assert low(2, True) == (1,) and low(2, False) == (0,)
    assert low(4, True) == low(5, True) == (2,)
    assert candidate_layers((16, 2, 40), 32, tied=True) == (16, 2)
    with pytest.raises(ValueError, match="layers='low' leaves no candidate in a model of 3 layers and the embeddings"):
        low(3, True)
    with pytest.raises(ValueError, match="name layers from 0 to 31"):
        candidate_layers((32,), 32, tied=False)


def test_the_furthest_layer_by_hand() -> None:
    # P = (3/4, 1/4). Q = (1/2, 1/2): M = (5/8, 3/8), twice the divergence is 5/4 log 5/8 + 3/4 log 3/8
    # - 5/8 log(3/4 1/2) - 3/8 log(1/4 1/2). Q = (1/4, 3/4) lies further, Q = P at 0
    final, same, even, other = np.log([[3, 1], [9, 3], [7, 7], [1, 3]])

    def divergence(p: np.ndarray, q: np.ndarray) -> float:
        m = (p + q) / 2
        return float((m * np.log(m / p)).sum() + (m * np.log(m / q)).sum()) / 4  # two KLs' mean, over two tokens

    p = np.array([0.75, 0.25])
    hand = 5 / 4 * np.log(5 / 8) + 3 / 4 * np.log(3 / 8) - 5 / 8 * np.log(3 / 8) - 3 / 8 * np.log(1 / 8)
    assert divergence(p, np.array([0.5, 0.5])) == pytest.approx(hand / 4)
    assert divergence(p, np.array([0.25, 0.75])) > hand / 4 > 0
    assert premature_layer(final, [same, even, other]) == 2
    assert premature_layer(final, [even, same]) == 0
    assert premature_layer(final, [same, even, even]) == 1
    assert premature_layer(final, [other]) == 0


def test_it_is_the_reversed_divergence_averaged() -> None:
    """KL(M || P), not KL(P || M): where the two disagree, Hugging Face's order of arguments decides."""
    rng = np.random.default_rng(3)
    disagree = 0
    for _ in range(200):
        final, exits = rng.normal(0, 3, 5), rng.normal(0, 3, (2, 5))
        p, q = softmax(final), softmax(exits)
        m = (p + q) / 2
        reversed_ = (m * np.log(m / p) + m * np.log(m / q)).mean(axis=1)
        usual = (p * np.log(p / m) + q * np.log(q / m)).mean(axis=1)
        assert premature_layer(final, exits) == reversed_.argmax()
        disagree += reversed_.argmax() != usual.argmax()
    assert disagree > 0


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def test_the_filter_and_the_contrast_by_hand() -> None:
    final, base = np.log([60.0, 7.0, 5.0, 28.0]) + 3, np.log([10.0, 20.0, 30.0, 40.0]) - 5
    kept = np.log([6.0, 7 / 20, np.nan, 28 / 40])
    kept[2] = -np.inf  # 5 < 60/10 <= 7
    np.testing.assert_allclose(dola_contrast(final, base), kept, rtol=1e-12)
    np.testing.assert_allclose(dola_contrast(final, base, relative_top=0.0)[2], np.log(5 / 30), rtol=1e-12)
    assert np.isfinite(dola_contrast(final, base, relative_top=1.0)).tolist() == [True, False, False, False]


# --- the method, on models ---


def dola_row(path: Path, tokens: Sequence[int], layers: Sequence[int], relative_top: float = 0.1) -> np.ndarray:
    """The contrasted row, in float64 from the reference."""
    ref = reference(path, cpu_rounding=True)
    final, exits = ref.standard(tokens)[-1], ref.exits(tokens, layers)[:, -1]
    p, q = softmax(final), softmax(exits)
    m = (p + q) / 2
    best = int((m * np.log(m / p) + m * np.log(m / q)).mean(axis=1).argmax())
    row = np.log(p) - np.log(q[best])
    row[p < relative_top * p.max()] = -np.inf
    return row


@pytest.mark.parametrize(
    ("arch", "kwargs", "name", "layers"),
    [
        ("llama", {"n_layer": 6}, "dola-low", (0, 2)),
        ("llama", {"n_layer": 6}, "dola-high", (3, 5)),
        ("qwen2", {"n_layer": 8, "tied": True}, "dola-low", (2,)),
        ("gemma3", {"n_layer": 9}, "dola-high", (4, 6, 8)),
        ("phi3", {}, "dola:2:0:1", (2, 0, 1)),
        ("llama", {"n_layer": 6}, "dola:1:4:relative_top=0.5", (1, 4)),
    ],
)
def test_dola_is_the_reference_step_by_step(
    arch: str, kwargs: dict[str, Any], name: str, layers: tuple[int, ...], tiny: Tiny, load: Load
) -> None:
    path = tiny(arch, **kwargs)
    llm, method = load(path, False), parse(name)
    assert isinstance(method.rows, DoLa) and method.rows.candidates(llm) == layers
    session, seen = Session(llm), []
    plain = Method("greedy").generate(session, "tell me more", max_tokens=8)
    answer = method.generate(session, "tell me more", max_tokens=8, look=lambda token, row: seen.append((token, row)))
    assert answer.n_evaluated == 0, "the prompt in the cache is the plain one"

    tokens = llm.tokenize(b"tell me more", special=False)
    ref = reference(path, cpu_rounding=True)
    for token, row in seen:
        wanted = dola_row(path, tokens, layers, method.rows.relative_top)
        kept = np.isfinite(wanted)
        edge = (
            np.abs(
                softmax(ref.standard(tokens)[-1]) / softmax(ref.standard(tokens)[-1]).max() - method.rows.relative_top
            )
            < 0.01
        )
        in_play = row > row.max() - 55  # the others are 60 below
        assert (in_play == kept)[~edge].all()
        both = kept & in_play
        # the difference of two log-softmaxes: of the last layer's row and of an exit's
        limit = 2 * tolerance(path) + 2 * tolerance(path, of=ref.exits(tokens, layers))
        close(row[both], wanted[both], limit)
        tokens.append(token)
    assert method.generate(session, "tell me more", max_tokens=8).tokens == answer.tokens
    assert Method("greedy").generate(session, "tell me more", max_tokens=8).tokens == plain.tokens


def test_other_layers_are_not_read_from_where_the_last_ones_were(tiny: Tiny, load: Load) -> None:
    """Graphs with the same number of exits have the same number of nodes, by which ggml decides to reuse a memory plan."""
    path = tiny("llama", n_layer=6)
    llm = load(path, False)
    tokens = llm.tokenize(b"tell me more", special=False)
    for layer in (0, 2, 5, 1, 4):
        session, seen = Session(llm), []
        method = parse(f"dola:{layer}:relative_top=0")
        method.generate(session, "tell me more", max_tokens=1, look=lambda token, row, seen=seen: seen.append(row))
        limit = 2 * tolerance(path) + 2 * tolerance(path, of=reference(path).exits(tokens, (layer,)))
        close(seen[0], dola_row(path, tokens, (layer,), 0.0), limit)


def test_a_model_that_was_loaded_with_pcd_can_be_asked_with_dola(tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    a, b = (parse("dola-low").generate(load(path, pcd), "one two three", max_tokens=6) for pcd in (True, False))
    assert a.tokens == b.tokens


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("dola-low", pypcd.UnsupportedError, "no candidate in a model of 3 layers"),  # whose head is the embeddings'
        ("dola:7", pypcd.UnsupportedError, "no candidate in a model of 3 layers"),
        ("dola:1+beam:2", pypcd.UnsupportedError, "one answer at a time"),
        ("dola", ValueError, "dola-low"),
        ("dola:low", ValueError, "layers is 'low'"),
        ("dola:2:2", ValueError, "each layer once"),
        ("dola-low:3", ValueError, "write dola:3"),
        ("dola-low:layers=3", ValueError, "'layers'"),
        ("dola-low:relative_top=2", ValueError, "relative_top is 2"),
        ("dola-low:relative=2", ValueError, "did you mean 'relative_top'"),
        ("dola-low+pcd", ValueError, "two parts of one kind"),
    ],
)
def test_dola_says_what_it_cannot_do(name: str, error: type[Exception], named: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("gemma3"), False, n_seq_max=5)
    with pytest.raises(error, match=named):
        parse(name).generate(llm, "one two")
    assert Method("dola", DoLa((1,)), Greedy()).refusal(llm) is None


@pytest.mark.parametrize("layers", [(), (-1,), (True,), "middle"])
def test_layers_are_numbers(layers: Any) -> None:
    with pytest.raises(ValueError, match="layers is .*; allowed"):
        DoLa(layers)
