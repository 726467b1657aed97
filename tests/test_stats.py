"""Paired statistics against hand-worked cases."""

from __future__ import annotations

import pytest

from pypcd.evaluation._stats import interval, paired


def test_a_hand_worked_comparison() -> None:
    result = paired([True] * 6 + [False] * 4, [False] * 5 + [True] + [True] + [False] * 3)
    assert (result.n, result.score, result.wins, result.losses, result.difference) == (10, 60.0, 5, 1, 40.0)
    assert result.p == pytest.approx(2 * (1 + 6) / 2**6)  # two-sided binomial tail of 1 in 6
    assert -20 <= result.low < 40 < result.high <= 100


def test_equal_outcomes_differ_in_nothing() -> None:
    result = paired([True, False, True], [True, False, True])
    assert (result.wins, result.losses, result.low, result.high, result.p) == (0, 0, 0.0, 0.0, 1.0)
    assert not result.is_clear


def test_a_large_one_sided_gain_is_clear() -> None:
    result = paired([True] * 80 + [False] * 20, [True] * 60 + [False] * 40)
    assert result.is_clear and result.low > 0 and result.p < 1e-5


def test_a_few_samples_that_differ_are_not_clear() -> None:
    """The bootstrap alone would say so: none of its draws is below zero."""
    result = paired([True] * 4 + [False] * 296, [False] * 300)
    assert result.low > 0 and result.p == pytest.approx(0.125) and not result.is_clear
    assert not paired([True], [False]).is_clear
    assert paired([True] * 6 + [False] * 294, [False] * 300).is_clear  # p = 2/64


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
    with pytest.raises(ValueError, match="both need the same samples"):
        paired(method, baseline)
