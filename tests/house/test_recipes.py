"""scripts/recipes: what those that time something time is what they say (times themselves are not looked at), and the tables of
what tests/engine/test_backend.py wrote down."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import module_at

import pypcd
from pypcd import server

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("beside", ["twice as many", "stock"])
def test_requests_are_timed_beside_others(
    beside: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        program = str(server.executable())
    except pypcd.LibraryError:
        pytest.skip("llama-server was not built (PYPCD_SERVER=OFF); pip install . without that builds it")
    sizes = ("--requests=2", "--length=24", "--n-tokens=3", "--rounds=2", "--threads=1")
    # ours in place of stock's, which need not have been built: without LLAMA_ARG_PCD it takes no request with PCD either
    path = str(ROOT / "research" / "time_server.py")
    monkeypatch.setattr(sys, "argv", [path, "demo", *sizes, *(["--stock", program] if beside == "stock" else [])])
    runpy.run_path(path, run_name="__main__")
    rows = capsys.readouterr().out.splitlines()[3:]
    number = r"\d+(?:\.\d+)? \(\d+\.\d\d, \d+\.\d\d to \d+\.\d\d\)"
    names = [re.match(rf"\| (.*?) \| {number} \| {number} \| {number} \|$", row).groups()[0] for row in rows]
    ours = ["2 with --pcd off", "2 with PCD"]
    assert names == (["2 to stock", *ours, '2 with "pcd": false'] if beside == "stock" else ["4 with --pcd off", *ours])
    assert "(1.00, 1.00 to 1.00)" in rows[0]


def test_groups_have_their_worst_and_what_failed_is_named(tmp_path: Path) -> None:
    good: dict[str, Any] = {"engine": "stock", "setting": "rerotated", "kv": "f16"}
    good |= {"work": "steps", "placement": "gpu", "model": "llama"}
    good.update(
        standard=1e-6, plain=1e-6, over=6e-6, plain_over=2e-6, effect=0.5, outcome="passed", test="t[1]", why=""
    )
    good.update(left={}, splits=[2, 3])
    bad = {**good, "left": {"ACC of node": 2}, "splits": [2, 14], "over": 0.25, "outcome": "failed", "test": "t[2]"}
    bad["why"] = "E  assert 1\nE  AssertionError: L*"
    crashed = {"test": "t[3]", "outcome": "failed", "why": "worker 'gw0' crashed while running 't[3]'"}
    again = {**good, "test": "t[2]", "outcome": "failed"}  # done twice: the last one counts
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, again, bad, crashed)))
    command = [sys.executable, ROOT / "scripts/recipes/rows_table.py", file]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "## Rows: 3 cases, 2 failed" in said
    assert "| rerotated | 2 | 1 | 1e-06 | 1 | 0.25 | 1.25e+05 | 0.5 | 1 | 2 / 14 |" in said
    assert "- t[2]: failed; E  AssertionError: L*\n- t[3]: failed; worker 'gw0' crashed" in said


# -- compare_transformers.py: when both sides compute the same. The run itself needs torch and transformers --------------


program = module_at(ROOT / "scripts/recipes/compare_transformers.py")
PLAIN, PASSES, OURS, SHARED, REROTATED = program.WAYS


def sides(noise: float = 0.0, shift: float = 0.0) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(0)
    first, second, off = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
    rows = {PLAIN: [first], PASSES: [first, second], OURS: [first + noise * off + shift]}
    rows[SHARED] = rows[REROTATED] = [first, second + noise * off + shift]
    return {name: {"rows": np.stack(r), "chosen": [1, 2, 3]} for name, r in rows.items()}


def test_sides_agree_if_their_rows_differ_by_rounding_alone() -> None:
    found = sides(0.1, shift=5.0)  # no probability depends on a shift of all logits
    found[OURS]["chosen"] = [1, 2, 4]
    agreement = program.Agreement.of(found)
    assert agreement and agreement.same == (2, 3)
    assert agreement.plain == pytest.approx(0.01, rel=0.2) and agreement.effect == pytest.approx(2, rel=0.2)
    for way, i in ((OURS, 0), (SHARED, 1)):  # one row that is off is enough for them not to agree
        found = sides()
        found[way]["rows"] = found[way]["rows"].copy()
        found[way]["rows"][i] += 0.6 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
        assert not program.Agreement.of(found)


def test_only_the_second_row_may_be_off_by_a_share_of_what_over_rotation_does() -> None:
    found = sides(0.3)  # 0.09, where L* and L differ by 2
    assert not program.Agreement.of(found)
    found[OURS] = found[PLAIN]
    assert program.Agreement.of(found) and program.Agreement.of(found).second > program.LIMIT
    found[PASSES] = {**found[PASSES], "rows": found[SHARED]["rows"][[0, 0]]}  # over-rotation without any effect
    assert not program.Agreement.of(found)
