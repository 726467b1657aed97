"""Early exits against the float64 reference's hidden states, and DoLa against the same in numpy and by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Tiny, close, native_row, reference, shape, tolerance
from limits import allowed_nmse, nmse
from tiny_gguf import ARCHS

import pypcd
from pypcd import engine
from pypcd.decode import Greedy, Method, Session, parse
from research.methods.dola import DoLa, candidate_layers, dola_contrast, premature_layer
from research.methods.exits import Exits, has_tied_head, read_head

Load = Callable[..., pypcd.Llama]

TIED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tied": True}),
    ("qwen2", {"tied": True}),
    ("gemma3", {"tied": False}),
]
CASES = [(arch, {}) for arch in ARCHS if arch != "mamba"] + TIED
IDS = ["-".join([arch, *(f"{k}={v}" for k, v in kw.items())]) for arch, kw in CASES]


def exits_of(llm: pypcd.Llama, layers: Sequence[int], *parts: Sequence[int]) -> np.ndarray:
    """The exits of the last token of a text that is evaluated in parts."""
    with contextlib.closing(Exits(llm, layers)) as exits:
        for part in parts:
            llm.eval(part)
        return exits.rows()


def wanted_exits(path: Path, tokens: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """The same from hidden states as the CPU computes them, through an exact head."""
    hidden = reference(path, cpu_rounding=True).trace(tokens).hidden
    return np.stack([reference(path)._head(hidden[il][-1:])[0] for il in layers])


# --- the exits ---


@pytest.mark.parametrize(("arch", "kwargs"), CASES, ids=IDS)
def test_exits_are_the_heads_view_of_hidden_states(arch: str, kwargs: dict[str, Any], tiny: Tiny, load: Load) -> None:
    path = tiny(arch, **kwargs)
    llm, layers = load(path, False), range(reference(path).n_layer)
    for n, *parts in ((60, TOKENS[:59], TOKENS[59:60]), (90, TOKENS[60:90])):  # a step, and several micro-batches
        got, wanted = exits_of(llm, layers, *parts), wanted_exits(path, TOKENS[:n], layers)
        assert got.dtype == np.float32
        close(got, wanted, tolerance(path, of=wanted))
    assert np.abs(np.diff(wanted, axis=0)).max() > 0.3, "layers must differ, or this test shows nothing"
    assert has_tied_head(llm) == ("output.weight" not in reference(path)._w)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_layers_come_in_the_order_that_was_asked_for(flash_attn: bool, tiny: Tiny, load: Load) -> None:
    path, layers = tiny("qwen3"), (2, 0)
    llm = load(path, False, n_ubatch=16, flash_attn=flash_attn, f16=flash_attn)
    got, wanted = exits_of(llm, layers, TOKENS[:63]), wanted_exits(path, TOKENS[:63], layers)
    close(got, wanted, tolerance(path, of=wanted, **shape(llm)))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_afterwards_the_models_own_rows_are_stocks_to_the_bit(
    arch: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    stock, llm = (load(tiny(arch), False, flash_attn=flash_attn, f16=flash_attn) for _ in range(2))
    for i, layers in enumerate([(), (0,), (0, 1, 2), ()]):
        for model in stock, llm:
            engine.clear(model)
        if layers:
            exits_of(llm, layers, TOKENS[i * 20 : i * 20 + 20])
            engine.clear(llm)
        for model in stock, llm:
            model.eval(TOKENS[i * 20 : i * 20 + 20])
        assert np.array_equal(native_row(stock), native_row(llm))


def test_a_quantised_head_is_the_one_the_model_has(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", weight_type="Q8_0")
    llm = load(path, False)
    got = exits_of(llm, (0, 2), TOKENS[:40])
    last = reference(path, cpu_rounding=True).standard(TOKENS[:40])[-1]
    assert nmse(got, wanted_exits(path, TOKENS[:40], (0, 2))) <= allowed_nmse(nmse(native_row(llm), last)) < 0.1


def test_a_head_has_a_bias_and_may_lie_in_another_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix, bias, embeddings = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 4), 6, (6, 4)))
    for i, tensors in enumerate([{"token_embd.weight": embeddings}, {"output.weight": matrix, "output.bias": bias}], 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{i:05}-of-00002.gguf", "phi2")
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = read_head(str(tmp_path / "m-00001-of-00002.gguf"))
    assert np.array_equal(found[0], matrix) and np.array_equal(found[1], bias)


def test_the_bias_is_added(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("llama")
    llm, (matrix, none) = load(path, False), read_head(str(path))
    plain = exits_of(llm, (0, 2), TOKENS[:9])
    bias = np.linspace(-3, 3, len(none), dtype=np.float32)
    monkeypatch.setattr("research.methods.exits.read_head", lambda path: (matrix, bias))
    engine.clear(llm)
    assert not none.any() and np.array_equal(exits_of(llm, (0, 2), TOKENS[:9]), plain + bias)


def test_what_exits_cannot_do_is_said(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    for layers, named in (((3,), "layer is 3; allowed: 0 .* to 2"), ((0, -1), "layer is -1")):
        with pytest.raises(ValueError, match=named):
            Exits(llm, layers)
    q8 = {"type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}
    coarse = load(tiny("llama", n_embd=128), False, flash_attn=True, **q8)
    assert "needs flash attention" in (DoLa((1,)).refusal(coarse) or "")
    with contextlib.closing(Exits(llm, (1,))) as exits, pytest.raises(pypcd.UnsupportedError, match="'llama'.*block 1"):
        exits.rows()  # nothing was evaluated


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
