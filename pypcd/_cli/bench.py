"""pypcd bench: what PCD costs on this machine, against plain decoding in its own fastest setting."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import llama_cpp

from pypcd import _machine
from pypcd._bench import Measurement, bench, modes_for

HELP = "time plain decoding and PCD side by side"

DEFAULT_MODES = "rerotated,shared,window,rerotated-alternate,rerotated-cautious"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a GGUF file, or demo")
    parser.add_argument("--length", default="512,2048", help="tokens in the context, comma-separated (default %(default)s)")
    parser.add_argument("--mode", default=DEFAULT_MODES, help="rerotated, shared, window, each also with -alternate or -cautious behind it")
    parser.add_argument("--n-tokens", type=int, default=16, help="tokens decoded per round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--flash-attn", choices=("both", "on", "off"), default="both", help="settings to try; a mode is reported in its faster one")
    parser.add_argument("--threads", type=int, help="default: all cores up to four, above that half")
    parser.add_argument("--gpu-layers", type=int, help="layers on the GPU; default: all")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    lengths = [_length(text) for text in args.length.split(",")]
    for name, value in (("--n-tokens", args.n_tokens), ("--rounds", args.rounds)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed: at least 1")
    modes = modes_for([name for name in args.mode.split(",") if name])
    threads = args.threads or _machine.default_threads()
    options = {"n_threads": threads, "n_threads_batch": threads}
    if args.gpu_layers is not None:
        options["n_gpu_layers"] = args.gpu_layers

    show = sys.stderr.isatty()

    def progress(text: str) -> None:
        if show:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    flash_attn = {"both": (False, True), "on": (True,), "off": (False,)}[args.flash_attn]
    rows: list[Measurement] = []
    if not args.json:
        print(f"{args.model}, {threads} threads, {'GPU' if _machine.has_gpu() else 'CPU'}, llama-cpp-python {llama_cpp.__version__}; medians of {args.rounds} rounds")
        print(f"{'tokens':>6}  {'mode':<20} {'flash':>5} {'tok/s':>8} {'time/plain':>11} {'prompt/plain':>13} {'KV MiB':>8}")
    for row in bench(args.model, modes, lengths, n_tokens=args.n_tokens, rounds=args.rounds, flash_attn=flash_attn, progress=progress, **options):
        progress("")
        rows.append(row)
        if not args.json:
            print(
                f"{row.n_past:>6}  {row.mode:<20} {'on' if row.flash_attn else 'off':>5} {row.tokens_per_second:>8.2f} "
                f"{row.ratio:>10.2f}x {row.prefill_ratio:>12.2f}x {row.kv_bytes / 2**20:>8.1f}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"model": args.model, "n_threads": threads, "gpu": _machine.has_gpu(), "measurements": [dataclasses.asdict(row) for row in rows]}, indent=2))
    return 0


def _length(text: str) -> int:
    number = text.strip().lower()
    factor = 1024 if number.endswith("k") else 1
    try:
        value = int(number.rstrip("k")) * factor
    except ValueError:
        value = 0
    if value < 16:
        raise ValueError(f"--length has {text!r}; allowed: integers of at least 16, such as 512,2k")
    return value
