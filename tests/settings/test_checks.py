"""Ranges: what is allowed, what is rejected, and that a dataclass keeps what its checks give."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd.cli._options import at_least
from pypcd.decode import Sampling
from pypcd.settings.ranges import Choice, Integer, Number, OrNone, literal


@pytest.mark.parametrize("make", [Integer(0), lambda name, value: Sampling(**{name: value}).seed])
def test_an_integer_is_neither_a_bool_nor_a_fraction_nor_text_and_may_be_numpys(make: Any) -> None:
    for value in (7, np.int64(7), np.int32(7)):
        assert make("seed", value) == 7 and type(make("seed", value)) is int
    for value in (2.5, 7.0, True, np.True_, "seven", None, math.nan, -1, 10**30):
        with pytest.raises(ValueError, match="^seed is .*; allowed: an integer "):
            make("seed", value)


@pytest.mark.parametrize("make", [Number(0, 1), lambda name, value: Sampling(**{name: value}).top_p])
def test_a_number_is_finite_neither_a_bool_nor_text_and_may_be_numpys(make: Any) -> None:
    for value in (0.5, np.float64(0.5), np.float32(0.5)):
        assert make("top_p", value) == 0.5 and type(make("top_p", value)) is float
    for value in (True, np.True_, "half", None, math.nan, math.inf, -math.inf, -1e9, 10**400):
        with pytest.raises(ValueError, match="^top_p is .*; allowed: from 0 to 1"):
            make("top_p", value)


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
    assert Integer(0, 2**32 - 2).allowed == "an integer from 0 to 4294967294"
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
