"""adaptive="jsd": a contrast whose strength follows the divergence of the two rows, in C++, numpy and float64."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import c_functions
import numpy as np
import pytest
import reference
from batches import EVALUATIONS, Setting
from conftest import TOKENS, Load, Tiny, follow
from hypothesis import given
from hypothesis import strategies as st

from pypcd.engine import _bindings as _native
from pypcd.settings.formula import contrast, jsd, strength

EXACT = 1e-6  # of a number between 0 and 1: cpp/formulas/strength.cpp computes to about 1e-6
STRONG: Setting = {"adaptive": "jsd", "beta": 5.0}


def c_strength(standard: Any, over: Any, beta: float = 1.0, adaptive: int = 1) -> float:
    rows = [np.ascontiguousarray(row, np.float32) for row in (standard, over)]
    pointers = [row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for row in rows]
    return c_functions.pcd_strength(*pointers, len(rows[0]), beta, adaptive)


def random_rows(seed: int, n: int, spread: float, apart: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    first = random.normal(0, spread, n).astype(np.float32)
    return first, (first + apart * random.normal(0, spread, n)).astype(np.float32)


def check_jsd(first: np.ndarray, second: np.ndarray, wanted: float) -> None:
    assert jsd(first, second) == pytest.approx(wanted, abs=1e-9)
    assert c_strength(first, second) == pytest.approx(wanted, abs=EXACT)


# -- the divergence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "wanted"),
    [
        ([1, 1], [1, 1], 0.0),
        ([1, 1, 1e-30], [1e-30, 1e-30, 1], 1.0),
        ([1, 1e-30], [1, 1], 1.5 - 0.75 * math.log2(3)),  # the entropy of (3/4, 1/4), less half a bit
        ([3, 1], [1, 3], 1 - (2 - 0.75 * math.log2(3))),  # one bit, less the entropy of (3/4, 1/4)
        ([5], [9], 0.0),
    ],
    ids=str,
)
def test_divergences_by_hand(p: list[float], q: list[float], wanted: float) -> None:
    first, second = np.log(p), np.log(q)
    assert reference.jsd(first, second) == pytest.approx(wanted, abs=1e-12)
    check_jsd(first, second, wanted)


seeds, sizes = st.integers(0, 2**32 - 1), st.integers(1, 1200)  # longer than the blocks that C++ adds up
spreads, gaps = st.floats(1 / 64, 30, width=32), st.floats(0, 4, width=32)


@given(seeds, sizes, spreads, gaps)
def test_numpy_and_the_engine_agree_with_the_definition(seed: int, n: int, spread: float, apart: float) -> None:
    first, second = random_rows(seed, n, spread, apart)
    wanted = reference.jsd(first.astype(float), second.astype(float))
    check_jsd(first, second, wanted)
    check_jsd(second, first, wanted)
    assert 0.0 <= c_strength(first, second) <= 1.0 and 0.0 <= jsd(first, second) <= 1.0


MASKS = [-np.inf, np.nan, -3.4e38, -1e31, np.inf, 3.4e38]


@given(seeds, st.integers(2, 600), st.lists(st.tuples(st.integers(0, 599), st.sampled_from(MASKS), st.booleans())))
def test_what_is_no_logit_is_left_out(seed: int, n: int, masks: list[tuple[int, float, bool]]) -> None:
    """In either row: the divergence is that of the other tokens."""
    rows = random_rows(seed, n, 3.0, 1.0)
    gone = np.zeros(n, bool)
    for at, mask, in_second in masks:
        rows[in_second][at % n] = mask
        gone[at % n] = True
    left = [row[~gone].astype(float) for row in rows]
    check_jsd(*rows, reference.jsd(*left) if len(left[0]) else 0.0)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_rows_without_a_common_logit_are_not_contrasted(mask: float) -> None:
    first, second = np.array([2.0, 1.0, 0.0]), np.full(3, mask)
    check_jsd(first, second, 0.0)
    check_jsd(second, first, 0.0)
    assert contrast(first, second, beta=5, adaptive="jsd").tolist() == first.tolist()


# -- the strength ------------------------------------------------------------------------------------------------------


def test_strength_is_beta_times_the_measure() -> None:
    first, second = np.log([3.0, 1.0]), np.log([1.0, 3.0])
    for beta in (0.0, 0.5, 1000.0):
        assert strength(first, second, beta=beta) == c_strength(first, second, beta, 0) == beta
        wanted = beta * reference.jsd(first, second)
        assert strength(first, second, beta=beta, adaptive="jsd") == pytest.approx(wanted)
        assert c_strength(first, second, beta) == pytest.approx(wanted, abs=beta * EXACT)
    with pytest.raises(ValueError, match="adaptive is 'jds'"):
        strength(first, second, adaptive="jds")


@given(seeds, st.integers(2, 400), gaps, st.floats(0, 10, width=32), st.integers(2, 60))
def test_the_contrast_is_that_of_the_definition(seed: int, n: int, apart: float, beta: float, gamma: int) -> None:
    first, second = (row.astype(float) for row in random_rows(seed, n, 3.0, apart))
    wanted = reference.contrast(first, second, beta, gamma, adaptive="jsd")
    np.testing.assert_allclose(contrast(first, second, beta=beta, gamma=gamma, adaptive="jsd"), wanted, atol=1e-6)


# -- in the engine -----------------------------------------------------------------------------------------------------

WINDOW: Setting = {"perturbation": "none", "window": 3, "n_sink": 1}


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(
    "setting", [{}, {"cache": "shared"}, {"cache": "separate"}, WINDOW, {"relative_top": 0.05}], ids=str
)
def test_rows_are_those_of_the_reference(setting: Setting, evaluation: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {**setting, **STRONG, "evaluation": evaluation})
    follow(llm, tiny("llama"), TOKENS, 40)
    rows = llm.pcd_logits()
    wanted = 5 * reference.jsd(rows.standard.astype(float), rows.local.astype(float))
    assert rows.beta == pytest.approx(wanted, abs=5 * EXACT) and 0 < wanted < 5
    assert wanted != pytest.approx(5.0, rel=0.05), "the divergence must matter, or this test shows nothing"


def test_the_strength_of_a_step_can_be_read(tiny: Tiny, load: Load) -> None:
    for setting, wanted in (({"beta": 1.5}, 1.5), ({"gamma": 1}, None), ({"relative_top": 1.0}, None)):
        for evaluation in EVALUATIONS:
            llm = load(tiny("llama"), {**setting, "evaluation": evaluation})
            llm.eval(TOKENS[:10])
            assert llm.pcd_logits().beta == wanted
            llm.pcd = {"adaptive": "jsd"}
            llm.eval(TOKENS[10:11])
            assert (llm.pcd_logits().beta is None) == (wanted is None)
    assert math.isnan(_native.pcd_get_strength_ith(llm.ctx, 77))
    llm.pcd = False
    llm.reset()
    llm.eval(TOKENS[:10])
    assert math.isnan(_native.pcd_get_strength_ith(llm.ctx, -1))
