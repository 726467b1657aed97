"""`pypcd eval` with the methods that the paper compares with, its authors' tasks, pictures of the differences, and the
paper's tables beside those of a run.

python -m research.eval MODEL --method dola-low,ms-poe,segr
python -m research.eval MODEL --paper table2
python -m research.eval MODEL --method pcd:paper:base=1e4,pcd:paper:base=3e4      # B' itself, in place of base_ratio = B'/B
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence

import research.authors
import research.methods  # noqa: F401  registers them
from pypcd import cli, files
from pypcd.cli import eval as product
from pypcd.evaluation import Directory, rows
from pypcd.gguf import read_gguf, resolve_model
from research import plots
from research.paper import PAPER_TABLES

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    own = argparse.ArgumentParser(prog="python -m research.eval", add_help=False)
    own.add_argument("--paper", choices=sorted(PAPER_TABLES))
    asked, others = own.parse_known_args(words)
    paper = PAPER_TABLES.get(asked.paper)
    parser = argparse.ArgumentParser(prog="python -m research.eval")
    product.add_arguments(parser)
    args = parser.parse_args(others)
    if paper is not None:
        if args.quick:
            parser.error("--quick and --paper choose lengths and methods; give one of them")
        args.task = args.task or ",".join(paper.tasks)
        args.method = args.method or ",".join(paper.methods)
        args.length = args.length or ",".join(map(str, paper.lengths))

    def run() -> int:
        if args.method and ":base=" in args.method:
            base = read_gguf(resolve_model(args.model)).shape.rope_freq_base
            ratio = lambda found: f":base_ratio={float(found[1]) / base:g}"
            args.method = re.sub(r":base=(\d+(?:\.\d*)?(?:e\d+)?)(?=[:,]|$)", ratio, args.method)
        status = product.run(args)
        out, plan = Directory(product.folder(args)), product.plan_of(args)
        if importlib.util.find_spec("matplotlib") and len(plan.methods) > 1:
            plots.save(plots.differences(rows(plan, out.records())), out.path / "summary.png")
        if paper is not None:
            text = paper.markdown(plan, out.records())
            files.write(out.path / "summary.md", (out.path / "summary.md").read_text(encoding="utf-8") + "\n" + text)
            if not args.json:
                print("\n" + text)
        return status

    return cli.reported(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
