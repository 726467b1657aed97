"""pypcd eval: whether a method helps this model, by how much, at what length, and whether that is more than chance."""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from collections.abc import Sequence

from pypcd import files
from pypcd.cli import _options, _progress, _table, _terminal, demo
from pypcd.errors import InputError
from pypcd.evaluation import GROUPS, Directory, Plan, advice, evaluate, markdown, rows
from pypcd.evaluation.plan import BASELINE, HALVES
from pypcd.evaluation.stats import MIN_N
from pypcd.evaluation.tasks import parts_of
from pypcd.evaluation.tasks.everyday import SHORT, kind_of

DEFAULT_METHODS = (BASELINE, "pcd", "pcd:unsure", "pcd:window:relative_top=0.1", "control")
DEFAULT_LENGTHS, EVERYDAY_LENGTHS = (1024, 2048, 4096), (SHORT, 1024)
DEFAULT_N = 300

DEMO_METHODS = (BASELINE, "pcd", "pcd:window", "pcd:unsure", "control")

QUICK_METHODS = (BASELINE, "replay", "pcd:unsure", "pcd:window:relative_top=0.1")
QUICK_TASKS = ("xquad", "kv-records")
QUICK_LENGTHS = (1200,)  # with passages and an answer it fits in a context of 2,048
QUICK_N = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd eval MODEL [options]"
    parser._actions[0].help = argparse.SUPPRESS  # -h: help is to fit a screen, and whoever reads it has found it
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME,...", help=f"default: kv; --quick: {','.join(QUICK_TASKS)}; demo: kv-short")
    add("--method", metavar="NAME,...", help="besides greedy (default: pcd, two variants, control)")
    add("--length", metavar="N,...", help="tokens of prompt and answer (1k,2k,4k; everyday: 300,1k)")
    n, few = (_of_each(["everyday"], n) for n in (DEFAULT_N, QUICK_N))
    add(
        "--n",
        metavar="N",
        type=_options.at_least(1),
        help=f"questions of each task and length ({DEFAULT_N}; everyday: {n})",
    )
    add(
        "--quick",
        action="store_true",
        help=f"{QUICK_N} (everyday: {few}) questions, {len(QUICK_METHODS)} methods, {QUICK_LENGTHS[0]} tokens",
    )
    add("--half", metavar="HALF", choices=HALVES, help="first, to choose by, or second, to judge by")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    add("--out", metavar="DIR", help="the run, to go on after a stop (default: eval-MODEL)")
    add("--chat", action="store_true", help="ask through the model's chat template")
    add("--max-tokens", metavar="N", type=_options.at_least(1), help="longest answer (default: the task's own)")
    _options.add_jobs(parser)
    _options.add_machine(parser)
    _options.add_list(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    _options.note_of_template(args.model, args.chat)
    out = Directory(folder(args))
    with _terminal.resumable(), _options.jobs(args) as jobs:
        options = _options.machine_options(args)
        try:
            with _progress.following("answering") as progress:
                outcome = evaluate(plan, out, jobs=jobs, options=options, progress=progress)
        except KeyboardInterrupt:
            _print_so_far(plan, out)
            raise

    text = markdown(plan, outcome.records, outcome.refused)
    files.write(out.path / "summary.md", text)
    if args.json:
        table = [row.as_dict() for row in rows(plan, outcome.records)]
        record = {"plan": vars(plan), "refused": outcome.refused, "rows": table}
        print(json.dumps(record, indent=2))
    else:
        if args.quick:
            n, names = len(plan.indices(plan.n)), _tasks(args)
            together = "".join(f", {n * len(GROUPS[name])} of all of {name}" for name in names if name in GROUPS)
            more = "" if args.n else f"{_of_each(names, DEFAULT_N)} questions, "
            text += (
                f"\n\nquick: {n} questions of each task and length{together}, of which at least {MIN_N} must differ to show anything; "
                f"--task {','.join(names)} without --quick asks {more}more lengths and methods.\n\n{advice(plan, outcome.records)}\n"
            )
        _terminal.write(_table.aligned(text, _table.columns()))
    _terminal.say(f"answers and tables are in {out.path}")
    return 0


def folder(args: argparse.Namespace) -> str:
    """Where the run is."""
    return args.out or f"eval-{pathlib.Path(args.model).stem}{'-quick' * args.quick}"


def _print_so_far(plan: Plan, out: Directory) -> None:
    """The table of the questions that all methods have answered."""
    records = out.records()
    answered = collections.Counter(key[:3] for key in records)
    n = max(answered.values(), default=0)  # some methods may be refused
    records = {key: record for key, record in records.items() if answered[key[:3]] == n}
    if records:
        _terminal.write("\n" + _table.aligned(markdown(plan, records, {}), _table.columns()))
        total = len(plan.tasks) * len(plan.lengths) * len(plan.indices(plan.n))
        _terminal.say(f"so far: {len(records) // n} of {total} questions")


def plan_of(args: argparse.Namespace) -> Plan:
    tasks = _tasks(args)
    is_demo = args.model == "demo"
    usual = EVERYDAY_LENGTHS if all(map(kind_of, parts_of(tasks))) else demo.LENGTHS if is_demo else DEFAULT_LENGTHS
    lengths: tuple[int, ...] = QUICK_LENGTHS if args.quick else usual
    methods: tuple[str, ...] = QUICK_METHODS if args.quick else DEMO_METHODS if is_demo else DEFAULT_METHODS
    return Plan(
        model=args.model,
        tasks=tasks,
        methods=_options.names(args.method) or methods,
        lengths=_options.lengths(args.length) if args.length else lengths,
        n=args.n or _usual_n(tasks, is_demo, args.quick),
        seed=args.seed,
        chat=args.chat,
        max_tokens=args.max_tokens,
        half=args.half,
    )


def _tasks(args: argparse.Namespace) -> tuple[str, ...]:
    default = _options.default_task(args.model)
    return _options.names(args.task) or (QUICK_TASKS if args.quick and args.model != "demo" else (default,))


def _usual_n(tasks: tuple[str, ...], is_demo: bool, quick: bool) -> int:
    if quick:
        return QUICK_N // len(tasks) if tasks == QUICK_TASKS else _of_each(tasks, QUICK_N)
    return _of_each(tasks, demo.N if is_demo else DEFAULT_N)


def _of_each(tasks: Sequence[str], n: int) -> int:
    """How many questions each task is asked so that a cell has n: a group's cell has those of all its tasks.

    Raises:
        ValueError: there are groups and other tasks.
    """
    groups = [name for name in tasks if name in GROUPS]
    each = -(-n // max((len(GROUPS[name]) for name in groups), default=1))
    if groups and (others := [name for name in tasks if name not in GROUPS]):
        raise InputError(
            f"--task has {groups[0]} and {others[0]}, which are asked {each} and {n} questions of each task unless --n says "
            "how many; give --n, or ask them in two runs"
        )
    return each
