"""pypcd demo: questions that the model that comes with pypcd can answer, such as those that `pypcd eval demo` asks."""

from __future__ import annotations

import argparse
import sys

from pypcd import Llama
from pypcd.cli import _options, _terminal
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task

LENGTHS = (240, 530, 1010, 1490)  # tokens with which this model reads 16, 40, 80 and 120 pairs, and answers
N = 75  # questions a length
SHOWN = 215  # a question on which the paper's setting changes the answer to the right one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd demo [K]"
    parser.epilog = (
        "The model 'demo' looks values up in a JSON object. A fault was planted in it in training, a pull towards the last value, the "
        "failure that PCD is made for. 'pypcd demo | pypcd generate demo --pcd paper' shows one answer, 'pypcd eval demo' measures all. "
        "What PCD gains there says nothing about any other model."
    )
    parser._optionals.title = "arguments"  # one list of all, as in the other commands
    parser._optionals.add_argument(
        "k", nargs="?", metavar="K", type=_options.at_least(1), default=SHOWN, help="1 to 300 (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    total, k = N * len(LENGTHS), args.k - 1
    if k >= total:
        raise InputError(
            f"question {args.k} is none of the demo's; allowed: 1 to {total}, the same number for each of {len(LENGTHS)} lengths"
        )
    tokenizer = ModelTokenizer(Llama("demo", n_ctx=256))
    sample = task("kv-short").samples(N, LENGTHS[k // N], tokenizer, 0)[k % N]
    _terminal.write(sample.prompt.begun + "\n" * sys.stdout.isatty())
    _terminal.say(f"the right value is {sample.answers[0]}, the last one in the prompt {sample.extra['nearest']}")
    return 0
