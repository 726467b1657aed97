#!/usr/bin/env python3
"""What the preset `gentle` was chosen from: every formula tried on the first half of the questions, in one table.

    python scripts/recipes/search.py build/evidence/smollm2.gguf

`scripts/evidence search` calls it. Records the rows along the right answers (pypcd/evaluation/_rows.py) of retrieval and
everyday questions, a few hundred of each, and judges all formulas on them: summary.csv has them all, summary.md the best of
each kind. The best of many flatters itself; what was chosen is judged on the other half, by decoding.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from pypcd._cli import _progress, _terminal
from pypcd._errors import PCDError
from pypcd.evaluation import Directory, Formula, Paired, Plan, Screen, record
from pypcd.evaluation._balance import LONG, RETRIEVAL, SHORT_PROMPTS, group_of
from pypcd.evaluation._stats import NOT_SHOWN, interval, paired_counts
from pypcd.evaluation.tasks._everyday import SHORT

WINDOWS = tuple(f"pcd:window:window={n}" for n in (32, 64, 128, 256))
TURNED = ("pcd:base_ratio=0.5", "pcd:base_ratio=0.1", "pcd:base_ratio=0.01", "pcd:base_ratio=0.1:cache=shared")

# folder -> tasks, tokens, questions of which half is recorded, longest answer, views
PARTS = {
    "needles600": (("niah-multikey-2",), 600, 160, 40, WINDOWS),
    "needles1500": (("niah-multikey-2",), 1500, 60, 40, WINDOWS),
    "uuids600": (("niah-multikey-3",), 600, 80, 48, WINDOWS),
    "kv600": (("kv-short",), 600, 60, None, WINDOWS),
    "short": (("everyday",), SHORT, 24, None, WINDOWS),
    "shots1000": (("everyday",), 1000, 26, None, WINDOWS),
    "shots2000": (("everyday",), 2000, 8, None, WINDOWS),
    "behind1000": (("everyday-behind",), 1000, 20, None, WINDOWS),
}
# over-rotation on fewer questions: it helped nowhere
PARTS_TURNED = {
    "turned600": (("niah-multikey-2",), 600, 80, 40, TURNED),
    "turned-shots1000": (("everyday",), 1000, 4, None, TURNED),
}

BETAS = ("0.25", "0.5", "0.75", "1", "1.5", "2.5", "2.5*jsd", "5*jsd", "10*jsd", "20*jsd", "sqrt(jsd)", "2*sqrt(jsd)")
CUTS = ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8")
SURE = ("", "entropy>=1.5", "entropy>=2", "entropy>=2.5", "entropy>=3")
# safeguards, each alone: on the model's or the twin's sureness, on how much or how the rows disagree, on what is lifted
GUARDS = (
    *(f"top<{p}" for p in (0.3, 0.4, 0.5, 0.6)),
    *(f"top_s<{p}" for p in (0.3, 0.5, 0.6, 0.8)),
    *(f"entropy_s>{bits}" for bits in (1, 1.5, 2, 3)),
    *(f"jsd>{d}" for d in (0.05, 0.1, 0.2, 0.4, 0.6)),
    *(f"(l-s)>{nats}" for nats in (0, 0.5, 1, 2, 3, 4)),
    *("jsd<0.3", "rank>1", "rank<=2", "rank<=3", "rank_back>1", "rank_back<=2", "rank_back>3"),
    *("entropy>entropy_s", "entropy<entropy_s", "entropy<entropy_s+1", "step<3"),
    *("entropy>=2 and jsd>0.05", "entropy>=2 and top_s<0.8", "entropy>=1.5 and top<0.5"),
)


def formulas(views: Sequence[str]) -> Iterator[str]:
    for view, beta, cut in itertools.product(views, BETAS, CUTS):
        guards = GUARDS if view == WINDOWS[1] and beta in ("0.5", "1", "2.5", "10*jsd") else ()
        for where in (*(SURE if view in WINDOWS else SURE[:1]), *guards):
            yield f"{view}:beta={beta}:relative_top={cut}" + (f":where={where}" if where else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model")
    add("--work", type=pathlib.Path, default="build/evidence/search", help="where the rows are (default %(default)s)")
    add("--out", type=pathlib.Path, default="docs/evidence/search", help="for the tables (default %(default)s)")
    add("--jobs", type=int, default=1)
    args = parser.parse_args()

    try:
        write(args)
    except (ValueError, FileNotFoundError, PCDError) as error:
        raise SystemExit(f"search: {error}") from error


def write(args: argparse.Namespace) -> None:
    tables = [table(args, parts, views) for parts, views in ((PARTS, WINDOWS), (PARTS_TURNED, TURNED))]
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(args.out / "summary.csv", [row for rows in tables for row in rows])
    (args.out / "summary.md").write_text("\n\n".join(map(markdown, tables)) + f"\n\n{NOT_SHOWN}\n", encoding="utf-8")
    _terminal.say(f"tables are in {args.out}")


Row = tuple[str, dict[str, Paired]]  # a formula, and its comparison with greedy in each group of questions


def table(args: argparse.Namespace, parts: dict[str, tuple], views: Sequence[str]) -> list[Row]:
    """Each formula on all questions of these parts."""
    wanted = [Formula.parse(text) for text in formulas(views)]
    rows: list[Row] = [(formula.name, {}) for formula in wanted]
    grouped: dict[str, dict] = {}
    for name, (tasks, length, n, max_tokens, of) in parts.items():
        plan = Plan(args.model, tasks, of, (length,), n=n, max_tokens=max_tokens, half="first")
        options = {"n_threads": 1, "n_threads_batch": 1}
        with _progress.following(name) as progress:
            found = record(plan, Directory(args.work / name), jobs=args.jobs, options=options, progress=progress)
        for key, one in found.records.items():
            grouped.setdefault(group_of(key[0], key[1]), {})[key] = one
    for group, records in grouped.items():
        screen = Screen(records)
        plain, _ = screen.follow(Formula(None))
        for (_, cells), formula in zip(rows, wanted):
            cells[group] = paired_counts(screen.follow(formula)[0], plain)
    return rows


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["formula", *(f"{name}: {what}" for name in names for what in ("n", "wins", "losses"))])
        for formula, cells in rows:
            found = [cells.get(name) for name in names]
            writer.writerow(
                [formula, *itertools.chain(*(("", "", "") if p is None else (p.n, p.wins, p.losses) for p in found))]
            )


def markdown(rows: Sequence[Row]) -> str:
    """The 15 formulas with the highest gain among those without a loss in long everyday prompts, and 15 of all; of those with
    the same figures the first one."""
    groups = [name for name in (RETRIEVAL, LONG, SHORT_PROMPTS) if name in rows[0][1]]
    spared = [row for row in rows if LONG not in row[1] or row[1][LONG].difference >= 0]
    what = "Points against greedy with 95% intervals (over answers), on the first half of the questions; wins / losses."
    lines = [f"{len(rows)} formulas. {what}\n"]
    sizes = {name: rows[0][1][name].n for name in groups}
    plain = {name: rows[0][1][name].score - rows[0][1][name].difference for name in groups}
    head = [f"{name} (greedy {plain[name]:.1f}, n = {sizes[name]})" for name in groups]
    for title, part in (("No loss in long everyday prompts", spared), ("All", rows)):
        unlike: dict[tuple, Row] = {}
        for row in part:
            unlike.setdefault(tuple((p.wins, p.losses) for p in row[1].values()), row)
        best = sorted(unlike.values(), key=lambda row: -row[1][RETRIEVAL].difference)[:15]
        lines += [
            f"{title}, the 15 with the highest gain\n",
            f"| formula | {' | '.join(head)} |",
            "| --- " * (1 + len(groups)) + "|",
        ]
        lines += [
            f"| `{name}` | {' | '.join(f'{interval(c[g])} ({c[g].wins} / {c[g].losses})' for g in groups)} |"
            for name, c in best
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
