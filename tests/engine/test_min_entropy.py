"""min_entropy: plain decoding, and no twin, where the model is sure: where softmax(L) has less entropy; contrast elsewhere.

Plain rows are held to the library with PCD off, contrasted ones to the reference, entropies to float64."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Callable

import numpy as np
import pytest
from batches import Native, Setting, check_seen, decode_batch, read, set_seq
from conftest import TOKENS, Tiny, check_rows, close, greedy, native_row, rounding
from hypothesis import given
from hypothesis import strategies as st
from reference import bits
from test_min_context import check_plain

import pypcd
from pypcd import decode
from pypcd.engine import _bindings as _native
from pypcd.lab.formula import Formula
from pypcd.method import contrast, entropy

Load = Callable[..., pypcd.Llama]

CACHES = ["rerotated", "shared", "separate"]
WAYS = ["fused", "alternate", "auto"]
EXACT = 1e-5  # bits: cpp/formulas/formulas.h says about 1e-6 of log2(n_vocab), and n_vocab is below 2^10 here


def c_entropy(row: Any) -> float:
    row = np.ascontiguousarray(row, np.float32)
    return _native.pcd_entropy(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(row))


def between(values: list[float]) -> float:
    """A number that about half of the values are below of, and none is near."""
    ordered = sorted(values)
    i = max(range(len(ordered) // 4, 3 * len(ordered) // 4), key=lambda i: ordered[i + 1] - ordered[i])
    assert ordered[i + 1] - ordered[i] > 1e-3
    return (ordered[i] + ordered[i + 1]) / 2


# -- the entropy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([0.0] * 8, 3.0),
        ([5.0] * 1024, 10.0),
        ([0.0], 0.0),
        ([100.0, 0.0, 0.0], 0.0),
        (np.log([0.5, 0.25, 0.25]), 1.5),
        ([1.0, 1.0, -np.inf, np.nan, -3e38], 1.0),  # what is no logit does not count
        ([-np.inf, np.nan], 0.0),
        ([0.0, 0.0] + [-9e29] * 1000, 1.0),  # hardly a logit
    ],
)
def test_entropies_worked_by_hand(row: Any, wanted: float) -> None:
    assert entropy(row) == pytest.approx(wanted, abs=1e-9)
    assert c_entropy(row) == pytest.approx(wanted, abs=EXACT)


@given(st.integers(0, 2**32 - 1), st.integers(1, 900), st.floats(0, 30), st.floats(-100, 100))
def test_entropies_of_random_rows(seed: int, n: int, spread: float, constant: float) -> None:
    """Between 0 and log2(n), the same for a row moved by a constant."""
    row = np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)
    assert entropy(row) == pytest.approx(bits(row), abs=1e-9)
    assert c_entropy(row) == pytest.approx(bits(row), abs=EXACT)
    assert 0.0 <= c_entropy(row) <= math.log2(n) + EXACT
    rounding = 2 * float(np.abs(row).max() + abs(constant)) * 2**-23 * 10  # of the row that is moved, in bits
    assert c_entropy(row + np.float32(constant)) == pytest.approx(bits(row), abs=EXACT + rounding)


# -- one sequence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_rows_are_plain_where_the_model_is_sure_and_the_references_elsewhere(
    cache: str, evaluation: str, tiny: Tiny, load: Load
) -> None:
    path, n = tiny("llama"), 20
    stock = load(path, False)
    rows = []
    for end in range(20, 20 + n):
        stock.eval(TOKENS[stock.n_tokens : end])
        rows.append(native_row(stock).copy())
    least = between([bits(row) for row in rows])
    llm = load(path, {"cache": cache, "evaluation": evaluation, "min_entropy": least})
    n_plain = 0
    for end, row in zip(range(20, 20 + n), rows):
        llm.eval(TOKENS[llm.n_tokens : end])
        if bits(row) < least:
            n_plain += 1
            got = llm.pcd_logits()
            assert got.beta is None and np.array_equal(got.contrasted, got.standard)
            assert np.array_equal(native_row(llm), got.standard)
            close(native_row(llm), row, rounding(path))
            if evaluation == "alternate" and cache != "separate":
                assert got.local is None
        else:
            check_rows(llm, path, TOKENS[:end])
    assert 0 < n_plain < n
    stats = llm.pcd_stats()
    if evaluation == "alternate" and cache != "separate":
        assert (stats.n_twins, stats.n_skipped) == (n - n_plain, n_plain)
    if evaluation == "fused":
        assert stats.n_twins == n


@pytest.mark.parametrize("cache", CACHES[:2])
def test_a_model_that_is_always_sure_decodes_plainly_without_a_twin(cache: str, tiny: Tiny, load: Load) -> None:
    setting = {"cache": cache, "evaluation": "alternate", "min_entropy": 100.0}
    llm, stock = load(tiny("llama"), setting), load(tiny("llama"), False)
    for end in range(10, 30):
        for other in (llm, stock):
            other.eval(TOKENS[other.n_tokens : end])
        assert np.array_equal(native_row(llm), native_row(stock))
        check_plain(llm, native_row(stock))
    assert llm.pcd_stats().n_twins == 0 and llm.pcd_stats().n_skipped == 20


def test_zero_contrasts_everywhere(tiny: Tiny, load: Load) -> None:
    plain, llm = (load(tiny("llama"), {"min_entropy": least}) for least in (0.0, 1e-9))
    assert greedy(plain) == greedy(llm) != greedy(load(tiny("llama"), False))


def test_where_it_is_sure_no_token_is_left_out(tiny: Tiny, load: Load) -> None:
    """A cut leaves one token to sample from; a sure step keeps all of them."""
    cut = {"relative_top": 1.0, "evaluation": "alternate"}
    few, llm, stock = (load(tiny("llama"), s) for s in (cut, {**cut, "min_entropy": 100.0}, False))
    for other in (few, llm, stock):
        other.eval(TOKENS[:30])
    assert np.sort(native_row(few))[-2] < native_row(few).max() - 50
    assert np.array_equal(native_row(llm), native_row(stock))


@given(st.integers(0, 2**32 - 1), st.floats(0, 8))
def test_the_formula_in_numpy(seed: int, least: float) -> None:
    random = np.random.default_rng(seed)
    first, second = random.normal(0, 3, 200), random.normal(0, 3, 200)
    got = contrast(first, second, beta=1.5, gamma=20, min_entropy=least)
    if bits(first) < least:
        assert np.array_equal(got, first)
    else:
        assert np.array_equal(got, contrast(first, second, beta=1.5, gamma=20))


@given(st.integers(0, 2**32 - 1), st.floats(0, 8))
def test_the_control_contrasts_where_the_setting_does(seed: int, least: float) -> None:
    method = decode.parse(f"control:1.5:gamma=20:min_entropy={least!r}")
    assert isinstance(method.rows, decode.Control) and decode.parse(method.name) == method
    random = np.random.default_rng(seed)
    row, prior = random.normal(0, 3, 200), random.normal(0, 3, 200)
    got, wanted = method.rows._contrasted(row, prior), contrast(row, prior, beta=1.5, gamma=20, min_entropy=least)
    assert np.array_equal(got[np.isfinite(wanted)], wanted[np.isfinite(wanted)])
    assert np.isfinite(wanted).sum() == (200 if bits(row) < least else 20)


# -- several sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", WAYS)
def test_each_sequence_has_its_own(evaluation: str, native: Native) -> None:
    base: Setting = {"evaluation": evaluation}
    together, stock = native("llama", base, n_seq_max=3), native("llama", n_seq_max=3)
    leasts = [0.0, 100.0, 1e-6]
    for seq, least in enumerate(leasts):
        assert set_seq(together, seq, {**base, "min_entropy": least, "beta": 1.0}) == (0, "")
    entries = [(TOKENS[(11 * s + 7 * p) % 120], p, [s], p == 11) for s in range(3) for p in range(12)]
    assert decode_batch(together, entries) == decode_batch(stock, entries) == 0
    for seq, least in enumerate(leasts):
        i = 12 * seq + 11
        close(together.rows(i)[0] if least < 100 else together.seen(i), stock.seen(i), together.limit)
        if least == 100:
            assert math.isnan(_native.pcd_get_strength_ith(together.ctx, i))
        else:
            check_seen(together, i, {"beta": 1.0})


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_one_batch_are_judged_one_by_one(cache: str, evaluation: str, combine: bool, native: Native) -> None:
    """As guesses of a draft model are. With combine = false all of them read plain, and the contrast is asked for."""
    stock, n = native("llama"), 20
    entries = [(TOKENS[p], p, [0], p >= 10) for p in range(10 + n)]
    assert decode_batch(stock, entries) == 0
    plain = [stock.seen(10 + i).copy() for i in range(n)]
    least = between([bits(row) for row in plain])
    setting: Setting = {"cache": cache, "evaluation": evaluation, "min_entropy": least}
    context = native("llama", setting)
    assert set_seq(context, 0, {**setting, "combine": combine}) == (0, "")
    assert decode_batch(context, entries) == 0
    sure = [bits(row) < least for row in plain]
    assert 0 < sum(sure) < n
    for i, row in enumerate(plain, 10):
        beta = _native.pcd_get_strength_ith(context.ctx, i)
        contrasted = read(_native.pcd_get_logits_ith(context.ctx, i, _native.ROW_CONTRASTED), len(row))
        assert contrasted is not None
        if sure[i - 10]:
            assert math.isnan(beta)
            close(contrasted, row, context.limit)
        else:
            assert beta == 2.5 and np.isfinite(contrasted).sum() == 30
        if sure[i - 10] or not combine:
            close(context.seen(i), row, context.limit)
        else:
            check_seen(context, i, {})


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_that_are_not_allowed(native: Native) -> None:
    for value in (-1, 101):
        with pytest.raises(ValueError, match=f"min_entropy is {value}; allowed: from 0 to 100"):
            pypcd.PCDConfig(min_entropy=value)
    assert pypcd.PCDConfig.resolve("window:min_entropy=2").describe().endswith("min_entropy=2.0")
    context, params, error = native("llama"), _native.pcd_default_params(), ctypes.create_string_buffer(500)
    params.min_entropy = -1
    assert _native.pcd_set(context.ctx, ctypes.byref(params), error, 500) == _native.INVALID
    assert error.value.decode() == "min_entropy is -1, allowed: 0 to 100"


def test_a_setting_with_floors_is_a_formula() -> None:
    for fields in (
        {"min_entropy": 2.5},
        {"min_context": 512},
        {"min_entropy": 1e-6},
        {"min_first_entropy": 2.25},
        {"min_context": 512, "min_entropy": 2, "min_first_entropy": 1},
        {"min_context": 512, "min_entropy": 2},
    ):
        config = pypcd.PCDConfig.preset("window").replace(beta=1, **fields)
        formula = Formula.of(config)
        assert formula.config == config and Formula.parse(formula.name) == formula
    assert Formula.of(config).where == "context>=512 and entropy>=2"
    for where, fields in (
        ("entropy>=.5", {"min_entropy": 0.5}),
        ("first>=0 and context>=9", {"min_context": 9}),
        ("first>=1. and context-step>=9", {"min_context": 9, "min_first_entropy": 1.0}),
        ("first>=0 and context-step>=9", None),
        ("first>=1 and context>=9", None),
    ):
        formula = Formula(pypcd.PCDConfig.preset("window"), "1", 30, "0", where)
        assert formula.config == (fields and pypcd.PCDConfig.preset("window").replace(beta=1, **fields))
