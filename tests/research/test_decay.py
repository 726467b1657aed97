"""The decay simulation against explicit rotation matrices, its rates on curves whose rate is known, the claims by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from research.claims import check_claims, claimed_rate, lemma_bound, theorem_ratio
from research.decay import CURVES, GRID, Decay, Rates, bins, envelope, grid, log_rate, power_rate

PAPER = Decay()


def rotation(position: int, theta: np.ndarray) -> np.ndarray:
    """R_Theta(m) of Eq. 3, the whole matrix."""
    matrix = np.zeros((2 * len(theta), 2 * len(theta)))
    for j, t in enumerate(theta):
        c, s = math.cos(position * t), math.sin(position * t)
        matrix[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[c, -s], [s, c]]
    return matrix


@pytest.mark.parametrize("transition", ["exponential", "none"])
def test_the_three_curves_are_those_of_the_rotated_vectors(transition: str) -> None:
    setting = Decay(base=1000.0, over_base=50.0, alpha=0.7, beta=1.3, d=12, length=40, transition=transition)
    curves = setting.simulate()
    theta = np.array([1000.0 ** (-2 * j / 12) for j in range(6)])
    over = theta * reference.rho(12, 0.7, 0.05, transition)
    q = np.tile([1.0, 0.0], 6)  # A_j = 1, phi_j = 0
    for k in range(40):
        first, second = ((rotation(k, t) @ q) @ q / 6 for t in (theta, over))
        assert curves.standard[k] == pytest.approx(first, abs=1e-12)
        assert curves.over_rotated[k] == pytest.approx(second, abs=1e-12)
        assert curves.contrasted[k] == pytest.approx(2.3 * first - 1.3 * second, abs=1e-12)
    assert [getattr(curves, name)[0] for name in CURVES] == pytest.approx([1, 1, 1])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_the_envelope_is_the_largest_of_what_follows(values: list[float]) -> None:
    got = envelope(np.array(values))
    assert got.tolist() == [max(abs(v) for v in values[i:]) for i in range(len(values))]


def test_rates_of_curves_whose_rate_is_known() -> None:
    k = np.arange(5000.0)
    with np.errstate(divide="ignore"):
        assert power_rate(k, k**-0.7) == pytest.approx(0.7, rel=1e-6)
        assert power_rate(k, k**-0.7 * np.where(k % 2, 1, -1)) == pytest.approx(0.7, rel=1e-6)
        assert log_rate(k, 1 - 0.05 * np.log(k)) == pytest.approx(0.05, rel=1e-3)
    assert power_rate(k, np.ones(5000)) == pytest.approx(0, abs=1e-12) == log_rate(k, np.ones(5000))
    assert log_rate(k, 0.1 * np.log1p(k)) < 0  # it grows


@pytest.mark.parametrize(("d", "base"), [(128, 1e8), (2048, 1e6)])
def test_equal_vectors_lose_one_over_ln_b_whatever_d_is(d: int, base: float) -> None:
    rates = Decay(base=base, over_base=1e5, d=d, transition="none", length=8192).simulate().rates()
    assert rates["standard"].log == pytest.approx(1 / math.log(base), rel=0.05)
    assert rates["over_rotated"].log == pytest.approx(1 / math.log(1e5), rel=0.08)


@given(st.integers(2, 3000), st.integers(1, 100))
def test_bins_hold_every_distance_once(length: int, n: int) -> None:
    k = np.arange(float(length))
    parts = bins(k, k, n)
    assert len(parts["mean"]) <= n
    assert parts["low"][0] == 1 and parts["high"][-1] == length - 1
    assert (parts["low"][1:] == parts["high"][:-1] + 1).all()
    assert (parts["low"] <= parts["mean"]).all() and (parts["mean"] <= parts["high"]).all()


def test_beyond_the_over_rotated_floor_the_contrast_loses_more_than_it_slowed() -> None:
    """With theta' of B' = 100 the over-rotated curve ends near 100 tokens; beyond, 1 + beta times the standard one is left."""
    rates = PAPER.replace(over_base=100.0, transition="none").simulate().rates()
    assert abs(rates["over_rotated"].far) < 0.02
    assert rates["contrasted"].far == pytest.approx(1.6 * rates["standard"].far, rel=0.1)
    kinked = np.where(np.arange(10_000) < 100, 1.0, 1 - 0.1 * np.log(np.maximum(np.arange(10_000), 1) / 100))
    assert Rates.of(np.arange(10_000.0), kinked).far == pytest.approx(0.1, rel=0.01)


def test_the_grid_changes_one_value_at_a_time() -> None:
    cases = list(grid(PAPER.replace(length=64), {"d": (4, 8), "beta": (1.0,)}))
    assert [(name, value) for name, value, _ in cases] == [("d", 4), ("d", 8), ("beta", 1.0)]
    assert cases[1][2].setting == PAPER.replace(length=64, d=8)
    for name, values in GRID.items():
        assert getattr(PAPER, name) in values  # each row has the paper's own setting in it


def test_the_lemmas_bound_by_hand() -> None:
    setting = Decay(base=100.0, over_base=10.0, d=4, length=64)
    c1 = 1 + (100**-0.5) ** 2  # A = 1, theta = 1 and 0.1, to the power d/2
    for k in (11, 40):
        wanted = c1 * k**-2 * math.exp(-(k**0.5) * math.log(100))
        assert math.exp(lemma_bound(k, setting)) == pytest.approx(wanted, rel=1e-12)
    # cos 63 + cos 6.3: scores come back, so no bound can go to zero
    assert setting.at([63]).standard[0] == pytest.approx((math.cos(63) + math.cos(6.3)) / 2)
    assert setting.at([63]).standard[0] > 0.99


def test_the_theorems_ratio_by_hand() -> None:
    setting = Decay(base=100.0, over_base=10.0, d=4, beta=0.5, length=64)
    s, turned = (math.cos(3) + math.cos(3 * base**-0.5) for base in (100, 10))
    wanted = math.log(abs(1.5 * s - 0.5 * turned)) / math.log(abs(s))
    assert theorem_ratio([3], setting)[0] == pytest.approx(wanted)
    wanted = math.log(abs(1.5 * s - 0.5 * turned) / 2) / math.log(abs(s) / 2)
    assert theorem_ratio([3], setting, normalised=True)[0] == pytest.approx(wanted)


def test_what_is_claimed_and_what_is_measured_at_the_papers_setting() -> None:
    rates = PAPER.simulate().rates()
    claims = check_claims(PAPER, rates)
    assert claims.factor == pytest.approx((math.log(1e6) / math.log(1e4)) ** (2 / 512))
    assert claims.factor == pytest.approx(1.0016, abs=1e-4) and claims.claimed == pytest.approx(0.9984, abs=1e-4)
    assert claims.claimed == claimed_rate(PAPER)
    assert claims.measured_log == pytest.approx(claims.identity, rel=1e-9)
    assert claims.measured_log < 0.9  # hundreds of times what is claimed
    assert claims.lemma_holds == 0 and claims.lemma_at == 2 and claims.lemma_score > 200
    assert claims.lemma_bound_log10 < -80
    assert claims.theorem_holds < 0.5 and claims.theorem_largest > 1
    assert claims.floor == pytest.approx((1 / 512) ** 0.5)
    far = np.random.default_rng(1).integers(2**20, 2**32, 4000)
    assert np.sqrt((PAPER.at(far).standard ** 2).mean()) == pytest.approx(claims.floor, rel=0.1)


WRONG = {"base": 1.0, "over_base": 1e7, "alpha": -1, "beta": math.nan, "d": 7, "length": 3, "transition": "linear"}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name: str) -> None:
    value = WRONG[name]
    with pytest.raises(ValueError, match=f"{name} is {value!r}; allowed"):
        PAPER.replace(**{name: value})
