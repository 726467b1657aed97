"""Attention by frequency block, against full rotation matrices."""

from __future__ import annotations

import numpy as np
import pytest
from reference import softmax
from test_decay import rotation

from pypcd.settings import formula
from research.spectrum import block_scores, spectrum

D, N, HEADS, HEADS_KV = 12, 50, 4, 2
THETA = formula.frequencies(D, 100.0)
RHO = formula.rho(D, alpha=0.8, base_ratio=0.01)


def order(pairing: str, d: int = D) -> np.ndarray:
    """The index of each dimension in the paper's layout, pair after pair."""
    return np.arange(d) if pairing == "norm" else np.arange(d).reshape(2, -1).T.ravel()


def attention(q: np.ndarray, k: np.ndarray, theta: np.ndarray, pairing: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores and probabilities of the last position, with every vector rotated by its own position."""
    at = order(pairing)
    turned = rotation(len(k) - 1, theta) @ q[at]
    scores = np.array([turned @ (rotation(n, theta) @ k[n][at]) for n in range(len(k))]) / len(q) ** 0.5
    return scores, softmax(scores)


@pytest.fixture(scope="module")
def layer() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(HEADS, D)), rng.normal(size=(N, HEADS_KV, D))


@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_blocks_are_the_products_of_their_own_dimensions(layer, pairing: str) -> None:
    q, k = layer[0][1], layer[1][:, 0]
    got = block_scores(q, k, np.arange(N)[::-1], THETA, pairing=pairing)
    at = order(pairing)
    for n in (0, 17, N - 1):
        a, b = rotation(N - 1, THETA) @ q[at], rotation(n, THETA) @ k[n][at]
        np.testing.assert_allclose(got[n], (a * b).reshape(-1, 2).sum(axis=1), atol=1e-12)


@pytest.mark.parametrize("pairing", ["norm", "neox"])
def test_sides_are_those_of_the_whole_attention(layer, pairing: str) -> None:
    q, k = layer
    got = spectrum(q, k, THETA, RHO, pairing=pairing, n_bins=6)
    distance = N - 1 - np.arange(N)
    for side, theta in ((got.before, THETA), (got.after, THETA * RHO)):
        each = [attention(q[h], k[:, h // 2], theta, pairing) for h in range(HEADS)]
        scores, p = (np.mean(x, axis=0) for x in zip(*each))
        for i, (low, high) in enumerate(zip(got.edges, got.edges[1:])):
            inside = (distance >= low) & (distance < high)
            assert inside.any()
            assert side.attention[i] == pytest.approx(p[inside].sum())
            assert side.score[i] == pytest.approx(scores[inside].mean())
        assert side.reach == pytest.approx((p * distance).sum())
        assert side.attention.sum() == pytest.approx(1)
        np.testing.assert_allclose(side.share.sum(axis=1), 1)
        np.testing.assert_allclose(side.contribution.sum(axis=1), side.score, atol=1e-12)
    assert got.edges[0] == 0 and got.edges[-1] == N


def test_the_reach_of_a_block_alone(layer) -> None:
    q, k = layer
    got = spectrum(q, k, THETA, RHO)
    for j in (0, 3, D // 2 - 1):
        alone = np.where(np.arange(D // 2) == j, RHO, 1.0) * THETA
        reach = [attention(q[h], k[:, h // 2], alone, "neox")[1] @ (N - 1 - np.arange(N)) for h in range(HEADS)]
        assert got.reach_alone[j] == pytest.approx(np.mean(reach))


def test_one_block_makes_all_of_the_score() -> None:
    q, k = np.zeros((1, D)), np.zeros((N, 1, D))
    q[0, 2] = q[0, 2 + D // 2] = 1.0
    k[:, 0, 2] = k[:, 0, 2 + D // 2] = 1.0
    got = spectrum(q, k, THETA, RHO)
    np.testing.assert_allclose(got.before.share[:, 2], 1)
    others = [j for j in range(D // 2) if j != 2]
    np.testing.assert_allclose(got.reach_alone[others], got.before.reach)


def test_dimensions_that_are_not_rotated_are_a_column_of_their_own(layer) -> None:
    q, k = layer
    got = block_scores(q[0], k[:, 0], np.arange(N)[::-1], THETA[:2], pairing="neox")
    assert got.shape == (N, 3)
    np.testing.assert_allclose(got[:, 2], k[:, 0, 4:] @ q[0, 4:])
    whole = spectrum(q, k, THETA[:2], RHO[:2])
    assert whole.before.share.shape[1] == 3 and whole.reach_alone.shape == (2,)
    np.testing.assert_allclose(whole.before.contribution[:, 2], whole.after.contribution[:, 2])


def test_wrong_shapes_are_named(layer) -> None:
    q, k = layer
    for call, named in (
        (lambda: spectrum(q, k[:, 0], THETA, RHO), r"\(50, 12\)"),
        (lambda: spectrum(q[:3], k, THETA, RHO), "n_heads_kv"),
        (lambda: spectrum(q, k, THETA, RHO[:5]), r"rho \(5,\)"),
        (lambda: spectrum(q, k, THETA, RHO, pairing="gptj"), "'gptj'"),
        (lambda: block_scores(q[0, :8], k[:, 0, :8], np.arange(N), THETA), r"theta \(6,\)"),
        (lambda: spectrum(q, k, THETA, RHO, n_bins=0), "n_bins is 0"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
