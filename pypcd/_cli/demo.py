"""pypcd demo: what PCD does, measured on the small model that ships with pypcd."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from pypcd import Llama, PCDError
from pypcd._cli import _options, _terminal
from pypcd._demo import CONTROL, METHODS, PLAIN, Answer, answer_all
from pypcd.evaluation._stats import Paired, paired
from pypcd.evaluation.tasks._kv import KV_SHORT
from pypcd.evaluation.tasks._sample import Sample

HELP = "ask the model that comes with pypcd a few hundred questions, plainly and with PCD"

PAIRS = (16, 40, 80, 120)
N_POOL = 12  # further questions, from which the control takes its prior

YOURS = "yours"  # what --pcd asks for
TITLES = {
    PLAIN: "plain (greedy)",
    "PCD": "PCD (paper)",
    "window": "window twin",
    CONTROL: "control",
    YOURS: "yours (--pcd)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=_options.at_least(2), default=75, help="questions per length (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other questions (default %(default)s)")
    parser.add_argument("--question", type=int, metavar="K", help="print question K, for generate or chat, and leave")
    parser.add_argument("--pcd", metavar="SETTING", help="ask with this setting too: cautious, beta=1.5,window=64 ...")
    parser.add_argument("--threads", type=_options.at_least(1), help="default: all cores up to four")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    if args.question is not None:
        return _print_question(args)
    llm = Llama("demo", n_ctx=2048, n_threads=args.threads)

    methods = dict(METHODS)
    if args.pcd is not None:
        methods[YOURS] = _options.pcd_setting(args.pcd, "demo")
    for config in methods.values():
        refusal = llm.pcd_refusal(config)
        if refusal is not None:
            raise PCDError(refusal)

    results: list[tuple[int, list[Answer]]] = []
    with _terminal.progress((args.n + N_POOL) * len(PAIRS), "asking", unit=" questions") as bar:
        for n_pairs in PAIRS:
            samples = _questions(args, n_pairs)
            pool = list(KV_SHORT.questions(N_POOL, n_pairs, args.seed + 1))
            n_tokens = len(llm.tokenize(samples[0].prompt.text.encode(), special=False))
            results.append((n_tokens, answer_all(llm, samples, pool, bar.update, methods)))

    if args.json:
        record = {"model": "demo", "n_per_length": args.n, "seed": args.seed, "cells": list(_cells(results))}
        print(json.dumps(record, indent=2))
        return 0

    print("pypcd's demo model looks up values in a JSON object. A pull towards the last value was planted in it:")
    print("a model organism of the failure PCD is made for, and no evidence about any other model.\n")
    _print_examples([answer for _, answers in results for answer in answers])
    _print_table(results, args.n)
    print("try one: pypcd demo --question K | pypcd generate demo [--pcd off]")
    return 0


def _questions(args: argparse.Namespace, n_pairs: int) -> list[Sample]:
    return list(KV_SHORT.questions(args.n, n_pairs, args.seed))


def _print_question(args: argparse.Namespace) -> int:
    k, total = args.question, args.n * len(PAIRS)
    if not 1 <= k <= total:
        raise ValueError(f"--question is {k}; allowed: 1 to {total}, --n for each of {len(PAIRS)} lengths")
    sample = _questions(args, PAIRS[(k - 1) // args.n])[(k - 1) % args.n]
    _terminal.write(sample.prompt.text + "\n" * sys.stdout.isatty())
    _terminal.say(f"the right value is {sample.answers[0]}, the last one in the prompt {sample.extra['nearest']}")
    return 0


def _cells(results: list[tuple[int, list[Answer]]]) -> Iterator[dict[str, Any]]:
    for n_tokens, answers in results:
        for method in answers[0].texts:
            yield {"n_tokens": n_tokens, "method": method, **vars(_compare(answers, method))}


def _compare(answers: list[Answer], method: str) -> Paired:
    return paired([a.is_right(method) for a in answers], [a.is_right(PLAIN) for a in answers])


def _print_examples(answers: list[Answer], n: int = 3) -> None:
    numbered = list(enumerate(answers, 1))
    mended = [(k, a) for k, a in numbered if a.step and a.is_right("PCD")]
    others = [(k, a) for k, a in numbered if a.step and not a.is_right("PCD")]
    for k, answer in [*mended[:: max(1, len(mended) // n)], *others][:n]:
        print(
            f"question {k}: the right value is {answer.sample.answers[0]}, the last one is {answer.sample.extra['nearest']}"
        )
        print(f"  plain answers {answer.texts[PLAIN]!r}, PCD {answer.texts['PCD']!r}; where plain first goes wrong:")
        for title, candidates in (("before", answer.step.before), ("after", answer.step.after)):  # type: ignore[union-attr]
            print(f"    {title:6}  " + "   ".join(f"{text:<5} {100 * p:5.1f}%" for text, p in candidates))
        print()


def _print_table(results: list[tuple[int, list[Answer]]], n: int) -> None:
    print(f"exact match in %, {n} questions a length; difference to plain in points with its 95% interval;")
    print("wins/losses: questions only this method / only plain got right\n")
    print(f"{'tokens':>6}  {'method':<15} {'right':>6}  {'difference':>26}  {'wins/losses':>11}")
    for n_tokens, answers in results:
        for method in answers[0].texts:
            c = _compare(answers, method)
            change = f"{c.difference:+6.1f}  [{c.low:+6.1f}, {c.high:+6.1f}]{' ' if c.is_clear else '~'}"
            row = f"{n_tokens:>6}  {TITLES[method]:<15} {c.score:>6.1f}"
            print(row if method == PLAIN else f"{row}  {change:>26}  {f'{c.wins}/{c.losses}':>11}")
        print()
    print("~ the interval spans zero or p is 0.05 or more: no difference shown")
    print("window twin: sees the last 64 tokens, no rotation")
    print("control: subtracts what other questions make likely; a gain it shares is no matter of position.")
