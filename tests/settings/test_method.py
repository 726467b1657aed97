"""The formulas of the method, in numpy (pypcd) and in C++ (the library), against the reference's own."""

from __future__ import annotations

import ctypes
import math

import c_functions
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

import pypcd
import pypcd.settings.formula
from pypcd.engine._bindings import Params
from pypcd.settings.fields import FIELDS
from pypcd.settings.formula import contrast, frequencies, rho

n_rots = st.integers(1, 128).map(lambda n: 2 * n)
alphas = st.floats(0, 10, width=32)
ratios = st.floats(2.0**-20, 1, width=32)
BEHIND = 60.0  # LLAMA_PCD_BEHIND
# few distinct values, so that ties are the rule
logits = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=1, max_size=40)


def c_rho(n_rot: int, alpha: float, base_ratio: float, transition: str) -> np.ndarray:
    out = np.full(n_rot // 2, np.nan)
    pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
    c_functions.pcd_rho(n_rot, alpha, base_ratio, FIELDS["transition"].numbers[transition], pointer)
    return out


def c_contrast(
    first: np.ndarray, second: np.ndarray | None, beta: float, gamma: int, relative_top: float, behind: float = math.inf
) -> tuple[int, np.ndarray]:
    first, out = first.astype(np.float32), np.full(len(first), np.nan, np.float32)
    second = None if second is None else second.astype(np.float32)

    def pointer(a: np.ndarray | None) -> object:
        return None if a is None else a.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    params = Params(beta=beta, gamma=gamma, relative_top=relative_top)
    n = c_functions.pcd_contrast(
        pointer(first), pointer(second), len(first), ctypes.byref(params), behind, pointer(out), None
    )
    return n, out


@given(n_rots, alphas, ratios, st.sampled_from(["exponential", "none"]))
def test_rho_is_equation_4_in_python_and_in_c(n_rot: int, alpha: float, base_ratio: float, transition: str) -> None:
    wanted = reference.rho(n_rot, alpha, base_ratio, transition)
    got = rho(n_rot, alpha=alpha, base_ratio=base_ratio, transition=transition)
    np.testing.assert_allclose(got, wanted, rtol=1e-9)
    np.testing.assert_allclose(c_rho(n_rot, alpha, base_ratio, transition), wanted, rtol=1e-9)
    assert (got >= 1 - 1e-9).all()
    for none in (rho(n_rot, alpha=0, base_ratio=base_ratio), rho(n_rot, alpha=alpha, base_ratio=1)):
        assert none == pytest.approx(1)
    assert got[0] == pytest.approx(1)


@given(n_rots, st.floats(1, 1e7))
def test_frequencies_fall_by_a_constant_factor_from_1(n_rot: int, base: float) -> None:
    theta = frequencies(n_rot, base)
    assert len(theta) == n_rot // 2 and theta[0] == 1.0
    np.testing.assert_allclose(theta, [base ** (-2 * j / n_rot) for j in range(n_rot // 2)], rtol=1e-9)


def test_an_unknown_transition_is_an_error() -> None:
    with pytest.raises(ValueError, match="transition is 'linear'; allowed: 'exponential', 'none'"):
        rho(16, transition="linear")


@settings(max_examples=200)
@given(logits, st.sampled_from([0.0, 0.5, 1.5, 2.5]), st.integers(1, 45), st.sampled_from([0.0, 0.04, 0.2, 0.9, 1.0]))
def test_contrast_is_equation_6_with_ties_to_the_lower_id(
    rows: list[tuple[int, int]], beta: float, gamma: int, relative_top: float
) -> None:
    first, second = np.array(rows, np.float64).T
    wanted = reference.contrast(first, second, beta, gamma, relative_top)
    kept = np.isfinite(wanted)
    if kept.sum() == 1:  # decided whatever L* says
        wanted[kept] = first[kept]
    assert contrast(first, second, beta=beta, gamma=gamma, relative_top=relative_top).tolist() == wanted.tolist()
    n, got = c_contrast(first, second, beta, gamma, relative_top)
    assert n == kept.sum()
    assert got.tolist() == wanted.tolist()  # small integers and halves are exact in float32
    n, got = c_contrast(first, None, beta, gamma, relative_top)  # without L* the plausible logits stay
    assert n == kept.sum() and got.tolist() == np.where(kept, first, -np.inf).tolist()
    n, got = c_contrast(first, second, beta, gamma, relative_top, BEHIND)
    assert n == kept.sum() and got.tolist() == reference.behind(wanted, first).tolist()


def test_excluded_tokens_lie_60_behind_the_best_one_by_hand() -> None:
    standard = np.array([3.0, 5.0, 1.0, 4.0, -36.0, -1000.0])
    contrasted = [-np.inf, 2.0, -np.inf, 2.5, -np.inf, -np.inf]
    wanted = [-57.5, 2.0, -59.5, 2.5, -57.5 - 30 - 9 * 9 / 18, -57.5 - 30 - 9 * 973 / 982]
    np.testing.assert_allclose(pypcd.settings.formula.put_behind(contrasted, standard), wanted, rtol=1e-12)
    n, got = c_contrast(standard, 3 * standard - 2 * np.array([0, 2.0, 0, 2.5, 0, 0]), 0.5, 2, 0.0, BEHIND)
    assert n == 2
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@given(
    st.integers(0, 2**32 - 1), st.integers(2, 400), st.integers(1, 60), st.floats(0.1, 30), st.floats(0, 5, width=32)
)
def test_excluded_tokens_are_improbable_in_their_order_and_within_reach_of_a_bias(
    seed: int, n_vocab: int, gamma: int, spread: float, beta: float
) -> None:
    """Of a logit_bias, which is at most 100."""
    first, second = np.random.default_rng(seed).normal(0, spread, (2, n_vocab)).astype(np.float32)
    _, got = c_contrast(first, second, beta, gamma, 0.0, BEHIND)
    strict = contrast(first, second, beta=beta, gamma=gamma)
    rest = ~np.isfinite(strict)
    mine = pypcd.settings.formula.put_behind(strict, first)
    np.testing.assert_allclose(got, mine, rtol=1e-5, atol=1e-3 * spread)
    if rest.any():
        for row in (got, mine):
            order = np.argsort(-first[rest], kind="stable")
            assert (np.diff(row[rest][order]) <= 0).all()
            assert row.max() - 60.01 < row[rest].max() < row.max() - 59.99
            assert row[rest].min() + 100 > row.max()


MASKS = [-np.inf, np.nan, -3.4e38, -1e31, np.inf, 3.4e38]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_masked_token_is_never_plausible_and_stays_masked(mask: float) -> None:
    """By a model that never gives some of its tokens, in L and in L*."""
    first, second = np.array([mask, 2.0, mask, 1.0, 0.0]), np.array([mask, 1.0, 0.0, 2.0, 0.0])
    for gamma, wanted in ((9, [4.5, -1.5, 0.0]), (2, [4.5, -1.5, 4.5 - 60])):
        n, got = c_contrast(first, second, 2.5, gamma, 0.0, BEHIND)
        assert n == min(gamma, 3) and got[[1, 3, 4]].tolist() == wanted and (got[[0, 2]] == -np.inf).all()
        strict = contrast(first, second, gamma=gamma)
        assert strict[[1, 3]].tolist() == wanted[:2] and (strict[[0, 2]] == -np.inf).all()
        assert pypcd.settings.formula.put_behind(strict, first).tolist() == got.tolist()
    assert c_contrast(first, second, 2.5, 9, 0.9)[0] == 1  # relative to the best that is a logit
    assert np.isfinite(contrast(first, second, relative_top=0.9)).sum() == 1


@pytest.mark.parametrize("unknown", MASKS, ids=str)
def test_where_the_twin_gives_no_number_a_token_keeps_its_logit(unknown: float) -> None:
    first, second = np.array([2.0, 1.0, 0.0]), np.array([1.0, unknown, 0.0])
    for got in (c_contrast(first, second, 2.5, 9, 0.0)[1], contrast(first, second)):
        assert got.tolist() == [4.5, 1.0, 0.0]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_row_without_one_logit_stays_as_it_is(mask: float) -> None:
    row = np.full(5, mask, np.float32)
    n, got = c_contrast(row, row, 2.5, 3, 0.1, BEHIND)
    assert n == 0 and np.array_equal(got, row, equal_nan=True)
    assert np.array_equal(contrast(row, row, relative_top=0.1), row, equal_nan=True)


numbers = st.sampled_from([-np.inf, np.inf, np.nan, -3.4e38, 3.4e38, 0.0]) | st.floats(-50, 50, width=32)


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40),
    st.floats(0, 1000, width=32),
    st.integers(1, 45),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([BEHIND, math.inf]),
)
def test_no_row_makes_a_number_that_was_not_there(
    rows: list[tuple[float, float]], beta: float, gamma: int, relative_top: float, behind: float
) -> None:
    first, second = np.array(rows, np.float32).T
    n, got = c_contrast(first, second, beta, gamma, relative_top, behind)
    is_logit = np.abs(first) < 1e30
    assert n == min(gamma, is_logit.sum()) or relative_top and 0 < n <= is_logit.sum()
    if n:
        assert np.isfinite(got[is_logit]).all() or behind == math.inf
        assert (got[~is_logit] == -np.inf).all() and (got[is_logit] > -np.inf).sum() >= n


def test_log_probabilities_sum_to_one_even_of_large_logits_and_excluded_tokens() -> None:
    row = np.array([1000.0, 999.0, -np.inf, 0.0])
    p = np.exp(pypcd.settings.formula.log_softmax(row))
    assert p.sum() == pytest.approx(1.0) and p[0] / p[1] == pytest.approx(math.e) and p[2] == 0
