"""Profiles: Llama and the command line load what tune writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

import pypcd
from pypcd import PCDConfig
from pypcd.config import Profile
from pypcd.gguf import resolve_model


def test_a_profile_is_a_setting(tmp_path: Path) -> None:
    config, path = PCDConfig(beta=1.5, window=64, type_k_over="q8_0"), tmp_path / "my model, tuned.json"
    Profile(str(path), config.as_dict(), {"n": 3}).write()
    assert PCDConfig.resolve(str(path)) == PCDConfig.resolve(f" {path} ") == config


def test_a_profile_may_say_off(tmp_path: Path) -> None:
    Profile(str(tmp_path / "off.json"), None, {}).write()
    assert Profile.read(tmp_path / "off.json").fields is None
    assert PCDConfig.resolve(str(tmp_path / "off.json")) is None
    assert PCDConfig.from_profile(str(tmp_path / "off.json")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a profile written by pypcd tune"),
        ("[1]", "is not a profile written by pypcd tune"),
        ('{"pypcd_profile": 2, "pcd": null}', "is not a profile written by pypcd tune"),
        ('{"pypcd_profile": 1, "pcd": 3}', "is damaged"),
        ('{"pypcd_profile": 1, "pcd": null, "evidence": []}', "is damaged"),
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


def test_a_profile_of_another_model_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = os.path.getsize(resolve_model("demo"))
    for n, name in ((size, "same.json"), (size + 1, "other.json")):
        Profile(str(tmp_path / name), {"beta": 1.5}, {"model": "big.gguf", "model_bytes": n}).write()
    assert Profile.read(tmp_path / "same.json").remark(resolve_model("demo")) is None
    with contextlib.closing(pypcd.Llama("demo", pcd=str(tmp_path / "same.json"), n_ctx=64)) as llm:
        llm("x", max_tokens=1, pcd=str(tmp_path / "same.json"))
        assert not caplog.records
        llm("x", max_tokens=1, pcd=str(tmp_path / "other.json"))
        assert f"big.gguf, {size + 1} bytes; this one has {size}" in caplog.text
    caplog.clear()
    with contextlib.closing(pypcd.Llama("demo", pcd=str(tmp_path / "other.json"), n_ctx=64)) as llm:
        assert llm.pcd == PCDConfig(beta=1.5)
    assert "was chosen with another model" in caplog.text
