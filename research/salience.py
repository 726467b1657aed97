"""Posterior salience (Eq. 1 of the paper): how high the right answer ranks at the position where the answer begins.

The gold token is the most probable token that can begin the right answer. Its rank under one method is a reading.

    python -m research.salience MODEL --help
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pypcd.cli import _loading, _options, _table, _terminal
from pypcd.decode import Session
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, Sample, task
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import NOT_SHOWN, interval, paired
from pypcd.prompt import prompt_tokens
from pypcd.settings.config import PCDConfig, typed
from research import files, plots
from research.command import command
from research.vocabulary import Vocabulary, rank

__all__ = ["RANKS", "Reading", "SalienceRow", "count_ranks", "measure", "salience", "salience_rows"]

N_COMPETITORS = 5

# rank bins: from this rank up to the next one
RANKS = (1, 2, 3, 5, 9, 17, 33, 65)

_MAX_SKIPPED = 8

Settings = Mapping[str, PCDConfig | None]


@dataclasses.dataclass(frozen=True)
class Reading:
    """One question's gold token under one method, at the position where the answer begins.

    Attributes:
        index: the question's number.
        method: the setting's name.
        n_tokens: number of tokens of the prompt.
        n_skipped: number of tokens written before the answer, such as a quotation mark.
        rank: the gold token's rank, from 1 (Eq. 1).
        gold: its text, in quotes and safe for a terminal.
        gold_logit: its logit; None if PCD excluded it, since it is not plausible.
        competitors: the best other tokens, text and logit, best first; without excluded ones.
    """

    index: int
    method: str
    n_tokens: int
    n_skipped: int
    rank: int
    gold: str
    gold_logit: float | None
    competitors: tuple[tuple[str, float], ...]


def salience(ranks: Iterable[int]) -> float | None:
    """S(L), the mean reciprocal rank (Eq. 1); None without ranks."""
    values = [1.0 / rank for rank in ranks]
    return sum(values) / len(values) if values else None


def measure(
    session: Session, questions: Iterable[Sample], settings: Settings, vocabulary: Vocabulary, *, chat: bool = False
) -> Iterator[list[Reading]]:
    """Find the gold token's rank where the answer begins, for one question after another.

    The answer begins at the first position where plain decoding does not write a quotation mark, space, colon or
    backslash; every method gets the tokens that plain decoding writes before it. Of the tokens that can begin the right
    answer, the one with the highest logit is the gold token. Both are as in the paper's authors' code. Tokens that PCD
    excludes rank behind all others, in the order of L.

    Args:
        settings: by name; None is plain decoding.
        chat: use the model's chat template.

    Returns:
        The readings of a question, one for each setting, in their order.
    """
    for index, sample in enumerate(questions):
        gold = vocabulary.first_tokens(sample.answers)
        tokens = prompt_tokens(session.llm, sample.prompt, chat=chat)
        row = session.start(tokens)
        skipped: list[int] = []
        while len(skipped) < _MAX_SKIPPED and vocabulary.is_skipped(int(row.argmax())):
            skipped.append(int(row.argmax()))
            row = session.step({0: skipped[-1]})[0]
        readings = []
        for name, setting in settings.items():
            if setting is not None:
                row = session.start(tokens, setting)
                for token in skipped:
                    row = session.step({0: token})[0]
                logits = session.llm.pcd_logits().contrasted
            else:
                row = session.start(tokens)
                for token in skipped:
                    row = session.step({0: token})[0]
                logits = row
            best = max(gold, key=lambda token: (row[token], -token))
            others = [int(t) for t in np.argsort(-logits, kind="stable")[: N_COMPETITORS + 1] if t != best]
            readings.append(
                Reading(
                    index=index,
                    method=name,
                    n_tokens=len(tokens),
                    n_skipped=len(skipped),
                    rank=rank(row, gold),
                    gold=vocabulary.shown(best),
                    gold_logit=float(logits[best]) if np.isfinite(logits[best]) else None,
                    competitors=tuple(
                        (vocabulary.shown(t), float(logits[t])) for t in others if np.isfinite(logits[t])
                    )[:N_COMPETITORS],
                )
            )
        session.finish()
        yield readings


# -- over lengths -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SalienceRow:
    """One method at one length: a line of the table.

    Attributes:
        length: the requested length in tokens, with the answer.
        n_tokens: mean length of the prompts.
        n: number of questions.
        salience: S(L) over all questions.
        n_wrong: number of questions whose gold token plain decoding does not rank first.
        salience_wrong: S(L) over these, the same questions for every method.
        n_own_wrong: number of questions whose gold token this method does not rank first.
        salience_own_wrong: S(L) over those, as the authors plot it. Questions that the method corrects drop out of it.
        median_rank: over all questions.
        worst_rank: over all questions.
        difference: S(L) minus plain decoding's, over all questions.
        low: the lower end of its 95% bootstrap interval over questions.
        high: the upper end.
        p: p of the sign test on which of the two ranked the gold token higher.
        is_clear: whether this shows a difference, by the same rule as in evaluations.
        gold_logit: mean over the questions whose gold token is not excluded; None if there are none.
        competitor_logits: mean logits of the best other tokens, best first.
    """

    length: int
    method: str
    n_tokens: float
    n: int
    salience: float
    n_wrong: int
    salience_wrong: float | None
    n_own_wrong: int
    salience_own_wrong: float | None
    median_rank: float
    worst_rank: int
    difference: float
    low: float
    high: float
    p: float
    is_clear: bool
    gold_logit: float | None
    competitor_logits: tuple[float, ...]


def salience_rows(length: int, readings: Sequence[Sequence[Reading]]) -> list[SalienceRow]:
    """The readings of one length as table rows, one for each method; "greedy" (plain decoding) must be among them."""
    by_method: dict[str, list[Reading]] = {}
    for of_one in readings:
        for reading in of_one:
            by_method.setdefault(reading.method, []).append(reading)
    plain = np.array([r.rank for r in by_method[BASELINE]])

    made = []
    for method, items in by_method.items():
        ranks = np.array([r.rank for r in items])
        compared = paired((1 / ranks).tolist(), (1 / plain).tolist())  # in points: hundredths
        golds = [r.gold_logit for r in items if r.gold_logit is not None]
        columns = [
            [r.competitors[i][1] for r in items if len(r.competitors) > i]
            for i in range(max(len(r.competitors) for r in items))
        ]
        made.append(
            SalienceRow(
                length=length,
                method=method,
                n_tokens=float(np.mean([r.n_tokens for r in items])),
                n=len(items),
                salience=float(np.mean(1 / ranks)),
                n_wrong=int((plain > 1).sum()),
                salience_wrong=salience(ranks[plain > 1].tolist()),
                n_own_wrong=int((ranks > 1).sum()),
                salience_own_wrong=salience(ranks[ranks > 1].tolist()),
                median_rank=float(np.median(ranks)),
                worst_rank=int(ranks.max()),
                difference=compared.difference / 100,
                low=compared.low / 100,
                high=compared.high / 100,
                p=compared.p,
                is_clear=compared.is_clear,
                gold_logit=float(np.mean(golds)) if golds else None,
                competitor_logits=tuple(float(np.mean(column)) for column in columns if column),
            )
        )
    return made


def count_ranks(ranks: Iterable[int]) -> list[int]:
    """How many ranks fall into each bin of RANKS."""
    at = np.searchsorted(RANKS, list(ranks), side="right") - 1
    return np.bincount(at.astype(int), minlength=len(RANKS)).tolist()


# -- the command --------------------------------------------------------------------------------------------------------

PCD = "PCD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m research.salience MODEL [options]"
    parser.epilog = (
        "With --out: pictures (figures 2, 3a and 5 of the paper), every reading as CSV, all figures as JSON."
    )
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME", help="as in `pypcd eval` (default: kv; for demo kv-short)")
    add("--length", metavar="N,...", default="512,1k,2k", help="tokens of a prompt (default %(default)s)")
    add("--n", metavar="N", type=_options.at_least(1), default=50, help="questions a length (default %(default)s)")
    add("--pcd", metavar="SETTING", default="on", help="such as unsure:beta=1.5 (default: unsure)")
    add("--chat", action="store_true", help="ask through the model's chat template")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    _options.add_machine(parser)
    add("--out", metavar="DIR", type=pathlib.Path, help="where to write pictures and data")
    add("--format", choices=plots.FORMATS, default="png", help="of the pictures (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    lengths = _options.lengths(args.length)
    name = args.task or _options.default_task(args.model)
    chosen = task(name)
    setting = _options.pcd_setting(args.pcd, args.model)
    if setting is None:
        raise InputError("--pcd is off, and plain decoding is measured anyway; allowed: on, a preset, or values")
    if args.out is not None:
        plots.require()
        files.open_folder(args.out)

    # tokens besides the prompt: its answer, and what a model may write before that
    n_ctx = max(lengths) * (2 if chosen.may_exceed else 1) + 64
    llm = _loading.open_model(args.model, setting, n_ctx=n_ctx, **_options.machine_options(args))
    llm.check_pcd(setting)

    tokenizer = ModelTokenizer(llm, chat=args.chat)
    asked = [(length, chosen.samples(args.n, length, tokenizer, args.seed)) for length in lengths]
    settings: Settings = {BASELINE: None, PCD: setting}
    session, vocabulary = Session(llm), Vocabulary(llm)
    read: list[tuple[int, list[list[Reading]]]] = []
    table: list[SalienceRow] = []
    record: dict[str, Any] = {
        "model": args.model,
        "task": name,
        "n_per_length": args.n,
        "seed": args.seed,
        "chat": args.chat,
        "pcd": setting.as_dict(),
        "n_vocab": llm.n_vocab(),
    }
    written: list[pathlib.Path] = []
    with _terminal.Bar(args.n * len(lengths), "asking", unit=" questions") as bar:
        for length, items in asked:
            of_length = []
            for readings in measure(session, items, settings, vocabulary, chat=args.chat):
                of_length.append(readings)
                bar.update(1)
            read.append((length, of_length))
            table += salience_rows(length, of_length)
            ranks = {m: [r.rank for _, qs in read for q in qs for r in q if r.method == m] for m in settings}
            record["cells"] = [dataclasses.asdict(row) for row in table]
            record["ranks"] = {"from": list(RANKS), **{method: count_ranks(values) for method, values in ranks.items()}}
            if args.out is not None:  # after each length, since a long one may be stopped
                written = _write(args, read, table, ranks, record)
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
    from research import figures  # which draws what this module measures

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
            _table.table(head, rows, [name not in ("method", "difference") for name in head], _table.columns()),
            "",
            _table.paragraph(NOT_SHOWN),
        )
    )


def _of(value: float | None, n: int) -> str:
    return "-" if value is None else f"{value:.2f}/{n}"


if __name__ == "__main__":
    sys.exit(command("salience", add_arguments, run))
