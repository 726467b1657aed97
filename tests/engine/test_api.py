"""The C API where a caller, or a model that does not exist yet, asks for what it cannot do."""

from __future__ import annotations

import ctypes
from pathlib import Path

import c_functions
import llama_cpp
import numpy as np
import pytest
from batches import OK, Native, ask, decode_batch, decode_in, read, turn_off, turn_on
from conftest import TOKENS, Tiny, run_python
from preload import needs_preload

from pypcd.engine import _bindings as _native
from pypcd.engine import _log

ON = OK


# -- sequence ids of twins ---------------------------------------------------------------------------------------------


def test_more_sequences_than_twins_leave_are_refused(native: Native) -> None:
    context = native("llama", n_seq_max=193)
    assert ask(context, {}) == (
        _native.UNSUPPORTED,
        "twins take the last 64 of the 256 sequence ids; n_seq_max is 193, allowed: at most 192",
    )
    assert ask(native("llama", n_seq_max=192), {}) == ON


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_text_in_a_twins_sequence_is_not_lost(arch: str, native: Native) -> None:
    """llama.cpp lets a cache have any id up to 255, and with PCD off that is no concern of ours."""
    context, stock = native(arch), native(arch)
    for each in (context, stock):
        decode_in([each], TOKENS[:9])
        llama_cpp.llama_memory_seq_cp(each.memory, 0, 200, -1, -1)
    status, text = ask(context, {})
    assert status == _native.UNSUPPORTED
    assert "sequence 200 has tokens, and the ids from 192 on are for PCD's twins" in text
    assert context.span(200) == stock.span(200) == (0, 8)
    decode_in((context, stock), TOKENS[9:10])
    assert np.array_equal(context.seen(), stock.seen())
    assert llama_cpp.llama_memory_seq_rm(context.memory, 200, -1, -1)
    turn_on(context, {})


def test_nor_one_that_was_copied_there_while_pcd_is_on(native: Native) -> None:
    context = native("llama", {})
    decode_in([context], TOKENS[:9])
    llama_cpp.llama_memory_seq_cp(context.memory, 0, 200, 0, -1)
    before = context.span(), context.span(200)
    _log.clear_errors()
    assert decode_batch(context, [(7, 9, [0], True)]) == -1
    assert "sequence 200 has tokens, and the ids from 192 on are for PCD's twins" in _log.last_errors()
    assert (context.span(), context.span(200)) == before
    assert llama_cpp.llama_memory_seq_rm(context.memory, 200, -1, -1)
    assert decode_batch(context, [(7, 9, [0], True)]) == 0


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [True, False])
def test_a_contrasted_row_lives_until_the_next_decode(combine: bool, native: Native) -> None:
    context = native("llama")
    params = c_functions.pcd_default_params()
    params.combine = combine
    assert _native.pcd_set(context.ctx, ctypes.byref(params), None, 0) == _native.OK
    decode_in([context], TOKENS[:9], out=[7, 8])
    pointers = [_native.pcd_get_logits_ith(context.ctx, i, _native.ROW_CONTRASTED) for i in (7, 8)]
    first, second = (read(pointer, context.n_vocab) for pointer in pointers)
    for i in (7, 8):
        _native.pcd_get_strength_ith(context.ctx, i)
        _native.pcd_get_logits_ith(context.ctx, i, _native.ROW_CONTRASTED)
    assert not np.array_equal(first, second)
    assert np.array_equal(read(pointers[0], context.n_vocab), first)
    assert np.array_equal(read(pointers[1], context.n_vocab), second)


def test_the_rows_of_a_long_prompt_are_freed(native: Native) -> None:
    context, n = native("llama", {}), 60
    row = 4 * context.n_vocab

    def row_bytes() -> int:
        return context.stats.row_bytes

    decode_in([context], TOKENS[:n], out=range(n))
    assert row_bytes() >= 2 * n * row
    turn_off(context)
    assert context.rows(5) and row_bytes() >= 2 * n * row, "rows live until the next decode"
    decode_in([context], TOKENS[n : n + 1])
    assert row_bytes() == 0
    turn_on(context, {})
    decode_in([context], TOKENS[:n], n + 1, out=range(n))
    _native.pcd_trim(context.ctx)
    assert context.rows(5) and row_bytes() >= 2 * n * row
    turn_off(context)
    _native.pcd_trim(context.ctx)
    assert row_bytes() == 0 and not _native.pcd_get_logits_ith(context.ctx, 5, _native.ROW_STANDARD)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_an_offset_between_limits_that_are_turned_around_is_none() -> None:
    assert c_functions.pcd_offset(1, 2, 1, 0) == 0
    assert c_functions.pcd_offset(1, 2, 2**31 - 1, -(2**31)) == 0
    assert {c_functions.pcd_offset(1, i, -1, 1) for i in range(50)} == {-1, 0, 1}
    widest = [c_functions.pcd_offset(1, i, -(2**31), 2**31 - 1) for i in range(50)]
    assert min(widest) < -(2**29) and max(widest) > 2**29


# -- models that do not exist yet --------------------------------------------------------------------------------------

REFUSALS = """
import sys
import pypcd

llm = pypcd.Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, n_gpu_layers=0)
for setting in ({}, {"cache": "shared"}, {"cache": "separate"}, {"perturbation": "none", "window": 8}):
    refusal = pypcd.engine.pcd_refusal(llm, pypcd.PCDConfig.resolve(setting))
    try:
        llm.pcd = setting
        assert refusal is None, refusal
        llm.eval([3, 4, 5])
        print("runs")
    except pypcd.UnsupportedError as error:
        assert refusal and refusal in str(error), (refusal, error)
        print(refusal)
"""

HIDDEN = (
    "rotates queries or keys in a way that PCD does not follow, so L* would be wrong; "
    'use perturbation="none" with a window'
)
CHANGED = (
    'changes its keys after rotating them, so a stored key cannot be rotated further; use cache="shared" or "separate"'
)


@needs_preload
@pytest.mark.parametrize(
    ("arch", "odd", "said"),
    [
        ("llama", "", ["runs"] * 4),
        ("llama", "scale", [f"the architecture 'llama' {HIDDEN}"] * 3 + ["runs"]),
        ("hunyuan-dense", "", ["runs"] * 4),
        ("hunyuan-dense", "reshape", [f"the architecture 'hunyuan-dense' {CHANGED}"] + ["runs"] * 3),
    ],
)
def test_a_rotation_that_is_not_followed_is_refused(
    arch: str, odd: str, said: list[str], tiny: Tiny, preload: Path
) -> None:
    done = run_python(REFUSALS, tiny(arch), LD_PRELOAD=str(preload), PRELOAD_GRAPHS=odd)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


PLANS = """
import ctypes, sys
import pypcd
import llama_cpp

n_planned = ctypes.CDLL(sys.argv[2]).preload_n_planned
text = list(range(3, 63))


def plans(llm, n_steps=3):
    "How many graphs were planned anew for prompts of several micro-batches, and steps."
    before = n_planned()
    llm.reset()
    llm.eval(text)
    for token in text[:n_steps]:
        llm.eval([token])
    return n_planned() - before


llm = pypcd.Llama(sys.argv[1], n_ctx=256, n_batch=16, n_ubatch=8, n_threads=1, n_threads_batch=1, n_gpu_layers=0)
stock = plans(llm)
llm.pcd = "paper"
plans(llm)
llm.pcd = False
plans(llm)  # the first graph after PCD may
print(stock, plans(llm))
"""


@needs_preload
def test_with_pcd_off_again_graphs_are_planned_as_if_it_had_never_been_on(tiny: Tiny, preload: Path) -> None:
    """A plan waits for all devices, so that the micro-batches of a prompt would not overlap on several GPUs."""
    done = run_python(PLANS, tiny("llama"), preload, LD_PRELOAD=str(preload))
    assert done.returncode == 0, done.stderr
    stock, off = map(int, done.stdout.split())
    assert stock == off
