#!/usr/bin/env python3
"""Judge many ways to contrast on the same questions, without decoding for each.

    python scripts/recipes/screen.py MODEL --task niah-multikey-2 --length 600 --n 100 --out DIR \\
        pcd:window pcd:window:beta={1,2.5,5*jsd}:relative_top={0,0.1,0.3} 'pcd:window:where=rank>1'

Records the rows along the right answers once (pypcd/lab/recorded.py), a view of PCD at a time, and judges the formulas
on them (pypcd/lab/formula.py says what they may be). Stopped, it goes on where it was; more formulas of recorded views take
milliseconds. Every formula is listed, the best first; the best of many flatters itself, so choose on one half of the
questions (--half first) and judge on the other (--half second). --check decodes by the formulas, and shows how often the
verdicts agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

from pypcd.cli import _options, _progress
from pypcd.cli._text import sentence
from pypcd.decode import PCD
from pypcd.evaluation import Directory, Plan
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import HALVES
from pypcd.evaluation.stats import NOT_SHOWN, interval
from pypcd.lab.formula import Formula
from pypcd.lab.recorded import record
from pypcd.lab.screen import Agreement, Scored, Screen, agreement, score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model")
    add("formulas", nargs="*", help="greedy, or pcd:… with expressions for beta, relative_top and where")
    add("--formulas", dest="file", metavar="FILE", help="more of them, one a line")
    add("--task", required=True, help="one or more, with commas")
    add("--length", required=True, help="tokens, one or more, with commas")
    add("--n", type=int, default=100, help="questions in each cell (default %(default)s)")
    add("--max-tokens", type=int, help="the longest answer of plain decoding (default: the task's)")
    add("--seed", type=int, default=0)
    add("--chat", action="store_true")
    add("--k", type=int, default=64, help="tokens of each row that are kept (default %(default)s)")
    add("--half", choices=HALVES, help="only these questions, as in `pypcd eval`")
    add("--check", type=int, default=0, metavar="N", help="decode the first N questions of each cell by each formula")
    add("--threads", type=int, default=1)
    _options.add_jobs(parser)
    add("--out", type=pathlib.Path, required=True, help="where the rows are kept")
    args = parser.parse_intermixed_args()

    try:
        with _options.jobs(args) as jobs:
            run(args, jobs)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        print(f"screen: {sentence(error)}", file=sys.stderr)
        sys.exit(2)


def read_formulas(args: argparse.Namespace) -> list[Formula]:
    texts = args.formulas
    if args.file:
        try:
            texts = texts + pathlib.Path(args.file).read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{args.file} is not a text; allowed: formulas, one a line, in UTF-8") from None
    formulas = list(dict.fromkeys(Formula.parse(text) for text in texts if text.strip()))
    if all(formula.view is None for formula in formulas):
        raise ValueError("there is no formula with a contrast; give at least one, such as pcd:window:beta=1")
    return formulas


def run(args: argparse.Namespace, jobs: Jobs) -> None:
    formulas = read_formulas(args)
    plan = Plan(
        model=args.model,
        tasks=tuple(args.task.split(",")),
        methods=tuple(PCD(formula.view).name for formula in formulas if formula.view is not None),
        lengths=_options.lengths(args.length),
        n=args.n,
        seed=args.seed,
        chat=args.chat,
        max_tokens=args.max_tokens,
        half=args.half,
    )
    how = {"options": {"n_threads": args.threads, "n_threads_batch": args.threads}, "jobs": jobs}
    with _progress.following("recording") as progress:
        outcome = record(plan, Directory(args.out / "rows"), k=args.k, progress=progress, **how)
    for name, why in outcome.refused.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    screen = Screen(outcome.records)
    formulas = [f for f in formulas if f.view is None or PCD(f.view).name not in outcome.refused]
    print_scores(screen, score(screen, formulas))
    if args.check:
        known = [formula for formula in formulas if formula.view is None or formula.config]
        with _progress.following("decoding") as progress:
            found = agreement(
                screen,
                known,
                dataclasses.replace(plan, n=min(args.check, args.n)),
                Directory(args.out / "check"),
                progress=progress,
                **how,
            )
        print_agreement(found)


def print_scores(screen: Screen, scored: list[Scored]) -> None:
    cells = [*screen.cells, *([(None, None)] if len(screen.cells) > 1 else [])]
    for cell in cells:
        task, length = cell
        print(f"\n{task}, {length} tokens" if task else "\nall together", end="\n\n")
        print("| right % | over greedy | wins / losses | open | formula |\n| ---: | --- | ---: | ---: | --- |")
        for one in sorted(scored, key=lambda one: -one.cells[cell].score):
            p = one.cells[cell]
            print(
                f"| {p.score:.1f} | {interval(p)} | {p.wins} / {p.losses} | {one.n_open[cell]} | {one.formula.name} |"
            )
    print(f"\n{NOT_SHOWN}\nopen: counted as wrong, but may be right in another spelling")


def print_agreement(found: list[Agreement]) -> None:
    print("\nBeside real decoding\n\n| same | only screened | only decoded | of these open | formula |")
    print("| ---: | ---: | ---: | ---: | --- |")
    for a in found:
        print(
            f"| {a.n_same} of {a.n} | {len(a.screened_only)} | {len(a.decoded_only)} | {a.n_open} | {a.formula.name} |"
        )


if __name__ == "__main__":
    main()
