"""The commands plot, salience and spectrum on the demo model: what they print, what they write, and mistakes."""

from __future__ import annotations

import csv
import json
import sys

import pytest


def read_csv(path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_plot_decay_prints_the_claims_and_writes_what_it_draws(research, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    small = ("plot", "decay", "--d", "64", "--length", "512")
    text, _ = research(*small, "--out", str(tmp_path / "new"))
    assert "claim of the paper" in text and "A.4" in text and "B'" in text
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"decay.png", "decay.csv", "decay.json", "decay_grid.png", "decay_grid.csv"}
    rows = read_csv(tmp_path / "new/decay.csv")
    assert len(rows) == 512 and [float(rows[0][c]) for c in ("standard", "over_rotated", "contrasted")] == [1, 1, 1]
    record = json.loads((tmp_path / "new/decay.json").read_text())
    assert record == json.loads(research(*small, "--json")[0])
    assert len(record["grid"]) == 20 and f"{record['claims']['claimed']:.5f}" in text
    assert f"{record['rates']['standard']['log']:.4f}" in text


QUICK = ("salience", "demo", "--length=96,160", "--n=4", "--threads=1")


def test_salience_takes_a_setting_of_the_stock_engine(research) -> None:
    assert "PCD paper:cache=separate" in research(*QUICK, "--pcd=paper:cache=separate")[0]


def test_salience_prints_and_writes_the_same_figures(research, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    text, _ = research(*QUICK, "--out", str(tmp_path), "--format=svg")
    assert {p.name for p in tmp_path.iterdir()} == {
        "salience.svg", "ranks.svg", "logits.svg", "salience.csv", "readings.csv", "salience.json",
    }  # fmt: skip
    record = json.loads((tmp_path / "salience.json").read_text())
    assert record["task"] == "kv-short" and [c["method"] for c in record["cells"]] == ["greedy", "PCD"] * 2
    assert sum(record["ranks"]["greedy"]) == sum(record["ranks"]["PCD"]) == 8
    readings = read_csv(tmp_path / "readings.csv")
    assert len(readings) == 16
    for cell in record["cells"]:
        mine = [r for r in readings if (int(r["length"]), r["method"]) == (cell["length"], cell["method"])]
        assert cell["salience"] == pytest.approx(sum(1 / int(r["rank"]) for r in mine) / 4)
        assert f"{cell['salience']:.3f}" in text
    curves = read_csv(tmp_path / "salience.csv")
    assert [float(c["gold_logit"]) for c in curves] == [c["gold_logit"] for c in record["cells"]]
    assert float(curves[0]["other_logit_1"]) == record["cells"][0]["competitor_logits"][0]
    first = json.loads(research(*QUICK, "--json", "--seed=1", "--pcd=paper:beta=0")[0])
    assert first["pcd"]["beta"] == 0
    for plain, mine in zip(first["cells"][::2], first["cells"][1::2]):
        assert plain["salience"] == mine["salience"]  # beta 0 leaves the order of L


def test_spectrum_prints_and_writes_a_line_and_a_picture_for_each_layer(research, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten")
    words = ("spectrum", "demo", "-f", str(tmp_path / "text.txt"), "--threads=1")
    text, _ = research(*words, "--out", str(tmp_path / "new"))
    record = json.loads(research(*words, "--json")[0])
    layers = record["layers"]
    assert json.loads((tmp_path / "new/spectrum.json").read_text())["layers"] == layers
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"spectrum.json", *(f"layer-{il}.png" for il in layers)}
    assert f"the last of {record['n_tokens']} tokens" in text
    for il, layer in layers.items():
        assert layer["edges"][-1] == record["n_tokens"]
        assert sum(layer["attention_before"]) == pytest.approx(1) == sum(layer["attention_after"])
        assert f"{il:>5} {layer['reach_before']:>8.1f} {layer['reach_after']:>8.1f}" in text


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("plot", "decay", "--out", __file__), "is a file; allowed: a folder"),
        (("salience", "demo", "--task", "kv-shrt"), "did you mean 'kv-short'"),
        (("salience", "demo", "--pcd", "off"), "--pcd is off"),
        (("spectrum", "demo", "--pcd", "window"), "over-rotates nothing"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(args, named, research) -> None:
    out, err = research(*args, status=2)
    assert out == "" and err.startswith("pypcd: ") and named in err and err.count("\n") == 1


def test_without_matplotlib_pictures_are_refused_and_tables_are_not(research, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "new"
    printed, err = research("plot", "decay", "--out", str(out), status=1)
    assert printed == "" and "pip install matplotlib" in err and not out.exists()
    assert "standard" in research("plot", "decay", "--d=16", "--length=64", "--no-grid")[0]
