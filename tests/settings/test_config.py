"""PCDConfig: its fields, their defaults and ranges by hand, against the library's and ggml's."""

from __future__ import annotations

import math
import pathlib
import pickle
import re
from typing import Any, get_args

import c_functions
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd import PCDConfig
from pypcd.engine import _bindings as _native
from pypcd.engine._native import native_params
from pypcd.settings import fields
from pypcd.settings.fields import FIELDS, Fields
from pypcd.settings.ranges import Choice, Integer, Number, OrNone

configs = st.builds(
    PCDConfig,
    alpha=st.floats(0, 10),
    beta=st.floats(0, 1000),
    gamma=st.integers(1, 2**31 - 1),
    base_ratio=st.floats(0, 1, exclude_min=True),
    relative_top=st.floats(0, 1),
    cache=st.just("shared"),
    evaluation=st.sampled_from(get_args(fields.Evaluation)),
    transition=st.sampled_from(get_args(fields.Transition)),
    window=st.none() | st.integers(1, 2**31 - 1),
    n_sink=st.integers(0, 2**31 - 1),
    type_k_over=st.none() | st.sampled_from(get_args(fields.KeyType)),
) | st.builds(PCDConfig, alpha=st.floats(0, 10), cache=st.sampled_from(get_args(fields.Cache)))


def test_the_library_has_the_same_defaults() -> None:
    ours, theirs = native_params(PCDConfig()), c_functions.pcd_default_params()
    for name, kind in _native.Params._fields_:
        assert getattr(ours, name) == getattr(theirs, name), name


@given(configs)
def test_every_field_reaches_the_library(c: PCDConfig) -> None:
    params = native_params(c)
    for name, field in FIELDS.items():
        value, native = getattr(c, name), getattr(params, name)
        if isinstance(value, float):
            assert np.float32(value) == native
        else:
            assert field.numbers.get(value, value) == native


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_a_fields_numbers_are_those_of_what_is_allowed(field: fields.Field) -> None:
    kind = field.range.kind if isinstance(field.range, OrNone) else field.range
    assert (None in field.numbers) == isinstance(field.range, OrNone)
    assert set(field.numbers) - {None} == set(kind.names if isinstance(kind, Choice) else ())
    assert len(set(field.numbers.values())) == len(field.numbers)
    assert field.range(field.name, field.default) == field.default


def test_the_names_of_a_choice_are_those_of_its_type() -> None:
    for name, kind in Fields.__annotations__.items():
        names = get_args(getattr(fields, kind.partition(" |")[0], None))
        assert set(names) == set(FIELDS[name].numbers) - {None}, name


# -- the setting -------------------------------------------------------------------------------------------------------


def test_defaults_by_hand() -> None:
    """Those of presets are in docs/settings.md, with which tests/house/test_docs.py compares them."""
    c = PCDConfig()
    assert (c.alpha, c.beta, c.gamma, c.base_ratio, c.relative_top) == (0.2, 2.5, 30, 1e-4, 0)
    assert (c.cache, c.evaluation, c.transition) == ("rerotated", "auto", "exponential")
    assert (c.perturbation, c.window) == ("over-rotation", None)


# field -> what is allowed, and values that are not
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "alpha": ("from 0 to 10", [-0.1, 10.5, math.nan, "0.2", None, True, [0.2], 1j, 10**400]),
    "beta": ("from 0 to 1000", [-1, math.inf, "high"]),
    "base_ratio": ("more than 0 and at most 1", [0, 1.5, -1e-4, {}]),
    "relative_top": ("from 0 to 1", [1.1, math.nan, b"0"]),
    "gamma": ("an integer of at least 1", [0, -3, 30.0, True, "30", 2**31]),
    "window": ("an integer of at least 1", [0, -5, 2.5]),
    "n_sink": ("an integer of at least 0", [-1, None]),
    "cache": ("'rerotated', 'shared', 'separate'", ["rerotate", None, ["shared"]]),
    "type_k_over": ("'f32'", ["q8", 8]),
    "evaluation": ("'fused', 'alternate', 'auto'", ["fuse", 0]),
    "transition": ("'exponential', 'none'", ["linear"]),
    "perturbation": ("'over-rotation', 'none'", ["over_rotation"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_refused_with_what_is_allowed(name: str) -> None:
    allowed, values = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(values[0]))}.*; allowed: {allowed}(?![0-9])"):
        PCDConfig(**{name: values[0]})
    for value in values:
        for make in (lambda **fields: PCDConfig(**fields), lambda **fields: PCDConfig.resolve(fields)):
            with pytest.raises(ValueError, match=f"^{name} is .*; allowed: "):
                make(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 20, "cache": "separate"}, 'window is 20.*allowed with it: None and perturbation="over-rotation"$'),
        ({"perturbation": "none"}, "set window"),
    ],
    ids=str,
)
def test_values_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PCDConfig(**fields)


@given(configs)
def test_a_config_survives_dict_and_pickle(c: PCDConfig) -> None:
    assert PCDConfig(**c.as_dict()) == c == pickle.loads(pickle.dumps(c))
    assert PCDConfig.resolve(c.as_dict()) == c


def test_key_types_are_ggmls() -> None:
    import gguf

    for name, number in FIELDS["type_k_over"].numbers.items():
        assert name is None or gguf.GGMLQuantizationType[name.upper()] == number


def test_the_servers_page_asks_for_numbers_that_are_allowed() -> None:
    page = pathlib.Path(__file__).parents[2] / "cpp/server/page/assets/settings.js"
    if not page.exists():
        pytest.skip("it lies in a checkout only")
    values = page.read_text(encoding="utf-8").partition("export const VALUES")[2]  # other numbers are the sampling's
    rows = re.findall(r'^  (\w+): {label: "[^"]*", min: (\d+),(?: max: (\d+),)? step: ("any"|1),', values, re.MULTILINE)
    assert len(rows) > 5
    for name, low, high, step in rows:
        field = FIELDS[name]
        kind = field.range.kind if isinstance(field.range, OrNone) else field.range
        assert isinstance(kind, (Integer, Number)) and field.own, name
        assert int(low) == min([kind.low, *field.numbers.values()]), name  # 0 where None is meant
        assert not high or int(high) == kind.high, name
        assert field.is_float == (step != "1"), name
