"""Tensors read during an evaluation, against the float64 reference's."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, close, native_row, reference, rounding, shape, tolerance

import pypcd
from pypcd import engine
from pypcd.engine import tap


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "phi3", "gemma2", "gemma3", "gpt2", "bloom"])
def test_attention_weights_are_the_references(arch: str, flash_attn: bool, tiny: Tiny, load: Load) -> None:
    path, tokens = tiny(arch), TOKENS[:50]
    llm = load(path, False, flash_attn=flash_attn, n_ubatch=32)
    llm.eval(tokens[:10])
    with tap(llm, ["kq_soft_max"]) as seen:
        llm.eval(tokens[10:])
    wanted = reference(path, cpu_rounding=True).trace(tokens).attention
    assert sorted(seen) == [f"kq_soft_max-{il}" for il in range(len(wanted))]
    for il, weights in enumerate(wanted):
        parts = seen[f"kq_soft_max-{il}"]
        assert [part.dtype for part in parts] == [np.float32] * 2
        assert [part.shape[:3] for part in parts] == [(1, len(weights), n) for n in (32, 8)]
        got = np.concatenate(parts, axis=2)[0]
        close(got[:, :, :50], weights[:, 10:], tolerance(path, of=weights, flash_attn=flash_attn))
        assert not got[:, :, 50:].any()


def test_names_are_whole_numbers_and_no_views(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=12)
    llm = load(path, False)
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


def test_rows_with_gaps_are_put_together(tiny: Tiny, load: Load) -> None:
    """phi3's values are part of a longer row."""
    path = tiny("phi3")
    llm, ref = load(path, False), reference(path)
    with tap(llm, ["Vcur-0"]) as seen:
        llm.eval(TOKENS[:7])
    values = ref._qkv(0, ref._norm(ref.trace(TOKENS[:7]).hidden[0], "blk.0.attn_norm"))[2]
    close(seen["Vcur-0"][-1][0], values, tolerance(path, of=values))


def test_other_types_are_numbers_too(tiny: Tiny, load: Load) -> None:
    """A cache made for flash attention has its values transposed; without it they are transposed back, as float16."""
    path = tiny("llama")
    llm, ref = load(path, False, flash_attn=True, f16=True), reference(path)
    with tap(llm, ["v_cont-0"]) as seen:
        llm.eval(TOKENS[:20])
    values = ref._qkv(0, ref._norm(ref.trace(TOKENS[:20]).hidden[0], "blk.0.attn_norm"))[2]
    close(seen["v_cont-0"][0][0, :, :, :20], values.transpose(1, 2, 0), tolerance(path, of=values, **shape(llm)))


@pytest.mark.parametrize("flash_attn", [False, True])
def test_with_a_tap_rows_are_those_without_flash_attention_and_afterwards_stock_to_the_bit(
    flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    path = tiny("qwen2")
    stock, exact, llm = (load(path, False, flash_attn=how) for how in (flash_attn, False, flash_attn))
    exact.eval(TOKENS[:40])
    with tap(llm, ["kq_soft_max", "ffn"]):
        llm.eval(TOKENS[:40])
    close(native_row(llm), native_row(exact), rounding(path))
    if flash_attn:
        llm.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        llm.eval(TOKENS[:40])
    stock.eval(TOKENS[:40])
    for token in TOKENS[40:43]:
        assert np.array_equal(native_row(stock), native_row(llm))
        stock.eval([token])
        llm.eval([token])


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


def test_numbers_that_are_put_into_a_tensor_are_what_the_rest_is_computed_from(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_layer=4)
    other, llm = load(path, False), load(path, False)
    with tap(other, ["l_out-1"]) as seen:
        other.eval(TOKENS[20:40])
    (wanted,) = seen["l_out-1"]
    looked: list[str] = []

    def put(name: str, array: np.ndarray, tensor: int) -> None:
        looked.append(name)
        assert np.array_equal(engine.contents(tensor), array) and not np.array_equal(array, wanted)
        engine.ggml_base().ggml_backend_tensor_set(tensor, wanted.ctypes.data, 0, wanted.nbytes)

    with tap(llm, ["l_out-1"], put) as seen:
        llm.eval(TOKENS[:20])
    assert looked == ["l_out-1"] and not seen
    assert np.array_equal(native_row(llm), native_row(other))


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


def test_what_cannot_be_tapped_is_refused_in_a_sentence(tiny: Tiny, load: Load) -> None:
    path = tiny("llama", n_embd=128)
    llm = load(path, False)
    for names in ([], "l_out", [""]):
        with pytest.raises(ValueError, match="allowed: .*kq_soft_max"), tap(llm, names):
            pass
    with tap(llm, ["l_out"]), pytest.raises(pypcd.UnsupportedError, match="tapped already"), tap(llm, ["kq"]):
        pass


@pytest.mark.parametrize("pcd", [False, True])
@pytest.mark.parametrize(
    ("arch", "kwargs", "types"),
    [
        ("llama", {"n_embd": 128}, "type_v"),
        ("deepseek2", {}, "type_k and type_v"),  # its values are a part of the cached keys
    ],
)
def test_values_in_blocks_need_flash_attention(
    arch: str, kwargs: dict[str, int], types: str, pcd: bool, tiny: Tiny, load: Load
) -> None:
    q8 = {"type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0}
    path = tiny(arch, **kwargs)
    coarse, fine = load(path, pcd, flash_attn=True, **q8), load(path, pcd, flash_attn=True, f16=True)
    with (
        pytest.raises(pypcd.UnsupportedError, match=f"type q8_0, which needs flash attention.*use {types} f16 or f32"),
        tap(coarse, ["kq_soft_max"]),
    ):
        coarse.eval(TOKENS[:36])
    coarse.eval(TOKENS[:36])
    assert np.isfinite(native_row(coarse)).all()
    with tap(fine, ["kq_soft_max"]) as seen:
        fine.eval(TOKENS[:36])
    assert len(seen) == 3 and all(np.isfinite(part).all() for parts in seen.values() for part in parts)
