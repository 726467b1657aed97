"""The C API where a caller, or a model that does not exist yet, asks for what it cannot do; and a check changes nothing."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import c_functions
import llama_cpp
import numpy as np
import pytest
from batches import OK, Native, Setting, ask, decode_batch, decode_in, read, set_seq, turn_off, turn_on
from conftest import TOKENS, Tiny
from own_process import run
from preload import needs_preload

import pypcd
from pypcd.engine import _bindings as _native
from pypcd.engine import _log
from pypcd.engine._native import native_params

# -- sequence ids of twins ---------------------------------------------------------------------------------------------


def test_more_sequences_than_twins_leave_are_refused(native: Native) -> None:
    context = native("llama", n_seq_max=193)
    assert ask(context, {}) == (
        _native.UNSUPPORTED,
        "twins take the last 64 of the 256 sequence ids; n_seq_max is 193, allowed: at most 192",
    )
    assert ask(native("llama", n_seq_max=192), {}) == OK


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
    all_rows = 2 * n * 4 * context.n_vocab
    decode_in([context], TOKENS[:n], out=range(n))
    assert context.stats.row_bytes >= all_rows
    turn_off(context)
    assert context.rows(5) and context.stats.row_bytes >= all_rows, "rows live until the next decode"
    decode_in([context], TOKENS[n : n + 1])
    assert context.stats.row_bytes == 0
    turn_on(context, {})
    decode_in([context], TOKENS[:n], n + 1, out=range(n))
    _native.pcd_trim(context.ctx)
    assert context.rows(5) and context.stats.row_bytes >= all_rows
    turn_off(context)
    _native.pcd_trim(context.ctx)
    assert context.stats.row_bytes == 0 and not _native.pcd_get_logits_ith(context.ctx, 5, _native.ROW_STANDARD)


# -- models that do not exist yet --------------------------------------------------------------------------------------

REFUSALS = """
llm = new(n_gpu_layers=0)
for setting in ({}, {"cache": "shared"}, {"perturbation": "none", "window": 8}):
    refusal = pypcd.engine.pcd_refusal(llm, pypcd.PCDConfig(**setting))
    try:
        llm.pcd = pypcd.PCDConfig(**setting)
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
CHANGED = 'changes its keys after rotating them, so a stored key cannot be rotated further; use cache="shared"'


@needs_preload
@pytest.mark.parametrize(
    ("arch", "odd", "said"),
    [
        ("llama", "", ["runs"] * 3),
        ("llama", "scale", [f"the architecture 'llama' {HIDDEN}"] * 2 + ["runs"]),
        ("hunyuan-dense", "", ["runs"] * 3),
        ("hunyuan-dense", "reshape", [f"the architecture 'hunyuan-dense' {CHANGED}"] + ["runs"] * 2),
    ],
)
def test_a_rotation_that_is_not_followed_is_refused(
    arch: str, odd: str, said: list[str], tiny: Tiny, preload: Path
) -> None:
    assert run(tiny(arch), REFUSALS, LD_PRELOAD=str(preload), PRELOAD_GRAPHS=odd, stderr="(?s).*") == said


KINDS: list[Setting | None] = [
    None,
    {},
    {"alpha": 0.4},
    {"cache": "shared"},
    {"type_k_over": "f16"},
    {"evaluation": "alternate"},
    {"perturbation": "none", "window": 8},
]


def read_back(context: Any) -> dict[str, float] | None:
    params = _native.Params()
    if not c_functions.pcd_get(context.ctx, ctypes.byref(params)):
        return None
    return {name: getattr(params, name) for name, *_ in params._fields_}


def fields(setting: Setting | None) -> dict[str, float] | None:
    if setting is None:
        return None
    params = native_params(pypcd.PCDConfig(**setting))
    return {name: getattr(params, name) for name, *_ in params._fields_}


# -- checks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_a_check_changes_nothing(arch: str, native: Native) -> None:
    context, alone = native(arch), native(arch)
    for setting in KINDS:
        for each in (context, alone):
            if setting is None:
                turn_off(each)
            else:
                turn_on(each, setting)
        decode_in((context, alone), TOKENS[:12], 0)
        before = read_back(context), bytes(context.stats)
        for other in KINDS[1:]:
            status, text = ask(context, other, _native.pcd_check)
            assert (status, text) == OK
            assert (read_back(context), bytes(context.stats)) == before
            assert before[0] == fields(setting)
        decode_in((context, alone), TOKENS[12:13], 12)
        assert np.array_equal(context.seen(), alone.seen())
        if setting is not None:
            assert np.array_equal(context.rows(), alone.rows())
        for each in (context, alone):
            _native.pcd_trim(each.ctx)
            llama_cpp.llama_memory_clear(each.memory, True)


OF_STOCK = 'cache="separate" is evaluated by the stock engine alone; open the model with engine="stock", or use cache="rerotated" or "shared"'


def test_what_only_the_stock_engine_evaluates_is_refused_and_none_chooses_it(
    native: Native, tiny: Tiny, load: Any
) -> None:
    context, setting = native("llama", {}, n_seq_max=2), {"cache": "separate"}
    for asked in (ask(context, setting), ask(context, setting, _native.pcd_check), set_seq(context, 1, setting)):
        assert asked == (_native.UNSUPPORTED, OF_STOCK)
    assert read_back(context) == fields({})
    llm = load(tiny("llama"), "paper")
    assert llm.engine == "native"
    for attempt in (
        lambda: setattr(llm, "pcd", setting),
        lambda: llm("x", max_tokens=1, pcd=setting),
        lambda: load(tiny("llama"), setting, engine="native"),
    ):
        with pytest.raises(pypcd.UnsupportedError, match=re.escape(OF_STOCK)):
            attempt()
    assert llm.pcd == pypcd.PCDConfig()
    assert load(tiny("llama"), setting).engine == "stock"


# -- memory ------------------------------------------------------------------------------------------------------------

FAILING = """
import ctypes
fail_at = ctypes.CDLL(sys.argv[2]).preload_fail_at
fail_at.restype, fail_at.argtypes = ctypes.c_long, [ctypes.c_long]
*steps, after = eval(sys.argv[3])
text, exact = list(range(3, 33)), dict(flash_attn=False, type_k=0, type_v=0, n_gpu_layers=0)

def rows(llm, n):
    llm.eval(text[llm.n_tokens : n])
    if llm.pcd is None:
        return (np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy(),)
    got = llm.pcd_logits()
    return got.standard, got.local

wanted = {}
for name, setting in (("before", steps[-1]), ("after", after)):
    llm = new(pcd=setting, **exact)
    wanted[name] = llm.pcd, rows(llm, 21)
    llm.close()
n_failed, n, said = 0, 0, set()
while True:
    llm = new(pcd=steps[0], **exact)
    llm.eval(text[:20])
    llm.pcd = steps[-1]
    fail_at(n)
    try:
        llm.pcd = after
    except (pypcd.PCDError, MemoryError) as error:
        failed = True
        if "the second keys need another" in str(error):
            beside = "beside those in force; turn PCD off before this change, which then frees them" in str(error)
            said.add((beside, llm.pcd_stats().second_bytes > 0))
    else:
        failed = False
    done = fail_at(-1) >= 0
    n_failed += failed
    pcd, expected = wanted["before" if failed else "after"]
    assert llm.pcd == pcd, (n, failed, llm.pcd)
    for row, right in zip(rows(llm, 21), expected):
        assert abs(row - right).max() < 1e-3, (n, failed, abs(row - right).max())
    llm.pcd = after  # now that there is memory
    assert llm.pcd == wanted["after"][0]
    llm.eval(text[21:22])
    llm.close()
    if done:
        break
    n += 1 + n // 8
assert n_failed > 1, n_failed
print(said)
"""


@needs_preload
@pytest.mark.parametrize(
    ("steps", "beside"),
    [
        ([False, {}], None),
        ([{}, {"cache": "shared"}], None),
        ([{}, {"type_k_over": "f16", "alpha": 0.4}], True),
        ([{}, False, {"type_k_over": "f16"}], False),
        ([{"cache": "shared"}, {"alpha": 0.4}], False),
        ([{"perturbation": "none", "window": 8}, {"cache": "shared"}], None),
    ],
    ids=str,
)
def test_whichever_allocation_fails_a_change_holds_whole_or_not_at_all(
    steps: list[Any], beside: bool | None, tiny: Tiny, preload: Path
) -> None:
    """Second keys of another type have to fit beside the former ones, unless PCD is off: then these are freed first. The error
    says so."""
    steps = [one if one is False else pypcd.PCDConfig(**one).as_dict() for one in steps]
    said = run(tiny("llama"), FAILING, preload, repr(steps), LD_PRELOAD=str(preload), stderr="(?s).*")
    assert beside is None or said == [str({(beside, beside)})]
