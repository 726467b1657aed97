"""Commands of pypcd in the process of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pypcd.cli import _terminal, main

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run("eval", "demo", status=0): what `pypcd eval demo` writes to stdout and stderr, and ends with that status."""
    monkeypatch.setattr(_terminal, "setup", lambda: None)

    def run(*words: object, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err

    return run


def record(run: Run, *words: object) -> Any:
    """The JSON object that a command prints."""
    return json.loads(run(*words, "--json")[0])
