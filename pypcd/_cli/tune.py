"""pypcd tune: finds the PCD setting that helps a model most, if one does."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
from typing import Any

from pypcd._cli import _options, _progress, _table, _terminal, _text
from pypcd._gguf import resolve_model
from pypcd._settings import Profile
from pypcd.evaluation import Directory, Plan, Tuned, counts_of, facts, run_options, tune
from pypcd.evaluation._plan import BASELINE
from pypcd.evaluation._stats import NOT_SHOWN, fewest, interval

DEFAULT_TASKS = "kv,niah-multikey-2,vt"
DEFAULT_LENGTHS, DEFAULT_N = "1k,4k", 200
QUICK_LENGTHS, QUICK_N = "1k", 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd tune MODEL [options]"
    parser.epilog = "Half of the questions choose the setting, the other half judges it."
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME,...", help=f"default: {DEFAULT_TASKS}; for demo kv-short")
    add("--length", metavar="N,...", help=f"your prompts' tokens (default {DEFAULT_LENGTHS})")
    add("--n", metavar="N", type=_options.at_least(2), help=f"questions a cell (default {DEFAULT_N})")
    add(
        "--quick",
        action="store_true",
        help=f"{QUICK_N} questions a cell, {QUICK_LENGTHS} tokens, 7 settings for 22 to 37",
    )
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    add("--profile", metavar="FILE", help="where the setting is written (default: MODEL.pcd.json)")
    add("--out", metavar="DIR", help="answers, to go on after a stop (default: tune-MODEL)")
    add("--data", metavar="PATH", help="where the questions of longbench-... are")
    add("--chat", action="store_true", help="ask through the model's chat template")
    add("--jobs", metavar="N", type=_options.at_least(1), default=1, help="processes (default %(default)s)")
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    name = pathlib.Path(args.model).stem + "-quick" * args.quick
    path, profile = resolve_model(args.model), pathlib.Path(args.profile or f"{name}.pcd.json")
    if not profile.parent.is_dir():
        raise ValueError(f"--profile is {profile}, but there is no folder {profile.parent}")
    plan = Plan(
        model=args.model,
        tasks=_options.names(args.task or _options.default_task(args.model, DEFAULT_TASKS)),
        methods=(BASELINE,),
        lengths=_options.lengths(args.length or (QUICK_LENGTHS if args.quick else DEFAULT_LENGTHS)),
        n=args.n or (QUICK_N if args.quick else DEFAULT_N),
        seed=args.seed,
        chat=args.chat,
        data=args.data,
    )
    options = run_options(plan, _options.machine_options(args), args.jobs)
    with _terminal.progress(os.path.getsize(path), "hashing the model", unit="B") as bar:
        known = facts(plan, options, bar.update)
    n_judged = len(plan.lengths) * sum(map(_second, counts_of(plan).values()))
    if n_judged < fewest():
        _terminal.note(
            f"{_counted(n_judged, 'question')} to judge by, but fewer than {fewest()} cannot show a difference: nothing will "
            f"be recommended; {_ask_more(plan, fewest())}"
        )

    with _terminal.resumable(), _progress.following("answering") as progress:

        def tell(method: str, gain: float) -> None:
            progress.clear()
            _terminal.say(f"{gain:+6.1f} points  {method}")

        tuned = tune(
            plan,
            Directory(args.out or f"tune-{name}"),
            options=options,
            jobs=args.jobs,
            model_facts=known,
            quick=args.quick,
            tell=tell,
            progress=progress,
        )
    config = tuned.config
    evidence = _evidence(plan, tuned, known)
    Profile(str(profile), config.as_dict() if config else None, evidence).write()
    if args.json:
        print(json.dumps({"pcd": config.as_dict() if config else None, **evidence}, indent=2))
    else:
        _print(plan, tuned, profile, args.quick)
    return 0


def _evidence(plan: Plan, tuned: Tuned, known: dict[str, Any]) -> dict[str, Any]:
    judged = [{"task": task, "length": length, **vars(result)} for (task, length), result in tuned.judged_by.items()]
    return {
        **vars(plan),
        **known,
        "verdict": tuned.verdict,
        "n_judged": tuned.n_judged,
        "n_needed": tuned.n_needed,
        "best": tuned.method,
        "chosen_by": tuned.chosen_by and vars(tuned.chosen_by),
        "judged_by": judged,
        "tried": tuned.tried,
        "refused": tuned.refused,
    }


def _first(n: int) -> int:
    """How many of n questions choose the setting; the others judge it."""
    return n - n // 2


def _second(n: int) -> int:
    return n // 2


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _ask_more(plan: Plan, n_judged: int) -> str:
    """Advice: how many questions a cell leave that many to judge by."""
    n = 2 * math.ceil(n_judged / (len(plan.tasks) * len(plan.lengths)))
    return f"ask more of them, --n {n}, or more tasks and lengths"


def _print(plan: Plan, tuned: Tuned, profile: pathlib.Path, quick: bool) -> None:
    counts = counts_of(plan).values()
    n_first, n_second = (" to ".join(str(n) for n in sorted({f(n) for n in counts})) for f in (_first, _second))
    if tuned.method is None:
        print(
            f"none of {len(tuned.tried)} settings beat plain decoding on the questions they were tried on ({n_first} a cell)"
        )
    else:
        print(
            f"{tuned.method} was the best of {len(tuned.tried)} settings; on other questions ({n_second} a cell), against greedy:\n"
        )
        print(_results(tuned))
        print(f"\n{NOT_SHOWN}")
    for method, reason in tuned.refused.items():
        _terminal.note(f"{method} was not tried: {reason}")
    print("\n".join(_text.wrap(_verdict(plan, tuned, profile), min(_table.columns() or 120, 120))))
    if quick:
        print(
            "quick: few settings were tried, on few questions; without --quick, changes of single values are tried too"
        )


def _results(tuned: Tuned) -> str:
    head = ("tokens", "task", BASELINE, "PCD", "difference", "wins / losses")
    rows = [
        (
            str(length or ""),
            task or "all",
            f"{p.score - p.difference:.1f}",
            f"{p.score:.1f}",
            interval(p),
            f"{p.wins} / {p.losses}",
        )
        for (task, length), p in tuned.judged_by.items()
    ]
    return _table.table(head, rows, (True, False, True, True, False, True), 2, _table.columns())


def _verdict(plan: Plan, tuned: Tuned, profile: pathlib.Path) -> str:
    if tuned.verdict == "on":
        return f"use it: pypcd.Llama(..., pcd={str(profile)!r}), or --pcd {profile}"
    if tuned.verdict == "off":
        return f"recommended: leave PCD off on prompts like these ({profile} says so too)"
    return (
        f"no recommendation: {_counted(tuned.n_judged, 'question')} to judge by {'is' if tuned.n_judged == 1 else 'are'} too "
        f"few. The best setting and greedy disagreed on {100 * tuned.disagreement:.0f}% of the questions it was chosen by; "
        f"then about {tuned.n_needed} questions are needed to show a gain of 10 points, four times in five: "
        f"{_ask_more(plan, tuned.n_needed)}. Until then leave PCD off ({profile} says so too)."
    )
