"""Pictures: the same data gives the same bytes, and all that they show is in the data files next to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_salience import reading

from pypcd import plots
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import MARGIN
from pypcd.explain.steps import Candidate, Step
from pypcd.lab import figures
from pypcd.lab.balance import LONG, RETRIEVAL, SHORT_PROMPTS, Run, balance
from pypcd.lab.decay import Decay, grid
from pypcd.lab.salience import salience_rows
from pypcd.lab.spectrum import spectrum

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
}


def a_spectrum():
    rng = np.random.default_rng(0)
    return figures.spectrum(
        spectrum(rng.normal(size=(2, 8)), rng.normal(size=(64, 1, 8)), [1, 0.3, 0.1, 0.03], [1, 2, 4, 8])
    )


FIGURES["spectrum"] = a_spectrum


def a_step(chosen: str = '"28"', plain: str = '"71"') -> Step:
    def candidate(text, before, rank_before, local, after, rank_after) -> Candidate:
        is_chosen = rank_after == 1
        return Candidate(0, text, before, rank_before, local, after, rank_after, is_chosen, is_chosen)

    return Step(
        0,
        chosen,
        (
            candidate(chosen, 0.25, 2, 0.01, 0.875, 1),
            candidate('"third"', 0.05, 4, 0.1, 0.1, 2),
            candidate('"fourth"', 0.02, 5, 0.0, 0.0, None),
            candidate('"second"', 0.06, 3, 0.05, 0.0, 7),
            candidate(plain, 0.5, 1, 0.75, 0.005, 9),
        ),
        True,
    )


FIGURES["decisive token"] = lambda: plots.decisive_token(a_step(), "71-00", "28-11", beta=1.5, is_right=(False, True))


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


FIGURES["balances"] = lambda: figures.balances(
    [*balance(a_run()), *balance(a_run("Some-Model-3.1-8B-Instruct-abliterated.$Q4_K_M"))]
)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("kind", plots.FORMATS)
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


def test_an_unknown_format_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match="'.gif'"):
        plots.save(FIGURES["ranks"](), tmp_path / "a.gif")


def test_a_decisive_tokens_bars_are_its_probabilities() -> None:
    panels = FIGURES["decisive token"]().axes
    shown = [[round(bar.get_width(), 6) for bar in axes.patches] for axes in panels]
    # the token of plain decoding, PCD's, the two likeliest others, and what is left of 100%
    assert shown == [[50, 25, 6, 5, 14], [75, 1, 5, 10, 9], [0.5, 87.5, 0, 10, 2]]
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels == ['"71"', '"28"', '"second"', '"third"', "all others"]
    assert [text.get_text() for text in panels[0].texts] == ["50.0%", "25.0%", "6.0%", "5.0%", "14.0%"]
    assert panels[2].get_title(loc="left") == "2.5 L − 1.5 L*\nafter the contrast"
    labels = [axes.get_xlabel() for axes in panels]
    assert "✗ 71-00 (wrong)" in labels[0] and "✓ 28-11 (right)" in labels[2]
    two = [bar.get_facecolor() for bar in panels[0].patches[:2]]
    assert two[0] != two[1] and panels[0].patches[0].get_hatch() and not panels[0].patches[1].get_hatch()


def test_texts_that_no_font_has_or_that_look_like_formulas_are_drawn_as_they_are(tmp_path) -> None:
    step = a_step('"$a$ and a very long token"', '"\u202e漢字$\\frac"')
    figure = plots.decisive_token(
        step, "漢字" * 9 + " $x", "\\frac$ $" * 9, beta=1, before="漢 $ and a long beginning" * 3
    )
    plots.save(figure, tmp_path / "a.png")  # a missing glyph would be a warning, and a warning an error here
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0].startswith('"\\u202e') and names[1].startswith('"$a$ and a') and max(map(len, names)) <= 12
    title = figure._suptitle.get_text()
    assert title.endswith("long beginning") and len(title) < 80
    renderer = drawn(figure)
    for axes in figure.axes:
        boxes = apart(renderer, [*axes.get_yticklabels(), axes.xaxis.label, *axes.texts])
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


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
            if row.method == "pcd:paper":  # its difference is beyond the axis: drawn at the edge, with its figures
                assert x.difference < axes.get_xlim()[0] < drawn[name].get_xdata()[0]
                shown = f"{x.difference:+.0f}, {y.difference:+.0f}".replace("-", "−")
                assert [text.get_text() for text in axes.texts] == [shown]
            else:
                assert list(drawn[name].get_xydata()[0]) == [x.difference, y.difference]
                assert ((x.low, x.high), (y.difference,) * 2) in bars and ((x.difference,) * 2, (y.low, y.high)) in bars
        [band] = axes.patches
        assert band.get_x() == -MARGIN and band.get_x() + band.get_width() == axes.get_xlim()[1]


def drawn(figure: Figure) -> RendererBase:
    """Labels are known, and have places, once a figure has been drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def apart(renderer: RendererBase, texts: Iterable[Any]) -> list[Any]:
    """The boxes of these texts, of which no two touch."""
    boxes = [box for box in (text.get_window_extent(renderer) for text in texts) if box.width]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    return boxes


def test_texts_of_balances_do_not_touch() -> None:
    figure = FIGURES["balances"]()
    renderer = drawn(figure)
    for axes in figure.axes:
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        apart(renderer, [t for t in ticks if t.get_text()])
    texts = [text for axes in figure.axes for text in (axes.title, *axes.texts)]
    boxes = apart(renderer, [*figure.legends, figure._supxlabel, *texts])
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_nothing_to_draw_is_an_error() -> None:
    run = a_run()
    only = Run("m", run.methods, {key: record for key, record in run.records.items() if key[0] == "kv-short"})
    with pytest.raises(ValueError, match="no setting has answers"):
        figures.balances(balance(only))
