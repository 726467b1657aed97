"""The user's folders on each system, and where there are none; files that are written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd import files
from pypcd.decode.prompt_cache import PromptCache

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
    monkeypatch.setattr(files.sys, "platform", system)
    assert (files.cache(), files.state()) == (home / cache / "pypcd", home / state / "pypcd")


@pytest.mark.parametrize(
    ("system", "variable", "find"),
    [
        ("linux", "XDG_CACHE_HOME", files.cache),
        ("darwin", "XDG_CACHE_HOME", files.cache),
        ("linux", "XDG_STATE_HOME", files.state),
        ("win32", "LOCALAPPDATA", files.cache),
    ],
)
def test_a_variable_names_another(
    monkeypatch: pytest.MonkeyPatch, homeless: None, system: str, variable: str, find: Callable[[], Path]
) -> None:
    monkeypatch.setattr(files.sys, "platform", system)
    with pytest.raises(OSError, match=f"no home folder; set HOME or {variable}"):
        find()
    monkeypatch.setenv(variable, "/elsewhere")
    assert find() == Path("/elsewhere/pypcd")


def test_without_a_home_documents_are_not_kept_and_it_is_said(homeless: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pypcd"):
        cache = PromptCache()
    assert cache.limit == 0 and cache.entries() == []
    assert "not kept on disk: this user has no home folder" in caplog.text


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file, link = tmp_path / "talk.json", tmp_path / "link.json"
    files.write(file, "first")
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()
    file.chmod(0o640)
    link.symlink_to(file)
    files.write(link, b"second")
    assert link.is_symlink() and file.read_text() == "second" and file.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"talk.json", "link.json"}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX's")
def test_if_writing_fails_the_former_file_stays(tmp_path: Path) -> None:
    """Files of this process may have 5,000 bytes, so that writing fails half-way, as on a full disk."""
    file = tmp_path / "talk.json"
    file.write_text("former")
    with pytest.raises(UnicodeEncodeError):
        files.write(file, "\udce9")  # text that UTF-8 does not have
    code = """
import resource, signal, sys
from pypcd import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
try:
    files.write(sys.argv[1], "x" * 100_000)
except OSError as error:
    print(error.strerror)
"""
    assert run_python(code, file).stdout == "File too large\n"
    assert file.read_text() == "former" and [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@settings(max_examples=30)
@given(
    st.recursive(
        st.text(st.characters()), lambda texts: st.lists(texts) | st.dictionaries(st.text(st.characters()), texts)
    )
)
def test_json_has_any_text(record: object) -> None:
    """Halves of surrogate pairs too, beside which the same letters may stand for themselves."""
    assert json.loads(files.json_text(record).decode("utf-8")) == json.loads(json.dumps(record))


def test_a_pipe_has_nothing_to_lose(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no FIFOs")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as cat:
        files.write(tmp_path / "pipe", "through")
        assert cat.communicate()[0] == b"through"
