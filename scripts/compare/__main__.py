"""scripts/compare_transformers: the same GGUF in Hugging Face transformers and in pypcd, plain and with PCD.

scripts/compare_transformers                                # SmolLM2-135M, fetched once
scripts/compare_transformers model.gguf --length 512,4k
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from environment import ROOT, Failed, find
from figures import HEAD, cells
from run import Plan

from pypcd import PCDError, __version__, machine
from pypcd.cli import _options, _table
from pypcd.gguf import resolve_model


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/compare_transformers",
        usage="%(prog)s [MODEL] [options]",
        description="Time a GGUF in Hugging Face transformers (its GGUF loader, torch on the CPU; PCD as two passes over one "
        "cache) and in pypcd, in turns.",
        epilog="Speedups are transformers' time over pypcd's, plain or with PCD. The first run installs torch and "
        "transformers into .cache.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a GGUF file (default: SmolLM2-135M-Instruct, fetched once)")
    add("--length", metavar="N,...", default="512,2048", help="tokens of the prompt (default %(default)s)")
    add(
        "--n-tokens", metavar="N", type=_options.at_least(2), default=32, help="decoded per round (default %(default)s)"
    )
    add("--rounds", metavar="N", type=_options.at_least(1), default=3, help="interleaved rounds (default %(default)s)")
    add("--threads", metavar="N", type=_options.at_least(1), help="CPU threads of both sides")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of transformers' weights")
    add("--text", metavar="FILE", type=pathlib.Path, help="what the prompt is made of (default: pypcd's own pages)")
    add("--python", metavar="FILE", help="a Python that has torch and transformers, in place of .cache's")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    lengths = sorted(set(_options.lengths(args.length)))
    text = (args.text.read_bytes() if args.text else _pages()).decode("utf-8", "replace")
    if not text:
        raise Failed(f"{args.text} is empty")
    model = resolve_model(args.model) if args.model else None  # a misspelt name is told before anything is installed
    python, versions = find(args.python, _progress)
    threads = args.threads or machine.default_threads()
    versions.update({"pypcd": __version__, "llama-cpp-python": importlib.metadata.version("llama-cpp-python")})
    plan = Plan(model or _smollm2(), python, args.n_tokens, args.rounds, threads, args.dtype, text, _progress)
    record = {"model": plan.model, "n_threads": threads, "dtype": args.dtype, "versions": versions, "lengths": []}
    if not args.json:
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        print(
            _table.aligned(f"{plan.model}, {threads} threads, {args.dtype} in transformers; {named}", _table.columns())
        )
    agreed = True
    for n in lengths:
        found, check = plan.at(n)
        agreed = agreed and check.agrees
        measurements = [dataclasses.asdict(figures) for figures in found]
        record["lengths"].append({"agreement": dataclasses.asdict(check), "measurements": measurements})
        if not args.json:
            right = [False] + [True] * (len(HEAD) - 1)
            print(f"Prompt of {n} tokens\n\n{_table.table(HEAD, cells(found), right, 1, _table.columns())}\n")
            print(_table.aligned(str(check), _table.columns()), flush=True)
    if args.json:
        print(json.dumps(record, indent=2))
    if not agreed:
        raise Failed("the sides do not compute the same, so their times say nothing")
    return 0


def _pages() -> bytes:
    return b"\n".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))


def _smollm2() -> str:
    done = subprocess.run(
        [str(ROOT / "scripts/recipes/smollm2")],
        text=True,
        stdout=subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )
    if done.returncode != 0:
        raise Failed("SmolLM2 could not be fetched; the lines above say why; or name a GGUF file")
    return done.stdout.strip()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    try:
        return run(parse())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (Failed, PCDError, ValueError, OSError) as error:
        _progress("")
        print(f"compare_transformers: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
