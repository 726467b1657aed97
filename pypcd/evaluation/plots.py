"""How pictures look, and those of `eval` and `explain`. Needs matplotlib.

They are for print and for the colour-blind: colours of Okabe and Ito, and a marker or hatch for each. The same data gives the same
file, byte for byte.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import files
from pypcd.errors import InputError, PCDError
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.report import Row
from pypcd.explain.places import Mark, Reading, between, last_of
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
    return figure, figure.subplot_mosaic(**kwargs) if "mosaic" in kwargs else figure.subplots(**kwargs)


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
    drawn = io.BytesIO()
    with drawing():
        figure.savefig(drawn, format=kind(path), metadata=blank[kind(path)])
    files.write(path, drawn.getvalue())
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
_COLOUR_OF = {"plain": VERMILLION, "PCD": BLUE, None: BLACK}


def decisive_token(
    step: Step,
    plain: str,
    pcd: str,
    reading: Reading,
    *,
    beta: float,
    is_right: tuple[bool | None, bool | None] = (None, None),
) -> Any:
    """A token where PCD and plain decoding differ: what each evaluation read before it, its candidates in L, in L* and after the
    contrast, and both answers.

    Args:
        step: the token's step, with is_changed.
        plain, pcd: the text of each answer from the first token on in which they differ.
        reading: the prompt, and what PCD wrote before the token.
        beta: strength of the contrast.
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
        size = (7.2, 0.24 * len(names) + 3.5)
        figure, grid = new_figure(*size, mosaic="ppp;LSC", height_ratios=(1.7, 0.24 * len(names) + 1.2))
        prompt, *panels = (grid[name] for name in "pLSC")
        _strip(prompt, reading)
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
            axes.set_yticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(left=False)
        panels[0].set_yticks(y, names, parse_math=False, fontsize=9)
        for label, (colour, _) in zip(panels[0].get_yticklabels()[:2], looks):
            label.set(color=colour, weight="bold")
        figure.set_dpi(_RC["savefig.dpi"])  # texts are not quite as wide at another one
        figure.draw_without_rendering()  # lays it out
        _write(prompt, reading)
        return figure


def _strip(axes: Any, reading: Reading) -> None:
    """The prompt from left to right, once as L and once as L* sees it, with the answers that stand in it."""
    n, seen = reading.n_tokens, reading.seen
    lanes = ((1.0, "L", (range(n),)), (0.0, "L*", seen))
    for y, _, parts in lanes:
        axes.barh(y, n, 0.62, color="white", edgecolor="0.7", linewidth=0.6)
        for part in parts:
            axes.barh(y, len(part), 0.62, part.start, color="0.82", linewidth=0)
    taken = [*seen, *(span for mark in reading.marks for span in mark.spans)]
    widest = max(between(taken, n), key=len, default=range(0))
    if len(widest) > 0.15 * n:
        middle = widest.start + len(widest) / 2
        axes.text(middle, 0, "not seen", ha="center", va="center", fontsize=8.5, color="0.35")
    for mark in reading.marks:
        _mark(axes, mark, n, lanes)
    axes.set_xlim(0, n)
    axes.set_ylim(-1.5, 2.4)
    axes.set_xticks([])
    axes.set_yticks([y for y, _, _ in lanes], [f"{name} sees" for _, name, _ in lanes], fontsize=9)
    axes.tick_params(left=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(_what_is_seen(n, seen), fontsize=9, loc="left")
    axes.set_xlabel(" ", fontsize=9, loc="left", parse_math=False)  # its room; the text is known once the width is


def _what_is_seen(n: int, seen: Sequence[range]) -> str:
    if len(seen) == 1 and len(seen[0]) == n:
        return f"The text so far: L and L* see all {n} tokens"
    first, last = (range(0), *seen)[-2:]
    parts = [f"the {name} {len(part)}" for name, part in (("first", first), ("last", last)) if part]
    return f"The text so far: L sees all {n} tokens, L* only {' and '.join(parts)}"


def _mark(axes: Any, mark: Mark, n: int, lanes: Sequence[tuple[float, str, Sequence[range]]]) -> None:
    """An answer in the lanes; where it is not seen, its outline in dots."""
    colour = _COLOUR_OF[mark.writer]
    least = 0.006 * n  # a long prompt's answer is to be seen too
    for y, _, parts in lanes:
        for span in mark.spans:
            left, width = min(span.start, n - least), max(len(span), least)
            inside = [range(max(span.start, part.start), min(span.stop, part.stop)) for part in parts]
            if span in inside:
                axes.barh(y, width, 0.62, left, color=colour, linewidth=0)
                continue
            axes.barh(y, width, 0.62, left, facecolor="white", edgecolor=colour, linestyle=":", linewidth=0.8)
            for part in filter(len, inside):
                axes.barh(y, len(part), 0.62, part.start, color=colour, linewidth=0)


def _write(axes: Any, reading: Reading) -> None:
    """The end of the text, and the text around each answer: the first above the lanes and the second below.

    The axes have their final size.
    """
    width = axes.get_window_extent().width
    _fit(
        axes.xaxis.label, width, lambda most: f"The next token, after “{drawable(reading.text, most, from_end=True)}”:"
    )
    for mark, (y, side) in zip(reading.marks, ((1.7, "bottom"), (-0.72, "top"))):
        colour = _COLOUR_OF[mark.writer]
        shown = axes.text(0, y, "", va=side, color=colour, fontsize=8.5, parse_math=False, in_layout=False)
        _fit(shown, width, functools.partial(_around, mark))


def _around(mark: Mark, most: int) -> str:
    writes = "PCD writes" if mark.writer == "PCD" else "plain decoding writes"
    what = "the right answer" if mark.is_right else writes
    if not mark.spans:
        return f"{what}, {drawable(mark.text, most // 3)}, does not stand in the prompt"
    times = f", {len(mark.spans)} times" if len(mark.spans) > 1 else ""
    return f"{what}{times}: {drawable(' '.join(mark.around.split()), most)}"


def _fit(label: Any, width: float, text: Callable[[int], str]) -> None:
    """Give a label as much of a text as fits in a width. `text`: at most so many characters of it."""
    for most in range(76, 8, -4):
        label.set_text(text(most))
        if label.get_window_extent().width <= width:
            return


def drawable(text: str, n: int, *, from_end: bool = False) -> str:
    """At most n characters of a text; those that are not printable or not in the font are escaped."""
    from matplotlib.font_manager import findfont, get_font  # type: ignore[import-not-found]

    text = text[-n - 1 :] if from_end else text[: n + 1]  # no more can be kept
    font = get_font(findfont(_RC["font.family"]))
    has = [c.isprintable() and font.get_char_index(ord(c)) for c in text]
    kept = "".join(c if known else c.encode("unicode_escape").decode() for c, known in zip(text, has))
    if from_end:
        return last_of(kept, n)
    return kept if len(kept) <= n else kept[: n - 1] + "…"
