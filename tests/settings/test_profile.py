"""Profiles: Llama and the command line load what tune writes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

import pypcd
from pypcd import PCDConfig
from pypcd.cli import main
from pypcd.gguf import resolve_model
from pypcd.settings.config import Profile


@pytest.mark.parametrize("config", [PCDConfig(beta=1.5, window=64, type_k_over="q8_0"), None])
def test_a_profile_is_a_setting_or_off(config: PCDConfig | None, tmp_path: Path) -> None:
    path = str(tmp_path / "my model, tuned.json")
    Profile(path, config and config.as_dict(), {"n": 3}).write()
    assert PCDConfig.resolve(path) == PCDConfig.resolve(f" {path} ") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a profile written by pypcd tune"),
        ("[1]", "is not a profile written by pypcd tune"),
        ('{"pypcd_profile": 2, "pcd": null}', "is not a profile written by pypcd tune"),
        ('{"pypcd_profile": 1, "pcd": 3}', "is damaged"),
        ('{"pypcd_profile": 1, "pcd": null, "evidence": []}', "is damaged"),
        ('{"pypcd_profile": 1, "pcd": {"beta": -1}}', "beta is -1"),
        ('{"pypcd_profile": 1, "pcd": {"betta": 1}}', "betta"),
    ],
)
def test_what_is_no_profile_is_said_to_be_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(FileNotFoundError, match="p.json.*pypcd tune"):
        PCDConfig.resolve(str(path))
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        PCDConfig.resolve(str(path))


def test_each_use_warns_once_if_it_is_of_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    size = os.path.getsize(resolve_model("demo"))
    same, other = str(tmp_path / "same.json"), str(tmp_path / "other, by me.json")
    for n, path in ((size, same), (size + 1, other)):
        Profile(path, {"beta": 1.5}, {"model": "big.gguf", "model_bytes": n}).write()
    with contextlib.closing(pypcd.Llama("demo", n_ctx=256, n_threads=1)) as llm:
        uses = {
            "argument": lambda path: pypcd.Llama("demo", pcd=path, n_ctx=64, n_threads=1).close(),
            "assignment": lambda path: setattr(llm, "pcd", path),
            "call": lambda path: llm("x", max_tokens=1, pcd=path),
            "stream": lambda path: list(llm("x", max_tokens=2, stream=True, pcd=path)),
            "generate": lambda path: next(llm.generate([1, 2], pcd=path)),
        }
        for path, n_warnings in ((same, 0), (other, 1)):
            for name, use in uses.items():
                caplog.clear()
                llm.pcd = False
                use(path)
                assert caplog.text.count(f"big.gguf, {size + 1} bytes; this one has {size}") == n_warnings, name
            llm.pcd = path
            assert llm.pcd == PCDConfig(beta=1.5)
    command = ["generate", "demo", "-p", "x", "--max-tokens", "1", "--threads", "1", "--json", "--pcd", other]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["pcd"]["beta"] == 1.5
    assert err.replace("\n", " ").count("was chosen with another model (big.gguf") == 1
