"""The recipe that tries rules for when to contrast: gains and what is spoilt by hand, and a small run."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypcd.lab.formula import Formula

WHEN = Path(__file__).parents[2] / "scripts/recipes/when.py"


@pytest.fixture(scope="module")
def when() -> dict[str, Any]:
    made = runpy.run_path(str(WHEN))
    return made["main"].__globals__


def answers(when: dict[str, Any], about: str, chats: str) -> dict[str, Any]:
    return {
        when["ABOUT"]: np.array([c == "1" for c in about]),
        **{group: np.array([True]) for group in when["EVERYDAY"] if group != when["CHATS"]},
        when["CHATS"]: np.array([c == "1" for c in chats]),
    }


def test_gain_and_spoilt_by_hand(when: dict[str, Any]) -> None:
    """Two of four questions won and one lost; of 100 right everyday answers one spoilt, which is 1%, or two."""
    keys = [("m", half) for half in ("first", "second")]
    plain = {key: answers(when, "0011", "1" * 97 + "0") for key in keys}
    good = when["Tried"](f"{when['VIEW']}:beta=1", "", {key: answers(when, "1110", "0" + "1" * 97) for key in keys})
    bad = when["Tried"](f"{when['VIEW']}:beta=2", "", {key: answers(when, "1111", "00" + "1" * 96) for key in keys})
    found = when["gain"](good, plain, "m", "first", (when["ABOUT"],))
    assert (found.n, found.wins, found.losses, found.difference) == (4, 2, 1, 25)
    assert when["spoilt"](good, plain, "m", "first") == (1, 100) and when["spoilt"](bad, plain, "m", "first") == (
        2,
        100,
    )
    text = when["report"]([bad, good], plain, ["m"], {"m": {"75": 1.5}})
    assert "1 rules are safe on the first half. Of these 1 are safe" in text
    safe, every = text.split("## All")
    assert "`beta=1` | +25.0" in safe and "`beta=2`" not in safe
    assert every.index("`beta=2`") < every.index("`beta=1`"), "by gain"


def test_every_candidate_is_a_formula(when: dict[str, Any]) -> None:
    bits = {name: 2.0 for name in ("50", "75", "90", "97", "s90", "s97")}
    texts = {text for text, _ in when["candidates"]()}
    assert len({Formula.parse(when["filled"](text, bits)) for text in texts}) > 100


def test_a_small_run(when: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = when["Cell"]
    cells = [cell(group, ("kv-short",), 200 + 30 * i, 4) for i, group in enumerate(when["GROUPS"])]
    monkeypatch.setitem(when, "CELLS", cells)
    monkeypatch.setattr(
        sys, "argv", ["when.py", "demo", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    )
    when["main"]()
    with (tmp_path / "out/summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(list(when["candidates"]()))
    for row in rows:
        assert row[f"demo, first, {when['ABOUT']}: n"] == "2"
        if row["mode"]:
            assert row[f"demo, second, {when['SHORT']}: wins"] == row[f"demo, second, {when['SHORT']}: losses"] == "0"
    monkeypatch.setattr(sys, "argv", ["when.py", "nowhere.gguf", "--work", str(tmp_path / "work")])
    with pytest.raises(SystemExit):
        when["main"]()
