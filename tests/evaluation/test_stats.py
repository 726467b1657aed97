"""Paired statistics against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation.stats import MIN_N, _tango, interval, paired


def test_a_hand_worked_comparison() -> None:
    result = paired([True] * 6 + [False] * 4, [False] * 5 + [True] + [True] + [False] * 3)
    assert (result.n, result.score, result.wins, result.losses, result.difference) == (10, 60.0, 5, 1, 40.0)
    assert result.p == pytest.approx(2 * (1 + 6) / 2**6)  # two-sided binomial tail of 1 in 6
    assert -20 <= result.low < 40 < result.high <= 100
    assert (result.right, result.spoilt, result.regression) == (2, 1, 50.0)


def test_fractions_are_compared_too_and_what_was_right_is_spoilt() -> None:
    """By hand; what was wrong before cannot be spoilt."""
    result = paired([1, 0.5, 0, 0.5, 1, 0], [1, 1, 1, 0.75, 0, 0])
    assert (result.wins, result.losses, result.difference, result.score) == (1, 3, -12.5, 50.0)
    assert (result.right, result.spoilt) == (3, 2) and result.regression == pytest.approx(200 / 3)
    equal = paired([0.5, 0], [0.5, 0])
    assert (equal.low, equal.high, equal.p, equal.is_clear) == (0.0, 0.0, 1.0, False)
    assert equal.regression == 0.0, "nothing was right"


def test_a_few_samples_that_differ_are_not_clear() -> None:
    """By the bootstrap alone it would be clear: none of its draws is below zero."""
    result = paired([True] * 4 + [False] * 296, [False] * 300)
    assert result.low > 0 and result.p == pytest.approx(0.125) and not result.is_clear
    # two-sided sign test: 2 / 2^5 is 0.0625, 2 / 2^6 is 0.03125
    assert next(n for n in range(1, 9) if paired([1.0] * n, [0.0] * n).is_clear) == MIN_N
    assert paired([True] * MIN_N + [False] * 294, [False] * 300).is_clear


def test_the_interval_covers_the_analytic_one() -> None:
    n, wins, losses = 400, 60, 20
    result = paired(
        [True] * wins + [False] * (n - wins), [False] * wins + [True] * losses + [False] * (n - wins - losses)
    )
    mean = (wins - losses) / n
    half = 1.96 * ((wins + losses) / n - mean**2) ** 0.5 / n**0.5
    assert result.low == pytest.approx(100 * (mean - half), abs=0.6)
    assert result.high == pytest.approx(100 * (mean + half), abs=0.6)


def test_an_interval_is_written_in_one_way() -> None:
    assert interval(paired([1] * 6 + [0] * 4, [0] * 10, seed=1)).startswith("+60.0 [+30.0, +90.0]")
    assert interval(paired([1, 0], [1, 0])) == "+0.0 [+0.0, +0.0] ~"
    assert interval(paired([0] * 8, [1] * 8), 2) == "-100.00 [-100.00, -100.00]"


@pytest.mark.parametrize(("method", "baseline"), [([], []), ([True], [True, False])])
def test_unpaired_outcomes_are_refused(method: list[bool], baseline: list[bool]) -> None:
    with pytest.raises(ValueError, match="allowed: the same samples"):
        paired(method, baseline)


# -- that nothing is lost ----------------------------------------------------------------------------------------------


def likeliest_loss(n: int, wins: int, losses: int, difference: float) -> float:
    """The share of losses that makes wins, losses and equal results most probable, if wins are `difference` more: by trying."""
    shares = np.linspace(max(0, -difference), (1 - difference) / 2, 400_001)[1:-1]
    counts = np.array([wins, losses, n - wins - losses])
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log([shares + difference, shares, 1 - 2 * shares - difference])
        return float(shares[np.where(counts[:, None] > 0, counts[:, None] * logs, 0.0).sum(0).argmax()])


@given(st.integers(20, 2000), st.integers(0, 19), st.integers(0, 19))
@settings(max_examples=25, deadline=None)
def test_the_score_test_by_its_definition(n: int, wins: int, losses: int) -> None:
    wins, losses = min(wins, n // 3), min(losses, n // 3)
    lost = likeliest_loss(n, wins, losses, -0.02)
    variance = n * (2 * lost - 0.02 - 0.02**2)
    expected = (wins - losses + 0.02 * n) / variance**0.5
    assert _tango(n, wins, losses, -0.02) == pytest.approx(expected, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(
    ("wins", "losses", "n", "points", "excluded"),
    [
        (0, 0, 188, -2, False),  # 189 = 1.960^2 * 0.98 / 0.02, though all bootstrap intervals of equals have no width
        (0, 0, 189, -2, True),
        (9, 9, 600, -2, True),
        (9, 9, 150, -2, False),
        (30, 0, 60, -2, True),
        (0, 12, 600, -2, False),
        (5, 15, 600, -2, False),
        (0, 0, 34, 10, False),  # 35 = 1.960^2 * 0.9 / 0.1
        (0, 0, 35, 10, True),
        (3, 1, 76, 10, True),
        (3, 1, 50, 10, False),
        (0, 6, 6, 10, True),
    ],
)
def test_a_difference_is_excluded_only_by_many_samples(
    wins: int, losses: int, n: int, points: float, excluded: bool
) -> None:
    equal = [0.0] * (n - wins - losses)
    result = paired([1.0] * wins + [0.0] * losses + equal, [0.0] * wins + [1.0] * losses + equal)
    assert result.excludes(points) == excluded and result.spares == result.excludes(-2)


def test_a_loss_that_is_there_is_seldom_excluded_and_none_mostly_is() -> None:
    """By simulation: 2 points are lost, or nothing is. 589 = 0.03 * ((1.960 + 0.842) / 0.02)^2, for a power of 80%."""
    rng, n = np.random.default_rng(0), 589
    shown = {0.0: 0, 0.02: 0}
    for loss in shown:
        for _ in range(400):
            wins, losses, equal = rng.multinomial(n, [(0.03 - loss) / 2, (0.03 + loss) / 2, 0.97])
            mine, plain = [1] * wins + [0] * (losses + equal), [0] * wins + [1] * losses + [0] * equal
            shown[loss] += paired(mine, plain, n_bootstrap=500).spares
    assert shown[0.02] / 400 < 0.05 and 0.65 < shown[0.0] / 400 < 0.95
