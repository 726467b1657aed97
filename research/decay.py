"""Long-term decay of a single layer's attention scores (sections 3.4, A.1 and A.2 of the paper), in numpy alone.

S(k) = sum_j A_j cos(k theta_j + phi_j)      standard
S*(k): the same with theta*_j                over-rotated
(1 + beta) S(k) - beta S*(k)                 contrasted
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd.settings.fields import RANGES
from pypcd.settings.formula import frequencies, rho
from pypcd.settings.ranges import Integer, Number, check

__all__ = ["CURVES", "GRID", "Curves", "Decay", "Rates", "bins", "envelope", "grid", "log_rate", "power_rate", "scores"]

Array = npt.NDArray[np.float64]

CURVES = ("standard", "over_rotated", "contrasted")

_CHUNK = 2**20  # cosines at a time


@dataclasses.dataclass(frozen=True)
class Decay:
    """The setting of a simulation; the defaults are those of section 3.4.

    The paper does not say which vectors it uses, that is, A_j and phi_j. Here query and key are the same vector with A_j = 1,
    phi_j = 0, as RoPE's decay is usually drawn. Up to a factor, this is also the mean score of random vectors that are
    positively correlated; of independent ones the mean is 0 at every distance, and there is nothing to decay.

    Args:
        base: B, more than 1.
        over_base: B', more than 1 and at most B.
        alpha: slope of the transition function, 0 to 10.
        beta: strength of the contrast, 0 to 1000.
        d: dimensions of a head, even, 2 to 65536.
        length: distances 0 to length - 1, 16 to 2**22.
        transition: "exponential" (Eq. 4), or "none": theta* = theta', as in section A.1.

    Raises:
        ValueError: a value is out of range.
    """

    base: float = 1e6
    over_base: float = 1e4
    alpha: float = 0.4
    beta: float = 0.6
    d: int = 512
    length: int = 16384
    transition: str = "exponential"

    def __post_init__(self) -> None:
        check(self, **{name: RANGES[name] for name in ("alpha", "beta", "transition")})
        check(self, base=Number(1, open_below=True), d=Integer(2, 65536, multiple_of=2), length=Integer(16, 2**22))
        check(self, over_base=Number(1, self.base, open_below=True, note="at most the base"))

    def replace(self, **changes: Any) -> Decay:
        return dataclasses.replace(self, **changes)

    @property
    def theta(self) -> Array:
        """float64[d/2], radians per position."""
        return frequencies(self.d, self.base)

    @property
    def theta_over(self) -> Array:
        """theta*, float64[d/2]."""
        table = rho(self.d, alpha=self.alpha, base_ratio=self.over_base / self.base, transition=self.transition)
        return self.theta * table

    def at(self, distance: npt.ArrayLike) -> Curves:
        """The three curves at given distances, as shares of the largest value that the standard one could take."""
        k = np.asarray(distance, np.float64)
        standard, turned = (scores(k, theta) / (self.d // 2) for theta in (self.theta, self.theta_over))
        return Curves(self, k, standard, turned, (1 + self.beta) * standard - self.beta * turned)

    def simulate(self) -> Curves:
        """The curves at every distance from 0 to length - 1."""
        return self.at(np.arange(self.length))


@dataclasses.dataclass(frozen=True)
class Curves:
    """Scores over distance, each float64[n]; 1 is the largest value that a standard score could take."""

    setting: Decay
    distance: Array
    standard: Array
    over_rotated: Array
    contrasted: Array

    def rates(self) -> dict[str, Rates]:
        """How fast each curve decays."""
        return {name: Rates.of(self.distance, getattr(self, name)) for name in CURVES}

    def table(self) -> dict[str, Array]:
        """Columns by name."""
        return {"distance": self.distance, **{name: getattr(self, name) for name in CURVES}}


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a curve decays; see power_rate() and log_rate().

    Attributes:
        power: p of an envelope like k^-p.
        log: the share of the largest score that is lost when the distance grows by a factor e.
        far: the same, from the square root of the longest distance on. Where the over-rotated curve has reached its
            floor, the contrasted one is 1 + beta times the standard one, and loses 1 + beta times as much.
    """

    power: float
    log: float
    far: float

    @classmethod
    def of(cls, distance: Array, values: Array) -> Rates:
        late = distance >= distance.max() ** 0.5
        return cls(power_rate(distance, values), log_rate(distance, values), log_rate(distance[late], values[late]))


def scores(distance: Array, theta: Array) -> Array:
    """S(k) = sum_j cos(k theta_j) (Lemma A.2 with A_j = 1, phi_j = 0), float64[len(distance)]."""
    step = max(1, _CHUNK // len(theta))
    parts = [
        np.cos(np.multiply.outer(distance[i : i + step], theta)).sum(axis=1) for i in range(0, len(distance), step)
    ]
    return np.concatenate(parts)


# -- how fast a curve decays ------------------------------------------------------------------------------------------


def envelope(values: Array) -> Array:
    """The lowest curve above |S| that never rises: E(k) = max of |S(k')| over k' >= k."""
    return np.maximum.accumulate(np.abs(values)[::-1])[::-1]


def bins(distance: Array, values: Array, n: int = 64) -> dict[str, Array]:
    """A curve in at most n bins of equal width in ln k, from distance 1 on.

    Returns:
        distance (the geometric mean in a bin), mean, low and high, one for each bin that is not empty.
    """
    k, v = distance[distance >= 1], values[distance >= 1]
    edges = np.geomspace(k.min(), k.max() * (1 + 1e-12), n + 1)
    where = np.clip(np.searchsorted(edges, k, side="right") - 1, 0, n - 1)
    used = np.unique(where)
    groups = [where == i for i in used]
    return {
        "distance": np.array([np.exp(np.log(k[g]).mean()) for g in groups]),
        "mean": np.array([v[g].mean() for g in groups]),
        "low": np.array([v[g].min() for g in groups]),
        "high": np.array([v[g].max() for g in groups]),
    }


def power_rate(distance: Array, values: Array) -> float:
    """The algebraic decay rate p, as if the envelope were k^-p.

    Minus the slope of the least-squares line through ln E(k) over ln k, E as in envelope(), at the first distance of
    each of 64 bins of equal width in ln k, so that each doubling of the distance has the same weight.
    """
    k, e = distance[distance >= 1], envelope(values)[distance >= 1]
    at = np.unique(np.searchsorted(k, np.geomspace(k.min(), k.max(), 65)[:-1]))
    return -_slope(np.log(k[at]), np.log(np.maximum(e[at], 1e-300)))


def log_rate(distance: Array, values: Array) -> float:
    """The share of the largest score that is lost when the distance grows by a factor e.

    Minus the slope of the least-squares line through S over ln k, with S averaged in 64 bins of equal width in ln k.
    With equal vectors S(k) = 1 - (ln k + 0.577) / ln B while 1 << k << B, so the rate is 1 / ln B for every d. It is
    linear in the curve: contrasted rate = (1 + beta) standard rate - beta over-rotated rate.
    """
    parts = bins(distance, values)
    return -_slope(np.log(parts["distance"]), parts["mean"])


def _slope(x: Array, y: Array) -> float:
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


# -- the grid of Figure 4 ---------------------------------------------------------------------------------------------

# the paper names the parameters that it varied, but not their values
GRID: Mapping[str, tuple[float, ...]] = {
    "d": (32, 128, 512, 2048),
    "beta": (0.3, 0.6, 1.5, 2.5),
    "alpha": (0.1, 0.2, 0.4, 0.6),
    "base": (1e5, 1e6, 1e7, 1e8),
    "over_base": (1e2, 1e3, 1e4, 1e5),
}


def grid(setting: Decay, varied: Mapping[str, tuple[float, ...]] = GRID) -> Iterator[tuple[str, float, Curves]]:
    """The setting with one value changed at a time: its name, the value and the curves."""
    for name, values in varied.items():
        for value in values:
            yield name, value, setting.replace(**{name: value}).simulate()
