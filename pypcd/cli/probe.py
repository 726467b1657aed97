"""pypcd probe: finds the heads of a model that retrieve, so that passages are found by its attention too."""

from __future__ import annotations

import argparse
import json

from pypcd.cli import _loading, _options, _terminal
from pypcd.evaluation.probe import N_TEXTS, probe
from pypcd.find.heads import keep_heads

N_CTX = 6144  # what the questions' texts need, in most tokenizers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd probe MODEL [options]"
    parser.epilog = f"It asks questions about {N_TEXTS} texts, and keeps what it finds in your folder for caches."
    _options.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _options.add_machine(parser)


def run(args: argparse.Namespace) -> int:
    llm = _loading.open_model(args.model, n_ctx=N_CTX, **_options.machine_options(args))
    with _terminal.Bar(None, "asking", unit=" questions") as bar:
        heads = probe(llm, lambda n, total: bar.update(n - bar.n))
    path = keep_heads(llm, heads)
    listed = ", ".join(f"{il}: {' '.join(map(str, some))}" for il, some in heads.items())
    if args.json:
        print(json.dumps({"model": args.model, "heads": heads}))
    else:
        print(f"heads that retrieve, by layer: {listed}")
        _terminal.say(f"kept in {path}; questions about documents look with them from now on")
    return 0
