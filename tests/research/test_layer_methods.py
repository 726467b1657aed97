"""DoLa, which reads what earlier layers would predict, and Ms-PoE, which turns each head by a ratio of its own.

Both against the float64 reference: its hidden states through its head, its heads with their ratios. What they share with all methods is in
tests/decode/test_methods.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Tiny, close, native_row, reference, rounding, tolerance
from reference import Heads, softmax
from tiny_gguf import ARCHS, ROPE_ARCHS, finish

import pypcd
from pypcd import engine
from pypcd.decode import Method, Session, parse
from research.methods import heads
from research.methods.dola import DoLa, candidate_layers, dola_contrast
from research.methods.exits import Exits, has_tied_head, read_head
from research.methods.heads import HeadRatios, head_counts
from research.methods.mspoe import MsPoE
from research.tensors import tap

Load = Callable[..., pypcd.Llama]

TEXT = "tell me rather more of it, and of all that has been said of it, and by whom, and when it was, please"
OUTLIERS = {"n_batch": 128, "n_ubatch": 128}  # the order of outliers needs a prompt in one micro-batch

# head counts: groups of two, no groups, one key for all; then what else a rotation may have
ROTATING: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in ROPE_ARCHS if arch != "qwen2vl"),
    *((arch, {"n_head_kv": 4}) for arch in ("llama", "qwen3", "phi3")),
    *((arch, {"n_head_kv": 1}) for arch in ("llama", "qwen2")),
    ("llama", {"n_head": 6, "n_embd": 96, "n_head_kv": 3}),
    ("llama", {"rope_freqs": np.linspace(1, 8, 8)}),
    ("llama", {"yarn": (4.0, 64)}),
    ("qwen2", {"yarn": (4.0, 64)}),
    ("qwen2", {"linear_scale": 4.0}),
]
NO_OUTLIERS = ("gemma2", "gemma3", "hunyuan-dense")

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("dola-low", "llama", {"n_layer": 6}),
    ("dola-high", "llama", {"n_layer": 6}),
    ("dola-low", "qwen2", {"n_layer": 8, "tied": True}),
    ("dola-high", "gemma3", {"n_layer": 9}),
    ("dola:2:0:1", "phi3", {}),
    ("dola:1:4:relative_top=0.5", "llama", {"n_layer": 6}),
    *((f"dola:{layer}:relative_top=0", "llama", {"n_layer": 6}) for layer in (0, 2, 5)),
    *((name, arch, {"n_layer": 4, **more})
      for name in ("ms-poe", "ms-poe:first_layer=0", "ms-poe-outlier", "ms-poe-outlier:first_layer=0")
      for arch, more in ROTATING if not ("outlier" in name and arch in NO_OUTLIERS)),
    ("ms-poe:first_layer=0:max_ratio=2.5", "llama", {"n_layer": 4}),
    ("ms-poe", "lfm2", {"n_layer": 4}),  # a hybrid model has ratios where it attends
]  # fmt: skip
CANDIDATES = {  # of the named choices above: every second layer of a half, without the embeddings if they are the head
    ("dola-low", "llama"): (0, 2),
    ("dola-high", "llama"): (3, 5),
    ("dola-low", "qwen2"): (2,),
    ("dola-high", "gemma3"): (4, 6, 8),
}


def named(case: tuple[Any, ...]) -> str:
    *words, more = case
    return " ".join([*words, *(f"{key}={value if np.isscalar(value) else '...'}" for key, value in more.items())])


def dola_row(final: np.ndarray, exits: np.ndarray, relative_top: float) -> np.ndarray:
    """The contrasted row, in float64 from the reference's; -inf where it is filtered. The exit is chosen by KL(M || P) and
    KL(M || Q), averaged over tokens: Hugging Face's order of arguments."""
    p, q = softmax(final), softmax(exits)
    m = (p + q) / 2
    row = np.log(p) - np.log(q[int((m * np.log(m / p) + m * np.log(m / q)).mean(axis=-1).argmax())])
    row[p < relative_top * p.max()] = -np.inf
    return row


@pytest.mark.parametrize(("name", "arch", "more"), CASES, ids=map(named, CASES))
def test_every_row_is_the_references(name: str, arch: str, more: dict[str, Any], tiny: Tiny, load: Load) -> None:
    """A prompt in two batches, one of them in two micro-batches (or in one, for the order of outliers), and three steps."""
    path, rows = tiny(arch, **more), parse(name).rows
    llm = load(path, False, **(OUTLIERS if "outlier" in name else {"n_ubatch": 40}))
    ref, tokens, seen = reference(path, cpu_rounding=True), llm.tokenize(TEXT.encode(), special=False), []
    n_prompt = len(tokens)
    parse(name).generate(llm, TEXT, max_tokens=4, look=lambda token, row: seen.append((token, row.copy())))
    tokens += [token for token, _ in seen]
    plain = ref.standard(tokens)
    if isinstance(rows, MsPoE):
        ratios = Heads(rows.min_ratio, rows.max_ratio, rows.first_layer, rows.order == "outlier")
        wanted = ref.with_heads(tokens, ratios, n_prompt)
        assert np.abs(plain - wanted)[n_prompt - 1].max() > 0.05, "ratios must matter, or this test shows nothing"
        for i, (_, row) in enumerate(seen, n_prompt - 1):
            close(row, wanted[i], tolerance(path, len(tokens)))
        return
    assert isinstance(rows, DoLa)
    assert rows.candidates(llm) == CANDIDATES.get((name, arch), rows.layers)
    exits = ref.exits(tokens, rows.candidates(llm))
    # the difference of two log-softmaxes: of the last layer's row and of an exit's
    limit = 2 * tolerance(path, len(tokens)) + 2 * tolerance(path, len(tokens), of=exits)
    for i, (_, row) in enumerate(seen, n_prompt - 1):
        contrasted = dola_row(plain[i], exits[:, i], rows.relative_top)
        kept, in_play = np.isfinite(contrasted), row > row.max() - 55  # the others are 60 below
        edge = np.abs(softmax(plain[i]) / softmax(plain[i]).max() - rows.relative_top) < min(0.01, rows.relative_top)
        assert (in_play == kept)[~edge].all()
        close(row[kept & in_play], contrasted[kept & in_play], limit)


def test_a_prompt_stays_in_the_cache_for_the_same_rows_and_for_no_others(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama", n_layer=4), False, **OUTLIERS)
    session, n_prompt = Session(llm), len(llm.tokenize(TEXT.encode(), special=False))
    plain = parse("greedy").generate(session, TEXT, max_tokens=6)
    for name, n_first in (("dola-low", 1), ("ms-poe", n_prompt), ("ms-poe-outlier", n_prompt)):
        first, again = (parse(name).generate(session, TEXT, max_tokens=6) for _ in range(2))
        assert (first.n_evaluated, again.n_evaluated, again.tokens) == (n_first, 1, first.tokens)
        after = parse("greedy").generate(session, TEXT, max_tokens=6)
        assert (after.n_evaluated, after.tokens) == (n_first, plain.tokens), "under other ratios it is another prompt"


# --- early exits ---

EXIT_CASES: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in ARCHS if arch != "mamba"),
    ("llama", {"tied": True}),
    ("qwen2", {"tied": True}),
    ("gemma3", {"tied": False}),
]


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


@pytest.mark.parametrize(("arch", "more"), EXIT_CASES, ids=map(named, EXIT_CASES))
def test_exits_are_the_heads_view_of_hidden_states(arch: str, more: dict[str, Any], tiny: Tiny, load: Load) -> None:
    path = tiny(arch, **more)
    llm, layers = load(path, False), range(reference(path).n_layer)[::-1]  # in the order that was asked for
    for n, *parts in ((60, TOKENS[:59], TOKENS[59:60]), (90, TOKENS[60:90])):  # a step, and several micro-batches
        got, wanted = exits_of(llm, layers, *parts), wanted_exits(path, TOKENS[:n], layers)
        assert got.dtype == np.float32
        close(got, wanted, tolerance(path, of=wanted))
    assert np.abs(np.diff(wanted, axis=0)).max() > 0.3, "layers must differ, or this test shows nothing"
    assert has_tied_head(llm) == ("output.weight" not in reference(path)._w)


def test_a_heads_matrix_and_bias_may_be_quantised_and_in_any_part_of_a_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix, bias, embeddings = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 32), 6, (6, 32)))
    for i, tensors in enumerate([{"token_embd.weight": embeddings}, {"output.weight": matrix, "output.bias": bias}], 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-{i:05}-of-00002.gguf", "phi2")
        for name, tensor in tensors.items():
            kind = gguf.GGMLQuantizationType.Q8_0 if name == "output.weight" else None
            data = tensor if kind is None else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        finish(writer)
    found = read_head(str(tmp_path / "m-00001-of-00002.gguf"))
    scale = np.abs(matrix).max(axis=1, keepdims=True) / 127  # of Q8_0, one for each row of 32
    assert np.abs(found[0] - matrix).max() < 0.51 * scale.max() and np.array_equal(found[1], bias)


def test_the_bias_is_added(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("llama")
    llm, (matrix, none) = load(path, False), read_head(str(path))
    plain = exits_of(llm, (0, 2), TOKENS[:9])
    bias = np.linspace(-3, 3, len(none), dtype=np.float32)
    monkeypatch.setattr("research.methods.exits.read_head", lambda path: (matrix, bias))
    engine.clear(llm)
    assert not none.any() and np.array_equal(exits_of(llm, (0, 2), TOKENS[:9]), plain + bias)


# --- DoLa, by hand ---


def test_candidates_are_hugging_faces() -> None:
    for layers, n, tied, wanted in (
        ("low", 32, False, (0, 2, 4, 6, 8, 10, 12, 14)),
        ("high", 32, False, (16, 18, 20, 22, 24, 26, 28, 30)),
        ("high", 32, True, (16, 18, 20, 22, 24, 26, 28, 30)),
        ("low", 41, True, range(2, 20, 2)),
        ("high", 41, False, range(21, 41, 2)),
        ("low", 80, False, range(0, 20, 2)),
        ("high", 80, False, range(60, 80, 2)),
        *(("low", *case) for case in ((1, False, [0]), (1, True, [0]), (2, True, [1]), (4, True, [2]))),
        ((16, 2, 40), 32, True, (16, 2)),
    ):
        assert candidate_layers(layers, n, tied=tied) == tuple(wanted)
    with pytest.raises(ValueError, match="name layers from 0 to 31"):
        candidate_layers((32,), 32, tied=False)


def test_the_filter_and_the_contrast_by_hand() -> None:
    final, base = np.log([60.0, 7.0, 5.0, 28.0]) + 3, np.log([10.0, 20.0, 30.0, 40.0]) - 5
    kept = np.log([6.0, 7 / 20, np.nan, 28 / 40])
    kept[2] = -np.inf  # 5 < 60/10 <= 7
    np.testing.assert_allclose(dola_contrast(final, base), kept, rtol=1e-12)
    np.testing.assert_allclose(dola_contrast(final, base, relative_top=0.0)[2], np.log(5 / 30), rtol=1e-12)
    assert np.isfinite(dola_contrast(final, base, relative_top=1.0)).tolist() == [True, False, False, False]


# --- Ms-PoE's ratios ---


@contextlib.contextmanager
def ratios(llm: pypcd.Llama, low: float = 1.2, high: float = 1.8, first: int = 2) -> Iterator[HeadRatios]:
    """Those of order="static"."""
    with contextlib.closing(HeadRatios(llm, MsPoE(low, high, first)._static(llm))) as heads:
        yield heads
        heads.check()


@contextlib.contextmanager
def found_ratios(llm: pypcd.Llama, tokens: list[int]) -> Iterator[HeadRatios]:
    """A prompt that was evaluated with those of order="outlier"."""
    with ratios(llm) as heads:
        heads.find = MsPoE(order="outlier").by_outliers
        llm.eval(tokens)
        heads.find = None
        yield heads


def test_another_prompt_has_another_order_and_keeps_it_whatever_is_set_meanwhile(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=6)
    llm, heads = load(path, False, **OUTLIERS), Heads(outliers=True)
    seen = set()
    for tokens in (TOKENS[:40], TOKENS[30:70]):
        engine.clear(llm)
        with found_ratios(llm, tokens) as own:
            trace = reference(path).trace(tokens, heads)
            np.testing.assert_allclose(own.ratios, trace.ratios, rtol=1e-12)
        seen.add(tuple(np.concatenate(trace.ratios)))
    assert len(seen) == 2 and head_counts(llm) == [4] * 6
    session, method = Session(llm), parse("ms-poe-outlier")
    first = method.generate(session, "one two three", max_tokens=4)
    HeadRatios(llm, MsPoE(1.2, 3)._static(llm)).close()
    again = method.generate(session, "one two three", max_tokens=4)
    assert again.n_evaluated == 1 and again.tokens == first.tokens


def test_ratios_of_1_are_the_model_to_the_bit_and_equal_ones_a_scale_of_all_positions(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4, rope_freqs=np.linspace(1, 3, 8))
    llm, stock = load(path, False), load(path, False)
    stock.eval(TOKENS[:50])
    with ratios(llm, 1, 1, 0):
        llm.eval(TOKENS[:50])
    assert np.array_equal(native_row(llm), native_row(stock))
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
    assert np.abs(reference(path).standard(TOKENS[:60])[-1] - wanted).max() > 0.3


# --- afterwards, and what is refused ---


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("what", ["exits", "ratios", "found ratios"])
def test_afterwards_the_models_own_rows_are_stocks_to_the_bit(
    what: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    stock, llm = (load(tiny("llama", n_layer=4), False, flash_attn=flash_attn, f16=True) for _ in range(2))
    if what == "exits":
        exits_of(llm, (0, 2), TOKENS[50:60])
    else:
        with ratios(llm) if what == "ratios" else found_ratios(llm, TOKENS[:50]):
            llm.eval(TOKENS[50:60])
    engine.clear(llm)
    for part in TOKENS[:50], TOKENS[50:51], TOKENS[51:52]:
        stock.eval(part)
        llm.eval(part)
        assert np.array_equal(native_row(stock), native_row(llm))


REFUSED: list[tuple[str, str, str]] = [
    ("dola-low", "gemma3", "no candidate in a model of 3 layers"),  # whose head is the embeddings'
    ("dola:1+beam:2", "gemma3", "one answer at a time"),
    ("ms-poe:first_layer=9", "llama", "first_layer is 9, allowed: 0 to 2"),
    *(("ms-poe:first_layer=0", arch, "no rotary positions") for arch in ("bloom", "mamba")),
    ("ms-poe:first_layer=0", "qwen2vl", "M-RoPE"),
    ("ms-poe:first_layer=0", "deepseek2", "MLA"),
    ("ms-poe:first_layer=0", "starcoder", "head by head: .*does not show them"),  # which rotates in name only
    ("ms-poe-outlier", "gemma3", "sliding-window"),
    ("ms-poe-outlier", "lfm2", "recurrent state"),
    ("ms-poe-outlier:first_layer=0", "hunyuan-dense", "changes its queries after their rotation"),  # by a norm
]  # fmt: skip


@pytest.mark.parametrize(("name", "arch", "why"), REFUSED)
def test_what_a_model_cannot_do_is_refused_and_leaves_it_as_it_was(
    name: str, arch: str, why: str, tiny: Tiny, load: Load
) -> None:
    stock, llm = (load(tiny(arch), False, n_seq_max=5) for _ in range(2))
    with pytest.raises(pypcd.UnsupportedError, match=why):
        parse(name).generate(llm, "one two three", max_tokens=2)
    engine.clear(llm)
    for model in llm, stock:
        model.eval(TOKENS[:20])
    assert np.array_equal(native_row(llm), native_row(stock))


def test_what_exits_and_ratios_cannot_do_is_said(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny("llama"), False, n_ubatch=16)
    for layers, why in (((3,), "layer is 3; allowed: 0 .* to 2"), ((0, -1), "layer is -1")):
        with pytest.raises(ValueError, match=why):
            Exits(llm, layers)
    with contextlib.closing(Exits(llm, (1,))) as exits, pytest.raises(pypcd.UnsupportedError, match="'llama'.*block 1"):
        exits.rows()  # nothing was evaluated
    with pytest.raises(ValueError, match="at most 16 .*n_ubatch"):
        parse("ms-poe-outlier").generate(llm, TEXT)
    assert Method("ms-poe", MsPoE()).refusal(llm) is None is Method("dola", DoLa((1,))).refusal(llm)
    # queries are not turned without their keys, as of an architecture whose keys have another name in the graph
    monkeypatch.setattr(heads, "tap", lambda llm, names, look: tap(llm, names[:1], look))
    with pytest.raises(pypcd.UnsupportedError, match="of layer 2, .* shows only the tensors Q"), ratios(llm):
        llm.eval(TOKENS[:16])
