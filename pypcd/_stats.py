"""Paired comparison of two methods on the same samples. Knows nothing of models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["Paired", "paired"]


@dataclasses.dataclass(frozen=True)
class Paired:
    """A method against a baseline on the same n samples.

    Attributes:
        n: samples.
        score: the method's mean, in percent.
        wins, losses: samples only the method, only the baseline got right.
        difference: in points.
        low, high: 95% bootstrap interval of the difference, in points.
        p: exact two-sided McNemar p; 1 where both never disagree.
    """

    n: int
    score: float
    wins: int
    losses: int
    difference: float
    low: float
    high: float
    p: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired(method: Sequence[bool], baseline: Sequence[bool], *, seed: int = 0, n_bootstrap: int = 10_000) -> Paired:
    """Compare right/wrong outcomes sample by sample.

    Raises:
        ValueError: the two differ in length, or are empty.
    """
    a, b = np.asarray(method, bool), np.asarray(baseline, bool)
    if len(a) != len(b) or len(a) == 0:
        raise ValueError(f"paired outcomes of {len(a)} and {len(b)} samples; both need the same samples, at least one")
    delta = a.astype(int) - b.astype(int)
    wins, losses = int((delta > 0).sum()), int((delta < 0).sum())
    # resampling n differences of -1, 0, 1 is drawing their counts
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(a), [wins / len(a), losses / len(a), 1 - (wins + losses) / len(a)], size=n_bootstrap)
    low, high = np.percentile(100 * (counts[:, 0] - counts[:, 1]) / len(a), [2.5, 97.5])
    return Paired(
        len(a),
        100 * float(a.mean()),
        wins,
        losses,
        100 * float(delta.mean()),
        float(low),
        float(high),
        _mcnemar(wins, losses),
    )


def _mcnemar(wins: int, losses: int) -> float:
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)
