"""Pictures: the same data gives the same bytes, and what they show is in the data beside them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import matplotlib
from test_salience import reading

from pypcd.analysis import _plots
from pypcd.analysis._decay import Decay, grid
from pypcd.analysis._salience import salience_rows
from pypcd.analysis._spectrum import spectrum
from pypcd.evaluation._plan import BASELINE

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
    "decay": lambda: _plots.decay(SMALL.simulate()),
    "grid": lambda: _plots.decay_grid(list(grid(SMALL, {"d": (8, 16), "beta": (0.5,)}))),
    "salience": lambda: _plots.salience(table()),
    "ranks": lambda: _plots.ranks({BASELINE: [1, 2, 9, 400], "PCD": [1, 1, 1, 3]}),
    "logits": lambda: _plots.logits(table()),
}


def a_spectrum():
    rng = np.random.default_rng(0)
    return _plots.spectrum(
        spectrum(rng.normal(size=(2, 8)), rng.normal(size=(64, 1, 8)), [1, 0.3, 0.1, 0.03], [1, 2, 4, 8])
    )


FIGURES["spectrum"] = a_spectrum


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("kind", _plots.FORMATS)
def test_the_same_data_gives_the_same_bytes(name: str, kind: str, tmp_path) -> None:
    first = _plots.save(FIGURES[name](), tmp_path / f"a.{kind}").read_bytes()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "savefig.dpi": 20}):  # a user's own taste
        second = _plots.save(FIGURES[name](), tmp_path / f"b.{kind}").read_bytes()
    assert first == second and len(first) > 1000
    assert b"matplotlib" not in first.lower() or kind == "svg"


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_named(name: str) -> None:
    figure = FIGURES[name]()
    labels = [axes.get_xlabel() for axes in figure.axes if axes.get_visible()]
    assert any(labels) or figure._supxlabel is not None


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
    with pytest.raises(ValueError, match=r"a picture's suffix is '.gif'; allowed: .png, .svg, .pdf"):
        _plots.save(FIGURES["ranks"](), tmp_path / "a.gif")
