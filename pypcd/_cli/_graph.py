"""pypcd bench --graph: what pypcd.measure.graph_costs finds, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from pypcd._cli import _options, _terminal
from pypcd.measure import GRAPH_METHODS, GraphCost, graph_costs

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--graph", action="store_true", help="the host's work instead: graphs, microseconds, bytes")
    add("--cells", metavar="N,...", default="1k,32k,128k", help="used cells, for --graph (default %(default)s)")


def run(args: argparse.Namespace, names: Sequence[str] | None, progress: Callable[[str], None], **options: Any) -> None:
    """Measure and print. `names`: the methods; None: each way to keep second keys, and the window."""
    methods = list(names or GRAPH_METHODS)
    width = max(map(len, methods))
    costs: list[GraphCost] = []
    for cost in graph_costs(
        args.model,
        methods,
        _options.lengths(args.cells, "--cells"),
        n_tokens=args.n_tokens,
        rounds=args.rounds,
        flash_attn=args.flash_attn != "off",
        progress=progress,
        **options,
    ):
        progress("")
        if not costs and not args.json:
            print(_header(args, width), flush=True)
        costs.append(cost)
        if not args.json:
            print(_line(cost, width), flush=True)
    if args.json:
        print(json.dumps({"model": args.model, "graphs": [dataclasses.asdict(cost) for cost in costs]}, indent=2))
    else:
        _terminal.note(
            "host: time in llama_decode less computing graphs; own: of this, in PCD's code; added: host less that of off"
        )


def _header(args: argparse.Namespace, width: int) -> str:
    flash = "off" if args.flash_attn == "off" else "on"
    of = f"medians of {args.rounds} rounds of {args.n_tokens} steps"
    return (
        f"{args.model}, flash attention {flash}; {of}\n"
        f"{'cells':>6}  {'method':<{width}} {'nodes':>6} {'splits':>6} {'reused':>6} {'host us':>8} {'own us':>8} {'added us':>8} "
        f"{'KiB in':>8} {'KiB out':>8}"
    )


def _line(cost: GraphCost, width: int) -> str:
    added = "-" if cost.added_us is None else f"{cost.added_us:.0f}"
    return (
        f"{cost.n_cells:>6}  {cost.method:<{width}} {cost.n_nodes:>6} {cost.n_splits:>6} {cost.reused:>6.0%} "
        f"{cost.host_us:>8.0f} {cost.own_us:>8.1f} {added:>8} {cost.bytes_in / 1024:>8.1f} {cost.bytes_out / 1024:>8.1f}"
    )
