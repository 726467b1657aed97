"""The method in numpy: over-rotated frequencies, the contrast and its plausible tokens, the entropy.

Knows nothing of models or libraries.

Symbols as in the paper (arXiv 2506.08371): theta the model's RoPE frequencies and theta* the over-rotated (higher) ones,
B the RoPE base, d the number of rotated dimensions of a head, L and L* the logits of the two evaluations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd.settings.fields import RANGES

__all__ = [
    "contrast",
    "entropy",
    "frequencies",
    "log_softmax",
    "plausible",
    "put_behind",
    "rho",
    "tilt",
]

Array = npt.NDArray[np.float64]


def frequencies(n_rot: int, rope_freq_base: float) -> Array:
    """theta_j = B^(-2(j-1)/d) for j = 1 .. d/2 (section 2.1).

    Args:
        n_rot: d, the rotated dimensions of a head; even.
        rope_freq_base: B.

    Returns:
        float64[n_rot/2], radians per position.
    """
    return float(rope_freq_base) ** (-2.0 * np.arange(n_rot // 2) / n_rot)


def rho(n_rot: int, *, alpha: float = 0.2, base_ratio: float = 1e-4, transition: str = "exponential") -> Array:
    """The factor by which each frequency is over-rotated: rho_j = theta*_j / theta_j (Eq. 4).

        T(x)  = 2 - exp(alpha x),  x = j / (d/2)      transition="none": T = 0
        rho_j = T + (1 - T) base_ratio^(-2(j-1)/d)    >= 1

    It does not depend on B, so it works with any change that a model makes to its frequencies.

    Returns:
        float64[n_rot/2]
    """
    j = np.arange(1, n_rot // 2 + 1)
    lowered = float(base_ratio) ** (-2.0 * (j - 1) / n_rot)
    exponential = RANGES["transition"]("transition", transition) == "exponential"
    t = 2.0 - np.exp(alpha * j / (n_rot // 2)) if exponential else np.zeros(len(j))
    return t + (1.0 - t) * lowered


def contrast(
    standard: npt.ArrayLike,
    local: npt.ArrayLike,
    *,
    beta: float = 2.5,
    gamma: int = 30,
    relative_top: float = 0.0,
    min_entropy: float = 0.0,
) -> Array:
    """L~ = (1 + beta) L - beta L* on the plausible tokens of L, -inf elsewhere (Eq. 6).

    Plausible tokens are the gamma most probable ones of L (the lower id first if logits are equal) that also reach
    relative_top times the highest probability. If only one is plausible it keeps its logit: there is nothing to decide.
    If softmax(L) has less entropy than min_entropy, the row is L: the model is sure.

    What is no number between -1e30 and 1e30 (-inf, NaN, the least float) is no logit. In L it masks a token, which is
    never plausible (if all are masked, L is returned). In L* it says nothing about its token, which keeps L.

    Args:
        standard: L, float[n_vocab].
        local: L*, float[n_vocab].
        beta: as in PCDConfig; so are gamma, relative_top and min_entropy.

    Returns:
        float64[n_vocab]
    """
    first = np.asarray(standard)
    if min_entropy > 0.0 and entropy(first) < min_entropy:
        return first.astype(np.float64)
    kept = plausible(first, gamma=gamma, relative_top=relative_top)
    if not len(kept):
        return first.astype(np.float64)
    return tilt(first, local, kept, 0.0 if len(kept) == 1 else beta)


def tilt(standard: npt.ArrayLike, local: npt.ArrayLike, kept: npt.NDArray[np.intp], beta: float) -> Array:
    """(1 + beta) L - beta L* on the tokens `kept`, -inf elsewhere; what is no logit in L* keeps L.

    Returns:
        float64[n_vocab]
    """
    first, second = np.asarray(standard), np.asarray(local)
    result = np.full(first.shape, -np.inf)
    result[kept] = first[kept]
    kept = kept[_is_logit(second[kept])]
    result[kept] = (1.0 + beta) * result[kept] - beta * second[kept].astype(np.float64)
    return result


def plausible(standard: npt.ArrayLike, *, gamma: int = 30, relative_top: float = 0.0) -> npt.NDArray[np.intp]:
    """The tokens that contrast() does not exclude, in the order of their ids; none if all are masked.

    Args:
        standard: L, float[n_vocab].
        gamma: as in PCDConfig; so is relative_top.
    """
    first = np.asarray(standard)
    row = np.where(_is_logit(first), first, -np.inf)
    least = np.partition(row, -gamma)[-gamma] if gamma < len(row) else -np.inf
    above, equal = np.flatnonzero(row > least), np.flatnonzero(row == least)
    kept = np.sort(np.concatenate([above, equal[: max(gamma - len(above), 0)]]))
    kept = kept[row[kept] > -np.inf]
    if relative_top > 0.0 and len(kept):
        logits = row[kept].astype(np.float64)
        kept = kept[logits >= logits.max() + np.log(relative_top)]
    return kept


def entropy(logits: npt.ArrayLike) -> float:
    """The entropy of softmax(logits) in bits, 0 to log2(n_vocab), over the tokens that have a logit; without any 0."""
    row = np.asarray(logits, np.float64)
    row = row[_is_logit(row)]
    if not len(row):
        return 0.0
    log_p = log_softmax(row)
    return float(max(0.0, -(np.exp(log_p) @ log_p) / np.log(2.0)))


def put_behind(contrasted: npt.ArrayLike, standard: npt.ArrayLike) -> npt.NDArray[np.floating[Any]]:
    """Put excluded tokens (-inf) about 60 behind the best one, in the order of the standard logits, as the engine does.

    They stay improbable (150,000 of them have less than 1e-7 of the probability at temperature 2), but each has a rank,
    and a bias of 100 lifts each above all others. Among themselves they are as far apart as in the standard logits, but
    for what is more than 30 behind the first of them: that is pressed together, so that none is 39 behind it.

    Returns:
        float[n_vocab], as wide as the standard logits; tokens masked in these stay at -inf.
    """
    first = np.asarray(standard)
    first = first if first.dtype.kind == "f" else first.astype(np.float64)
    row = np.asarray(contrasted, first.dtype)
    kept, rest = np.isfinite(row), ~np.isfinite(row) & _is_logit(first)
    if not kept.any() or not rest.any():
        return row
    lag = first[rest].max() - first[rest]
    far = lag > 30.0
    lag[far] = 39.0 - 81.0 / (lag[far] - 21.0)
    result = row.copy()
    result[rest] = row[kept].max() - _BEHIND - lag
    return result


def _is_logit(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.abs(values) < 1e30  # False for NaN


_BEHIND = 60.0  # nats; LLAMA_PCD_BEHIND


def log_softmax(logits: npt.ArrayLike) -> Array:
    """Log-probabilities of a row of logits, float64[n_vocab]."""
    row = np.asarray(logits, np.float64)
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())
