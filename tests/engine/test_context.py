"""The engine's own functions, against llama_cpp's; what a thread's calls failed over is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, native_row

import pypcd
from pypcd import engine


@pytest.fixture
def llm(tiny: Tiny, load: Load) -> pypcd.Llama:
    return load(tiny("llama"), False, n_seq_max=4)


def entries(tokens: list[int], first: int = 0, seq: int = 0) -> list[tuple[int, int, int, bool]]:
    return [(token, first + i, seq, True) for i, token in enumerate(tokens)]


def test_rows_are_llama_cpps_and_copies(llm: pypcd.Llama) -> None:
    assert engine.decode(llm, entries(TOKENS[:5]))
    rows = engine.rows(llm, 5)
    assert rows.shape == (5, llm.n_vocab()) and rows.dtype == np.float32
    for i in range(5):
        assert np.array_equal(rows[i], native_row(llm, i)) and np.array_equal(rows[i], engine.row(llm, i))
    last = engine.row(llm)
    assert np.array_equal(last, rows[4])
    before = last.copy()
    assert engine.decode(llm, entries(TOKENS[5:6], 5))
    assert np.array_equal(last, before) and not np.array_equal(engine.row(llm), before)


def test_a_row_that_nobody_asked_for_is_an_error_and_no_null_pointer(llm: pypcd.Llama) -> None:
    for i in (0, -1, 7):
        with pytest.raises(pypcd.PCDError, match=f"there are no logits for row {i}"):
            engine.row(llm, i)
    engine.decode(llm, [(TOKENS[0], 0, 0, False), (TOKENS[1], 1, 0, True)])
    assert np.array_equal(engine.row(llm, 1), engine.row(llm, -1))
    with pytest.raises(pypcd.PCDError, match="there are no logits for row 0"):
        engine.rows(llm, 2)


def test_a_full_context_refuses_a_batch_and_keeps_what_it_has(llm: pypcd.Llama) -> None:
    n_ctx = llm.n_ctx()
    tokens = (TOKENS * 3)[: n_ctx - 1]
    for i in range(0, len(tokens), 50):
        assert engine.decode(llm, entries(tokens[i : i + 50], i))
    assert not engine.decode(llm, entries([1, 2, 3], n_ctx - 1))
    assert engine.decode(llm, entries([1], n_ctx - 1))


def test_other_failures_have_llama_cpps_reason(llm: pypcd.Llama) -> None:
    with pytest.raises(pypcd.PCDError, match="llama_decode returned -1: .*invalid token"):
        engine.decode(llm, entries([10**6]))


def test_what_a_model_is(tiny: Tiny, load: Load) -> None:
    for arch, rotates, n_layer in (("llama", True, 3), ("bloom", False, 3), ("smollm3", True, 4)):
        llm = load(tiny(arch), False)
        assert (engine.rotates(llm), engine.n_layer(llm)) == (rotates, n_layer)
        assert engine.n_ctx_train(llm) == 1024
        assert not engine.is_recurrent(llm)
        assert engine.n_bytes(llm) == 4 * engine.n_parameters(llm)  # float32


def test_tokens_as_text(llm: pypcd.Llama) -> None:
    assert [token for token in range(llm.n_vocab()) if engine.is_end(llm, token)] == [llm.token_eos()]
    assert (engine.token_text(llm, 1), engine.token_text(llm, -1), engine.token_bytes(llm, 1)) == ("<s>", "", b"")
    tokens = llm.tokenize(b"tanere sira", add_bos=False)
    assert b"".join(engine.token_bytes(llm, token) for token in tokens) == b" tanere sira"


def test_twins_are_held_back_while_suspended_and_after_an_error_are_not(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper")
    with engine.pcd(llm).suspended():
        llm.eval(TOKENS[:5])
    assert llm.pcd_stats().n_twins == 0
    with pytest.raises(ZeroDivisionError), engine.pcd(llm).suspended():
        raise ZeroDivisionError
    llm.eval(TOKENS[5:6])
    assert llm.pcd_stats().n_twins == 1


# --- errors of a thread ---


def fail(name: str) -> None:
    """llama.cpp itself logs why."""
    assert not llama_cpp.llama_model_load_from_file(name.encode(), llama_cpp.llama_model_default_params())


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


def test_errors_are_those_of_the_threads_own_calls() -> None:
    def beside() -> str:
        before = engine.last_errors()
        fail("/theirs.gguf")
        return before + "|" + engine.last_errors()

    engine.clear_errors()
    fail("/ours.gguf")
    before, _, theirs = in_a_thread(beside).partition("|")
    assert before == "" and "/theirs.gguf" in theirs and "/ours.gguf" not in theirs
    in_a_thread(engine.clear_errors)
    assert "/ours.gguf" in engine.last_errors() and "/theirs.gguf" not in engine.last_errors()
