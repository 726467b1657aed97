"""pypcd tune: the PCD setting that helps a model most, or that none does."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from typing import Any

from pypcd._cli import _options, _terminal
from pypcd._gguf import resolve_model
from pypcd._profile import write_profile
from pypcd.evaluation import Directory, Plan, Tuned, counts_of, facts, tune

HELP = "find the PCD setting that helps a model most, if one does"

DEFAULT_TASKS = "kv,niah-multikey-2,vt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd tune MODEL [options]"
    parser.epilog = "Half of the questions choose the setting, the other half judges it."
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME,...", help=f"as in `pypcd eval` (default: {DEFAULT_TASKS}; for demo kv-short)")
    add("--length", metavar="N,...", default="1k,4k", help="your prompts' tokens (default %(default)s)")
    add("--n", metavar="N", type=_options.at_least(2), default=200, help="questions a cell (default %(default)s)")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    add("--profile", metavar="FILE", help="where the setting is written (default: MODEL.pcd.json)")
    add("--out", metavar="DIR", help="answers, to go on after a stop (default: tune-MODEL)")
    add("--data", metavar="PATH", help="where the questions of longbench-... are")
    add("--chat", action="store_true", help="ask through the model's chat template")
    add("--jobs", metavar="N", type=_options.at_least(1), default=1, help="processes (default %(default)s)")
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    name = pathlib.Path(args.model).stem
    path, profile = resolve_model(args.model), pathlib.Path(args.profile or f"{name}.pcd.json")
    if not profile.parent.is_dir():
        raise ValueError(f"--profile is {profile}, but there is no folder {profile.parent}")
    plan = Plan(
        model=args.model,
        tasks=_options.names(args.task or _options.default_task(args.model, DEFAULT_TASKS)),
        methods=("greedy",),
        lengths=_options.lengths(args.length),
        n=args.n,
        seed=args.seed,
        chat=args.chat,
        data=args.data,
    )
    options = _options.job_options(args)
    with _terminal.progress(os.path.getsize(path), "hashing the model", unit="B") as bar:
        known = facts(plan, options, bar.update)
    bar = _terminal.progress(None, "answering", unit=" tokens")

    def tell(method: str, gain: float) -> None:
        bar.clear()
        _terminal.say(f"{gain:+6.1f} points  {method}")

    with _terminal.resumable(), bar:
        tuned = tune(
            plan,
            Directory(args.out or f"tune-{name}"),
            options=options,
            jobs=args.jobs,
            model_facts=known,
            tell=tell,
            progress=bar.update,
        )
    config = tuned.config
    evidence = _evidence(plan, tuned, known)
    write_profile(profile, config.as_dict() if config else None, evidence)
    if args.json:
        print(json.dumps({"pcd": config.as_dict() if config else None, **evidence}, indent=2))
    else:
        _print(plan, tuned, profile)
    return 0


def _evidence(plan: Plan, tuned: Tuned, known: dict[str, Any]) -> dict[str, Any]:
    judged = [{"task": task, "length": length, **vars(result)} for (task, length), result in tuned.judged_by.items()]
    return {
        **vars(plan),
        **known,
        "best": tuned.method,
        "chosen_by": tuned.chosen_by and vars(tuned.chosen_by),
        "judged_by": judged,
        "tried": tuned.tried,
        "refused": tuned.refused,
    }


def _first(n: int) -> int:
    """Of n questions those that choose the setting."""
    return n - n // 2


def _second(n: int) -> int:
    return n // 2


def _print(plan: Plan, tuned: Tuned, profile: pathlib.Path) -> None:
    counts = counts_of(plan).values()
    n_first, n_second = (" to ".join(str(n) for n in sorted({f(n) for n in counts})) for f in (_first, _second))
    if tuned.method is None:
        print(
            f"none of {len(tuned.tried)} settings beat plain decoding on the {n_first} questions a cell they were tried on"
        )
    else:
        print(
            f"{tuned.method} was the best of {len(tuned.tried)} settings; on {n_second} other questions a cell, against greedy:\n"
        )
        print(f"{'task':<20} {'tokens':>6} {'greedy':>7} {'PCD':>6}  {'difference':>26}  {'wins/losses':>11}")
        for (task, length), p in tuned.judged_by.items():
            change = f"{p.difference:+6.1f}  [{p.low:+6.1f}, {p.high:+6.1f}]{' ' if p.is_clear else '~'}"
            print(
                f"{task or 'all':<20} {length or '':>6} {p.score - p.difference:>7.1f} {p.score:>6.1f}  {change:>26}  "
                f"{f'{p.wins}/{p.losses}':>11}"
            )
        print("\n~ the interval spans zero or p is 0.05 or more: no difference shown")
    for method, reason in tuned.refused.items():
        _terminal.note(f"{method} was not tried: {reason}")
    if tuned.helps:
        print(f"use it: pypcd.Llama(..., pcd={str(profile)!r}), or --pcd {profile}")
    else:
        print(f"recommended: leave PCD off on prompts like these ({profile} says so too)")
