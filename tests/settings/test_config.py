"""PCDConfig: defaults, presets, what `pcd=` accepts. Bad values are in test_hostile.py."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pypcd
from pypcd import PCDConfig, config
from pypcd.engine import _bindings as _native
from pypcd.engine._pcd import native_params

configs = st.builds(
    PCDConfig,
    alpha=st.floats(0, 10),
    beta=st.floats(0, 1000),
    gamma=st.integers(1, 2**31 - 1),
    base_ratio=st.floats(0, 1, exclude_min=True),
    relative_top=st.floats(0, 1),
    cache=st.sampled_from(["shared", "separate"]),
    evaluation=st.sampled_from(get_args(config.Evaluation)),
    transition=st.sampled_from(get_args(config.Transition)),
    window=st.none() | st.integers(1, 2**31 - 1),
    n_sink=st.integers(0, 2**31 - 1),
    perturbation=st.sampled_from(["over-rotation", "noise"]),
    band=st.sampled_from(get_args(config.Band)),
    type_k_over=st.none() | st.sampled_from(get_args(config.KeyType)),
    noise=st.floats(0, 10),
    offset_min=st.integers(-(2**20), 0),
    offset_max=st.integers(0, 2**20),
    seed=st.integers(0, 2**31 - 1),
)


def test_the_default_is_the_papers_optimum() -> None:
    c = PCDConfig()
    assert (c.alpha, c.beta, c.gamma, c.base_ratio) == (0.2, 2.5, 30, 1e-4)
    assert (c.relative_top, c.cache, c.evaluation, c.transition, c.perturbation, c.window) == (
        0,
        "rerotated",
        "auto",
        "exponential",
        "over-rotation",
        None,
    )
    assert c == PCDConfig.paper() == PCDConfig.preset("paper")


def test_the_library_has_the_same_defaults() -> None:
    ours, theirs = native_params(PCDConfig()), _native.pcd_default_params()
    for name, kind in _native.Params._fields_:
        assert getattr(ours, name) == getattr(theirs, name), name


@given(configs)
def test_every_field_reaches_the_library(c: PCDConfig) -> None:
    params = native_params(c)
    for field in dataclasses.fields(PCDConfig):
        value, native = getattr(c, field.name), getattr(params, field.name)
        if isinstance(value, str) or field.name == "type_k_over":
            assert getattr(_native, field.name.upper())[value] == native
        elif isinstance(value, float):
            assert np.float32(value) == native
        else:
            assert (value or 0) == native


def test_every_field_has_a_range() -> None:
    assert list(config.RANGES) == [field.name for field in dataclasses.fields(PCDConfig)]


def test_the_docstring_documents_every_field() -> None:
    for field in dataclasses.fields(PCDConfig):
        assert re.search(rf"^ +{field.name}: ", inspect.getdoc(PCDConfig) or "", re.MULTILINE), field.name


def test_a_config_is_a_frozen_hashable_value() -> None:
    c = PCDConfig(beta=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.beta = 2.0  # type: ignore[misc]
    assert {c: 1}[PCDConfig(beta=1.0)] == 1
    assert isinstance(c.beta, float)


@given(configs)
def test_a_config_survives_dict_and_pickle(c: PCDConfig) -> None:
    assert PCDConfig(**c.as_dict()) == c == pickle.loads(pickle.dumps(c))
    assert PCDConfig.resolve(c.as_dict()) == c


def test_presets() -> None:
    assert PCDConfig.preset("cautious") == PCDConfig.cautious() == PCDConfig(beta=1.5, relative_top=0.1)
    assert PCDConfig.preset("window") == PCDConfig.windowed() == PCDConfig(perturbation="none", window=64)
    assert PCDConfig.preset("blog") == PCDConfig.blog()
    assert (PCDConfig.blog().noise, PCDConfig.blog().beta, PCDConfig.blog().gamma) == (0.03, 1.5, 100)


def test_key_types_are_ggmls() -> None:
    import gguf

    for name, number in _native.TYPE_K_OVER.items():
        assert name is None or gguf.GGMLQuantizationType[name.upper()] == number


def test_what_pcd_accepts() -> None:
    base = PCDConfig(beta=7)
    assert PCDConfig.resolve(None) is PCDConfig.resolve(False) is PCDConfig.resolve(False, base) is None
    assert PCDConfig.resolve(True) == PCDConfig.resolve("on", base) == PCDConfig.gentle()
    assert PCDConfig.resolve({}) == PCDConfig.resolve("paper", base) == PCDConfig()
    assert PCDConfig.resolve(True, base) == base
    assert PCDConfig.resolve({"gamma": 5}, base) == PCDConfig(beta=7, gamma=5)
    assert PCDConfig.resolve(PCDConfig(gamma=3), base) == PCDConfig(gamma=3)


def test_describe_names_what_differs_from_the_default() -> None:
    assert PCDConfig().describe() == "paper"
    assert PCDConfig(beta=1.5, window=64).describe() == "beta=1.5:window=64"


def test_numpy_scalars_are_numbers() -> None:
    c = PCDConfig(alpha=np.float32(0.5), gamma=np.int64(7))
    assert (c.alpha, c.gamma) == (0.5, 7) and type(c.alpha) is float and type(c.gamma) is int


def test_replace_checks_the_new_value() -> None:
    assert PCDConfig().replace(beta=1).beta == 1.0
    with pytest.raises(ValueError, match="beta is -1"):
        pypcd.PCDConfig().replace(beta=-1)
