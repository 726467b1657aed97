"""Profiles: what tune writes is what Llama and the command line load."""

from __future__ import annotations

from pathlib import Path

import pytest

from pypcd import PCDConfig
from pypcd._config import parse_pcd
from pypcd._profile import read_profile, write_profile


def test_a_profile_is_a_setting(tmp_path: Path) -> None:
    config, path = PCDConfig(beta=1.5, window=64, type_k_over="q8_0"), tmp_path / "my model, tuned.json"
    write_profile(path, config.as_dict(), {"n": 3})
    assert PCDConfig.resolve(str(path)) == parse_pcd(f" {path} ") == config


def test_a_profile_may_say_off(tmp_path: Path) -> None:
    write_profile(tmp_path / "off.json", None, {})
    assert read_profile(tmp_path / "off.json") is None
    assert PCDConfig.resolve(str(tmp_path / "off.json")) is None
    assert parse_pcd(str(tmp_path / "off.json")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no profile written by pypcd tune"),
        ("[1]", "is no profile written by pypcd tune"),
        ('{"pypcd_profile": 2, "pcd": null}', "is no profile written by pypcd tune"),
        ('{"pypcd_profile": 1, "pcd": 3}', "is damaged"),
        ('{"pypcd_profile": 1, "pcd": {"beta": -1}}', "beta is -1; allowed"),
        ('{"pypcd_profile": 1, "pcd": {"betta": 1}}', "did you mean 'beta'"),
    ],
)
def test_what_is_no_profile_is_said_to_be_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        PCDConfig.resolve(str(path))


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no profile .*p.json; `pypcd tune` writes one"):
        PCDConfig.resolve(str(tmp_path / "p.json"))
