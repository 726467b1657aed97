"""scripts/recipes that time something: what they time is what they say. Times themselves are not looked at."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import Tiny

import pypcd
from pypcd import server

Recipe = Callable[..., dict[str, Any]]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Runs a script with some arguments, in this process."""

    def run(name: str, *arguments: object) -> dict[str, Any]:
        path = Path(__file__).parents[2] / "scripts/recipes" / name
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        return runpy.run_path(str(path), run_name="__main__")

    return run


def test_drafts_are_timed_by_how_many_guesses_are_right(
    tiny: Tiny, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe("time_drafts.py", tiny("llama"), "off", "paper", "--length=20", "--n-tokens=12", "--n-guesses=4")
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| right | off | paper |"
    assert [row.split(" | ")[0] for row in rows] == ["| all", "| half", "| none"]
    assert all(re.match(r"\| \w+( \| \d+\.\d\dx){2} \|$", row) for row in rows)
    text = list(range(100))
    right = {
        name: sum(map(int.__eq__, made["Knowing"](text, share, 4, 384).text, text))
        for name, share in made["SHARES"].items()
    }
    assert right["all"] == 100 and right["none"] == 0 and 30 < right["half"] < 70
    assert made["Knowing"](text, 1.0, 4, 384)(text[:10]).tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("beside", ["twice as many", "stock"])
def test_requests_are_timed_beside_others(beside: str, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        program = str(server.executable())
    except pypcd.LibraryError:
        pytest.skip("llama-server was not built (PYPCD_SERVER=OFF); pip install . without that builds it")
    sizes = ("--requests=2", "--length=24", "--n-tokens=3", "--rounds=2", "--threads=1")
    # ours in place of stock's, which need not have been built: without LLAMA_ARG_PCD it takes no request with PCD either
    recipe("time_server.py", "demo", *sizes, *(["--stock", program] if beside == "stock" else []))
    rows = capsys.readouterr().out.splitlines()[3:]
    number = r"\d+(?:\.\d+)? \(\d+\.\d\d, \d+\.\d\d to \d+\.\d\d\)"
    names = [re.match(rf"\| (.*?) \| {number} \| {number} \| {number} \|$", row).groups()[0] for row in rows]
    ours = ["2 with --pcd off", "2 with PCD"]
    assert names == (["2 to stock", *ours, '2 with "pcd": false'] if beside == "stock" else ["4 with --pcd off", *ours])
    assert "(1.00, 1.00 to 1.00)" in rows[0]
