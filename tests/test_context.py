"""The engine's own functions, against llama_cpp's and against a fresh evaluation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Tiny, close, native_row, rounding

import pypcd
from pypcd import _engine
from pypcd._engine import _bindings
from pypcd._engine._calls import ask, call

Load = Callable[..., pypcd.Llama]


@pytest.fixture
def llm(tiny: Tiny, load: Load) -> pypcd.Llama:
    return load(tiny("llama"), False, n_seq_max=4)


def fresh(llm: pypcd.Llama, tokens: list[int]) -> np.ndarray:
    _engine.clear(llm)
    llm.eval(tokens)
    return native_row(llm)


def entries(tokens: list[int], first: int = 0, seq: int = 0) -> list[tuple[int, int, int, bool]]:
    return [(token, first + i, seq, True) for i, token in enumerate(tokens)]


def test_rows_are_llama_cpps_and_copies(llm: pypcd.Llama) -> None:
    assert _engine.decode(llm, entries(TOKENS[:5]))
    rows = _engine.rows(llm, 5)
    assert rows.shape == (5, llm.n_vocab()) and rows.dtype == np.float32
    for i in range(5):
        assert np.array_equal(rows[i], native_row(llm, i)) and np.array_equal(rows[i], _engine.row(llm, i))
    last = _engine.row(llm)
    assert np.array_equal(last, rows[4])
    before = last.copy()
    assert _engine.decode(llm, entries(TOKENS[5:6], 5))
    assert np.array_equal(last, before) and not np.array_equal(_engine.row(llm), before)


def test_a_row_that_nobody_asked_for_is_an_error_and_no_null_pointer(llm: pypcd.Llama) -> None:
    for i in (0, -1, 7):
        with pytest.raises(pypcd.PCDError, match=f"there are no logits for row {i}"):
            _engine.row(llm, i)
    _engine.decode(llm, [(TOKENS[0], 0, 0, False), (TOKENS[1], 1, 0, True)])
    assert np.array_equal(_engine.row(llm, 1), _engine.row(llm, -1))
    with pytest.raises(pypcd.PCDError, match="there are no logits for row 0"):
        _engine.rows(llm, 2)


def test_a_full_context_refuses_a_batch_and_keeps_what_it_has(llm: pypcd.Llama) -> None:
    n_ctx = llm.n_ctx()
    tokens = (TOKENS * 3)[: n_ctx - 1]
    for i in range(0, len(tokens), 50):
        assert _engine.decode(llm, entries(tokens[i : i + 50], i))
    assert not _engine.decode(llm, entries([1, 2, 3], n_ctx - 1))
    assert _engine.decode(llm, entries([1], n_ctx - 1))


def test_other_failures_have_llama_cpps_reason(llm: pypcd.Llama) -> None:
    with pytest.raises(pypcd.PCDError, match="llama_decode returned -1: .*invalid token"):
        _engine.decode(llm, entries([10**6]))


def test_rewind_and_copies_leave_what_a_fresh_evaluation_has(llm: pypcd.Llama, tiny: Tiny) -> None:
    limit, wanted = rounding(tiny("llama")), fresh(llm, [*TOKENS[:10], 7])
    _engine.clear(llm)
    assert _engine.decode(llm, entries(TOKENS[:20]))
    _engine.copy_sequence(llm, 0, 2)
    assert _engine.rewind(llm, 10)  # all sequences
    for seq in (0, 2):
        assert _engine.decode(llm, entries([7], 10, seq))
        close(_engine.row(llm), wanted, limit)
    assert _engine.rewind(llm, 0, 2) and _engine.decode(llm, entries(TOKENS[:10], 0, 2))  # forgotten: starts again
    assert _engine.rewind(llm, 10, 0) and _engine.decode(llm, entries([7], 10))
    close(_engine.row(llm), wanted, limit)


def test_a_recurrent_state_cannot_go_back(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("mamba"), False)
    llm.eval(TOKENS[:10])
    assert _engine.is_recurrent(llm) and not _engine.rewind(llm, 5) and _engine.rewind(llm, 0, 0)


def test_what_a_model_is(tiny: Tiny, load: Load) -> None:
    for arch, rotates, n_layer in (("llama", True, 3), ("bloom", False, 3), ("smollm3", True, 4)):
        llm = load(tiny(arch), False)
        assert (_engine.rotates(llm), _engine.n_layer(llm)) == (rotates, n_layer)
        assert _engine.n_ctx_train(llm) == 1024 and _engine.rope_freq_scale(llm) == 1
        assert not _engine.is_recurrent(llm)
        assert _engine.n_bytes(llm) == 4 * _engine.n_parameters(llm)  # float32


def test_tokens_as_text(llm: pypcd.Llama) -> None:
    assert [token for token in range(llm.n_vocab()) if _engine.is_end(llm, token)] == [llm.token_eos()]
    assert (_engine.token_text(llm, 1), _engine.token_text(llm, -1), _engine.token_bytes(llm, 1)) == ("<s>", "", b"")
    tokens = llm.tokenize(b"tanere sira", add_bos=False)
    assert b"".join(_engine.token_bytes(llm, token) for token in tokens) == b" tanere sira"
    assert _engine.detokenize(llm, tokens) == b"tanere sira"
    assert _engine.detokenize(llm, tokens * 300).startswith(b"tanere sira tanere")


def test_an_evaluation_may_be_ended_half_way(llm: pypcd.Llama) -> None:
    asked = []
    _engine.set_abort(llm, lambda: bool(asked.append(1)) or True)
    with pytest.raises(pypcd.PCDError, match="llama_decode returned 2"):
        _engine.decode(llm, entries(TOKENS[:50]))
    assert asked
    _engine.set_abort(llm, None)
    _engine.clear(llm)
    assert _engine.decode(llm, entries(TOKENS[:50]))


def test_twins_are_held_back_while_suspended_and_after_an_error_are_not(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper")
    with _engine.suspended(llm):
        llm.eval(TOKENS[:5])
    assert llm.pcd_stats().n_twins == 0
    with pytest.raises(ZeroDivisionError), _engine.suspended(llm):
        raise ZeroDivisionError
    llm.eval(TOKENS[5:6])
    assert llm.pcd_stats().n_twins == 1


# --- a status becomes an exception, in one place ---


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (_bindings.INVALID, ValueError),
        (_bindings.UNSUPPORTED, pypcd.UnsupportedError),
        (_bindings.NO_MEMORY, pypcd.UnsupportedError),
        (_bindings.DISABLED, pypcd.UnsupportedError),
        (-99, pypcd.UnsupportedError),
    ],
)
def test_every_status_but_ok_is_an_error_with_the_librarys_sentence(
    status: int, error: type[Exception], llm: pypcd.Llama
) -> None:
    def function(ctx: Any, value: int, buffer: Any, n: int) -> int:
        assert ctx == llm.ctx and value == 5
        buffer.value = "größer geht nicht".encode()[: n - 1]
        return status

    assert ask(function, llm, 5) == (status, "größer geht nicht")
    with pytest.raises(error, match="größer geht nicht"):
        call(function, llm, 5)
    call(lambda ctx, buffer, n: _bindings.OK, llm)


def test_a_sequence_out_of_range_is_a_value_error_even_before_pcd_was_on(llm: pypcd.Llama) -> None:
    for seq_id in (-1, 192):
        with pytest.raises(ValueError, match=f"seq_id is {seq_id}; allowed: an integer from 0 to 191"):
            llm.pcd_for(seq_id, False)
    llm.pcd_for(191, False)


def test_a_closed_model_is_an_error_everywhere_and_no_crash(tiny: Tiny) -> None:
    llm = pypcd.Llama(tiny("llama"), pcd="paper", n_ctx=256, n_threads=1)
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: _engine.decode(llm, entries([1])),
        lambda: _engine.row(llm),
        lambda: _engine.rewind(llm, 0),
        lambda: _engine.copy_sequence(llm, 0, 1),
        lambda: _engine.shift(llm, 0, 0, 1, 1),
        lambda: _engine.can_shift(llm),
        lambda: _engine.set_abort(llm, lambda: True),
        lambda: _engine.is_end(llm, 1),
        lambda: _engine.token_bytes(llm, 1),
        lambda: _engine.detokenize(llm, [1]),
        lambda: _engine.n_layer(llm),
        lambda: _engine.check_decoder(llm),
        lambda: _engine.set_pcd(llm, None),
        lambda: _engine.pcd_logits(llm, 0),
        lambda: _engine.set_exits(llm, [1]),
        lambda: _engine.exit_rows(llm, 1, 0),
        lambda: _engine.head_counts(llm),
        lambda: _engine.init_sampler(llm, -1),
        lambda: llm.eval([1]),
        lambda: llm.pcd_for(0, False),
        lambda: llm.pcd_for(0, None),
    ]
    for use in uses:
        with pytest.raises(pypcd.PCDError, match="the model is closed"):
            use()
    _engine.set_exits(llm, ())  # already removed before the clean-up
    _engine.unset_head_ratios(llm)
    _engine.set_abort(llm, None)


def test_the_bindings_are_those_of_the_header() -> None:
    assert _bindings.lib is llama_cpp.llama_cpp._lib
    for name in ("pcd_set", "pcd_check", "pcd_set_exits", "pcd_set_tap", "pcd_set_head_ratios"):
        assert getattr(_bindings, name).restype is ctypes.c_int32
