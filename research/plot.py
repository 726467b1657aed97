"""python -m research.plot: the paper's simulations, with the figures behind the pictures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

from pypcd.cli import _terminal
from research import figures, files, plots
from research.claims import Claims, check_claims, claimed_rate
from research.command import command
from research.decay import CURVES, GRID, Curves, Decay, Rates, bins, grid

_NAMES = {"d": "d", "beta": "beta", "alpha": "alpha", "base": "B", "over_base": "B'"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m research.plot decay [options]"
    parser.epilog = "With --out: pictures, curves (CSV) and figures (JSON), besides the tables."
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=26)
    parser._optionals.title = "arguments"
    add = parser._optionals.add_argument
    add("what", metavar="WHAT", choices=("decay",), help="decay: section 3.4, figures 3b and 4")
    add("--out", metavar="DIR", type=pathlib.Path, help="where to write pictures and data")
    add("--format", choices=plots.FORMATS, default="png", help="format of the pictures (default %(default)s)")
    add("--no-grid", action="store_true", help="leave out the grid of figure 4")
    standard = Decay()
    add("--base", metavar="B", type=float, default=standard.base, help="base (default %(default)g)")
    add(
        "--over-base",
        metavar="B'",
        type=float,
        default=standard.over_base,
        help="over-rotated base (default %(default)g)",
    )
    add(
        "--alpha", metavar="A", type=float, default=standard.alpha, help="slope of the transition (default %(default)s)"
    )
    add("--beta", metavar="B", type=float, default=standard.beta, help="contrast (default %(default)s)")
    add("--d", metavar="N", type=int, default=standard.d, help="dimensions of a head (default %(default)s)")
    add("--length", metavar="N", type=int, default=standard.length, help="distances (default %(default)s)")
    add("--no-transition", action="store_true", help="theta* = theta', as in section A.1")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    setting = Decay(
        base=args.base,
        over_base=args.over_base,
        alpha=args.alpha,
        beta=args.beta,
        d=args.d,
        length=args.length,
        transition="none" if args.no_transition else "exponential",
    )
    if args.out is not None:
        plots.require()
        files.open_folder(args.out)

    n = 0 if args.no_grid else sum(map(len, GRID.values()))
    with _terminal.Bar(n + 2, "simulating", unit=" curves") as bar:
        curves = setting.simulate()
        rates = curves.rates()
        bar.update(1)
        claims = check_claims(setting, rates)
        bar.update(1)
        cases = []
        for case in () if args.no_grid else grid(setting):
            cases.append(case)
            bar.update(1)
    grid_rates = [(name, value, c.setting, c.rates()) for name, value, c in cases]

    record = {
        "setting": dataclasses.asdict(setting),
        "rates": {name: dataclasses.asdict(rate) for name, rate in rates.items()},
        "claims": dataclasses.asdict(claims),
        "grid": [_grid_record(*item) for item in grid_rates],
    }
    written = [] if args.out is None else _write(args, curves, cases, record)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        print(_report(setting, rates, claims))
        if grid_rates:
            print("\n" + _grid_table(grid_rates))
    if written:
        _terminal.say("written: " + ", ".join(map(str, written)))
    return 0


def _grid_record(name: str, value: float, setting: Decay, rates: dict[str, Rates]) -> dict[str, Any]:
    return {
        "varied": name,
        "value": value,
        "claimed": claimed_rate(setting),
        "rates": {curve: dataclasses.asdict(rate) for curve, rate in rates.items()},
    }


def _write(
    args: argparse.Namespace, curves: Curves, cases: list[tuple[str, float, Curves]], record: dict[str, Any]
) -> list[pathlib.Path]:
    out, suffix = args.out, args.format
    table = curves.table()
    written = [
        plots.save(figures.decay(curves), out / f"decay.{suffix}"),
        files.write_csv(out / "decay.csv", list(table), zip(*(column.tolist() for column in table.values()))),
        files.write_json(out / "decay.json", record),
    ]
    if cases:
        rows = []
        for name, value, case in cases:
            for curve in CURVES:
                parts = bins(case.distance, getattr(case, curve), 48)
                rows += [(name, value, curve, *part) for part in zip(*(parts[key].tolist() for key in parts))]
        header = ("varied", "value", "curve", "distance", "mean", "low", "high")
        written.append(plots.save(figures.decay_grid(cases), out / f"decay_grid.{suffix}"))
        written.append(files.write_csv(out / "decay_grid.csv", header, rows))
    return written


# -- text ------------------------------------------------------------------------------------------------------------

_LABELS = {"standard": "standard", "over_rotated": "over-rotated", "contrasted": "PCD"}


def _report(s: Decay, rates: dict[str, Rates], c: Claims) -> str:
    setting = (
        f"B={s.base:g}  B'={s.over_base:g}  alpha={s.alpha:g}  beta={s.beta:g}  d={s.d}",
        f"{s.length} distances, transition {s.transition}",
    )
    claimed = f"{c.claimed:.5f}"
    rows = (
        ("claim of the paper", "claimed", "measured"),
        (
            "2.3 rate of PCD / rate of standard",
            claimed,
            f"power {c.measured_power:.3f}, log {c.measured_log:.3f}, far {c.measured_far:.3f}",
        ),
        ("    1 - beta (r*/r - 1)", "", f"log {c.identity:.3f}: exact"),
        (f"A.4 |S({c.lemma_at})| at most", f"1e{c.lemma_bound_log10:.0f}", f"{c.lemma_score:.4g}"),
        ("    the bound holds at", "all", f"{_share(c.lemma_holds)} of distances"),
        ("    mean size of S/S(0), k -> inf", "0", f"{c.floor:.4f} (root mean square)"),
        ("A.5 ln|S_CD| / ln|S| at most", claimed, f"up to {c.theorem_largest:.3g}"),
        ("    holds at", "all", f"{_share(c.theorem_holds)} of distances, {_share(c.theorem_holds_far)} far out"),
        ("A.5 with S(0) = 1", claimed, f"up to {c.normalised_largest:.3g}"),
        ("    holds at", "all", f"{_share(c.normalised_holds)} of distances, {_share(c.normalised_holds_far)} far out"),
    )
    lines = [
        *setting,
        "",
        f"{'decay rate':<14} {'power':>8} {'log':>8} {'far':>8}",
        *(f"{_LABELS[name]:<14} {r.power:>8.4f} {r.log:>8.4f} {r.far:>8.4f}" for name, r in rates.items()),
        "power: p of an upper envelope like k^-p",
        "log: the share of S(0) lost as the distance grows by a factor e",
        f"far: the same from distance {math.isqrt(s.length - 1)} on",
        "",
        *(f"{name:<36} {number:>9}  {measured}".rstrip() for name, number, measured in rows),
    ]
    return "\n".join(lines)


def _grid_table(items: list[tuple[str, float, Decay, dict[str, Rates]]]) -> str:
    lines = [
        "log decay rates, one value changed at a time; PCD/standard as claimed and as measured",
        "",
        f"{'':<6} {'value':>8} {'standard':>9} {'over-rot.':>9} {'PCD':>9} {'claimed':>9} {'log':>7} {'far':>7}",
    ]
    before = items[0][0]
    for name, value, setting, rates in items:
        lines += [""] * (name != before)
        before = name
        numbers = " ".join(f"{rates[curve].log:>9.4f}" for curve in CURVES)
        log, far = (getattr(rates["contrasted"], r) / getattr(rates["standard"], r) for r in ("log", "far"))
        lines.append(f"{_NAMES[name]:<6} {value:>8g} {numbers} {claimed_rate(setting):>9.5f} {log:>7.3f} {far:>7.3f}")
    return "\n".join(lines)


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


if __name__ == "__main__":
    sys.exit(command("plot", add_arguments, run))
