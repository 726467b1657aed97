#!/usr/bin/env python3
"""Gain on long retrieval against loss on everyday questions, from the answers of `pypcd eval`: a table and a picture.

    python scripts/recipes/models.py FOLDER… --out docs/evidence/models

FOLDER is what `pypcd eval --out` has written, or holds several such. Only the second half of the questions counts, as
settings are chosen on the first (--half).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from pypcd.analysis import _plots
from pypcd.evaluation import balance, balance_csv, balance_markdown, read_run
from pypcd.evaluation._balance import Run
from pypcd.evaluation._plan import HALVES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folders", nargs="+", type=pathlib.Path, metavar="FOLDER")
    add("--half", choices=HALVES, default="second", help="which questions count (default %(default)s)")
    add("--out", type=pathlib.Path, required=True, help="the folder of the table and the picture")
    args = parser.parse_args()
    write([read_run(folder) for folder in args.folders], args.half, args.out)


def write(runs: list[Run], half: str, out: pathlib.Path) -> None:
    rows = [row for run in runs for row in balance(run, half)]
    if not rows:
        raise SystemExit(f"there are no answers to questions of the {half} half; run pypcd eval with --half {half}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(balance_markdown(runs, half), encoding="utf-8")
    (out / "summary.csv").write_text(balance_csv(runs, half), encoding="utf-8")
    record = {run.name: {"left_out": run.notes, "runs": run.facts} for run in runs}
    (out / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(balance_markdown(runs, half))
    try:
        _plots.save(_plots.balances(rows), out / "summary.png")
    except ValueError as error:
        (out / "summary.png").unlink(missing_ok=True)  # that of another run would not fit the table
        print(f"no picture was drawn: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
