"""What repeating passages gains, against how often plain decoding is right: a point for each model, length and kind of question.

    python -m research.finding MODEL --half second --paragraphs 12 --finder both --answers --json >12.jsonl
    python -m research.gain "SmolLM2 135M, XQuAD=12.jsonl" …
    python -m research.gain docs/evidence/gain.md --out gain.png

The points are of answers that research.finding wrote, each question answered plainly and with the passages of one finder; or of a table
that was made of such answers, and is on a page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence

from pypcd.errors import InputError
from pypcd.evaluation import stats
from research import plots
from research.command import command

__all__ = ["Point", "draw", "point_of", "points_of_page", "table"]

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito
_MARKERS = "os^D"
_HEAD = "| model | questions | tokens | n | plain | with passages | difference | wins / losses | spoilt |"


@dataclasses.dataclass(frozen=True)
class Point:
    """Answers of one model to one kind of question about texts of one length.

    Attributes:
        tokens: the median length of the plain prompts.
        plain: how often plain decoding is right, in percent.
        paired: with the passages, against plain.
    """

    model: str
    questions: str
    tokens: float
    plain: float
    paired: stats.Paired


def point_of(spelling: str) -> Point:
    """Read MODEL, QUESTIONS=FILE; answers that a stopped run has of one arm alone are left out.

    Raises:
        InputError: it is spelled otherwise, or no question of the file was answered both ways.
    """
    names, _, file = spelling.partition("=")
    model, comma, questions = names.partition(", ")
    if not file or not comma:
        raise InputError(f"the point is {spelling!r}; allowed: MODEL, QUESTIONS=FILE")
    rows = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines() if line.endswith("}")]
    plain, other = ({row["id"]: row for row in rows if row["finder"] == name} for name in ("plain", "both"))
    asked = [one for one in plain if one in other]
    if not asked:
        raise InputError(f"{file} has no question with answers of 'plain' and of 'both'; allowed: what --json printed")
    scores = ([arm[one]["right"] for one in asked] for arm in (other, plain))
    right = 100 * statistics.fmean(plain[one]["right"] for one in asked)
    tokens = statistics.median(plain[one]["tokens"] for one in asked)
    return Point(model, questions, tokens, right, stats.paired(*scores))


def points_of_page(path: pathlib.Path) -> list[Point]:
    """Read the lines of a table() on a page. Its counts say all of it, intervals too: each answer was right or wrong.

    Raises:
        InputError: the page has no such table.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    points = []
    for line in lines[lines.index(_HEAD) + 2 :] if _HEAD in lines else ():
        if not line.startswith("|"):
            break
        model, questions, tokens, n, plain, _, _, differ, _ = (cell.strip() for cell in line.strip("|").split("|"))
        wins, losses = map(int, differ.split(" / "))
        right = round(float(plain) * int(n) / 100)
        alike = [1.0] * (right - losses) + [0.0] * (int(n) - right - wins)
        compared = stats.paired([1.0] * wins + [0.0] * losses + alike, [0.0] * wins + [1.0] * losses + alike)
        points.append(Point(model, questions, float(tokens), 100 * right / int(n), compared))
    if not points:
        raise InputError(f"{path} has no table with the line {_HEAD!r}")
    return points


def table(points: Sequence[Point]) -> Iterator[str]:
    yield _HEAD
    yield "|---|---|---:|---:|---:|---:|---|---|---|"
    for one in points:
        p = one.paired
        cells = f"| {one.model} | {one.questions} | {one.tokens:.0f} | {p.n} | {one.plain:.1f} | {p.score:.1f} | "
        yield cells + f"{stats.interval(p)} | {p.wins} / {p.losses} | {p.spoilt} of {p.right} |"


def draw(points: Sequence[Point], path: pathlib.Path) -> None:
    """Each point with its 95% interval and its length; colours are models, shapes kinds of question, filled a shown difference."""
    models, kinds = ([*dict.fromkeys(names)] for names in zip(*((one.model, one.questions) for one in points)))
    with plots.drawing():
        figure, axes = plots.new_figure(6.4, 4)
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        seen = list[Point]()
        for one in points:
            colour, p = _COLOURS[models.index(one.model) % len(_COLOURS)], one.paired
            axes.plot([one.plain] * 2, [p.low, p.high], color=colour, linewidth=0.8, alpha=0.6)
            marker = _MARKERS[kinds.index(one.questions) % len(_MARKERS)]
            face = colour if p.is_clear else "white"
            axes.plot(one.plain, p.difference, marker=marker, color=colour, markerfacecolor=face, markersize=6)
            beside = any(
                abs(other.plain - one.plain) < 3 and abs(other.paired.difference - p.difference) < 3 for other in seen
            )
            where = {"xytext": (-5, 4), "ha": "right"} if beside else {"xytext": (5, 4)}
            label, at = f"{one.tokens / 1000:.1f}k", (one.plain, p.difference)
            axes.annotate(label, at, textcoords="offset points", fontsize=6.5, **where)
            seen.append(one)
        for index, model in enumerate(models):
            axes.plot([], [], linestyle="", marker="o", color=_COLOURS[index % len(_COLOURS)], label=model)
        for index, kind in enumerate(kinds):
            axes.plot([], [], linestyle="", marker=_MARKERS[index % len(_MARKERS)], color="0.5", label=kind)
        axes.legend(loc="upper right")
        axes.set_xlim(0, 100)
        axes.set_xlabel("right with plain decoding (%)")
        axes.set_ylabel("difference with passages repeated (points), 95% interval")
        plots.save(figure, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("points", metavar="MODEL, QUESTIONS=FILE", nargs="+", help="or a page with a table, FILE.md")
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, help="a picture")


def run(args: argparse.Namespace) -> int:
    points = list[Point]()
    for given in args.points:
        points += points_of_page(pathlib.Path(given)) if given.endswith(".md") else [point_of(given)]
    print(*table(points), sep="\n")
    if args.out:
        draw(points, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(command("gain", add_arguments, run))
