"""Settings as text: what is printed can be pasted, and an old spelling names the new one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_config import configs

from pypcd import PCDConfig
from pypcd.decode import PCD, parse, setting_of
from pypcd.settings.config import PRESETS, typed

windows = st.builds(
    PCDConfig,
    perturbation=st.just("none"),
    window=st.integers(1, 2**31 - 1),
    beta=st.floats(0, 1000),
    type_k_over=st.none() | st.sampled_from(["q8_0", "f16"]),
)
rerotated = st.builds(PCDConfig, base_ratio=st.floats(1e-9, 1), alpha=st.floats(0, 10), window=st.none() | st.just(64))
anything = configs | windows | rerotated


# -- text --------------------------------------------------------------------------------------------------------------


@given(anything, anything)
def test_what_describe_prints_is_the_setting_when_it_is_pasted(c: PCDConfig, other: PCDConfig) -> None:
    assert PCDConfig.resolve(c.describe()) == PCDConfig.resolve(c.describe(), other) == c
    assert PCDConfig.resolve(f" {c.describe()}\n", other) == c
    assert not re.search(r"[\s,+]", c.describe())  # as a method's name it may stand in a list, and beside another part


@given(anything)
def test_a_methods_name_is_the_setting_too(c: PCDConfig) -> None:
    name = f"pcd:{c.describe()}"
    assert parse(name).rows == PCD(c) and setting_of(name) == c


@pytest.mark.parametrize(
    "text", ["beta=1.5,window=64", "beta=1.5 window=64", "window,relative_top=0.1", "beta=1.5::window=64"]
)
def test_words_are_joined_by_colons_alone(text: str) -> None:
    for read in (PCDConfig.resolve, lambda text: parse(f"pcd:{text}")):
        with pytest.raises(ValueError, match="beta|window"):
            read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cautius",
            "pcd is 'cautius', which is not a setting .did you mean 'cautious'.*on, off, paper, unsure, cautious",
        ),
        ("pcd:cautious", "pcd is 'pcd:cautious', which is a method's name; write cautious"),
        ("", "allowed: on, off"),
        ("onn", "did you mean 'on'"),
        ("off:beta=1", "which is not a setting"),
        ("beta=", "name=value"),
        ("beta=1", r"pcd is 'beta=1', values without a preset; write paper:beta=1 or unsure:beta=1$"),
        ("beta=1:beta=2", "beta is given twice, 1 and 2"),
        ("beta=1.5,window=64", "beta is '1.5,window=64'"),
        ("beta=1.5 window=64", "beta is '1.5 window=64'"),
        ("window,relative_top=0.1", "no field 'window,relative_top'"),
        ("beta=1.5::window=64", "'' is not a value"),
        ("beta=1:window", "'window' is not a value; write it as name=value"),
        ("=1", "'=1' is not a value"),
        ("betta=1", "no field 'betta'"),
        ("paper:adaptive=jsd", "no field 'adaptive' any more: the strength is beta in every step; docs/evidence/when"),
        ("paper:noise=0.1", "no field 'noise' any more: the first version .* docs/evidence/table2 names the commit"),
        (
            "paper:perturbation=noise",
            "no perturbation=.noise. any more: the first version .* docs/evidence/table2 names",
        ),
        ("blog:gamma=30", "no preset 'blog' any more: the first version .* docs/evidence/table2 names the commit"),
        ("beta=-1", "beta is -1; allowed: from 0 to 1000"),
        ("gamma=2.5", "gamma is 2.5; allowed: an integer of at least 1"),
        ("gamma=none", "gamma is 'none'; allowed"),
    ],
)
def test_what_is_not_a_setting_is_answered_with_what_is(text: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PCDConfig.resolve(text)


def test_a_text_is_a_whole_setting_and_a_mapping_a_change() -> None:
    base = PCDConfig(beta=7, window=64)
    assert PCDConfig.resolve(None) is PCDConfig.resolve(False) is PCDConfig.resolve(False, base) is None
    assert PCDConfig.resolve({}) is None and PCDConfig.resolve({}, base) == base
    assert PCDConfig.resolve({"gamma": 5}, base) == base.replace(gamma=5)
    assert PCDConfig.resolve(PCDConfig(gamma=3), base) == PCDConfig(gamma=3)
    assert PCDConfig.resolve("paper:gamma=5", base) == PCDConfig(gamma=5)
    assert (
        PCDConfig.resolve("paper:window=off:type_k_over=none", base) == PCDConfig.resolve("paper", base) == PCDConfig()
    )
    assert PCDConfig.resolve("paper:window=none:cache=shared") == PCDConfig(cache="shared")
    for text in ("on", "ON", True):
        assert PCDConfig.resolve(text, base) == PCDConfig.resolve(text) == PCDConfig.preset("unsure")
    assert PCDConfig.resolve("cautious:beta=2", base) == PCDConfig.preset("cautious").replace(beta=2)
    assert PCDConfig.resolve("off", base) is None
    former = {"adaptive": None, "band": "low", "noise": 0.03, "offset_min": 0, "offset_max": 0, "seed": 0}
    assert PCDConfig().replace(**former, beta=2) == PCDConfig(beta=2), "a profile of an earlier release"
    with pytest.raises(
        ValueError, match="^pcd is .'beta': 1., which .* PCD is off; write paper:beta=1 or unsure:beta=1$"
    ):
        PCDConfig.resolve({"beta": 1})


def test_a_setting_is_shown_as_the_nearest_preset_and_what_differs() -> None:
    assert PCDConfig(beta=1.5, window=64).describe() == "paper:beta=1.5:window=64"
    assert list(PRESETS) == ["paper", "unsure", "cautious", "window"]
    for name in PRESETS:
        assert PCDConfig.preset(name) == PCDConfig.resolve(name)
        assert typed(PCDConfig.preset(name)) == name
    assert typed(None) == "off"
    for shown in ("paper:beta=1.5", "cautious:window=64", "window:gamma=10"):
        assert typed(PCDConfig.resolve(shown)) == shown
    likest = PCDConfig.preset("window").replace(beta=1.5, relative_top=0.1)  # cautious, but for its kind of twin
    assert "perturbation" not in typed(likest)
    with pytest.raises(ValueError, match="did you mean 'window'"):
        PCDConfig.preset("windw")


@pytest.mark.parametrize("name", ["control", "sample", "pcd:cautious+replay"])
def test_a_setting_is_not_found_in_other_methods(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"method is {re.escape(repr(name))}.*; allowed: greedy, pcd; pcd with any setting"
    ):
        setting_of(name)
    assert setting_of("greedy") is None
