"""Commands of pypcd, and of research/, in the process of the tests."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from pypcd.cli import _terminal, main

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run("eval", "demo", status=0): what `pypcd eval demo` writes to stdout and stderr, and ends with that status."""
    return _run(main, monkeypatch, capsys)


@pytest.fixture
def research(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """research("salience", "demo", status=0): the same of `python -m research.salience demo`."""

    def main_of(words: list[str]) -> int:
        from research.command import command

        module = importlib.import_module(f"research.{words[0]}")
        return command(words[0], module.add_arguments, module.run, words[1:])

    return _run(main_of, monkeypatch, capsys)


def _run(call: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(_terminal, "setup", lambda: None)

    def run(*words: object, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = call([str(word) for word in words])
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err

    return run


def record(run: Run, *words: object) -> Any:
    """The JSON object that a command prints."""
    return json.loads(run(*words, "--json")[0])
