"""Pictures: the same data gives the same bytes, and all that they show is in the data files next to them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import matplotlib
from runs import made_up
from test_salience import reading

from pypcd.evaluation import Plan, Row, rows
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import MARGIN
from research import figures, plots
from research.balance import LONG, RETRIEVAL, SHORT_PROMPTS, Run, balance
from research.decay import Decay, grid
from research.salience import salience_rows
from research.spectrum import Spectrum, spectrum

SMALL = Decay(d=16, length=256)


def table():
    made = []
    for length, shift in ((64, 0), (128, 1)):
        pairs = [
            (reading(i, BASELINE, 1 + shift * i, others=(3.0, 2.0)), reading(i, "PCD", 1, logit=None if i else 2.0))
            for i in range(4)
        ]
        made += salience_rows(length, pairs)
    return made


FIGURES = {
    "decay": lambda: figures.decay(SMALL.simulate()),
    "grid": lambda: figures.decay_grid(list(grid(SMALL, {"d": (8, 16), "beta": (0.5,)}))),
    "salience": lambda: figures.salience(table()),
    "ranks": lambda: figures.ranks({BASELINE: [1, 2, 9, 400], "PCD": [1, 1, 1, 3]}),
    "logits": lambda: figures.logits(table()),
    "spectrum": lambda: figures.spectrum(a_spectrum()),
    "differences": lambda: plots.differences(compared()),
    "balances": lambda: figures.balances(
        [*balance(a_run()), *balance(a_run("Some-Model-3.1-8B-Instruct-abliterated.$Q4_K_M"))]
    ),
}


def a_spectrum() -> Spectrum:
    rng = np.random.default_rng(0)
    return spectrum(rng.normal(size=(2, 8)), rng.normal(size=(64, 1, 8)), [1, 0.3, 0.1, 0.03], [1, 2, 4, 8])


def a_run(name: str = "model", n: int = 60) -> Run:
    """Settings that gain and lose: one far beyond the axes, several close together, more than there are colours."""
    right = {"greedy": (20, 45, 45), "pcd:paper": (5, 6, 2), "control": (18, 44, 43), "pcd:window": (32, 38, 35)}
    right["control:beta=0.5"] = (19, 43, 44)
    right |= {f"pcd:window:beta={beta}": (30, 45 - i, 44 - i) for i, beta in enumerate((0.5, 1, 1.5, 2, 3))}
    cells = (("kv-short", 600), ("everyday-json", 300), ("everyday-json", 1000))
    records = {
        (*cell, 2 * i + 1, method): {"score": float((i + 7 * k) % n < values[k])}
        for k, cell in enumerate(cells)
        for method, values in right.items()
        for i in range(n)
    }
    return Run(name, tuple(right), records)


EVALUATED = Plan("m.gguf", ("kv",), ("greedy", "gains", "same", "loses"), (100, 200), n=40)


def compared() -> list[Row]:
    """One method that is right where greedy is not, one that never differs, and one that is always wrong."""
    right = {"greedy": (0, 20), "gains": (0, 40), "same": (0, 20), "loses": (0, 0)}
    return rows(EVALUATED, made_up(EVALUATED, lambda method, i: float(i in range(*right[method]))))


@pytest.mark.parametrize(("name", "kind"), [*((name, "svg") for name in FIGURES), ("ranks", "png"), ("ranks", "pdf")])
def test_the_same_data_gives_the_same_bytes(name: str, kind: str, tmp_path) -> None:
    figure = FIGURES[name]()
    assert any(axes.get_xlabel() for axes in figure.axes) or figure._supxlabel is not None
    first = plots.save(figure, tmp_path / f"a.{kind}").read_bytes()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "savefig.dpi": 20}):  # a user's own settings
        second = plots.save(FIGURES[name](), tmp_path / f"b.{kind}").read_bytes()
    assert first == second and len(first) > 1000
    assert b"matplotlib" not in first.lower() or kind == "svg"


def test_curves_of_a_panel_differ_in_more_than_colour() -> None:
    for figure in (FIGURES["decay"](), FIGURES["salience"]()):
        for axes in figure.axes:
            drawn = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
            looks = {(line.get_linestyle(), line.get_marker(), str(line._dash_pattern)) for line in drawn}
            assert len(looks) == len(drawn) >= 2


def test_bars_are_the_counts_in_percent() -> None:
    [axes] = FIGURES["ranks"]().axes
    plain, mine = axes.containers
    assert [round(bar.get_height()) for bar in plain] == [25, 25, 0, 0, 25, 0, 0, 25]
    assert [round(bar.get_height()) for bar in mine] == [75, 0, 25, 0, 0, 0, 0, 0]


def test_a_difference_is_a_point_with_its_interval() -> None:
    table, figure = compared(), plots.differences(compared())
    assert [axes.get_title() for axes in figure.axes] == [f"kv\n{n} tokens, greedy 50.0%" for n in (100, 200)]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["gains", "same", "loses"]
    for axes, length in zip(figure.axes, (100, 200)):
        lines = [(*map(float, line.get_xdata()), line.get_marker()) for line in axes.lines[1:]]
        wanted = {row.method: row.paired for row in table if row.length == length}
        looks = {"gains": "^", "same": "o", "loses": "v"}
        assert lines == [
            part
            for name, marker in looks.items()
            for part in ((wanted[name].low, wanted[name].high, "None"), (wanted[name].difference, marker))
        ]
        assert (wanted["gains"].difference, wanted["same"].difference, wanted["loses"].difference) == (50, 0, -50)


def test_a_balance_is_a_point_with_both_intervals() -> None:
    rows = balance(a_run())
    figure = figures.balances(rows)
    panels = dict(zip((SHORT_PROMPTS, LONG), figure.axes))
    methods = [row.method for row in rows if row.method != BASELINE]
    assert len(figure.axes) == 2
    for group, axes in panels.items():
        drawn = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
        names = {"control": "control of paper, window", "control:beta=0.5": "control of window:\nbeta=0.5"}
        names = {name: names.get(name, name.removeprefix("pcd:")) for name in methods}
        assert list(drawn) == list(names.values())
        looks = {(line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in drawn.values()}
        assert len(looks) == len(drawn)
        bars = [tuple(map(tuple, line.get_data())) for line in axes.lines if len(line.get_xdata()) == 2]
        for row in rows[1:]:
            x, y = row.groups[group], row.groups[RETRIEVAL]
            name = names[row.method]
            if row.method == "pcd:paper":  # its difference is beyond the axis: drawn at the edge
                assert x.difference < axes.get_xlim()[0] < drawn[name].get_xdata()[0]
            else:
                assert list(drawn[name].get_xydata()[0]) == [x.difference, y.difference]
                assert ((x.low, x.high), (y.difference,) * 2) in bars and ((x.difference,) * 2, (y.low, y.high)) in bars
        [band] = axes.patches
        assert band.get_x() == -MARGIN and band.get_x() + band.get_width() == axes.get_xlim()[1]


def test_nothing_to_draw_is_an_error() -> None:
    run = a_run()
    only = Run("m", run.methods, {key: record for key, record in run.records.items() if key[0] == "kv-short"})
    with pytest.raises(ValueError, match="no setting has answers"):
        figures.balances(balance(only))
