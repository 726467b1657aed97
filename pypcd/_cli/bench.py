"""pypcd bench: the cost of PCD on this machine, compared with plain decoding in its own fastest setting."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys

import llama_cpp

from pypcd import _machine
from pypcd._cli import _former, _graph, _options, _terminal
from pypcd.measure import Measurement, bench, default_methods, methods_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd bench MODEL [options]"
    parser.epilog = "Times are ratios to greedy decoding in the same round; greedy and each method run in their own faster setting of flash attention."
    _options.add_model(parser)
    add = parser.add_argument
    add("--length", metavar="N,...", default="512,2048", help="tokens in the context (default %(default)s)")
    add(
        "--method",
        metavar="NAME,...",
        help="beside greedy: pcd:SETTING; two-rows (greedy steps of two tokens); stock (llama_cpp.Llama)",
    )
    _former.add_mode(parser)
    add("--text", metavar="FILE", type=pathlib.Path, help="what fills the context (default: random tokens)")
    add(
        "--n-tokens", metavar="N", type=_options.at_least(2), default=16, help="decoded per round (default %(default)s)"
    )
    add("--rounds", metavar="N", type=_options.at_least(1), default=5, help="interleaved rounds (default %(default)s)")
    add("--prompt", metavar="N", type=_options.at_least(16), default=512, help="tokens of the timed prompt (512)")
    add("--flash-attn", choices=("both", "on", "off"), default="both", help="settings to try (default %(default)s)")
    _graph.add_arguments(parser)
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.graph:
        options = _options.machine_options(args)
        options["n_threads"] = options["n_threads_batch"] = args.threads or _machine.default_threads()
        names = None if args.method is None else _former.checked_methods(_options.names(args.method))
        _graph.run(args, names, _progress, **options)
        return 0
    lengths = _options.lengths(args.length)
    names = default_methods() if args.method is None else _former.checked_methods(_options.names(args.method))
    methods = methods_for(names)
    width = max(map(len, methods))
    text = args.text.read_bytes().decode("utf-8", "replace") if args.text else ""
    if args.text and not text:
        raise ValueError(f"{args.text} is empty")
    options = _options.machine_options(args)
    options["n_threads"] = options["n_threads_batch"] = threads = args.threads or _machine.default_threads()

    rows: list[Measurement] = []
    flash_attn = {"both": (False, True), "on": (True,), "off": (False,)}[args.flash_attn]
    for row in bench(
        args.model,
        methods,
        lengths,
        text=text,
        n_tokens=args.n_tokens,
        rounds=args.rounds,
        n_prefill=args.prompt,
        flash_attn=flash_attn,
        progress=_progress,
        **options,
    ):
        _progress("")
        if not rows and not args.json:
            print(_header(args, threads, width), flush=True)
        rows.append(row)
        if not args.json:
            print(_line(row, width), flush=True)
    measured = {row.method for row in rows}
    for name in (name for name in methods if name not in measured):
        _terminal.note(f"this model cannot run {name}; 'pypcd info MODEL' says why")
    if args.json:
        record = {"model": args.model, "n_threads": threads, "gpu": _machine.has_gpu()}
        print(json.dumps({**record, "measurements": [dataclasses.asdict(row) for row in rows]}, indent=2))
    return 0


def _header(args: argparse.Namespace, threads: int, width: int) -> str:
    where = "GPU" if _machine.has_gpu() else "CPU"
    of = f"medians of {args.rounds} rounds of {args.n_tokens} tokens"
    return (
        f"{args.model}, {threads} threads, {where}, llama-cpp-python {llama_cpp.__version__}; {of}\n"
        f"{'tokens':>6}  {'method':<{width}} {'flash':>5} {'tok/s':>8} {'time/greedy':>11} {'twins':>6} {'prompt/greedy':>13} {'KV MiB':>8}"
    )


def _line(row: Measurement, width: int) -> str:
    flash, prefill = "on" if row.flash_attn else "off", "-"
    if row.prefill_ratio is not None:
        prefill = f"{row.prefill_ratio:.2f}x"
    return (
        f"{row.n_past:>6}  {row.method:<{width}} {flash:>5} {row.tokens_per_second:>8.2f} {row.ratio:>10.2f}x "
        f"{row.twins:>6.2f} {prefill:>13} {row.kv_bytes / 2**20:>8.1f}"
    )


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
