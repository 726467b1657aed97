"""How pictures look, and the one of an evaluation. Needs matplotlib.

They are for print and for the colour-blind: colours of Okabe and Ito, and a marker or hatch for each. The same data gives the same
file, byte for byte.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from pypcd import files
from pypcd.errors import InputError, PCDError
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.report import Row

__all__ = ["FORMATS", "differences", "drawing", "new_figure", "require", "save"]

# suffix -> metadata without date and version
FORMATS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}

BLACK, BLUE, VERMILLION = "#000000", "#0072B2", "#D55E00"

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 200,
    "svg.hashsalt": "pypcd",
    "svg.fonttype": "path",
    "hatch.linewidth": 0.6,
}


def require() -> None:
    """Check for matplotlib before measuring, which may take an hour.

    Raises:
        PCDError: matplotlib is not installed.
    """
    try:
        import matplotlib  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        raise PCDError("pictures need matplotlib, which is not installed; pip install matplotlib") from None


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """A block with our own matplotlib settings, so that the user's do not change a figure."""
    require()
    import matplotlib  # type: ignore[import-not-found]

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(width: float, height: float, **kwargs: Any) -> tuple[Any, Any]:
    """A figure of a size in inches. Not by pyplot, which keeps every figure and looks for a window."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**kwargs)


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a figure in the format of its suffix, without date or version.

    Raises:
        ValueError: the format is not one of FORMATS.
    """
    kind = path.suffix.lstrip(".")
    if kind not in FORMATS:
        raise InputError(f"a picture's suffix is {path.suffix!r}; allowed: {', '.join('.' + f for f in FORMATS)}")
    drawn = io.BytesIO()
    with drawing():
        figure.savefig(drawn, format=kind, metadata=FORMATS[kind])
    files.write(path, drawn.getvalue())
    return path


def differences(rows: Sequence[Row]) -> Any:
    """Each method's difference to greedy with its 95% interval: a panel for each task and length."""
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.task, row.length), {})[row.method] = row
    methods = [name for name in dict.fromkeys(row.method for row in rows) if name != BASELINE]
    n_columns = min(len(cells), 4)
    n_rows = -(-len(cells) // n_columns)
    y = {method: len(methods) - i for i, method in enumerate(methods)}
    with drawing():
        size = (1.6 + 1.7 * n_columns, n_rows * (0.9 + 0.17 * len(methods)))
        figure, grid = new_figure(*size, nrows=n_rows, ncols=n_columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(cells) :]:
            axes.set_axis_off()
        for axes, ((task, length), cell) in zip(grid.flat, cells.items()):
            axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
            for method, row in cell.items():
                if method != BASELINE:
                    p = row.paired
                    colour = BLACK if not p.is_clear else BLUE if p.low > 0 else VERMILLION
                    marker = "o" if not p.is_clear else "^" if p.low > 0 else "v"
                    face = colour if p.is_clear else "white"
                    axes.plot([p.low, p.high], [y[method]] * 2, color=colour, linewidth=1)
                    axes.plot(p.difference, y[method], marker=marker, color=colour, markerfacecolor=face, linestyle="")
            greedy = cell[BASELINE].paired.score
            axes.set_title(f"{task}\n{length} tokens, greedy {greedy:.1f}%")
            axes.set_ylim(0.3, len(methods) + 0.7)
        grid[0][0].set_yticks(list(y.values()), list(y))
        figure.supxlabel(
            "difference to greedy (points) with its 95% interval;\nfilled: it leaves zero out, and p is below 0.05",
            fontsize=8,
        )
        return figure
