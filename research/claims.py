"""Compares the paper's claims about the decay (sections 2.3, A.1) with the attention scores they are about."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from research.decay import Decay, Rates, scores

__all__ = ["Claims", "check_claims", "claimed_rate", "lemma_bound", "theorem_ratio"]

Array = npt.NDArray[np.float64]

_FAR = 2**32  # beyond any text: claims about the limit should hold here; k theta is still exact to 1e-6
_N_FAR = 20_000


@dataclasses.dataclass(frozen=True)
class Claims:
    """Claimed and measured figures for one setting.

    Attributes:
        factor: (ln B / ln B')^(2/d), the factor by which the contrast slows the decay, according to section 2.3.
        claimed: 1 / factor, the claimed rate of the contrasted curve as a share of the standard one's.
        measured_power: the contrasted curve's rate divided by the standard one's; 1 means no change, below 0 the scores
            grow with the distance. See Rates.
        measured_log: likewise.
        measured_far: likewise.
        identity: the value that measured_log must have, 1 - beta (r* / r - 1), from the rates r of the standard and r*
            of the over-rotated curve.
        lemma_holds: share of the distances from B^(2/d) to length - 1 at which Lemma A.4's bound holds.
        lemma_at: the first such distance.
        lemma_bound_log10: log10 of the bound there.
        lemma_score: |S| there, A_j = 1.
        floor: the root mean square of a normalised score at all distances, 1 / sqrt(d). The score is almost periodic and
            returns close to its first value again and again, so no bound on it can go to zero.
        theorem_holds: share of the simulation's distances at which ln|S_CD| / ln|S| is at most `claimed`, as stated in
            Theorem A.5: with theta', no transition, and A_j not normalised.
        theorem_holds_far: the same at random distances up to 2^32.
        theorem_largest: the largest of these ratios; the theorem says that the upper limit is below 1.
        normalised_holds: theorem_holds with S(0) = 1, the only scale at which a smaller ratio means a slower decay.
        normalised_holds_far: theorem_holds_far, likewise.
        normalised_largest: theorem_largest, likewise.
    """

    factor: float
    claimed: float
    measured_power: float
    measured_log: float
    measured_far: float
    identity: float
    lemma_holds: float
    lemma_at: int
    lemma_bound_log10: float
    lemma_score: float
    floor: float
    theorem_holds: float
    theorem_holds_far: float
    theorem_largest: float
    normalised_holds: float
    normalised_holds_far: float
    normalised_largest: float


def claimed_rate(setting: Decay) -> float:
    """(ln B' / ln B)^(2/d): the claimed decay rate of the contrast over the standard one (section 2.3, Theorem A.5)."""
    return (math.log(setting.over_base) / math.log(setting.base)) ** (2 / setting.d)


def lemma_bound(distance: npt.ArrayLike, setting: Decay) -> Array:
    """The natural logarithm of Lemma A.4's bound: C1 k^(-d/2) exp(-k^(2/d) ln B), C1 = sum_j A_j theta_j^(d/2), A_j = 1."""
    k = np.asarray(distance, np.float64)
    c1 = float((setting.theta ** (setting.d / 2)).sum())
    return math.log(c1) - setting.d / 2 * np.log(k) - k ** (2 / setting.d) * math.log(setting.base)


def theorem_ratio(distance: npt.ArrayLike, setting: Decay, *, normalised: bool = False) -> Array:
    """ln|S_CD(k)| / ln|S(k)| of Theorem A.5: S' with theta', no transition, lambda = beta."""
    k = np.asarray(distance, np.float64)
    plain = setting.replace(transition="none")
    scale = setting.d // 2 if normalised else 1
    s, turned = (scores(k, theta) / scale for theta in (plain.theta, plain.theta_over))
    contrasted = (1 + setting.beta) * s - setting.beta * turned
    tiny = np.finfo(float).tiny
    return np.log(np.maximum(np.abs(contrasted), tiny)) / np.log(np.maximum(np.abs(s), tiny))


def check_claims(setting: Decay, rates: dict[str, Rates]) -> Claims:
    """Compare the claims with a setting's scores.

    Args:
        rates: the rates of the setting's curves, from Curves.rates().
    """
    first = math.floor(setting.base ** (2 / setting.d)) + 1
    near = np.arange(first, max(setting.length, first + 1), dtype=np.float64)
    s = np.abs(scores(near, setting.theta))
    bound = lemma_bound(near, setting)

    far = np.unique(np.random.default_rng(0).integers(setting.length, _FAR, _N_FAR)).astype(np.float64)
    every = np.arange(1, setting.length, dtype=np.float64)
    claimed = claimed_rate(setting)
    raw, raw_far = (theorem_ratio(k, setting) for k in (every, far))
    unit, unit_far = (theorem_ratio(k, setting, normalised=True) for k in (every, far))

    standard, over, contrasted = (rates[name] for name in ("standard", "over_rotated", "contrasted"))
    return Claims(
        factor=1 / claimed,
        claimed=claimed,
        measured_power=contrasted.power / standard.power,
        measured_log=contrasted.log / standard.log,
        measured_far=contrasted.far / standard.far,
        identity=1 - setting.beta * (over.log / standard.log - 1),
        lemma_holds=float((np.log(np.maximum(s, np.finfo(float).tiny)) <= bound).mean()),
        lemma_at=first,
        lemma_bound_log10=float(bound[0]) / math.log(10),
        lemma_score=float(s[0]),
        floor=setting.d**-0.5,
        theorem_holds=float((raw <= claimed).mean()),
        theorem_holds_far=float((raw_far <= claimed).mean()),
        theorem_largest=float(max(raw.max(), raw_far.max())),
        normalised_holds=float((unit <= claimed).mean()),
        normalised_holds_far=float((unit_far <= claimed).mean()),
        normalised_largest=float(max(unit.max(), unit_far.max())),
    )
