"""The second keys, which twins see with cache="rerotated" (the first keys, turned): when they are made again, and the memory that they take.

Batches are passed to llama_decode directly."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from batches import Context, Native, check_row, decode_in, turn_off, turn_on
from conftest import SANITIZED, TOKENS, Tiny
from own_process import run

from pypcd.engine import _bindings as _native

# --- which cells are derived ---


@pytest.mark.parametrize(("arch", "n_caches"), [("llama", 1), ("gemma3", 2)])
def test_what_was_decoded_under_another_setting_is_derived_and_nothing_else(
    arch: str, n_caches: int, native: Native
) -> None:
    """Another one by its table: what is no part of that derives nothing."""
    context, fresh, stock = native(arch, {}), native(arch, {}), native(arch)
    decode_in((context, fresh, stock), TOKENS[:40])
    for n, between in enumerate((None, {"cache": "shared"}, {"perturbation": "none", "window": 8, "alpha": 0.4})):
        turn_off(context) if between is None else turn_on(context, between)
        decode_in((context, fresh, stock), TOKENS[40 + 3 * n : 42 + 3 * n])
        turn_on(context, {})
        before = context.stats.n_derived_cells
        decode_in((context, fresh, stock), TOKENS[42 + 3 * n : 43 + 3 * n])
        assert context.stats.n_derived_cells - before == 2 * n_caches
        check_row(context, stock, fresh)
    turn_on(context, {"beta": 1.0, "gamma": 5, "window": 20, "evaluation": "alternate"})
    decode_in([context], TOKENS[60:61])
    assert context.stats.n_derived == 3 and fresh.stats.n_derived_cells == 0


# --- memory ---


def bytes_of(context: Context) -> tuple[int, int]:
    """Of the second keys, and of the first keys and values."""
    stats = context.stats
    return stats.second_bytes, stats.kv_bytes


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek2"])
def test_a_setting_keeps_what_it_needs_and_frees_the_rest(arch: str, native: Native) -> None:
    context = native(arch)
    decode_in([context], TOKENS[:20])
    first = bytes_of(context)[1]
    turn_on(context)
    keys = bytes_of(context)[0]
    assert keys == (first if arch == "deepseek2" else first // 2)  # whose values are a part of its keys
    for setting, before_trim, after in (
        ({"alpha": 0.3}, keys, keys),
        ({"perturbation": "none", "window": 8}, keys, 0),
        ({}, keys, keys),
        ({"window": 8}, keys, keys),
        ({"type_k_over": "f16"}, keys // 2, keys // 2),
        ({"cache": "shared"}, keys // 2, 0),
        ({}, keys, keys),
    ):
        turn_on(context, setting)
        assert bytes_of(context) == (before_trim, first)
        _native.pcd_trim(context.ctx)
        assert bytes_of(context) == (after, first)
    turn_off(context)
    assert bytes_of(context) == (keys, first)
    turn_on(context)
    assert bytes_of(context) == (keys, first)
    turn_off(context)
    _native.pcd_trim(context.ctx)
    assert bytes_of(context) == (0, first)


def test_assigning_a_setting_frees_what_it_does_not_need(tiny: Tiny, load: Any) -> None:
    llm = load(tiny("llama"))
    llm.eval(TOKENS[:20])
    second = llm.pcd_stats().second_bytes
    assert second > 0
    llm("x", max_tokens=2, pcd={"cache": "shared"})  # for this call alone
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = None
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = "paper:cache=shared"
    assert llm.pcd_stats().second_bytes == 0


# --- too little memory ---

SQUEEZED = """
import re, resource
exact = dict(flash_attn=False, type_k=0, type_v=0, n_gpu_layers=0)
llm = new(pcd="paper:type_k_over=f16", n_ctx=65536, n_batch=2, **exact)
text = list(range(3, 23))
llm.eval(text)

def attempt(type_k_over, spare, off=False):
    used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
    before = llm.pcd_stats().n_derived_cells
    resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, resource.RLIM_INFINITY))
    if off:
        llm.pcd = False
    try:
        llm.pcd = "paper:type_k_over=" + type_k_over
    except pypcd.UnsupportedError as error:
        parts = str(error).split("cannot run here:", 1)[1].split(";")
        print(parts[0].strip(), "|", *(part.strip() for part in parts[1:] if "turn PCD off" in part))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # ggml aborts if a scheduler does not fit
    stats = llm.pcd_stats()
    text.append(len(text))
    llm.eval(text[-1:])
    print(stats.second_bytes // 2**20, "MiB", end=" ")
    if not stats.second_bytes:
        print("plain")
        return
    rows = llm.pcd_logits().local
    print(llm.pcd_stats().n_derived_cells - before, "derived", end=" ")
    llm.reset()
    llm.eval(text)
    fresh = llm.pcd_logits()
    print("right" if abs(rows - fresh.local).max() < abs(fresh.standard - rows).max() / 20 else "wrong")

attempt("f32", 180)
attempt("f32", 180, off=True)
attempt("f16", 150)
attempt("f32", 50)
attempt("f32", 20, off=True)
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer's allocator ends a process that runs out of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the process's memory, and reads it in /proc")
def test_second_keys_of_another_type_fit_beside_the_former_ones_or_these_stay(tiny: Tiny) -> None:
    """Unless PCD is off: then the former ones are freed first, and a failure leaves it off."""
    lines = run(tiny("llama", n_embd=512), SQUEEZED, stderr="(?s).*")  # 3 layers, 65536 cells, 2 heads of 128
    refused = "the second keys need another 192 MiB"
    beside = f"{refused} beside those in force | turn PCD off before this change, which then frees them"
    assert lines == [
        beside,
        "96 MiB 0 derived right",
        "192 MiB 21 derived right",
        "96 MiB 22 derived right",
        beside,
        "96 MiB 0 derived right",
        f"{refused} |",
        "0 MiB plain",
    ]
