"""Tensors read during an evaluation, against the float64 reference's."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, close, reference, tolerance

import pypcd
from pypcd import engine
from research.layers import read_layers
from research.tensors import tap

engines = pytest.mark.parametrize("kind", ["native", "stock"] if engine.is_native() else ["stock"])


@engines
def test_names_are_whole_numbers_and_no_views(kind: str, tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=12)
    llm = load(path, False, engine=kind)
    with tap(llm, ["l_out-1", "result_norm", "Kcur-3", "nothing"]) as seen:
        llm.eval(TOKENS[:9])
    assert sorted(seen) == ["Kcur-3", "l_out-1", "result_norm"]
    trace = reference(path).trace(TOKENS[:9])
    assert seen["l_out-1"][0].shape == (1, 1, 9, 64)
    close(seen["l_out-1"][0][0, 0], trace.hidden[2], tolerance(path, of=trace.hidden[2]))
    assert seen["result_norm"][0].shape == (1, 1, 1, 64)  # only the last token, whose logits were requested
    with tap(llm, ["l_out"]) as seen:
        llm.eval(TOKENS[9:10])
    assert len(seen) == 12 and seen["l_out-11"][0].shape == (1, 1, 1, 64)


def test_pcds_twins_are_seen_too(tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    llm = load(path, "paper")
    llm.eval(TOKENS[:30])
    with tap(llm, ["kq_soft_max-1"]) as seen:
        llm.eval(TOKENS[30:31])
    standard, twin = seen["kq_soft_max-1"]
    close(standard[0, :, 0, :31], reference(path).trace(TOKENS[:31]).attention[1][:, -1], tolerance(path, of=1.0))
    assert np.abs(twin[0, :, 0, :31] - standard[0, :, 0, :31]).max() > 0.01
    assert llm.pcd_logits().local is not None


def test_an_error_in_a_callback_is_raised_at_the_end_and_one_inside_takes_the_tap_off(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)

    def fail(name: str, array: np.ndarray, tensor: int) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"), tap(llm, ["l_out"], fail):
        llm.eval(TOKENS[:5])
    llm.reset()
    with pytest.raises(ZeroDivisionError), tap(llm, ["l_out"]) as seen:
        llm.eval(TOKENS[:5])
        raise ZeroDivisionError
    n = len(seen["l_out-0"])
    llm.eval(TOKENS[5:6])
    assert len(seen["l_out-0"]) == n == 1
    with tap(llm, ["l_out"]):
        llm.close()


@engines
def test_what_cannot_be_tapped_is_refused_in_a_sentence(kind: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False, engine=kind)
    for names in ([], "l_out", [""]):
        with pytest.raises(ValueError, match="allowed: .*l_out"), tap(llm, names):
            pass
    with tap(llm, ["l_out"]) as seen:
        with pytest.raises(pypcd.UnsupportedError, match="a callback already.*only one"), tap(llm, ["kq"]):
            pass
        llm.eval(TOKENS[:5])
    assert "l_out-0" in seen


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_queries_and_keys_are_the_references_before_rotation(
    arch: str, flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    path, text = tiny(arch), TOKENS[:40]
    ref, llm = reference(path), load(path, "paper", flash_attn=flash_attn)
    layers = read_layers(llm, text)
    assert list(layers) == list(range(ref.n_layer))
    assert llm.pcd is not None
    for il, hidden in enumerate(ref.trace(text).hidden[:-1]):
        q, k, _ = ref._qkv(il, ref._norm(hidden, f"blk.{il}.attn_norm"))
        if arch == "gemma2":  # scales its queries before they are rotated
            q = q * (np.abs(layers[il].q).max() / np.abs(q[-1]).max())
        close(layers[il].q, q[-1], tolerance(path, of=q, flash_attn=flash_attn))
        close(layers[il].k, k, tolerance(path, of=k, flash_attn=flash_attn))
        close(layers[il].theta, ref._rope[il][0], 1e-12)


@pytest.mark.parametrize("arch", ["gpt2", "bloom"])
def test_models_that_rotate_nothing_are_refused(arch: str, tiny: Tiny, load: Load) -> None:
    with pytest.raises(
        pypcd.UnsupportedError, match="none of this model.s layers has queries and keys that are rotated"
    ):
        read_layers(load(tiny(arch), False), TOKENS[:20])


def test_a_text_is_one_micro_batch(tiny: Tiny, load: Load) -> None:
    with pytest.raises(ValueError, match="the text has 100 tokens; allowed: 2 to 64, one micro-batch"):
        read_layers(load(tiny("llama"), False), TOKENS[:100])
