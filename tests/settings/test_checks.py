"""Ranges: what is allowed, what is rejected, and that every dataclass with numbers rejects the same values."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd import PCDConfig
from pypcd.cli._options import GenerationSettings, at_least
from pypcd.decode import Control, Sampling
from pypcd.evaluation import Plan
from pypcd.evaluation.tasks.kv import KV_SHORT
from pypcd.settings.ranges import Choice, Integer, Number, OrNone, literal


def plan(**values: Any) -> Plan:
    return Plan("m.gguf", ("kv",), ("greedy",), (64,), **values)


# field -> a function that makes an object with it, and a valid value
INTEGERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "PCDConfig.gamma": (lambda v: PCDConfig(gamma=v).gamma, 7),
    "PCDConfig.n_sink": (lambda v: PCDConfig(n_sink=v).n_sink, 7),
    "Sampling.top_k": (lambda v: Sampling(top_k=v).top_k, 7),
    "Sampling.seed": (lambda v: Sampling(seed=v).seed, 7),
    "Control.n_steps": (lambda v: Control(n_steps=v).n_steps, 7),
    "Plan.n": (lambda v: plan(n=v).n, 7),
    "Plan.seed": (lambda v: plan(seed=v).seed, 7),
    "Task.n": (lambda v: KV_SHORT.check(v, 64) or 7, 7),
    "Task.n_tokens": (lambda v: KV_SHORT.check(1, v) or 64, 64),
    "GenerationSettings.top_k": (
        lambda v: getattr(settings := GenerationSettings(), settings.set("top_k", v)),
        7,
    ),
}
NUMBERS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "PCDConfig.beta": (lambda v: PCDConfig(beta=v).beta, 0.5),
    "PCDConfig.base_ratio": (lambda v: PCDConfig(base_ratio=v).base_ratio, 0.5),
    "Sampling.temperature": (lambda v: Sampling(temperature=v).temperature, 0.5),
    "Sampling.top_p": (lambda v: Sampling(top_p=v).top_p, 0.5),
    "GenerationSettings.top_p": (
        lambda v: getattr(settings := GenerationSettings(), settings.set("top_p", v)),
        0.5,
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_neither_a_bool_nor_a_fraction_nor_text_and_may_be_numpys(name: str) -> None:
    make, good = INTEGERS[name]
    for value in (good, np.int64(good), np.int32(good)):
        assert make(value) == good and type(make(value)) is int
    for value in (2.5, float(good), True, np.True_, "seven", None, math.nan, -(10**9), 10**30):
        with pytest.raises(ValueError, match=f"{name.partition('.')[2]} is .*allowed: an? .*(integer|multiple)"):
            make(value)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_finite_neither_a_bool_nor_text_and_may_be_numpys(name: str) -> None:
    make, good = NUMBERS[name]
    for value in (good, np.float64(good), np.float32(good)):
        assert make(value) == good and type(make(value)) is float
    for value in (True, np.True_, "half", None, math.nan, math.inf, -math.inf, -1e9, 10**400):
        with pytest.raises(ValueError, match=f"{name.partition('.')[2]} is .*allowed: (from|more than) "):
            make(value)


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(0, 50), st.booleans())
def test_what_a_check_takes_is_what_it_says(value: int, low: int, span: int, open_below: bool) -> None:
    high = low + span
    number = Number(low, high, open_below=open_below)
    fits = low < value <= high if open_below else low <= value <= high
    for given_as in (value, float(value), Fraction(value), np.float64(value)):
        if fits:
            assert number("x", given_as) == value
        else:
            with pytest.raises(ValueError, match=f"^x is {value}(.0)?; allowed: {number.allowed}$"):
                number("x", given_as)
    words = f"more than {low} and at most {high}" if open_below else f"from {low} to {high}"
    assert number.allowed == words
    integer = Integer(low, high)
    if low <= value <= high:
        assert integer("x", value) == value
    else:
        with pytest.raises(ValueError, match=f"^x is {value}; allowed: an integer from {low} to {high}$"):
            integer("x", value)


def test_what_is_allowed_is_said_with_its_note() -> None:
    assert Integer(2, 8, multiple_of=2).allowed == "an even integer from 2 to 8"
    assert Integer(3, multiple_of=3, note="a group").allowed == "a multiple of 3 of at least 3; a group"
    assert Number(1, open_below=True, note="any").allowed == "more than 1; any"
    assert Number(0.1234567891, 1).allowed == "from 0.1234567891 to 1"
    assert OrNone(Integer(1)).allowed == "an integer of at least 1, or None"
    assert OrNone(Integer(1))("x", None) is None


def test_that_the_librarys_integers_end_is_said_where_it_matters() -> None:
    assert Integer(1)("x", 2**31 - 1) == 2**31 - 1
    with pytest.raises(ValueError, match="^x is 2147483648; allowed: an integer from 1 to 2147483647$"):
        Integer(1)("x", 2**31)
    with pytest.raises(ArgumentTypeError, match="^'2147483648'; allowed: an integer from 0 to 2147483647$"):
        at_least(0)("2147483648")
    with pytest.raises(ArgumentTypeError, match="^'-1'; allowed: an integer of at least 0$"):
        at_least(0)("-1")


def test_a_choice_names_the_nearest() -> None:
    assert Choice(("shared", "separate"))("cache", "shared") == "shared"
    for value in ("sharde", None, ["shared"], np.array(["shared", "x"])):
        with pytest.raises(ValueError, match=r"(?s)cache is .*allowed: 'shared', 'separate'"):
            Choice(("shared", "separate"))("cache", value)
    with pytest.raises(ValueError, match="did you mean 'shared'"):
        Choice(("shared", "separate"))("cache", "sharde")


def test_typed_values_are_read_as_what_they_look_like() -> None:
    assert [literal(text) for text in ("3", "3.0", "1e-4", "x", "")] == [3, 3.0, 1e-4, "x", ""]
    assert [type(literal(text)) for text in ("3", "3.0", "1e-4", "x")] == [int, float, float, str]
