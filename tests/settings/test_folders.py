"""The user's folders on each system, and where there are none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pypcd import folders
from pypcd.prompt_cache import PromptCache

VARIABLES = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "LOCALAPPDATA")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    return Path("/home/ada")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)


@pytest.mark.parametrize(
    ("system", "cache", "state"),
    [
        ("linux", ".cache", ".local/state"),
        ("darwin", "Library/Caches", ".local/state"),
        ("win32", "AppData/Local", "AppData/Local"),
    ],
)
def test_folders_of_each_system(
    monkeypatch: pytest.MonkeyPatch, home: Path, system: str, cache: str, state: str
) -> None:
    monkeypatch.setattr(folders.sys, "platform", system)
    assert (folders.cache(), folders.state()) == (home / cache / "pypcd", home / state / "pypcd")


@pytest.mark.parametrize(
    ("system", "variable", "find"),
    [
        ("linux", "XDG_CACHE_HOME", folders.cache),
        ("darwin", "XDG_CACHE_HOME", folders.cache),
        ("linux", "XDG_STATE_HOME", folders.state),
        ("win32", "LOCALAPPDATA", folders.cache),
    ],
)
def test_a_variable_names_another(
    monkeypatch: pytest.MonkeyPatch, homeless: None, system: str, variable: str, find: Callable[[], Path]
) -> None:
    monkeypatch.setattr(folders.sys, "platform", system)
    with pytest.raises(OSError, match=f"no home folder; set HOME or {variable}"):
        find()
    monkeypatch.setenv(variable, "/elsewhere")
    assert find() == Path("/elsewhere/pypcd")


def test_without_a_home_documents_are_not_kept_and_it_is_said(homeless: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pypcd"):
        cache = PromptCache()
    assert cache.limit == 0 and cache.entries() == []
    assert "not kept on disk: this user has no home folder" in caplog.text
