"""pypcd lab salience: how high the right answer ranks, by the length of the prompt, without and with PCD."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from pypcd import plots
from pypcd.cli import _loading, _options, _table, _terminal
from pypcd.config import typed
from pypcd.decode import Session
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import NOT_SHOWN, interval
from pypcd.evaluation.tasks import FROM_FILES
from pypcd.lab import figures, files
from pypcd.lab.questions import questions
from pypcd.lab.salience import RANKS, Reading, SalienceRow, Settings, count_ranks, measure, salience_rows
from pypcd.vocabulary import Vocabulary

PCD = "PCD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd lab salience MODEL [options]"
    parser.epilog = (
        "With --out: pictures (figures 2, 3a and 5 of the paper), every reading as CSV, all figures as JSON."
    )
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME", help="as in `pypcd eval` (default: kv; for demo kv-short)")
    add("--length", metavar="N,...", default="512,1k,2k", help="tokens of a prompt (default %(default)s)")
    add("--n", metavar="N", type=_options.at_least(1), default=50, help="questions a length (default %(default)s)")
    add("--pcd", metavar="SETTING", default="on", help="a preset, or beta=1.5:window=64 ... (default: unsure)")
    add("--data", metavar="PATH", help="where the questions of tasks from files are")
    add("--chat", action="store_true", help="ask through the model's chat template")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    _options.add_machine(parser)
    add("--out", metavar="DIR", type=pathlib.Path, help="where to write pictures and data")
    add("--format", choices=plots.FORMATS, default="png", help="of the pictures (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    lengths = _options.lengths(args.length)
    name = args.task or _options.default_task(args.model)
    chosen = task(name, data=args.data if name in FROM_FILES else None)
    setting = _options.pcd_setting(args.pcd, args.model)
    if setting is None:
        raise InputError("--pcd is off, and plain decoding is measured anyway; allowed: on, a preset, or values")
    if args.out is not None:
        plots.require()
        files.open_folder(args.out)

    # tokens besides the prompt: its answer, and what a model may write before that
    n_ctx = max(lengths) * (2 if chosen.may_exceed else 1) + 64
    llm = _loading.open_model(args.model, n_ctx=n_ctx, **_options.machine_options(args))
    llm.check_pcd(setting)

    tokenizer = ModelTokenizer(llm, chat=args.chat)
    asked = [(length, list(questions(chosen, args.n, length, tokenizer, args.seed))) for length in lengths]
    settings: Settings = {BASELINE: None, PCD: setting}
    session, vocabulary = Session(llm), Vocabulary(llm)
    read: list[tuple[int, list[list[Reading]]]] = []
    table: list[SalienceRow] = []
    with _terminal.progress(args.n * len(lengths), "asking", unit=" questions") as bar:
        for length, items in asked:
            of_length = []
            for readings in measure(session, items, settings, vocabulary, chat=args.chat):
                of_length.append(readings)
                bar.update(1)
            read.append((length, of_length))
            table += salience_rows(length, of_length)

    ranks = {m: [r.rank for _, qs in read for q in qs for r in q if r.method == m] for m in settings}
    record = {
        "model": args.model,
        "task": name,
        "n_per_length": args.n,
        "seed": args.seed,
        "chat": args.chat,
        "pcd": setting.as_dict(),
        "n_vocab": llm.n_vocab(),
        "cells": [dataclasses.asdict(row) for row in table],
        "ranks": {"from": list(RANKS), **{method: count_ranks(values) for method, values in ranks.items()}},
    }
    written = [] if args.out is None else _write(args, read, table, ranks, record)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        print(_report(args, name, typed(setting), table))
    if written:
        _terminal.say("written: " + ", ".join(map(str, written)))
    return 0


def _write(
    args: argparse.Namespace,
    read: Sequence[tuple[int, Sequence[Sequence[Reading]]]],
    table: Sequence[SalienceRow],
    ranks: dict[str, list[int]],
    record: dict[str, Any],
) -> list[pathlib.Path]:
    out, suffix = args.out, args.format
    header = ("length", "index", "method", "n_tokens", "n_skipped", "rank", "gold", "gold_logit")
    rows = [
        (length, *(getattr(reading, field) for field in header[1:]))
        for length, of_length in read
        for of_one in of_length
        for reading in of_one
    ]
    fields = [field.name for field in dataclasses.fields(SalienceRow) if field.name != "competitor_logits"]
    n = max(len(row.competitor_logits) for row in table)
    curves = [
        [getattr(row, field) for field in fields] + [*row.competitor_logits, *[None] * (n - len(row.competitor_logits))]
        for row in table
    ]
    return [
        plots.save(figures.salience(table), out / f"salience.{suffix}"),
        plots.save(figures.ranks(ranks), out / f"ranks.{suffix}"),
        plots.save(figures.logits(table), out / f"logits.{suffix}"),
        files.write_csv(out / "salience.csv", [*fields, *(f"other_logit_{i + 1}" for i in range(n))], curves),
        files.write_csv(out / "readings.csv", header, rows),
        files.write_json(out / "salience.json", record),
    ]


def _report(args: argparse.Namespace, task: str, setting: str, table: Sequence[SalienceRow]) -> str:
    head = ("tokens", "method", "S(L)", "wrong", "own", "median", "worst", "difference")
    rows = [
        (
            f"{row.n_tokens:.0f}",
            row.method,
            f"{row.salience:.3f}",
            _of(row.salience_wrong, row.n_wrong),
            _of(row.salience_own_wrong, row.n_own_wrong),
            f"{row.median_rank:g}",
            str(row.worst_rank),
            "" if row.method == BASELINE else interval(row, 3),
        )
        for row in table
    ]
    return "\n".join(
        (
            _table.paragraph(f"{args.model}, task {task}, {args.n} questions a length; PCD {setting}"),
            _table.paragraph(
                "S(L): mean of 1 / rank of the gold token; wrong: where greedy does not rank it first; own: where the method itself "
                "does not; difference: of S(L) to greedy, with its 95% interval"
            ),
            "",
            _table.table(head, rows, [name not in ("method", "difference") for name in head], 2, _table.columns()),
            "",
            _table.paragraph(NOT_SHOWN),
        )
    )


def _of(value: float | None, n: int) -> str:
    return "-" if value is None else f"{value:.2f}/{n}"
