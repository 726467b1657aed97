"""The paper's tables beside a run's: its figures as printed, what is run for a table, and the layout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import made_up

from pypcd.evaluation import Plan
from pypcd.evaluation.plan import BASELINE
from research import eval as research_eval
from research.paper import PAPER_TABLES, SWEEP, TABLE_1, TABLE_2


def test_the_papers_figures_are_as_printed() -> None:
    """Sums and means of the printed rows, worked out by hand."""
    assert sum(map(sum, TABLE_2["kv-authors"].values())) == pytest.approx(1753.2)
    assert sum(TABLE_2["vt-authors"]["pcd"]) == pytest.approx(228.76)
    assert TABLE_1["beta"][3] == 77.90


def test_table_1_changes_each_value_alone() -> None:
    table = PAPER_TABLES["table1"]
    plan = Plan("m.gguf", ("kv-authors",), table.methods, (8192,), n=10)
    best = {"pcd:beta=1.5": 9, "pcd:gamma=50": 8}
    records = made_up(plan, lambda method, i: float(i < best.get(method, 5)))
    text = table.markdown(plan, records)
    assert "| beta | 1.0-4.0 | 2.5 | 77.90, 3.1 | 56.7, 222.2 | 1.5: 90.0 | +40.0 [+10.0, +70.0] ~ |" in text
    assert "| without PCD | | | 72.00 | 50.0 | | |" in text
    assert len(set(table.methods)) == 2 + sum(len(values) - 1 for values in SWEEP.values())


def test_table_2_sets_figures_beside_the_papers() -> None:
    table = PAPER_TABLES["table2"]
    plan = Plan("m.gguf", table.tasks, table.methods, table.lengths, n=10)
    records = made_up(plan, lambda method, i: float(i < (7 if method == "pcd" else 6)))
    del records["vt-authors", 4096, 0, "segr"]
    text = table.markdown(plan, {k: v for k, v in records.items() if k[3] != "ms-poe"})
    assert "| pcd | 92.0 | 70.0 | +10.0 [+0.0, +30.0] ~ | 79.0 | 70.0 |" in text
    assert "| ms-poe | 90.0 | refused |  | 72.0 | refused |  | 51.0 | refused |  |" in text
    assert "n = 100 a cell" in text


def test_a_run_lays_out_the_papers_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--task", "kv-short", "--length", "250", "--n", "3", "--threads", "1"]
    words += ["--paper", "table2", "--method", "greedy,pcd,beam", "--out", str(tmp_path / "run")]
    assert research_eval.main(words) == 0
    assert "Table 2 of the paper, and demo\n" in capsys.readouterr().out
    text = (tmp_path / "run" / "summary.md").read_text()
    assert "## Table 2 of the paper, and demo" in text and "| method | paper, 4k | yours, 250 |" in text
    assert "| beam | 89.0 |" in text


def test_what_is_asked_is_the_tables_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(research_eval.product, "run", lambda args: asked.append(args) or sys.exit(0))
    for more in ([], ["--method", "pcd"]):
        with pytest.raises(SystemExit):
            research_eval.main(["model.gguf", "--paper", "table1", *more])
    first, second = asked
    assert first.task == second.task == "kv-authors" and first.length == "8192" and second.method == "pcd"
    assert set(first.method.split(",")) == set(PAPER_TABLES["table1"].methods) and BASELINE in first.method
