"""scripts/recipes/rows_table.py: the tables of what tests/engine/test_backend.py wrote down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_groups_have_their_worst_and_what_failed_is_named(tmp_path: Path) -> None:
    good: dict[str, Any] = {"setting": "rerotated", "kv": "f16", "work": "steps", "placement": "gpu", "model": "llama"}
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
