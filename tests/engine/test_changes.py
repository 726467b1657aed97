"""A change of setting holds whole or not at all, whatever fails on the way, and a check changes nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import Native, Setting, ask, decode_in, turn_off, turn_on
from conftest import TOKENS, Tiny, check_rows, run_python
from preload import needs_preload

import pypcd
from pypcd.engine import _bindings as _native
from pypcd.engine._native import native_params

KINDS: list[Setting | None] = [
    None,
    {},
    {"alpha": 0.4},
    {"cache": "shared"},
    {"cache": "separate"},
    {"cache": "separate", "type_k_over": "f16"},
    {"type_k_over": "f16"},
    {"evaluation": "alternate"},
    {"perturbation": "none", "window": 8},
    {"cache": "shared", "perturbation": "noise"},
]


def read_back(context: Any) -> dict[str, float] | None:
    params = _native.Params()
    if not _native.pcd_get(context.ctx, ctypes.byref(params)):
        return None
    return {name: getattr(params, name) for name, *_ in params._fields_}


def fields(setting: Setting | None) -> dict[str, float] | None:
    if setting is None:
        return None
    params = native_params(pypcd.PCDConfig(**setting))
    return {name: getattr(params, name) for name, *_ in params._fields_}


# -- reading back ------------------------------------------------------------------------------------------------------


def test_the_setting_in_force_is_the_librarys(tiny: Tiny, load: Any) -> None:
    """Also where somebody else changed it, by the C API."""
    llm = load(tiny("llama"), "beta=1.7:alpha=0.15:window=40")
    assert llm.pcd == pypcd.PCDConfig(beta=1.7, alpha=0.15, window=40)
    for setting in KINDS[1:]:
        turn_on(llm, setting)
        assert llm.pcd == pypcd.PCDConfig(**setting)
        if "type_k_over" not in (setting or {}):
            llm.reset()
            llm.eval(TOKENS[:20])
            check_rows(llm, tiny("llama"), TOKENS[:20])
    turn_off(llm)
    assert llm.pcd is None
    llm.pcd = "paper"  # what was in force before is not: this is a change
    llm.eval(TOKENS[20:21])
    check_rows(llm, tiny("llama"), TOKENS[:21])


# -- checks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_a_check_changes_nothing(arch: str, native: Native) -> None:
    context, alone = native(arch), native(arch)
    for setting in KINDS:
        if (arch, (setting or {}).get("cache")) == ("lfm2", "separate"):
            continue
        for each in (context, alone):
            if setting is None:
                turn_off(each)
            else:
                turn_on(each, setting)
        decode_in((context, alone), TOKENS[:12], 0)
        before = read_back(context), bytes(context.stats)
        for other in KINDS[1:]:
            status, text = ask(context, other, _native.pcd_check)
            assert (status == _native.OK) == (text == "") == ((arch, other.get("cache")) != ("lfm2", "separate"))
            assert (read_back(context), bytes(context.stats)) == before
            assert before[0] == fields(setting)
        decode_in((context, alone), TOKENS[12:13], 12)
        assert np.array_equal(context.seen(), alone.seen())
        if setting is not None:
            assert np.array_equal(context.rows(), alone.rows())
        for each in (context, alone):
            _native.pcd_trim(each.ctx)
            llama_cpp.llama_memory_clear(each.memory, True)


# -- memory ------------------------------------------------------------------------------------------------------------

FAILING = """
import ctypes, sys
import pypcd
import llama_cpp, numpy as np

fail_at = ctypes.CDLL(sys.argv[2]).preload_fail_at
fail_at.restype, fail_at.argtypes = ctypes.c_long, [ctypes.c_long]
before, after = eval(sys.argv[3])
text = list(range(3, 33))


def new(pcd):
    return pypcd.Llama(sys.argv[1], pcd=pcd, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, flash_attn=False,
                       type_k=0, type_v=0, n_gpu_layers=0)


def rows(llm, n):
    llm.eval(text[llm.n_tokens : n])
    if llm.pcd is None:
        return (np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy(),)
    got = llm.pcd_logits()
    return got.standard, got.local


wanted = {}
for name, setting in (("before", before), ("after", after)):
    llm = new(setting)
    wanted[name] = llm.pcd, rows(llm, 21)
    llm.close()
n_failed, n = 0, 0
while True:
    llm = new(before)
    llm.eval(text[:20])
    fail_at(n)
    try:
        llm.pcd = after
    except (pypcd.PCDError, MemoryError):
        failed = True
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
print("ok")
"""


@needs_preload
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (False, {}),
        ({}, {"cache": "separate"}),
        ({"cache": "separate"}, {}),
        ({}, {"type_k_over": "f16", "alpha": 0.4}),
        ({"cache": "shared"}, {"alpha": 0.4}),
        ({"perturbation": "none", "window": 8}, {"cache": "shared", "perturbation": "noise"}),
    ],
    ids=str,
)
def test_whichever_allocation_fails_a_change_holds_whole_or_not_at_all(
    before: Any, after: Any, tiny: Tiny, preload: Path
) -> None:
    settings = repr((before, pypcd.PCDConfig(**after).as_dict()))
    done = run_python(FAILING, tiny("llama"), preload, settings, LD_PRELOAD=str(preload))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
