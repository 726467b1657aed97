"""pypcd tune: finds the PCD setting that helps on long prompts and costs everyday questions nothing, if there is one."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from pypcd.cli import _options, _progress, _table, _terminal, _text
from pypcd.decode import PCD, setting_of
from pypcd.errors import InputError
from pypcd.evaluation import Paired, Plan, counts_of, facts, run_options
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import MARGIN, NOT_SHOWN, fewest, interval
from pypcd.evaluation.tasks.everyday import LEAST
from pypcd.gguf import resolve_model
from pypcd.lab.recorded import view_of
from pypcd.lab.tune import ALL, N_EVERYDAY, Cell, Tuned, Weighed, tune
from pypcd.settings import Profile

DEFAULT_TASKS = "kv,niah-multikey-2,vt"
DEFAULT_LENGTHS, DEFAULT_N = "1k,4k", 100
QUICK_LENGTHS, QUICK_N, QUICK_EVERYDAY = "1k", 40, 8
DEMO_LENGTHS = "500,1500"  # its context ends at 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd tune MODEL [options]"
    parser.epilog = "Half of the questions choose the setting, the other half judges it."
    _options.add_model(parser)
    add = parser.add_argument
    add("--task", metavar="NAME,...", help=f"default: {DEFAULT_TASKS}; for demo kv-short")
    add("--length", metavar="N,...", help=f"your prompts' tokens (default {DEFAULT_LENGTHS}; demo {DEMO_LENGTHS})")
    add("--n", metavar="N", type=_options.at_least(2), help=f"questions a cell (default {DEFAULT_N})")
    add(
        "--everyday",
        metavar="N",
        type=_options.at_least(0),
        help=f"everyday questions of each kind (default {N_EVERYDAY}; demo 0)",
    )
    add("--quick", action="store_true", help=f"--n {QUICK_N}, --everyday {QUICK_EVERYDAY}, 1k tokens, few settings")
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other questions (default %(default)s)")
    add("--profile", metavar="FILE", help="where the setting is written (default: MODEL.pcd.json)")
    add("--out", metavar="DIR", help="rows and answers (default: tune-MODEL)")
    add("--data", metavar="PATH", help="where the questions of longbench-... are")
    add("--chat", action="store_true", help="ask through the model's chat template")
    _options.add_jobs(parser)
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    name = pathlib.Path(args.model).stem + "-quick" * args.quick
    path, profile = resolve_model(args.model), pathlib.Path(args.profile or f"{name}.pcd.json")
    if not profile.parent.is_dir():
        raise InputError(f"--profile is {profile}, but there is no folder {profile.parent}")
    lengths = QUICK_LENGTHS if args.quick else DEMO_LENGTHS if args.model == "demo" else DEFAULT_LENGTHS
    plan = Plan(
        model=args.model,
        tasks=_options.names(args.task or _options.default_task(args.model, DEFAULT_TASKS)),
        methods=(BASELINE,),
        lengths=_options.lengths(args.length or lengths),
        n=args.n or (QUICK_N if args.quick else DEFAULT_N),
        seed=args.seed,
        chat=args.chat,
        data=args.data,
    )
    everyday = args.everyday
    if everyday is None:  # the demo model reads one kind of prompt
        everyday = 0 if args.model == "demo" else QUICK_EVERYDAY if args.quick else N_EVERYDAY
    n_judged = len(plan.lengths) * sum(n // 2 for n in counts_of(plan).values())
    if n_judged < fewest():
        _terminal.note(
            f"{_counted(n_judged, 'question')} to judge by, but fewer than {fewest()} cannot show a difference: nothing will "
            f"be recommended; {_ask_more(plan, fewest())}"
        )

    out = pathlib.Path(args.out or f"tune-{name}")
    with _terminal.resumable(), _options.jobs(args) as jobs:
        options = run_options(plan, _options.machine_options(args), jobs)
        with _terminal.progress(os.path.getsize(path), "hashing the model", unit="B") as bar:
            known = facts(plan, options, bar.update, jobs)
        with _progress.following("answering") as progress:
            tell = _Teller(progress)
            tuned = tune(
                plan,
                out,
                everyday=everyday,
                options=options,
                jobs=jobs,
                model_facts=known,
                quick=args.quick,
                tell=tell,
                progress=progress,
            )
    _write_tried(tuned, out / "tried.csv")
    config = tuned.config
    evidence = _evidence(plan, everyday, tuned, tell.best, known)
    Profile(str(profile), config.as_dict() if config else None, evidence).write()
    if args.json:
        print(json.dumps({"pcd": config.as_dict() if config else None, **evidence}, indent=2))
    else:
        _print(plan, everyday, tuned, profile, args.quick)
        _terminal.say(f"all {len(tuned.tried)} settings are in {out / 'tried.csv'}")
    return 0


class _Teller:
    """Prints the best setting of each view, round by round.

    Attributes:
        best: of each view the last one, with its figures, by the view's name as a method.
    """

    def __init__(self, progress: _progress.Follower) -> None:
        self.best: dict[str, tuple[str, Weighed]] = {}
        self._progress, self._asked = progress, (0, 0)

    def __call__(self, method: str, weighed: Weighed) -> None:
        config = setting_of(method)
        assert config is not None  # only settings of PCD are tried
        self.best[PCD(view_of(config)).name] = method, weighed
        asked = weighed.gain.n, weighed.everyday.n if weighed.everyday else 0
        self._progress.clear()
        if asked != self._asked:
            self._asked = asked
            usual = f" and {_counted(asked[1], 'everyday question')}" if weighed.everyday else ""
            _terminal.say(f"after {_counted(asked[0], 'long question')}{usual}, in points over greedy:")
        _terminal.say(f"  {_figures(weighed)}  {_typed(method)}")


def _typed(method: str) -> str:
    """A setting by its name as a method, as --pcd takes it."""
    return _options.describe_pcd(setting_of(method))


def _figures(weighed: Weighed) -> str:
    if weighed.everyday is None:
        return interval(weighed.gain)
    return f"long {interval(weighed.gain)}, everyday {interval(weighed.everyday)}"


def _evidence(
    plan: Plan, everyday: int, tuned: Tuned, best: Mapping[str, tuple[str, Weighed]], known: dict[str, Any]
) -> dict[str, Any]:
    def weighed(figures: Weighed) -> dict[str, Any]:
        return {"gain": vars(figures.gain), "everyday": figures.everyday and vars(figures.everyday)}

    def cells(results: Mapping[Cell, Paired]) -> list[dict[str, Any]]:
        return [{"task": task, "length": length, **vars(result)} for (task, length), result in results.items()]

    return {
        **vars(plan),
        "n_everyday": everyday,
        **known,
        "verdict": tuned.verdict,
        "n_judged": tuned.n_judged,
        "n_needed": tuned.n_needed,
        "n_everyday_needed": tuned.n_everyday_needed,
        "plain_everyday": tuned.plain_everyday,
        "best": tuned.method,
        "chosen_by": weighed(tuned.chosen_by),
        "gain": cells(tuned.gain),
        "everyday": cells(tuned.everyday),
        "n_tried": len(tuned.tried),
        "views": {view: {"best": method, **weighed(figures)} for view, (method, figures) in best.items()},
        "refused": tuned.refused,
    }


def _write_tried(tuned: Tuned, path: pathlib.Path) -> None:
    """Every setting with its figures on the first half."""
    head = [f"{kind}_{name}" for kind in ("long", "everyday") for name in ("n", "difference", "low", "high")]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", *head])
        for method, weighed in tuned.tried.items():
            values: list[str] = []
            for p in (weighed.gain, weighed.everyday):
                values += [str(p.n), *(f"{x:.2f}" for x in (p.difference, p.low, p.high))] if p else [""] * 4
            writer.writerow([method, *values])


# -- what is printed at the end ----------------------------------------------------------------------------------------


def _print(plan: Plan, everyday: int, tuned: Tuned, profile: pathlib.Path, quick: bool) -> None:
    n_tried, columns = len(tuned.tried), min(_table.columns() or 120, 120)
    if tuned.method is None:
        print("\n".join(_text.wrap(f"none of {n_tried} settings {_nothing(tuned)}", columns)))
    else:
        print(f"{_typed(tuned.method)} was the best of {n_tried} settings; on other questions, against greedy:\n")
        print(_results(tuned))
        print(f"\n{NOT_SHOWN}")
    for method, reason in tuned.refused.items():
        _terminal.note(f"{method} was not tried: {reason}")
    print("\n".join(_text.wrap(_verdict(plan, everyday, tuned, profile), columns)))
    if quick:
        print("quick: few settings were tried, on few questions, which cannot show that everyday ones lose nothing")


def _nothing(tuned: Tuned) -> str:
    """What may be said of settings of which none was chosen. One that was given up earlier may have been ahead by then."""
    n = tuned.chosen_by.gain.n
    last = {method: weighed for method, weighed in tuned.tried.items() if weighed.gain.n == n}
    method, most = max(last.items(), key=lambda item: item[1].gain.difference)
    if most.gain.difference <= 0:
        return f"was ahead of greedy after all {_counted(n, 'question')} to choose by"
    return (
        f"gained on long prompts without a loss on everyday questions, after all {_counted(n, 'long question')} to choose by; "
        f"the highest gain was that of {_typed(method)}: {_figures(most)}"
    )


def _results(tuned: Tuned) -> str:
    head = ("tokens", "task", BASELINE, "PCD", "difference", "wins / losses")
    rows = [*_lines(tuned.gain, "all long questions"), *_lines(tuned.everyday, "all everyday questions")]
    return _table.table(head, rows, (True, False, True, True, False, True), 2, _table.columns())


def _lines(results: Mapping[Cell, Paired], together: str) -> Iterator[tuple[str, ...]]:
    for (task, length), p in results.items():
        if len(results) > 2 or (task, length) != ALL:
            yield (
                str(length or ""),
                {"everyday": "everyday", "everyday-behind": "everyday, behind text"}.get(task or "", task or together),
                f"{p.score - p.difference:.1f}",
                f"{p.score:.1f}",
                interval(p),
                f"{p.wins} / {p.losses}",
            )


def _verdict(plan: Plan, everyday: int, tuned: Tuned, profile: pathlib.Path) -> str:
    unknown = f" {_harm_unknown(tuned)}" if not tuned.everyday else ""
    says_so = f"({profile} says so too)"
    if tuned.verdict == "on":
        return f"use it: pypcd.Llama(..., pcd={str(profile)!r}), or --pcd {profile}.{unknown}"
    if tuned.verdict == "off":
        why = ""
        if tuned.harms:
            why = ": it costs everyday questions"
        elif tuned.gains:
            why = f": a loss of {MARGIN:.0f} points on everyday questions is not excluded"
        return f"recommended: leave PCD off on prompts like these{why} {says_so}"
    if tuned.gains:
        n, wanted = tuned.everyday[ALL].n, tuned.n_everyday_needed or 0
        return (
            f"no recommendation: it gains on long prompts, but {_counted(n, 'everyday question')} to judge by are too few to "
            f"exclude a loss of {MARGIN:.0f} points; about {wanted} are needed: --everyday {math.ceil(everyday * wanted / n)}. "
            f"Until then leave PCD off {says_so}."
        )
    return (
        f"no recommendation: {_counted(tuned.n_judged, 'question')} to judge by {'is' if tuned.n_judged == 1 else 'are'} too "
        f"few. The best setting and greedy disagreed on {100 * tuned.disagreement:.0f}% of the questions it was chosen by; "
        f"then about {tuned.n_needed} questions are needed to show a gain of 10 points, four times in five: "
        f"{_ask_more(plan, tuned.n_needed)}. Until then leave PCD off {says_so}."
    )


def _harm_unknown(tuned: Tuned) -> str:
    if tuned.plain_everyday is None:
        return "What it costs on everyday questions is not known: none were asked (--everyday)."
    return (
        f"What it costs on everyday questions is not known: this model gets {tuned.plain_everyday:.0f}% of them right without "
        f"PCD, and with fewer than {LEAST:.0f}% they say nothing."
    )


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _ask_more(plan: Plan, n_judged: int) -> str:
    """Advice: how many questions a cell leave that many to judge by."""
    n = 2 * math.ceil(n_judged / (len(plan.tasks) * len(plan.lengths)))
    return f"ask more of them, --n {n}, or more tasks and lengths"
