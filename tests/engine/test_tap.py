"""Tensors read during an evaluation, against the float64 reference's."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import SMALL, TOKENS, Load, Tiny, close, native_row, reference, rounding, shape, tolerance

import pypcd
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
        assert [part.shape[:3] for part in parts] == [
            (
                1,
                len(weights),
                32,
            ),
            (1, len(weights), 8),
        ]
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
def test_afterwards_rows_are_stock_to_the_bit(flash_attn: bool, tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    stock, llm = (load(path, False, flash_attn=flash_attn, f16=flash_attn) for _ in range(2))
    with tap(llm, ["kq_soft_max"]):
        llm.eval(TOKENS[:40])
    if flash_attn:
        llm.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        llm.eval(TOKENS[:40])
    stock.eval(TOKENS[:40])
    for token in TOKENS[40:43]:
        assert np.array_equal(native_row(stock), native_row(llm))
        stock.eval([token])
        llm.eval([token])


@pytest.mark.parametrize("flash_attn", [False, True])
def test_a_tap_does_not_change_what_it_sees(flash_attn: bool, tiny: Tiny, load: Load) -> None:
    """With a tap, rows are those of stock llama.cpp without flash attention."""
    path = tiny("qwen2")
    stock, llm = load(path, False, flash_attn=False), load(path, False, flash_attn=flash_attn)
    stock.eval(TOKENS[:40])
    with tap(llm, ["kq_soft_max", "ffn"]):
        llm.eval(TOKENS[:40])
    close(native_row(llm), native_row(stock), rounding(path))


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


def test_an_error_while_copying_is_raised_at_the_end(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny("llama"), False)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"), tap(llm, ["l_out"]):
        monkeypatch.setattr("pypcd.engine._tap._copy", fail)
        llm.eval(TOKENS[:5])
        monkeypatch.undo()
    with tap(llm, ["l_out"]) as seen:
        llm.eval(TOKENS[5:6])
    assert len(seen) == 3


def test_an_error_inside_takes_the_tap_off(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
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


def test_a_context_with_a_callback_of_its_own_is_left_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    own = llama_cpp.ggml_backend_sched_eval_callback(lambda tensor, ask, data: bool(calls.append(ask)))

    class Watched(pypcd.Llama):
        @property
        def context_params(self) -> Any:
            return super().context_params

        @context_params.setter
        def context_params(self, params: Any) -> None:
            params.cb_eval = own
            pypcd.Llama.context_params.fset(self, params)  # type: ignore[attr-defined]

    llm = Watched(tiny("llama"), **SMALL)
    with pytest.raises(pypcd.UnsupportedError, match="callback of its own"), tap(llm, ["l_out"]):
        pass
    llm.eval(TOKENS[:5])
    assert calls
    llm.close()
