"""pypcd tune: finds a PCD setting that helps on long prompts and costs everyday questions nothing, if there is one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from pypcd.cli import _options, _progress, _table, _terminal
from pypcd.errors import InputError
from pypcd.evaluation import Paired, Plan, facts, run_options
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import MARGIN, MIN_N, NOT_SHOWN, WORTH, interval
from pypcd.evaluation.tasks.everyday import LEAST
from pypcd.evaluation.tune import (
    ALL,
    FEW_SETTINGS,
    MOST_SPOILT,
    N_EVERYDAY,
    SETTINGS,
    Cell,
    Tuned,
    tune,
)
from pypcd.settings.config import Profile

DEFAULT_TASKS = "xquad,kv-records"
DEFAULT_LENGTHS, DEFAULT_N = "1k,4k", 100
QUICK_LENGTHS, QUICK_N, QUICK_EVERYDAY = "1k", 12, 4
DEMO_LENGTHS = "500,1500"  # its context ends at 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd tune MODEL [options]"
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME,...", help=f"default: {DEFAULT_TASKS}; for demo kv-short")
    add("--length", metavar="N,...", help=f"your prompts' tokens (default {DEFAULT_LENGTHS}; demo {DEMO_LENGTHS})")
    add(
        "--n",
        metavar="N",
        type=_options.at_least(2),
        help=f"questions of each task and length ({DEFAULT_N}): half choose, half judge",
    )
    of_each = f"everyday questions of each kind (default {N_EVERYDAY}; demo 0)"
    add("--everyday", metavar="N", type=_options.at_least(0), help=of_each)
    few = (
        f"a first look: {QUICK_N} and {QUICK_EVERYDAY} questions, {QUICK_LENGTHS} tokens, {len(FEW_SETTINGS)} settings"
    )
    add("--quick", action="store_true", help=few)
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    add("--profile", metavar="FILE", help="where the setting is written (default: MODEL.pcd.json)")
    add("--out", metavar="DIR", help="the answers, to go on after a stop (default: tune-MODEL)")
    add("--chat", action="store_true", help="ask through the model's chat template")
    _options.add_jobs(parser)
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    is_demo, name = args.model == "demo", pathlib.Path(args.model).stem + "-quick" * args.quick
    profile, out = pathlib.Path(args.profile or f"{name}.pcd.json"), pathlib.Path(args.out or f"tune-{name}")
    if not profile.parent.is_dir():
        raise InputError(f"--profile is {profile}, but there is no folder {profile.parent}")
    lengths = QUICK_LENGTHS if args.quick else DEMO_LENGTHS if is_demo else DEFAULT_LENGTHS
    plan = Plan(
        model=args.model,
        tasks=_options.names(args.task or _options.default_task(args.model, DEFAULT_TASKS)),
        methods=(BASELINE,),
        lengths=_options.lengths(args.length or lengths),
        n=args.n or (QUICK_N if args.quick else DEFAULT_N),
        seed=args.seed,
        chat=args.chat,
    )
    everyday = args.everyday
    if everyday is None:  # the demo model reads one kind of prompt
        everyday = 0 if is_demo else QUICK_EVERYDAY if args.quick else N_EVERYDAY
    _options.note_of_template(args.model, args.chat)
    with _terminal.resumable(), _options.jobs(args) as jobs:
        options = run_options(plan, _options.machine_options(args), jobs)
        settings = FEW_SETTINGS if args.quick else SETTINGS
        how: dict[str, Any] = {"everyday": everyday, "settings": settings, "long_everyday": not args.quick}
        known = facts(plan, options, jobs)
        with _progress.following("answering") as progress:
            tuned = tune(plan, out, options=options, jobs=jobs, progress=progress, **how)
    evidence = {**vars(plan), "n_everyday": everyday, **known, **_evidence(tuned)}
    setting = tuned.config.as_dict() if tuned.config else None
    Profile(str(profile), setting, evidence).write()
    if args.json:
        print(json.dumps({"pcd": setting, **evidence}, indent=2))
    else:
        _print(plan, everyday, tuned, profile)
        if args.quick:
            print(_table.paragraph(_how_little(tuned, everyday)))
    _terminal.say(f"the answers are in {out}, the result is in {profile}")
    return 0


def _evidence(tuned: Tuned) -> dict[str, Any]:
    def cells(results: Mapping[Cell, Paired]) -> list[dict[str, Any]]:
        return [{"task": task, "length": length, **vars(result)} for (task, length), result in results.items()]

    names = ("verdict", "best", "n_judged", "plain_everyday", "refused")
    found = {name: getattr(tuned, name) for name in names}
    tried = {setting: dataclasses.asdict(figures) for setting, figures in tuned.tried.items()}
    judged = {name: cells(getattr(tuned, name)) for name in ("gain", "everyday", "replay")}
    return {**found, **judged, "tried": tried}


# -- what is printed at the end ----------------------------------------------------------------------------------------


def _print(plan: Plan, everyday: int, tuned: Tuned, profile: pathlib.Path) -> None:
    columns = _table.columns()
    names = ["setting", "long questions", *["everyday questions"] * (tuned.plain_everyday is not None)]
    tried = [[name, *map(_interval, (of.gain, of.everyday))][: len(names)] for name, of in tuned.tried.items()]
    print("First half of the questions, difference to greedy in points:\n")
    print(_table.table(names, tried, [False] * len(names), columns))
    if tuned.best:
        rows = [*_lines(tuned.gain, "all long questions"), *_lines(tuned.everyday, "all everyday questions")]
        head = ("tokens", "task", BASELINE, "PCD", "difference", "wins / losses", "spoilt")
        print(f"\nSecond half, with the best setting, {tuned.best}:\n")
        print(_table.table(head, rows, (True, False, True, True, False, True, True), columns))
    print(f"\n{_table.paragraph(NOT_SHOWN)}\n")
    for setting, reason in tuned.refused.items():
        _terminal.note(f"{setting} was left out: {reason}")
    print(_table.paragraph(_verdict(plan, everyday, tuned, profile)))
    if p := tuned.replay.get(ALL):
        beside = (
            f"Beside it, on the long questions of the second half: replay {interval(p)}, {p.wins} / {p.losses}. It repeats the "
            "passages that a question attends to: pypcd answer MODEL --context FILE -p QUESTION."
        )
        print(_table.paragraph(beside))


def _how_little(tuned: Tuned, everyday: int) -> str:
    cost = f", and so few everyday questions cannot show that a setting costs less than {MARGIN:.0f} points"
    return (
        f"quick is a first look: {tuned.n_judged} long questions judge, of which at least {MIN_N} must differ to show "
        f"anything{cost if everyday else ''}. Without --quick more are asked."
    )


def _interval(result: Paired | None) -> str:
    return interval(result) if result else ""


def _lines(results: Mapping[Cell, Paired], together: str) -> list[list[str]]:
    lines = []
    for (task, length), p in results.items():
        if len(results) > 2 or (task, length) != ALL:
            name = "everyday, behind text" if task == "everyday-behind" else task or together
            scores = f"{p.score - p.difference:.1f}", f"{p.score:.1f}"
            counts = f"{p.wins} / {p.losses}", f"{p.spoilt} of {p.right}"
            lines.append([str(length or ""), name, *scores, interval(p), *counts])
    return lines


def _verdict(plan: Plan, everyday: int, tuned: Tuned, profile: pathlib.Path) -> str:
    if tuned.verdict == "on":
        text = f"Use it: pypcd.Llama(..., pcd={str(profile)!r}), or --pcd {profile}."
        if tuned.everyday:
            return text
        why = "none were asked (--everyday)"
        if tuned.plain_everyday is not None:
            why = f"plain decoding gets only {tuned.plain_everyday:.0f}% of them right, and {LEAST:.0f}% are needed"
        return f"{text} What it costs on everyday questions is not known: {why}."
    if tuned.verdict == "off":
        spoilt = f"{tuned.everyday[ALL].regression:.1f}%" if ALL in tuned.everyday else "none"
        reasons = {
            "it loses everyday questions": tuned.harms,
            f"it spoils {spoilt} of the everyday questions that were right, and {MOST_SPOILT:.0f}% are allowed": tuned.gains
            and tuned.spoils,
            f"a gain of {WORTH:.0f} points is excluded, and none is shown": tuned.best,
            "every setting that gains loses everyday questions": tuned.chosen_by.gain.difference > 0,
            "no setting gains anything": True,
        }
        return f"Leave PCD off for prompts like these: {next(reason for reason, holds in reasons.items() if holds)}."
    if tuned.gains:
        kind, n, why = "everyday questions", tuned.everyday[ALL].n, f"a loss of {MARGIN:.0f} points"
        more = f"--everyday {2 * everyday}"
    else:
        kind, n, why = "questions", tuned.n_judged, f"a gain of {WORTH:.0f} points"
        more = f"--n {2 * plan.n}, or more tasks and lengths"
    return f"Too few {kind} to tell: {n} do not exclude {why}. Ask more of them: {more}. Leave PCD off until then."
