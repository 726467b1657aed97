"""pypcd bench --graph: what pypcd.bench.graph_costs finds, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from pypcd.bench import GRAPH_METHODS, GraphCost, graph_costs
from pypcd.cli import _options, _table, _terminal
from pypcd.errors import InputError

__all__ = ["add_arguments", "check", "run"]

_OF_TIMES = ("length", "sequences", "text", "prompt")  # options of bench that measure something else


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--graph", action="store_true", help="the host's work instead: graphs, microseconds, bytes")
    add("--cells", metavar="N,...", help="used cells, for --graph (default 1k,32k,128k)")


def check(args: argparse.Namespace) -> None:
    """Refuse options that would change nothing.

    Raises:
        ValueError: --cells without --graph, or an option beside it that it does not use.
    """
    if args.cells is not None and not args.graph:
        raise InputError(
            f"--cells is {args.cells}; allowed: beside --graph; use --length for times with so many tokens"
        )
    for name in _OF_TIMES:
        if args.graph and getattr(args, name) is not None:
            raise InputError(
                f"--{name} is {getattr(args, name)}; allowed: without --graph, which fills its cells without a text and "
                "decodes one token of one sequence at a time; use --cells for the number of used cells"
            )


def run(args: argparse.Namespace, names: Sequence[str] | None, progress: Callable[[str], None], **options: Any) -> None:
    """Measure and print. `names`: the methods; None: each way to keep second keys, and the window."""
    costs: list[GraphCost] = []
    measured = graph_costs(
        args.model,
        names or GRAPH_METHODS,
        _options.lengths(args.cells or "1k,32k,128k", "--cells"),
        n_tokens=args.n_tokens,
        rounds=args.rounds,
        flash_attn=args.flash_attn != "off",
        progress=progress,
        **options,
    )
    for _, group in itertools.groupby(measured, lambda cost: cost.n_cells):
        together = list(group)
        progress("")
        if not args.json:
            print("" if costs else _header(args, options["n_threads"]), _text(together), sep="\n", flush=True)
        costs += together
    if args.json:
        record = {"model": args.model, "n_threads": options["n_threads"], "flash_attn": args.flash_attn != "off"}
        print(json.dumps({**record, "graphs": [dataclasses.asdict(cost) for cost in costs]}, indent=2))
    else:
        _terminal.note(
            "of: tokens and twins in the last graph of a step, which nodes, splits and KiB are of; "
            "host: time in llama_decode less computing graphs; own: of this, in PCD's code; added: host less that of off"
            + (
                ""
                if costs[0].left is None
                else "; left: nodes that left the device: the CPU runs them, and not with off"
            )
        )
        for line in dict.fromkeys(f"{cost.method}: {_listed(cost.left)}" for cost in costs if cost.left):
            _terminal.note(f"left the device with {line}")


def _listed(left: dict[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(left.items()))


def _header(args: argparse.Namespace, threads: int) -> str:
    flash = "off" if args.flash_attn == "off" else "on"
    of = f"medians of {args.rounds} rounds of {args.n_tokens} steps"
    return _table.aligned(f"{args.model}, {threads} threads, flash attention {flash}; {of}", _table.columns())


def _text(costs: Sequence[GraphCost]) -> str:
    """The methods with one number of used cells."""
    head = ["method", "of", "nodes", "splits", "reused", "host us", "own us", "added us", "KiB in", "KiB out"]
    cells = [
        (
            cost.method,
            f"{cost.n_tokens}+{cost.n_twins}",
            str(cost.n_nodes),
            str(cost.n_splits),
            f"{cost.reused:.0%}",
            f"{cost.host_us:.0f}",
            f"{cost.own_us:.1f}",
            "-" if cost.added_us is None else f"{cost.added_us:.0f}",
            f"{cost.bytes_in / 1024:.1f}",
            f"{cost.bytes_out / 1024:.1f}",
            *([] if cost.left is None else [str(sum(cost.left.values()))]),
        )
        for cost in costs
    ]
    head += [] if costs[0].left is None else ["left"]
    right = [False] + [True] * (len(head) - 1)
    return f"{costs[0].n_cells} cells\n\n{_table.table(head, cells, right, 1, _table.columns())}"
