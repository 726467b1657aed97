"""The second keys, which twins see with cache="rerotated" (the first keys, turned): when they are made again, and the memory that they take.

Batches are passed to llama_decode directly."""

from __future__ import annotations

from typing import Any

import pytest
from batches import Context, Native, check_row, decode_in, turn_off, turn_on
from conftest import TOKENS, Tiny

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
