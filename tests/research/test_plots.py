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
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from test_salience import reading

from pypcd.evaluation import plots
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import MARGIN
from pypcd.explain.places import Mark, Reading
from pypcd.explain.steps import Candidate, Step
from research import figures
from research.balance import LONG, RETRIEVAL, SHORT_PROMPTS, Run, balance
from research.decay import Decay, grid
from research.salience import salience_rows
from research.spectrum import spectrum

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


def a_spectrum() -> Figure:
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


RIGHT = Mark("PCD", True, "28-11", (range(12, 15),), "Amy is 28-11.")
WRONG = Mark("plain", False, "71-00", (range(31, 34),), "Bob is 71-00.")


def a_token(
    *marks: Mark, n: int = 40, seen: tuple[range, ...] = (range(4), range(24, 40)), end: str = "It is"
) -> Figure:
    step, reading = a_step(), Reading(n, seen, end, marks)
    return plots.decisive_token(step, "71-00", "28-11", reading, beta=1.5, is_right=(False, True))


FIGURES["decisive token"] = lambda: a_token(RIGHT, WRONG)


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


def test_a_decisive_tokens_bars_are_its_probabilities() -> None:
    _, *panels = FIGURES["decisive token"]().axes
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


def lane(figure: Figure, y: int) -> list[tuple[float, float, str]]:
    """What is drawn in the lane of L (1) or of L* (0): where it begins and ends, and its colour, or that of its dotted outline."""
    bars = [bar for bar in figure.axes[0].patches if bar.get_y() + bar.get_height() / 2 == pytest.approx(y)]
    looks = [
        f": {to_hex(bar.get_edgecolor())}" if bar.get_linestyle() == ":" else to_hex(bar.get_facecolor())
        for bar in bars
    ]
    ends = [(round(bar.get_x(), 6), round(bar.get_x() + bar.get_width(), 6)) for bar in bars]
    return [(*end, look) for end, look in zip(ends, looks)]


GREY, WHITE = "#d1d1d1", "#ffffff"
BLUE, RED = plots.BLUE.lower(), plots.VERMILLION.lower()


def test_a_lane_shows_what_its_evaluation_sees_and_the_answers_in_it() -> None:
    figure = a_token(RIGHT, WRONG)
    assert lane(figure, 1) == [(0, 40, WHITE), (0, 40, GREY), (12, 15, BLUE), (31, 34, RED)]
    assert lane(figure, 0) == [
        (0, 40, WHITE), (0, 4, GREY), (24, 40, GREY), (12, 15, f": {BLUE}"), (31, 34, RED)
    ]  # fmt: skip
    strip, *panels = figure.axes
    assert strip.get_xlim() == (0, 40) and [label.get_text() for label in strip.get_yticklabels()] == [
        "L sees",
        "L* sees",
    ]
    assert strip.get_title(loc="left") == "The text so far: L sees all 40 tokens, L* only the first 4 and the last 16"
    assert strip.get_xlabel() == "The next token, after “It is”:"
    colours = {text.get_text(): to_hex(text.get_color()) for text in strip.texts}
    assert colours.pop("not seen") and colours == {
        "the right answer: Amy is 28-11.": BLUE,
        "plain decoding writes: Bob is 71-00.": RED,
    }
    names = [to_hex(label.get_color()) for label in panels[0].get_yticklabels()[:2]]
    assert names == [RED, BLUE]  # those of the rows
    # an answer that the window cuts is seen in part

    figure = a_token(Mark("PCD", True, "28-11", (range(22, 26),), "28-11"))
    assert lane(figure, 0)[3:] == [(22, 26, f": {BLUE}"), (24, 26, BLUE)]
    assert lane(figure, 1)[2:] == [(22, 26, BLUE)]


@pytest.mark.parametrize(
    ("seen", "title"),
    [
        ((range(40),), "L and L* see all 40 tokens"),
        ((range(30, 40),), "L sees all 40 tokens, L* only the last 10"),
        ((range(1), range(39, 40)), "L sees all 40 tokens, L* only the first 1 and the last 1"),
    ],
)
def test_the_heading_says_what_is_seen(seen: tuple[range, ...], title: str) -> None:
    figure = a_token(RIGHT, seen=seen)
    strip = figure.axes[0]
    assert strip.get_title(loc="left") == f"The text so far: {title}"
    shown = [text.get_text() for text in strip.texts]
    assert ("not seen" in shown) == (len(seen[0]) < 40)
    assert [part[:2] for part in lane(figure, 0) if part[2] == GREY] == [(part.start, part.stop) for part in seen]


def test_an_answer_that_is_not_in_the_prompt_or_in_it_more_than_once() -> None:
    nowhere, twice = Mark(None, True, "1234"), Mark("plain", False, "71", (range(2, 3), range(31, 32)), "Bob is 71.")
    figure = a_token(nowhere, twice)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert "the right answer, 1234, does not stand in the prompt" in shown
    assert "plain decoding writes, 2 times: Bob is 71." in shown
    assert [part[:2] for part in lane(figure, 0) if part[2] == RED] == [(2, 3), (31, 32)]


def test_answers_in_a_very_long_prompt_can_be_seen() -> None:
    n = 200_000
    right, wrong = (Mark(w, w == "PCD", "28", (range(at, at + 1),), "28") for w, at in (("PCD", 9), ("plain", n - 1)))
    figure = a_token(right, wrong, n=n, seen=(range(4), range(n - 64, n)))
    assert lane(figure, 1)[2:] == [(9, 9 + 0.006 * n, BLUE), (0.994 * n, n, RED)]
    assert lane(figure, 0)[3] == (9, 9 + 0.006 * n, f": {BLUE}")


@pytest.mark.parametrize(
    ("around", "at"), [("漢字 $ and a long beginning ", 0), ("$x$_^ \\frac{ ", 20), ("W" * 30, 39), ("word ", 0)]
)
def test_texts_that_no_font_has_or_that_look_like_formulas_are_drawn_as_they_are(
    around: str, at: int, tmp_path
) -> None:
    step = a_step('"$a$ and a very long token"', '"\u202e漢字$\\frac"')
    marks = (Mark(w, w == "PCD", "28", (range(at, at + 1),), around * 4 + "28") for w in ("PCD", "plain"))
    reading = Reading(40, (range(4), range(24, 40)), around * 40, tuple(marks))
    figure = plots.decisive_token(step, "漢字" * 9 + " $x", "\\frac$ $" * 9, reading, beta=1)
    plots.save(figure, tmp_path / "a.png")  # a missing glyph would be a warning, and a warning an error here
    strip, *panels = figure.axes
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names[0].startswith('"\\u202e') and names[1].startswith('"$a$ and a') and max(map(len, names)) <= 12
    renderer = drawn(figure)
    boxes = apart(renderer, [strip.title, strip._left_title, strip.xaxis.label, *strip.texts])
    for axes in panels:
        boxes += apart(renderer, [*axes.get_yticklabels(), axes.xaxis.label, *axes.texts])
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 for box in boxes)


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
