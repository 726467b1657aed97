"""Paired comparison of two methods on the same samples: the only rule for what counts as a difference, and its format.

Knows nothing of models.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pypcd.errors import InputError

__all__ = ["MARGIN", "MIN_N", "NOT_SHOWN", "WORTH", "Paired", "advised", "interval", "paired"]

LEVEL = 0.05
MIN_N = 6
"""Fewer samples that differ show nothing (Paired.is_clear): 2 / 2**5 is 0.0625."""
MARGIN = 2.0
"""Points: a loss below this counts as none (Paired.spares)."""

LITTLE_TO_GAIN = 90.0  # percent that the baseline has right
WORTH = 10.0
"""Points: a gain below this is not worth more questions."""

NOT_SHOWN = f"~: the interval spans zero or p is {LEVEL:.2f} or more, no difference shown"
"""The meaning of the ~ of interval(), for a legend."""


@dataclasses.dataclass(frozen=True)
class Paired:
    """A method against a baseline on the same n samples.

    Attributes:
        n: samples.
        score: the method's mean, in percent.
        wins: number of samples on which the method scored higher.
        losses: number of samples on which the baseline did.
        difference: method minus baseline, in points.
        low: the lower end of the difference's 95% bootstrap interval, in points.
        high: the upper end.
        p: exact two-sided McNemar p, or the sign test for scores between 0 and 1; 1 if the two never disagree.
        right: number of samples on which the baseline is right (its score is 1).
        spoilt: how many of these the method has not right.
    """

    n: int
    score: float
    wins: int
    losses: int
    difference: float
    low: float
    high: float
    p: float
    right: int
    spoilt: int

    @property
    def regression(self) -> float:
        """How much of what was right is spoilt, in percent; 0 if nothing was right. On questions whose context has nothing to do with
        them this is neutral regression (arXiv 2604.16686)."""
        return 100 * self.spoilt / self.right if self.right else 0.0

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero and p is below 0.05. Both are needed: if few samples differ, the bootstrap
        interval alone excludes zero too easily."""
        return (self.low > 1e-9 or self.high < -1e-9) and self.p < LEVEL  # sums of fractions round

    @property
    def spares(self) -> bool:
        """Whether a loss of MARGIN points is excluded (equivalence)."""
        return self.excludes(-MARGIN)

    def excludes(self, difference: float) -> bool:
        """Whether a gain of so many points, or below 0 a loss, is excluded: the interval ends before it, and so says Tango's
        score test. Both are needed: if few samples differ, the bootstrap interval alone is too narrow."""
        wins, losses, worst = self.wins, self.losses, self.low
        if difference > 0:  # a gain is the other method's loss
            wins, losses, worst = losses, wins, -self.high
        least = statistics.NormalDist().inv_cdf(1 - LEVEL / 2)
        return worst > -abs(difference) and _tango(self.n, wins, losses, -abs(difference) / 100) > least


def paired(method: Sequence[float], baseline: Sequence[float], *, seed: int = 0, n_bootstrap: int = 10_000) -> Paired:
    """Compare scores of 0 to 1, or right and wrong, sample by sample.

    The interval is the percentile bootstrap over samples. For scores other than 0 and 1, p is that of the exact sign
    test: McNemar's test on which of the two scored higher.

    Raises:
        ValueError: the two differ in length, or are empty.
    """
    a, b = np.asarray(method, float), np.asarray(baseline, float)
    if len(a) != len(b) or len(a) == 0:
        raise InputError(f"the scores are of {len(a)} and {len(b)} samples; allowed: the same samples, at least one")
    delta = a - b
    wins, losses = int((delta > 0).sum()), int((delta < 0).sum())
    # many differences are equal, so resampling them means drawing how often each value occurs
    values, counts = np.unique(delta, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(a), counts / len(a), size=n_bootstrap)
    low, high = np.percentile(100 * (draws @ values) / len(a), [2.5, 97.5])
    return Paired(
        len(a),
        100 * float(a.mean()),
        wins,
        losses,
        100 * float(delta.mean()),
        float(low),
        float(high),
        _mcnemar(wins, losses),
        int((b >= 1).sum()),
        int(((b >= 1) & (a < 1)).sum()),
    )


def interval(d: Any, decimals: int = 1) -> str:
    """The difference of a Paired, or of what has these figures too, as text: `+1.0 [-2.0, +3.0] ~`; NOT_SHOWN says what the ~ means."""
    values = (f"{value:+.{decimals}f}" for value in (d.difference, d.low, d.high))
    return "{} [{}, {}]".format(*values) + ("" if d.is_clear else " ~")


def advised(baseline: str, found: Mapping[str, Paired]) -> str:
    """A sentence about what to do.

    Args:
        found: the methods, and the baseline itself.
    """
    if baseline in found and found[baseline].score >= LITTLE_TO_GAIN:
        right = f"{found[baseline].score:.0f}% right"
        return f"{baseline} has {right}, so there is little to gain here: ask about longer texts, or leave it at that."
    gains = {method: one for method, one in found.items() if one.is_clear and one.difference > 0}
    open_ = {method: one for method, one in found.items() if one.difference > 0 and not one.excludes(WORTH)}
    if not gains and not open_:
        return f"No method shows a gain over {baseline}, so there is no reason to use one for questions like these."
    best = max(gains or open_, key=lambda method: found[method].difference)
    counts = f"{found[best].wins} answers more are right with it, and {found[best].losses} fewer"
    if gains:
        return f"Use {best} for questions like these: {counts}."
    return f"{best} is ahead of {baseline}, which may be chance: {counts}. Ask more questions."


def _tango(n: int, wins: int, losses: int, difference: float) -> float:
    """The score statistic z of a paired difference of proportions against a given one (Tango, Statistics in Medicine 17,
    1998), -1 < difference < 0."""
    b = wins + losses - (2 * n - wins + losses) * difference
    square = max(0.0, b * b + 8 * n * losses * difference * (1 - difference))
    lost = (b + math.sqrt(square)) / (4 * n)  # the likeliest share of losses, if that is the difference
    return (wins - losses - n * difference) / math.sqrt(n * (2 * lost + difference - difference**2))


def _mcnemar(wins: int, losses: int) -> float:
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)
