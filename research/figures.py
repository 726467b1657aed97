"""The lab's figures, in the style of `research.plots`. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pypcd.errors import InputError
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import MARGIN, Paired
from research.balance import LONG, RETRIEVAL, SHORT_PROMPTS, GainLoss, controlled, greedys
from research.decay import CURVES, Curves, bins
from research.plots import BLACK, BLUE, VERMILLION, drawing, new_figure
from research.salience import RANKS, SalienceRow, count_ranks
from research.spectrum import Spectrum

__all__ = ["balances", "decay", "decay_grid", "logits", "ranks", "salience", "spectrum"]

ORANGE, SKY, GREEN, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#CC79A7"

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

_DECAY: Mapping[str, tuple[str, str, Any]] = {
    "standard": ("standard", BLACK, "-"),
    "over_rotated": ("over-rotated", VERMILLION, (0, (1, 1))),
    "contrasted": ("PCD", BLUE, "--"),
}


# -- decay ------------------------------------------------------------------------------------------


def decay(curves: Curves) -> Any:
    """Figure 3b: scores over distance, with mean and range in bins of the distance."""
    with drawing():
        figure, axes = new_figure(4.6, 3.0)
        _decay_curves(axes, curves)
        axes.set_xlabel("distance between query and key (tokens)")
        axes.set_ylabel("attention score (1 = at distance 0)")
        axes.legend(loc="upper right")
        return figure


def _decay_curves(axes: Any, curves: Curves, n: int = 96) -> None:
    for name in CURVES:
        label, colour, style = _DECAY[name]
        parts = bins(curves.distance, getattr(curves, name), n)
        axes.fill_between(parts["distance"], parts["low"], parts["high"], color=colour, alpha=0.18, linewidth=0)
        axes.plot(parts["distance"], parts["mean"], color=colour, linestyle=style, label=label)
    axes.set_xscale("log")
    axes.set_xlim(1, curves.distance.max())
    axes.axhline(0, color="0.6", linewidth=0.5, zorder=0)


_GREEK = {"d": "d", "beta": "β", "alpha": "α", "base": "B", "over_base": "B'"}


def decay_grid(cases: Sequence[tuple[str, float, Curves]]) -> Any:
    """Figure 4: the same with one value changed at a time: a row for each name, a column for each of its values."""
    rows: dict[str, list[tuple[float, Curves]]] = {}
    for name, value, curves in cases:
        rows.setdefault(name, []).append((value, curves))
    n_columns = max(map(len, rows.values()))
    with drawing():
        figure, grid = new_figure(
            7.2, 1.35 * len(rows) + 0.5, nrows=len(rows), ncols=n_columns, sharex=True, sharey=True, squeeze=False
        )
        for row, (name, items) in zip(grid, rows.items()):
            for axes in row[len(items) :]:
                axes.set_axis_off()
            for axes, (value, curves) in zip(row, items):
                _decay_curves(axes, curves, 48)
                axes.set_title(f"{_GREEK[name]} = {_number(value)}", loc="right", pad=2)
        grid[0][0].set_ylim(-0.6, 1.4)
        figure.supxlabel("distance between query and key (tokens)", fontsize=8)
        figure.supylabel("attention score (1 = at distance 0)", fontsize=8)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        return figure


def _number(value: float) -> str:
    if value >= 1e4:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:g}"


# -- salience ------------------------------------------------------------------------------------------


def salience(rows: Sequence[SalienceRow]) -> Any:
    """Figure 2: S(L) over length; left for all questions, right for those that plain decoding gets wrong."""
    with drawing():
        figure, (left, right) = new_figure(6.4, 2.8, ncols=2, sharey=True)
        for axes, field, title in (
            (left, "salience", "all questions"),
            (right, "salience_wrong", "questions that plain decoding gets wrong"),
        ):
            for (method, items), (colour, style, marker) in zip(_by_method(rows).items(), STYLES):
                drawn = [(c.n_tokens, getattr(c, field)) for c in items if getattr(c, field) is not None]
                axes.plot(*_columns(drawn), color=colour, linestyle=style, marker=marker, label=method)
            axes.set_title(title)
            _length_axis(axes, rows)
        left.set_ylim(0, 1.02)
        left.set_ylabel("salience S(L) (mean of 1 / rank)")
        left.legend(loc="lower left")
        return figure


def ranks(by_method: Mapping[str, Sequence[int]]) -> Any:
    """Figure 3a: the ranks of the gold token (the right answer's first one), in percent of the questions."""
    with drawing():
        figure, axes = new_figure(4.6, 2.8)
        width = 0.8 / len(by_method)
        for i, (method, values) in enumerate(by_method.items()):
            counts = np.array(count_ranks(values))
            x = np.arange(len(RANKS)) + (i - (len(by_method) - 1) / 2) * width
            bars = axes.bar(
                x,
                100 * counts / max(len(values), 1),
                width,
                color=_FILLS[i % len(_FILLS)],
                edgecolor="black",
                linewidth=0.6,
                hatch=HATCHES[i % len(HATCHES)],
                label=method,
            )
            axes.bar_label(bars, [str(c) if c else "" for c in counts], fontsize=5, padding=1)
        axes.set_xticks(np.arange(len(RANKS)), _rank_labels())
        axes.set_xlabel("rank of the gold token")
        axes.set_ylabel("questions (%)")
        axes.legend(loc="upper right")
        return figure


_FILLS = (SKY, ORANGE, "white", PURPLE, GREEN)


def _rank_labels() -> list[str]:
    ends = [*(n - 1 for n in RANKS[1:]), None]
    return [
        str(start) if end == start else f"{start}+" if end is None else f"{start}–{end}"
        for start, end in zip(RANKS, ends)
    ]


def logits(rows: Sequence[SalienceRow]) -> Any:
    """Figure 5: mean logits of the gold token and of the best other tokens over length, a panel for each method."""
    by_method = _by_method(rows)
    with drawing():
        figure, panels = new_figure(3.2 * len(by_method), 2.9, ncols=len(by_method), squeeze=False)
        for axes, (method, items) in zip(panels[0], by_method.items()):
            gold = [(c.n_tokens, c.gold_logit) for c in items if c.gold_logit is not None]
            axes.plot(*_columns(gold), color=BLUE, marker="o", linewidth=2, label="gold token", zorder=3)
            n = max(len(c.competitor_logits) for c in items)
            for i in range(n):
                drawn = [(c.n_tokens, c.competitor_logits[i]) for c in items if len(c.competitor_logits) > i]
                shade = str(0.15 + 0.55 * i / max(n - 1, 1))
                axes.plot(
                    *_columns(drawn),
                    color=shade,
                    linestyle="--",
                    marker=".",
                    linewidth=1,
                    label=f"other token {i + 1}" + " (best)" * (i == 0),
                )
            axes.set_title(method if method == BASELINE else f"{method} (contrasted logits)")
            _length_axis(axes, rows)
        panels[0][0].set_ylabel("mean logit")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        return figure


def _by_method(rows: Sequence[SalienceRow]) -> dict[str, list[SalienceRow]]:
    found: dict[str, list[SalienceRow]] = {}
    for row in sorted(rows, key=lambda r: r.length):
        found.setdefault(row.method, []).append(row)
    return found


def _columns(points: Sequence[tuple[float, Any]]) -> tuple[list[float], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]


def _length_axis(axes: Any, rows: Sequence[SalienceRow]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator  # type: ignore[import-not-found]

    lengths = sorted({row.n_tokens for row in rows})
    axes.set_xscale("log")
    shown = lengths[-1:]
    for n in reversed(lengths):  # labels must not overlap
        if np.log(shown[-1] / n) > 0.17 * np.log(lengths[-1] / lengths[0]):
            shown.append(n)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{n:.0f}" if n < 1000 else f"{n / 1000:.3g}k" for n in shown])
    axes.set_xlabel("length of the prompt (tokens)")


# -- gain and loss ------------------------------------------------------------------------------------------

_FAR = -30.0, 60.0  # points: what lies further out is drawn at the edge


def balances(rows: Sequence[GainLoss]) -> Any:
    """Gain on long retrieval over the difference on everyday questions, short and long: a point for each setting with
    both 95% intervals, a line of panels for each model. A setting that was not asked both is left out.

    Raises:
        ValueError: no setting was asked both.
    """
    points = [(row, group, row.groups[group], row.groups[RETRIEVAL]) for row in rows for group in (SHORT_PROMPTS, LONG)
              if row.method != BASELINE and RETRIEVAL in row.groups and group in row.groups]  # fmt: skip
    if not points:
        raise InputError("there is nothing to draw: no setting has answers to long retrieval and to everyday questions")
    methods = list(dict.fromkeys(row.method for row, _, _, _ in points))
    models = list(dict.fromkeys(row.model for row, _, _, _ in points))
    groups = [group for group in (SHORT_PROMPTS, LONG) if any(point[1] == group for point in points)]
    x, y = _limits([p for _, _, p, _ in points]), _limits([p for _, _, _, p in points])
    with drawing():
        figure, grid = new_figure(7.2, 0.55 + 2.7 * len(models), nrows=len(models), ncols=len(groups), sharex=True,
                               sharey=True, squeeze=False)  # fmt: skip
        for line, model in zip(grid, models):
            for axes, group in zip(line, groups):
                shown = [(row.method, p, gain) for row, g, p, gain in points if (row.model, g) == (model, group)]
                _balance(axes, shown, methods, x, y)
                scores = [f"greedy: {greedys(p):.0f}% right, retrieval {greedys(gain):.0f}%" for _, p, gain in shown]
                name = [model] if len(models) > 1 else []
                axes.set_title("\n".join([*name, f"{group} prompts", *scores[:1]]), parse_math=False)
        figure.supxlabel(f"difference on everyday questions (points); green: less than {MARGIN:g} lost", fontsize=8)
        figure.supylabel("gain on long retrieval (points)", fontsize=8)
        handles = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels())}
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=min(len(handles), 4))
        return figure


_Ends = tuple[float, float]  # of an axis


def _balance(
    axes: Any, shown: Sequence[tuple[str, Paired, Paired]], methods: Sequence[str], x: _Ends, y: _Ends
) -> None:
    axes.axvspan(-MARGIN, x[1], color=GREEN, alpha=0.1, linewidth=0, zorder=0)
    axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    for method, p, gain in shown:
        colour, marker, face = _look(method, methods)
        at = _within(p.difference, x), _within(gain.difference, y)
        axes.plot([p.low, p.high], [at[1]] * 2, color=colour, linewidth=1)
        axes.plot([at[0]] * 2, [gain.low, gain.high], color=colour, linewidth=1)
        axes.plot(*at, color=colour, marker=marker, markerfacecolor=face, markersize=5.5, linestyle="", zorder=3,
                  label=_label(method, methods))  # fmt: skip
    axes.set_xlim(x)
    axes.set_ylim(y)
    axes.tick_params(labelbottom=True, labelleft=True)


def _limits(differences: Sequence[Paired]) -> _Ends:
    """The ends of an axis that holds all intervals, as far as _FAR, and always a few points around zero."""
    low = max(_FAR[0], min(-6.0, *(p.low for p in differences)))
    high = min(_FAR[1], max(4.0, *(p.high for p in differences)))
    margin = 0.04 * (high - low)
    return low - margin, high + margin


def _within(value: float, ends: _Ends) -> float:
    """The value, or the end of the axis, less the marker's size, where it is beyond."""
    low, high = ends
    margin = 0.025 * (high - low)
    return value if low <= value <= high else float(np.clip(value, low + margin, high - margin))


def _label(method: str, methods: Sequence[str]) -> str:
    of = ", ".join(name.removeprefix("pcd:") for name in controlled(method, methods))
    label = f"control of {of}" if of else method.removeprefix("pcd:")
    lines = textwrap.wrap(label.replace(":", ": "), 24, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.replace(": ", ":") for line in lines)


def _look(method: str, methods: Sequence[str]) -> tuple[str, str, str]:
    """Colour, marker and filling of a method, the same in all panels; controls have no colour."""
    is_control = method.startswith("control")
    i = [name for name in methods if name.startswith("control") == is_control].index(method)
    if is_control:
        return "0.45", "XPd*"[i % 4], "0.45"
    colour, _, marker = STYLES[i % len(STYLES)]
    return colour, marker, colour if i < len(STYLES) else "white"


# -- spectrum ------------------------------------------------------------------------------------------


def spectrum(result: Spectrum) -> Any:
    """Each block's contribution to the scores over distance, before and after over-rotation; the attention over distance;
    and the change of its reach when one block is over-rotated."""
    with drawing():
        figure, panels = new_figure(7.2, 5.0, nrows=2, ncols=2)
        n_blocks = len(result.reach_alone)
        edges = 1.0 + result.edges  # the axis is logarithmic, and distances begin at 0
        sides = (("before over-rotation", result.before), ("after over-rotation", result.after))
        largest = max(float(np.abs(side.contribution[:, :n_blocks]).max()) for _, side in sides)
        for axes, (title, side) in zip(panels[0], sides):
            mesh = axes.pcolormesh(
                edges,
                np.arange(n_blocks + 1) + 0.5,
                side.contribution[:, :n_blocks].T,
                cmap="PuOr",
                vmin=-largest,
                vmax=largest,
            )
            axes.set_xscale("log")
            axes.set_title(title)
            axes.set_xlabel("distance + 1 (tokens)")
        panels[0][0].set_ylabel("frequency block (1 is the fastest)")
        figure.colorbar(mesh, ax=list(panels[0]), label="mean contribution to the score")

        where, reach = panels[1]
        for (title, side), (colour, style, marker) in zip(sides, STYLES):
            where.plot(np.sqrt(edges[:-1] * edges[1:]), side.attention, color=colour, linestyle=style, marker=marker,
                       label=f"{title}, reach {side.reach:.0f}")  # fmt: skip
        where.set_xscale("log")
        where.set_xlabel("distance + 1 (tokens)")
        where.set_ylabel("attention in the bin")
        where.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
        reach.bar(np.arange(1, n_blocks + 1), result.reach_alone - result.before.reach, color=BLUE)
        reach.axhline(0, color="0.4", linewidth=0.6)
        reach.set_xlabel("the block that alone is over-rotated")
        reach.set_ylabel("change of the reach (tokens)")
        return figure
