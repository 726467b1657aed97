"""Second keys: which cells they are derived for again, and the memory that they take.

Second keys are the keys that twins see with cache="rerotated": the cached ones, turned. They follow from the first keys."""

from __future__ import annotations

from typing import Any

import pytest
from batches import (
    OK,
    Context,
    Native,
    check_row,
    decode_batch,
    decode_in,
    set_seq,
    turn_off,
    turn_on,
)
from conftest import TOKENS, Tiny

from pypcd.engine import _bindings as _native

SEQUENCES = {"n_seq_max": 4, "n_ctx": 1024, "n_batch": 1024, "n_ubatch": 64}


def derived(context: Context) -> int:
    """Of how many cells the second keys were derived so far."""
    return context.stats.n_derived_cells


# --- which cells are derived ---


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_token_decoded_with_pcd_off_costs_one_cell(arch: str, native: Native) -> None:
    context, fresh, stock = native(arch, {}), native(arch, {}), native(arch)
    n_caches = 2 if arch == "gemma3" else 1
    decode_in((context, fresh, stock), TOKENS[:60])
    for n in (60, 62):
        turn_off(context)
        decode_in((context, fresh, stock), TOKENS[n : n + 1])
        turn_on(context)
        before = derived(context)
        decode_in((context, fresh, stock), TOKENS[n + 1 : n + 2])
        assert derived(context) - before == n_caches
        check_row(context, stock, fresh)
    assert context.stats.n_derived == 2
    assert derived(fresh) == 0


def test_what_is_no_part_of_the_table_derives_nothing(native: Native) -> None:
    context = native("llama", {"alpha": 0.3}, **SEQUENCES)
    decode_in([context], TOKENS[:50])
    turn_on(context, {"alpha": 0.3, "beta": 1.0, "gamma": 5, "window": 20, "evaluation": "alternate"})
    decode_in([context], TOKENS[50:51])
    assert derived(context) == 0


# --- memory ---


def bytes_of(context: Context) -> tuple[int, int]:
    """Of the second keys and values, and of the first."""
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
        ({"cache": "separate"}, first, first),
        ({}, keys, keys),  # the second stream is lost, so its values are freed at once
        ({"alpha": 0.3}, keys, keys),
        ({"perturbation": "none", "window": 8}, keys, 0),
        ({}, keys, keys),
        ({"window": 8}, keys, keys),
        ({"type_k_over": "f16"}, keys // 2, keys // 2),
        ({"cache": "shared"}, keys // 2, 0),
        ({"cache": "separate"}, first, first),
        ({"cache": "shared"}, first, 0),
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


@pytest.mark.parametrize("cache", ["rerotated", "separate"])
def test_a_setting_in_between_costs_only_its_own_tokens(cache: str, native: Native) -> None:
    context, fresh, stock = native("llama", {"cache": cache}), native("llama", {"cache": cache}), native("llama")
    decode_in((context, fresh, stock), TOKENS[:40])
    for n, between in enumerate((None, {"cache": "shared"}, {"perturbation": "none", "window": 8, "alpha": 0.4})):
        turn_off(context) if between is None else turn_on(context, between)
        decode_in((context, fresh, stock), TOKENS[40 + 3 * n : 42 + 3 * n])
        turn_on(context, {"cache": cache})
        decode_in((context, fresh, stock), TOKENS[42 + 3 * n : 43 + 3 * n])
        check_row(context, stock, fresh)
    stats = context.stats
    assert (stats.n_derived_cells, stats.n_caught_up) == ((6, 0) if cache == "rerotated" else (0, 6))


def test_assigning_a_setting_frees_what_it_does_not_need(tiny: Tiny, load: Any) -> None:
    llm = load(tiny("llama"))
    llm.eval(TOKENS[:20])
    second = llm.pcd_stats().second_bytes
    assert second > 0
    llm("x", max_tokens=2, pcd={"cache": "shared"})  # for this call alone
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = None
    assert llm.pcd_stats().second_bytes == second
    llm.pcd = {"cache": "shared"}
    assert llm.pcd_stats().second_bytes == 0


# --- twins that are not turned beside others ---


def decode_each(context: Context, tokens: dict[int, int], at: dict[int, int]) -> None:
    """One token of each of these sequences, in one batch."""
    assert decode_batch(context, [(token, at[seq], [seq], True) for seq, token in tokens.items()]) == 0


def test_a_twin_that_is_not_turned_costs_no_graph(native: Native) -> None:
    """The graph is used again while as many twins are turned, whichever ones."""
    context = native("llama", {"evaluation": "fused"}, **SEQUENCES)
    at = dict.fromkeys(range(4), 0)
    for seq in (1, 3):
        assert set_seq(context, seq, {"perturbation": "none", "window": 12, "evaluation": "fused"}) == OK

    def built(steps: list[list[int]]) -> int:
        before = context.n_reused
        for seqs in steps:
            decode_each(context, {seq: TOKENS[at[seq]] for seq in seqs}, at)
            for seq in seqs:
                at[seq] += 1
        return len(steps) - (context.n_reused - before)

    assert built([[0, 1], [0, 1], [2, 3], [1, 2], [3, 0]]) == 1
    assert built([[0, 2], [1, 3], [0, 1]]) == 3
