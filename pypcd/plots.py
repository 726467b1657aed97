"""How pictures look, and those of `eval` and `explain`. Needs matplotlib.

They are for print and for the colour-blind: colours of Okabe and Ito, and a line style or marker for each curve. The same data
gives the same file, byte for byte.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pypcd.errors import InputError, PCDError
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.report import Row
from pypcd.explain.steps import Step

__all__ = [
    "FORMATS",
    "decisive_token",
    "differences",
    "drawable",
    "drawing",
    "kind",
    "new_figure",
    "require",
    "save",
]

FORMATS = ("png", "svg", "pdf")

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)

# colour, line style and marker of the n-th curve
STYLES = (
    (BLACK, "-", "o"),
    (BLUE, "--", "s"),
    (VERMILLION, "-.", "^"),
    (GREEN, ":", "D"),
    (PURPLE, (0, (5, 1, 1, 1, 1, 1)), "v"),
    (ORANGE, (0, (1, 3)), "P"),
)
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\")

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
        raise PCDError("pictures need matplotlib, which is not installed; pip install pypcd[plot]") from None


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


def kind(path: pathlib.Path) -> str:
    """The format of a picture, from its suffix.

    Raises:
        ValueError: it is not one of FORMATS.
    """
    suffix = path.suffix.lstrip(".")
    if suffix not in FORMATS:
        raise InputError(f"a picture's suffix is {path.suffix!r}; allowed: {', '.join('.' + f for f in FORMATS)}")
    return suffix


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a figure in the format of its suffix, without date or version.

    Raises:
        ValueError: the format is not one of FORMATS.
    """
    blank = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    }
    with drawing():
        figure.savefig(path, format=kind(path), metadata=blank[kind(path)])
    return path


# -- eval --------------------------------------------------------------------------------------------------------------


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


# -- explain -----------------------------------------------------------------------------------------------------------

_N_CANDIDATES = 4


def decisive_token(
    step: Step,
    plain: str,
    pcd: str,
    *,
    beta: float,
    before: str = "",
    is_right: tuple[bool | None, bool | None] = (None, None),
) -> Any:
    """A token where PCD and plain decoding differ: its candidates in L, in L* and after the contrast, and both answers.

    Args:
        step: the token's step, with is_changed.
        plain, pcd: the text of each answer from this token on.
        beta: strength of the contrast.
        before: the text that both wrote before it.
        is_right: whether plain's answer is right, and whether PCD's is; None: unknown.
    """
    theirs = min(step.candidates, key=lambda c: c.rank_before)
    ours = next(c for c in step.candidates if c.is_chosen)
    others = sorted((c for c in step.candidates if c not in (theirs, ours)), key=lambda c: c.rank_before)
    shown = [theirs, ours, *others[: _N_CANDIDATES - 2]]
    names = [*(drawable(c.text, 12) for c in shown), "all others"]
    looks = [(VERMILLION, "////"), (BLUE, ""), *[("0.65", "")] * (len(names) - 2)]
    marks = {None: "{}", True: "✓ {} (right)", False: "✗ {} (wrong)"}
    answers = [marks[known].format(drawable(text, 20)) for text, known in zip((plain, pcd), is_right)]
    columns = (
        ("L\nthe model", [c.before for c in shown], "plain decoding writes\n" + answers[0], VERMILLION),
        # where the contrast changes a token, L* was evaluated
        ("L*\nthe local-aware evaluation", [c.local or 0.0 for c in shown], "this is subtracted", "0.35"),
        (f"{1 + beta:g} L − {beta:g} L*\nafter the contrast", [c.after for c in shown],
         "PCD writes\n" + answers[1], BLUE),
    )  # fmt: skip
    y = np.arange(len(names))[::-1]
    with drawing():
        figure, panels = new_figure(7.2, 0.24 * len(names) + 1.75, ncols=len(columns), sharey=True)
        where = f"next token, after {drawable(before, 40, from_end=True)}" if before else "answer's first token"
        figure.suptitle(f"Probabilities of the {where}", fontsize=9, x=0.005, ha="left", parse_math=False)
        for axes, (title, values, result, colour) in zip(panels, columns):
            shares = [*values, max(1 - sum(values), 0.0)]
            bars = axes.barh(y, [100 * p for p in shares], 0.72, color=[c for c, _ in looks], edgecolor="white")
            for bar, (_, hatch) in zip(bars, looks):
                bar.set_hatch(hatch)
            axes.bar_label(bars, [f"{100 * p:.1f}%" if p < 0.9995 else "100%" for p in shares], padding=3, fontsize=8.5)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel(result, fontsize=9, color=colour, loc="left", parse_math=False, labelpad=2)
            axes.set_xlim(0, 128)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(left=False)
        panels[0].set_yticks(y, names, parse_math=False, fontsize=9)
        for label, (colour, _) in zip(panels[0].get_yticklabels()[:2], looks):
            label.set(color=colour, weight="bold")
        return figure


def drawable(text: str, n: int, *, from_end: bool = False) -> str:
    """At most n characters of a text; those that are not printable or not in the font are escaped."""
    from matplotlib.font_manager import findfont, get_font  # type: ignore[import-not-found]

    font = get_font(findfont(_RC["font.family"]))
    has = [c.isprintable() and font.get_char_index(ord(c)) for c in text]
    kept = "".join(c if known else c.encode("unicode_escape").decode() for c, known in zip(text, has))
    if len(kept) <= n:
        return kept
    return "…" + kept[1 - n :] if from_end else kept[: n - 1] + "…"
