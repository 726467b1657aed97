"""pypcd lab spectrum: what over-rotation does to a model's attention, frequency block by frequency block."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np

from pypcd import plots
from pypcd.cli import _loading, _options, _terminal
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.lab import figures, files
from pypcd.lab.layers import read_layers
from pypcd.lab.spectrum import Spectrum, spectrum
from pypcd.method import rho
from pypcd.prompt import Prompt, prompt_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd lab spectrum MODEL [-f FILE] [options]"
    parser.epilog = (
        "Reach is the mean distance, in tokens, over which the last token attends, averaged over heads. A block is a pair "
        "of dimensions that is rotated with one frequency. It sharpens if over-rotating it alone lowers the reach by more than "
        "one token, and blurs if that raises the reach by more than one token."
    )
    _options.add_model(parser)
    add = parser.add_argument
    add("-f", "--file", metavar="FILE", type=pathlib.Path, help="a text (default: a question of --task)")
    add("--task", metavar="NAME", help="as in `pypcd eval` (default: kv; for demo kv-short)")
    add("--length", metavar="N", default="1k", help="tokens of the question (default %(default)s)")
    add("--pcd", metavar="SETTING", default="paper", help="alpha=0.3:base_ratio=1e-3 ... (default %(default)s)")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="another question (default %(default)s)")
    _options.add_machine(parser)
    add("--out", metavar="DIR", type=pathlib.Path, help="where to write a picture and the data of each layer")
    add("--format", choices=plots.FORMATS, default="png", help="format of the pictures (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    config = _options.pcd_setting(args.pcd, args.model)
    if config is None or config.perturbation != "over-rotation":
        raise InputError(f"--pcd is {args.pcd!r}, which over-rotates nothing; allowed: on, or values such as alpha=0.3")
    if args.out is not None:
        plots.require()
        files.open_folder(args.out)
    lengths = _options.lengths(args.length)
    if len(lengths) != 1:
        raise InputError(f"--length is {args.length!r}; allowed: one length")
    length = lengths[0]
    text = args.file.read_text(encoding="utf-8", errors="replace") if args.file else ""
    size = max(2 * length, len(text.encode()) + 8)  # a token has a byte at least
    llm = _loading.open_model(args.model, n_ctx=size, n_batch=size, n_ubatch=size, **_options.machine_options(args))
    prompt = Prompt(after=text)
    if not args.file:
        name = args.task or _options.default_task(args.model)
        prompt = task(name).samples(4, length, ModelTokenizer(llm), args.seed)[1].prompt
    tokens = prompt_tokens(llm, prompt)

    made: dict[int, Spectrum] = {}
    with _terminal.progress(None, "analysing layers", unit=" layers") as bar:
        for il, layer in read_layers(llm, tokens).items():
            table = rho(
                2 * len(layer.theta),
                alpha=config.alpha,
                base_ratio=config.base_ratio,
                transition=config.transition,
                band=config.band,
            )
            made[il] = spectrum(layer.q, layer.k, layer.theta, table, pairing=layer.pairing)
            bar.update(1)

    if args.out is not None:
        for il, result in made.items():
            plots.save(figures.spectrum(result), args.out / f"layer-{il}.{args.format}")
        files.write_json(args.out / "spectrum.json", {"layers": {str(il): _record(s) for il, s in made.items()}})
    if args.json:
        print(
            json.dumps(
                {"model": args.model, "n_tokens": len(tokens), "layers": {il: _record(s) for il, s in made.items()}}
            )
        )
        return 0
    print(f"{args.model}, attention of the last of {len(tokens)} tokens; reach in tokens\n")
    print(f"{'layer':>5} {'before':>8} {'after':>8}   {'sharpening blocks':<20} {'blurring blocks':<20}")
    for il, result in made.items():
        change = result.reach_alone - result.before.reach
        near, far = (_ranges(np.flatnonzero(which) + 1) for which in (change < -1, change > 1))
        print(f"{il:>5} {result.before.reach:>8.1f} {result.after.reach:>8.1f}   {near:<20} {far:<20}".rstrip())
    print(
        f"\nblock 1 is the fastest, {len(change)} the slowest; listed: those that alone change the reach by more than a token"
    )
    return 0


def _ranges(numbers: Any) -> str:
    """1, 2, 3, 7 as "1-3 7"."""
    parts: list[list[int]] = []
    for n in map(int, numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "-"


def _record(result: Spectrum) -> dict[str, Any]:
    return {
        "edges": result.edges.tolist(),
        "reach_before": result.before.reach,
        "reach_after": result.after.reach,
        "reach_alone": result.reach_alone.tolist(),
        "attention_before": result.before.attention.tolist(),
        "attention_after": result.after.attention.tolist(),
        "contribution_before": result.before.contribution.tolist(),
        "contribution_after": result.after.contribution.tolist(),
    }
