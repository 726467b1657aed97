"""scripts/compare_transformers: the same GGUF in Hugging Face transformers and in pypcd, plain and with PCD.

scripts/compare_transformers                                # SmolLM2-135M, fetched once
scripts/compare_transformers model.gguf --length 512,4k
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pypcd
from pypcd import PCDConfig, machine
from pypcd.cli import _options, _table
from pypcd.gguf import resolve_model

ROOT = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).with_name("side.py")

# name: side, setting (None: plain); the first of each kind, plain and contrasted, is what pypcd's are compared with
WAYS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "transformers": ("theirs", None),
    "transformers, two passes": ("theirs", {}),
    "pypcd": ("ours", None),
    "pypcd, pcd:cache=shared": ("ours", {"cache": "shared"}),
    "pypcd, pcd": ("ours", {}),
}
HEAD = ("", "prompt tok/s", "decode tok/s", "time / plain", "prompt speedup", "decode speedup", "peak MiB")

# Kernels for quantised weights round their inputs to 8 bits: rows differ by about a thousandth (normalised squared
# error). Another model makes tenths. Over-rotation makes more of the rounding the longer the prompt is, so L* may also
# differ by a share of what over-rotation does; a wrong rotation would differ by about all of that.
LIMIT, SHARE = 0.02, 0.1

Rounds = dict[str, list[dict[str, Any]]]  # what side.py wrote, by way


class Failed(Exception):
    """Nothing more can be done; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near pypcd's rows after the prompt are to transformers'. Differences are normalised squared errors.

    Attributes:
        plain: of L.
        second: of L*, with cache=shared.
        effect: of L* and L on transformers' side: what there is to see.
        same: after how many of n_tokens tokens both sides would choose the same next one, plain and contrasted.
    """

    plain: float
    second: float
    effect: float
    n_tokens: int
    same: tuple[int, int]

    @property
    def agrees(self) -> bool:
        return self.plain <= LIMIT and self.second <= max(LIMIT, SHARE * self.effect)

    def __str__(self) -> str:
        rows = (
            f"L by {self.plain:.1g} and L* by {self.second:.1g} (normalised squared error; allowed: {LIMIT} and "
            f"{max(LIMIT, SHARE * self.effect):.1g}), where L* and L differ by {self.effect:.1g}"
        )
        plain, contrasted = self.same
        tokens = f"the same token after {plain} of {self.n_tokens} plain and {contrasted} contrasted ones"
        if self.agrees:
            return f"Both sides compute the same: their rows differ as rounding does, {rows}; {tokens}."
        return f"The sides do not compute the same: their rows differ by more than rounding, {rows}; {tokens}."


def agreement(rows: dict[str, Any], chosen: dict[str, list[int]]) -> Agreement:
    """
    Args:
        rows: the logits after the prompt by way, L and with PCD L*.
        chosen: what each would choose after each of the same tokens.
    """
    plain, passes, ours, shared, _ = WAYS
    return Agreement(
        plain=squared_error(rows[ours][0], rows[plain][0]),
        second=squared_error(rows[shared][1], rows[passes][1]),
        effect=squared_error(rows[passes][1], rows[passes][0]),
        n_tokens=len(chosen[plain]),
        same=tuple(sum(a == b for a, b in zip(chosen[x], chosen[y])) for x, y in ((ours, plain), (shared, passes))),  # type: ignore[arg-type]
    )


def squared_error(row: Any, wanted: Any) -> float:
    """The squared difference over the squared row, each less its mean, which no probability depends on."""
    n = min(len(row), len(wanted))  # a file may pad the vocabulary
    a, b = row[:n].astype(np.float64), wanted[:n].astype(np.float64)
    a, b = a - a.mean(), b - b.mean()
    return float(((a - b) ** 2).sum() / (b**2).sum())


def figures(n_prompt: int, rounds: Rounds) -> list[dict[str, Any]]:
    """A line for each way. Ratios are medians over rounds: of a token's time to that of the same side's plain decoding, and of
    transformers' time to this one's, plain or two passes as this one is."""
    first = {(side, pcd is None): name for name, (side, pcd) in reversed(WAYS.items())}

    def ratio(what: str, of: str, to: str) -> float:
        return statistics.median(a[what] / b[what] for a, b in zip(rounds[of], rounds[to]))

    return [
        {
            "way": name,
            "prompt_tokens_per_second": n_prompt / statistics.median(found["prompt"] for found in rounds[name]),
            "tokens_per_second": 1 / statistics.median(found["step"] for found in rounds[name]),
            "of_plain": ratio("step", name, first[side, True]),
            "prompt_speedup": ratio("prompt", first["theirs", pcd is None], name),
            "speedup": ratio("step", first["theirs", pcd is None], name),
            "peak_bytes": max(found["peak_bytes"] for found in rounds[name]),
        }
        for name, (side, pcd) in WAYS.items()
    ]


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    name, prompt, decode, *ratios, peak = found.values()
    return name, f"{prompt:.0f}", f"{decode:.1f}", *(f"{ratio:.2f}x" for ratio in ratios), f"{peak / 2**20:.0f}"


def compare(args: argparse.Namespace, model: str, text: bytes, n_prompt: int) -> tuple[list[dict[str, Any]], Agreement]:
    """The figures at one length, and whether both sides compute the same.

    Raises:
        Failed: one of the sides cannot run the model.
    """
    n_ctx = n_prompt + args.n_tokens + 32
    llm = pypcd.Llama(model, n_ctx=n_ctx, n_threads=args.threads, n_threads_batch=args.threads)
    words = llm.tokenize(text, special=False)
    prompt = (words * (n_prompt // len(words) + 1))[:n_prompt]
    tokens = [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(args.n_tokens + 1))]
    llm.close()
    rounds: Rounds = {name: [] for name in WAYS}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        asked = {"prompt": prompt, "tokens": tokens, "out": f"{folder}/out.json", "rows": f"{folder}/rows.npy"}
        for i in range(args.rounds):
            for name, (side, pcd) in WAYS.items():
                print(f"{n_prompt} tokens, round {i + 1} of {args.rounds}: {name}", file=sys.stderr)
                if side == "theirs" and pcd is not None:
                    pcd = {field: getattr(PCDConfig(), field) for field in ("alpha", "base_ratio", "beta", "gamma")}
                options = {"model": model, "n_ctx": n_ctx, "n_threads": args.threads, "dtype": args.dtype, "pcd": pcd}
                python = args.python if side == "theirs" else sys.executable
                command = [python, str(SIDE), json.dumps({**asked, "side": side, "options": options})]
                done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
                if done.returncode:
                    said = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing"])[-1]
                    raise Failed(f"{name} ended with status {done.returncode} and said last: {said}")
                rounds[name].append(json.loads(Path(asked["out"]).read_text()))
                rows[name] = np.load(asked["rows"])
    return figures(n_prompt, rounds), agreement(rows, {name: found[-1]["chosen"] for name, found in rounds.items()})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/compare_transformers",
        usage="%(prog)s [MODEL] [options]",
        description="Time a GGUF in Hugging Face transformers (its GGUF loader, torch on the CPU; PCD as two passes over one "
        "cache) and in pypcd, in turns.",
        epilog="Speedups are transformers' time over pypcd's, plain or with PCD. The first run installs torch and "
        "transformers into .nox/transformers.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a GGUF file (default: SmolLM2-135M-Instruct, fetched once)")
    add("--length", metavar="N,...", default="512,2048", help="tokens of the prompt (default %(default)s)")
    add(
        "--n-tokens", metavar="N", type=_options.at_least(2), default=32, help="decoded per round (default %(default)s)"
    )
    add("--rounds", metavar="N", type=_options.at_least(1), default=3, help="interleaved rounds (default %(default)s)")
    add("--threads", metavar="N", type=_options.at_least(1), default=machine.default_threads(), help="of both sides")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of transformers' weights")
    add("--text", metavar="FILE", type=Path, help="what the prompt is made of (default: pypcd's own pages)")
    add("--python", metavar="FILE", help="a Python that has torch and transformers, in place of .nox's")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def output_of(command: list[str], otherwise: str, **more: Any) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=False, cwd=ROOT, **more)
    if done.returncode:
        raise Failed(otherwise)
    return done.stdout.strip()


def run(args: argparse.Namespace) -> int:
    lengths = sorted(set(_options.lengths(args.length)))
    text = args.text.read_bytes() if args.text else b"\n".join(p.read_bytes() for p in sorted(ROOT.glob("docs/*.md")))
    if not text:
        raise Failed(f"{args.text} is empty")
    model = resolve_model(args.model) if args.model else None  # a misspelt name is told before anything is installed
    if not args.python:
        nox = [sys.executable, "-m", "nox", "--session", "transformers"]
        output_of(nox, "torch and transformers cannot be installed; the lines above say why; or give --python")
        args.python = str(ROOT / ".nox/transformers/bin/python")
    if model is None:
        command = [str(ROOT / "scripts/recipes/smollm2")]
        told = "SmolLM2 could not be fetched; the lines above say why; or name a GGUF file"
        model = output_of(command, told, env={**os.environ, "PYTHON": sys.executable})
    record: dict[str, Any] = {"model": str(model), "n_threads": args.threads, "dtype": args.dtype, "lengths": []}
    agreed = True
    for n in lengths:
        found, check = compare(args, str(model), text, n)
        agreed = agreed and check.agrees
        record["lengths"].append({"n_prompt": n, "agreement": dataclasses.asdict(check), "measurements": found})
        if not args.json:
            right = [False] + [True] * (len(HEAD) - 1)
            print(f"Prompt of {n} tokens\n\n{_table.table(HEAD, map(cells, found), right, 1, _table.columns())}\n")
            print(_table.aligned(str(check), _table.columns()), flush=True)
    if args.json:
        print(json.dumps(record, indent=2))
    if not agreed:
        raise Failed("the sides do not compute the same, so their times say nothing")
    return 0


def main() -> int:
    try:
        return run(parse())
    except KeyboardInterrupt:
        return 130
    except (Failed, pypcd.PCDError, ValueError, OSError) as error:
        print(f"compare_transformers: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
