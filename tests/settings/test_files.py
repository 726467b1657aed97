"""The user's folders on each system, and where there are none; files that are written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd import files
from pypcd.decode.prompt_cache import PromptCache


@pytest.mark.parametrize(
    ("system", "variable", "kind", "usual"),
    [
        ("linux", "XDG_CACHE_HOME", "cache", ".cache"),
        ("linux", "XDG_STATE_HOME", "state", ".local/state"),
        ("darwin", "XDG_CACHE_HOME", "cache", "Library/Caches"),
        ("darwin", "XDG_STATE_HOME", "state", ".local/state"),
        ("win32", "LOCALAPPDATA", "cache", "AppData/Local"),
        ("win32", "LOCALAPPDATA", "state", "AppData/Local"),
    ],
)
def test_folders_of_each_system(
    monkeypatch: pytest.MonkeyPatch, system: str, variable: str, kind: str, usual: str
) -> None:
    find = getattr(files, kind)
    monkeypatch.setattr(files.sys, "platform", system)
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    assert find() == Path("/home/ada") / usual / "pypcd"
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match=f"no home folder; set HOME or {variable}"):
        find()
    monkeypatch.setenv(variable, "/elsewhere")
    assert find() == Path("/elsewhere/pypcd")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_documents_are_not_kept_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING, "pypcd"):
        cache = PromptCache()
    assert cache.limit == 0 and cache.entries() == []
    assert "not kept on disk: this user has no home folder" in caplog.text


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file, link = tmp_path / "talk.json", tmp_path / "link.json"
    files.write(file, "first")
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    file.chmod(0o640)
    link.symlink_to(file)
    files.write(link, b"second")
    assert link.is_symlink() and file.read_text() == "second" and file.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"talk.json", "link.json", "other"}


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
