"""pypcd bench: the cost of PCD on this machine, compared with plain decoding in its own fastest setting."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence

import llama_cpp

from pypcd.bench import DEFAULT_METHODS, Measurement, bench, methods_for
from pypcd.cli import _options, _table, _terminal
from pypcd.cli._text import counted
from pypcd.decode import setting_of
from pypcd.engine import choose_engine
from pypcd.llama import machine
from pypcd.llama.threads import choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd bench MODEL [options]"
    _options.add_model(parser)
    add = parser.add_argument
    add("--length", metavar="N,...", default="512,2048", help="tokens in the context (default %(default)s)")
    add("--engine", metavar="NAME", help="native or stock (default: as in chat)")
    add("--method", metavar="NAME,...", help="beside greedy: pcd:SETTING (default: unsure, and a window)")
    add("--n-tokens", metavar="N", type=_options.at_least(2), default=16, help="decoded per round (%(default)s)")
    add("--rounds", metavar="N", type=_options.at_least(1), default=5, help="interleaved rounds (%(default)s)")
    add(
        "--prompt",
        metavar="N",
        type=_options.at_least(16),
        default=512,
        help="tokens of the timed prompt (%(default)s)",
    )
    add("--flash-attn", metavar="WHICH", choices=("on", "off"), help="on or off (default: as in chat)")
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    options = _options.machine_options(args)
    threads = args.threads or choose(options).decode
    options["n_threads"] = options["n_threads_batch"] = threads
    if args.flash_attn is not None:
        options["flash_attn"] = args.flash_attn == "on"
    if args.engine is not None:
        options["engine"] = choose_engine(args.engine)
    lengths = _options.lengths(args.length)
    methods = methods_for(DEFAULT_METHODS if args.method is None else _options.names(args.method))
    how = {"n_tokens": args.n_tokens, "rounds": args.rounds, "n_prefill": args.prompt, **options}
    rows: list[Measurement] = []
    try:
        with _terminal.Bar(None, "loading") as bar:

            def progress(text: str) -> None:
                bar.text = text
                bar.update(0)

            rows.extend(bench(args.model, methods, lengths, progress=progress, **how))
    finally:
        if rows and not args.json:  # those there are, if it is stopped
            _show(rows, args, threads)
    for name, config in methods.items():
        if name in {row.method for row in rows}:
            continue
        if choose_engine(None, config) == "stock" != choose_engine(args.engine):
            _terminal.note(f"{name} runs in the stock engine alone: pypcd bench --engine stock")
        else:
            _terminal.note(f"this model cannot run {name}; 'pypcd info MODEL' says why")
    if args.json:
        record = {"model": args.model, "n_threads": threads, "gpu": machine.has_gpu()}
        print(json.dumps({**record, "measurements": [dataclasses.asdict(row) for row in rows]}, indent=2))
    return 0


def _show(rows: Sequence[Measurement], args: argparse.Namespace, threads: int) -> None:
    where = f"RPC ({args.rpc})" if args.rpc else "GPU" if machine.has_gpu() else "CPU"
    head = f"{args.model}, {counted(threads, 'thread')}, {where}, llama-cpp-python {llama_cpp.__version__}"
    of = f"medians of {counted(args.rounds, 'round')} of {args.n_tokens} tokens, each beside greedy's in the same round"
    print(_table.paragraph(f"{head}; {of}"))
    for n_past, of_length in itertools.groupby(rows, lambda row: row.n_past):
        print(f"\n{n_past} tokens\n\n{_text([*of_length])}")
    print("", *map(_table.paragraph, _costs(rows)), sep="\n")


def _text(rows: Sequence[Measurement]) -> str:
    """The methods at one context length."""
    head = ("method", "tok/s", "time / greedy", "twins", "prompt / greedy", "KV MiB")
    cells = [
        (
            row.method,
            f"{row.tokens_per_second:.2f}",
            f"{row.ratio:.2f}x",
            f"{row.twins:.2f}",
            f"{row.prefill_ratio:.2f}x",
            f"{row.kv_bytes / 2**20:.1f}" if row.kv_bytes else "-",  # the stock engine does not know
        )
        for row in rows
    ]
    return _table.table(head, cells, [False] + [True] * (len(head) - 1), _table.columns())


def _costs(rows: Sequence[Measurement]) -> list[str]:
    """What each PCD setting costs, in a sentence."""
    of_method: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.method.startswith("pcd"):
            of_method.setdefault(row.method, []).append(row)
    sentences = []
    for method, found in of_method.items():
        shares = [("on a prompt", found[0].prefill_ratio)]
        shares += [("on a token" + f" after {row.n_past}" * (len(found) > 1), row.ratio) for row in found]
        *first, last = (f"{_share(ratio)} {what}" for what, ratio in shares)
        setting = "paper" if method == "pcd" else method.removeprefix("pcd:")
        text = f"{setting} costs {', '.join(first)} and {last}."
        config = setting_of(method)
        if config and config.min_first_entropy:
            text += " That is an answer that it contrasts; any other costs nothing."
        sentences.append(text)
    return sentences


def _share(ratio: float) -> str:
    """How much more time that is; medians of a few rounds do not tell 1% from nothing."""
    return "less than 2%" if ratio < 1.015 else f"{100 * (ratio - 1):.0f}%"
