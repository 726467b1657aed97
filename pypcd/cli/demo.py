"""pypcd demo: what PCD does, measured on the small model that comes with pypcd.

An evaluation like those of `pypcd eval`, in a temporary folder, and some of its answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from pypcd import Llama, PCDError, library
from pypcd.cli import _options, _progress, _table, _terminal
from pypcd.decode import PCD as PCDRows
from pypcd.errors import InputError
from pypcd.evaluation import Directory, ModelTokenizer, Paired, Plan, Sample, evaluate, rows, task
from pypcd.evaluation.plan import BASELINE, Key
from pypcd.evaluation.stats import NOT_SHOWN, interval
from pypcd.settings.config import RECOMMENDED

TASK = "kv-short"
LENGTHS = (240, 530, 1010, 1490)  # tokens with which this model reads 16, 40, 80 and 120 pairs, and answers
N = 75  # questions a length
SHOWN = 215  # a question on which the paper's setting changes the answer to the right one
N_POOL = 12  # further questions, which the control (the contrast without positions) takes its prior from
N_EXAMPLES = 3

PCD, WINDOW, ON, CONTROL = "PCD", "window", "on", "control"
YOURS = "yours"  # the setting of --pcd
METHODS = {BASELINE: BASELINE, PCD: "pcd", WINDOW: "pcd:window", ON: f"pcd:{RECOMMENDED}", CONTROL: "control"}
PRESET_OF = {PCD: "paper", WINDOW: "window"}
TITLES = {PCD: "PCD (paper)", WINDOW: "window twin", ON: f"{RECOMMENDED} (on)", YOURS: "yours (--pcd)"}

LEGEND = (
    "window twin: PCD whose second evaluation sees only the last 64 tokens, without over-rotation",
    f"{RECOMMENDED} (on): such a window, milder, and only from 300 tokens on where the model is unsure how to begin; what --pcd on means",
    "control: subtracts what other questions make likely; a gain that it shares does not come from position",
)

Records = Mapping[Key, Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=_options.at_least(2), default=N, help="questions per length (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other questions (default %(default)s)")
    parser.add_argument("--question", type=int, metavar="K", help="print question K, for generate or chat, and leave")
    parser.add_argument("--pcd", metavar="SETTING", help="ask with this setting too: cautious, beta=1.5:window=64 ...")
    parser.add_argument("--threads", metavar="N", type=_options.at_least(1), help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    methods = dict(METHODS)
    if library.why_stock():  # over-rotation needs the native engine
        del methods[PCD]
    if args.pcd is not None:
        config = _options.pcd_setting(args.pcd, "demo")
        methods[YOURS] = BASELINE if config is None else PCDRows(config).name
    plan = Plan("demo", (TASK,), tuple(methods.values()), LENGTHS, n=args.n, seed=args.seed, n_pool=N_POOL)
    if args.question is not None:
        return _print_question(question(args.question, plan))

    options = {"n_threads": args.threads, "n_threads_batch": args.threads}
    with tempfile.TemporaryDirectory() as folder, _progress.following("asking") as progress:
        outcome = evaluate(plan, Directory(folder), options=options, progress=progress)
    for trouble in (*outcome.refused.values(), *(r["error"] for r in outcome.records.values() if r.get("error"))):
        raise PCDError(trouble)

    cells = list(_cells(plan, outcome.records, methods))
    if args.json:
        record = {"model": "demo", "n_per_length": args.n, "seed": args.seed}
        listed = [{"n_tokens": n_tokens, "method": name, **vars(result)} for n_tokens, name, result in cells]
        print(json.dumps({**record, "cells": listed}, indent=2))
        return 0

    print(
        _table.paragraph(
            "pypcd's demo model looks up values in a JSON object. A fault was planted in it in training, a pull towards the last value: "
            "the failure that PCD is made for. What PCD gains here says nothing about any other model.\n"
        )
    )
    llm = Llama("demo", n_ctx=2048, **options)
    shown = PCD if PCD in methods else WINDOW
    for text in _examples(llm, plan, outcome.records, shown):
        print(_table.paragraph(text))
    _print_table(cells, args.n)
    if PCD not in methods:
        reason = f"The paper's setting was left out, since it needs pypcd's own libllama: {library.why_stock()}."
        print(_table.paragraph(reason))
    setting = PRESET_OF[shown]
    print(_table.paragraph(f"try one: pypcd demo --question K | pypcd generate demo --pcd {setting} (or off)"))
    print(_table.paragraph(f"and see why: pypcd demo --question K | pypcd explain demo --pcd {setting}"))
    return 0


def _samples(llm: Llama, plan: Plan, length: int) -> list[Sample]:
    return task(TASK).samples(plan.n, length, ModelTokenizer(llm), plan.seed)


def question(k: object, plan: Plan | None = None) -> Sample:
    """Question k of the demo, counted from 1.

    Raises:
        ValueError: there is no such question.
    """
    plan = plan or Plan("demo", (TASK,), tuple(METHODS.values()), LENGTHS, n=N, n_pool=N_POOL)
    total = plan.n * len(plan.lengths)
    if not isinstance(k, int) or not 1 <= k <= total:
        raise InputError(
            f"question {k} is none of the demo's; allowed: 1 to {total}, the same number for each of {len(plan.lengths)} lengths"
        )
    return _samples(Llama("demo", n_ctx=256), plan, plan.lengths[(k - 1) // plan.n])[(k - 1) % plan.n]


def _print_question(sample: Sample) -> int:
    _terminal.write(sample.prompt.text + "\n" * sys.stdout.isatty())
    _terminal.say(f"the right value is {sample.answers[0]}, the last one in the prompt {sample.extra['nearest']}")
    return 0


def _cells(plan: Plan, records: Records, methods: Mapping[str, str]) -> Iterator[tuple[int, str, Paired]]:
    """The length of a prompt in tokens, a method's name, and its comparison with greedy decoding."""
    of_method = {(row.length, row.method): row.paired for row in rows(plan, records)}
    for length in plan.lengths:
        n_tokens = records[TASK, length, 0, BASELINE]["n_prompt"]
        for name, method in methods.items():
            yield n_tokens, name, of_method[length, method]


def _examples(llm: Llama, plan: Plan, records: Records, shown: str) -> Iterator[str]:
    """N_EXAMPLES of the questions that greedy decoding gets wrong; first those that the method `shown` gets right."""
    numbered = [(length, index) for length in plan.lengths for index in range(plan.n)]

    def is_right(question: tuple[int, int], method: str) -> bool:
        return records[(TASK, *question, method)]["score"] == 1

    wrong = [question for question in numbered if not is_right(question, BASELINE)]
    gained = [question for question in wrong if is_right(question, METHODS[shown])]
    others = [question for question in wrong if question not in gained]
    for question in (*gained[:: max(1, len(gained) // N_EXAMPLES)], *others)[:N_EXAMPLES]:
        length, index = question
        sample = _samples(llm, plan, length)[index]
        plain, pcd = (records[(TASK, *question, method)]["prediction"].strip() for method in (BASELINE, METHODS[shown]))
        yield (
            f"question {numbered.index(question) + 1}: the right value is {sample.answers[0]}, the last one is "
            f"{sample.extra['nearest']}. greedy answers {plain!r}, PCD {pcd!r}\n"
        )


def _print_table(cells: list[tuple[int, str, Paired]], n: int) -> None:
    legend = (
        f"right: in % of {n} questions a length; difference to greedy, plain decoding, in points with its 95% interval; "
        "wins / losses: questions only this method / only greedy got right\n"
    )
    print(_table.paragraph(legend))
    head = ("tokens", "method", "right", "difference", "wins / losses")
    lines = [
        (str(n_tokens), TITLES.get(name, name), f"{c.score:.1f}")
        + (("", "") if name == BASELINE else (interval(c), f"{c.wins} / {c.losses}"))
        for n_tokens, name, c in cells
    ]
    print(_table.table(head, lines, (True, False, True, False, True), 2, _table.columns()))
    print("\n" + _table.paragraph(NOT_SHOWN))
    for line in LEGEND:
        print(_table.paragraph(line))
