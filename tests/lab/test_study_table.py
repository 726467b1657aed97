"""scripts/recipes/study_table.py against runs worked out by hand."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/recipes"))

import study_table


def run(folder: Path, kind: str, seed: int, right: dict[str, int]) -> None:
    """Ten questions at one length; each method answers the first few right, greedy five."""
    folder = folder / f"study-{kind}-{seed}"
    folder.mkdir()
    names = {"greedy": 5, **dict.fromkeys(study_table.METHODS, 5), **right}
    lines = [
        json.dumps({"length": 100, "method": method, "index": i, "score": float(i < n)})
        for method, n in names.items()
        for i in reversed(range(10))  # the order of lines means nothing
    ]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    record = {"model_sha256": f"{kind}{seed}", "pypcd": "1", "llama_cpp_python": "2"}
    (folder / "run.json").write_text(json.dumps(record))


def test_the_tables_are_those_of_the_runs(tmp_path: Path) -> None:
    for seed, n in ((0, 9), (1, 7)):
        run(tmp_path, "pulled", seed, {"pcd": n})
        run(tmp_path, "plain", seed, {"pcd": 4, "greedy": 10})
    out = tmp_path / "out"
    out.mkdir()
    study_table.main(str(tmp_path), str(out))
    pulled, plain = (out / "summary.md").read_text().split("## The same models before the pull")
    assert "| greedy | 50.0 |" in pulled and "| rerotated, beta 2.5 | +30.0 [" in pulled  # 6 more of 20
    assert "| 0 | 100 | 50.0 | +40.0 [" in pulled and "| 1 | 100 | 50.0 | +20.0 [" in pulled
    assert "| greedy | 100.0 |" in plain and "| rerotated, beta 2.5 | -60.0 [" in plain and "90-100% (2)" in plain
    assert "| study-plain-1 | plain1 | 1 | 2 |" in plain
    with (out / "summary.csv").open() as file:
        rows = {(r["kind"], r["seed"], r["method"]): r for r in csv.DictReader(file)}
    assert rows["pulled", "0", "pcd"]["difference"] == "40.00" and rows["pulled", "0", "pcd"]["wins"] == "4"
    assert (out / "summary.png").read_bytes()[1:4] == b"PNG"


def test_the_picture_has_a_line_for_each_seed() -> None:
    lines = [[(100.0, 1.0), (200.0, 2.0)], [(100.0, -1.0), (200.0, 0.5)]]
    figure = study_table.figures.seeds({"a": {"x": lines, "y": lines}, "b": {"x": lines}})
    drawn = [
        [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() not in ("None", None)]
        for axes in figure.axes
    ]
    assert [len(found) for found in drawn] == [4, 2]
    assert list(drawn[0][1].get_ydata()) == [-1.0, 0.5]
