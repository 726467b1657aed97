#!/usr/bin/env python3
"""Lay the runs of `scripts/evidence study` side by side: docs/evidence/study/summary.md, .csv and .png.

    python scripts/recipes/study_table.py build/evidence docs/evidence/study

`scripts/evidence study` calls it.
"""

from __future__ import annotations

import collections
import csv
import json
import pathlib
import sys

import numpy as np

from pypcd import plots
from pypcd.evaluation import Paired, paired
from pypcd.evaluation.stats import interval
from pypcd.lab import figures

KINDS = {
    "pulled": "Models with the pull planted",
    "plain": "The same models before the pull",
}
# as the runs name them -> as the tables do
METHODS = {
    "pcd:beta=0.5": "rerotated, beta 0.5",
    "pcd:beta=1.5": "rerotated, beta 1.5",
    "pcd": "rerotated, beta 2.5",
    "pcd:relative_top=0.1": "rerotated, relative_top 0.1",
    "pcd:relative_top=0.3": "rerotated, relative_top 0.3",
    "pcd:cache=separate:beta=0.5": "separate, beta 0.5",
    "pcd:cache=separate:beta=1.5": "separate, beta 1.5",
    "pcd:cache=separate": "separate, beta 2.5",
    "pcd:cache=separate:relative_top=0.1": "separate, relative_top 0.1",
    "pcd:cache=separate:relative_top=0.3": "separate, relative_top 0.3",
    "pcd:cache=shared:beta=0.5": "shared, beta 0.5",
    "pcd:cache=shared:beta=1.5": "shared, beta 1.5",
    "pcd:cache=shared": "shared, beta 2.5",
    "pcd:base_ratio=0.1": "rerotated, base_ratio 0.1",
    "pcd:perturbation=none:window=16": "window 16",
    "pcd:perturbation=none:window=64": "window 64",
    "control": "control",
}
DRAWN = ("pcd", "pcd:cache=separate", "pcd:cache=shared", "pcd:perturbation=none:window=16", "control")
BANDS = ((90, 101), (60, 90), (40, 60), (0, 40))

Cell = tuple[str, int, int]  # kind, seed, length
Scores = dict[tuple[Cell, str], list[float]]  # question by question


def read(folder: pathlib.Path) -> Scores:
    found: dict[tuple[Cell, str], dict[int, float]] = collections.defaultdict(dict)
    for kind in KINDS:
        for run in sorted(folder.glob(f"study-{kind}-*")):
            for line in (run / "samples.jsonl").read_text().splitlines():
                r = json.loads(line)
                found[(kind, int(run.name.rsplit("-", 1)[1]), r["length"]), r["method"]][r["index"]] = r["score"]
    return {key: [scores[i] for i in sorted(scores)] for key, scores in found.items()}


def compare(scores: Scores, method: str, cells: list[Cell]) -> Paired:
    mine, plain = ([x for cell in cells for x in scores[cell, m]] for m in (method, "greedy"))
    return paired(mine, plain)


def cells_of(scores: Scores, kind: str) -> list[Cell]:
    return sorted({cell for cell, _ in scores if cell[0] == kind})


def greedy(scores: Scores, cell: Cell) -> float:
    return 100 * float(np.mean(scores[cell, "greedy"]))


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def heading(*names: str) -> list[str]:
    return [row(*names), row(*["---"] * len(names))]


def compared(scores: Scores, columns: dict[str, list[Cell]]) -> list[str]:
    """A line for each method, a column for each group of cells."""
    plain = (f"{compare(scores, 'greedy', cells).score:.1f}" for cells in columns.values())
    lines = [*heading("", *columns), row("greedy", *plain)]
    for method, name in METHODS.items():
        lines.append(row(name, *(interval(compare(scores, method, cells)) for cells in columns.values())))
    return lines


def tables(scores: Scores) -> str:
    n = len(next(iter(scores.values())))
    lines = [
        "# The study's tables",
        "",
        f"{n} questions of `kv-short` a cell; differences to greedy in points with their 95% bootstrap interval over",
        "questions; ~: no difference shown (the interval spans zero, or McNemar's p is 0.05 or more). beta is 2.5 where none",
        "is given. Three seeds are three models: an interval holds for these, not for all models of their kind.",
        "",
        "    scripts/evidence study",
        "",
    ]
    for kind, title in KINDS.items():
        cells = cells_of(scores, kind)
        lengths = sorted({length for _, _, length in cells})
        lines += [f"## {title}", "", "Three seeds together:", ""]
        lines += compared(scores, {f"{n} tokens": [c for c in cells if c[2] == n] for n in lengths})
        lines += ["", "Cells grouped by greedy's score:", ""]
        bands = {(low, high): [c for c in cells if low <= greedy(scores, c) < high] for low, high in BANDS}
        lines += compared(scores, {f"{low}-{min(high, 100)}% ({len(g)})": g for (low, high), g in bands.items() if g})
        lines += ["", "Seed by seed:", ""]
        lines += heading("seed", "tokens", "greedy", *(METHODS[m] for m in DRAWN))
        for cell in cells:
            differences = (interval(compare(scores, method, [cell])) for method in DRAWN)
            lines += [row(str(cell[1]), str(cell[2]), f"{greedy(scores, cell):.1f}", *differences)]
        lines += [""]
    return "\n".join(lines)


def models(folder: pathlib.Path) -> str:
    """What was asked, run by run."""
    lines = ["## The models", "", *heading("run", "SHA-256 of the GGUF", "pypcd", "llama-cpp-python")]
    for kind in KINDS:
        for run in sorted(folder.glob(f"study-{kind}-*")):
            record = json.loads((run / "run.json").read_text())
            lines += [row(run.name, record["model_sha256"], record["pypcd"], record["llama_cpp_python"])]
    return "\n".join([*lines, ""])


def write_csv(scores: Scores, path: pathlib.Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["kind", "seed", "length", "method", "n", "score", "difference", "low", "high", "wins", "losses", "p"]
        )
        for cell, method in sorted(scores):
            p = compare(scores, method, [cell])
            values = [p.score, p.difference, p.low, p.high]
            writer.writerow([*cell, method, p.n, *(f"{v:.2f}" for v in values), p.wins, p.losses, f"{p.p:.3g}"])


def main(source: str, target: str) -> None:
    scores, folder = read(pathlib.Path(source)), pathlib.Path(target)
    (folder / "summary.md").write_text(tables(scores) + "\n" + models(pathlib.Path(source)))
    write_csv(scores, folder / "summary.csv")
    panels = {
        title: {
            METHODS[method]: [
                [
                    (cell[2], compare(scores, method, [cell]).difference)
                    for cell in cells_of(scores, kind)
                    if cell[1] == seed
                ]
                for seed in sorted({cell[1] for cell in cells_of(scores, kind)})
            ]
            for method in DRAWN
        }
        for kind, title in KINDS.items()
    }
    plots.save(figures.seeds(panels), folder / "summary.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
