"""The same plan for each model: gain on questions about a text, loss on others, in one table and one picture.

    python -m research.models model.gguf … --dry-run     # how many questions
    python -m research.models model.gguf …

`scripts/evidence models` calls it. Each model is asked the questions of research/survey.py, plainly, with every preset,
with a window with a cut, with controls, replay and recite; stopped, it goes on where it was. A folder in place of a model holds answers
that there are already (`pypcd eval --out`): they come into the table too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Sequence

import pypcd
from pypcd.cli import _options, _progress, _table, _terminal
from pypcd.errors import PCDError
from pypcd.evaluation import ModelTokenizer
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import HALVES
from pypcd.gguf import resolve_model
from pypcd.prompt import has_template
from research import figures, plots
from research.balance import Run, balance, balance_markdown, read_run
from research.survey import PARTS, fitting, legs, missing, names_of, run_survey, survey_options


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="a GGUF file, 'demo', or a folder of answers")
    add("--dry-run", action="store_true", help="print how many questions are to be asked, and stop")
    add("--part", metavar="NAME,...", help=f"only these: retrieval, everyday, {', '.join(PARTS)}")
    add("--method", metavar="NAME,...", help="only these, beside greedy")
    add(
        "--length",
        metavar="N,...",
        help="other lengths of long prompts (default: 600,2000,6000; chats 1000; everyday 1000,4000)",
    )
    add(
        "--n",
        metavar="N",
        type=_options.at_least(2),
        help="questions a cell, of which half is asked (default: each part's)",
    )
    add("--chat", action="store_true", help="ask through the chat template; the answers are kept apart, as MODEL-chat")
    add("--half", choices=HALVES, default="second", help="of the answers in folders, which count (default %(default)s)")
    _options.add_jobs(parser)
    _options.add_machine(parser)
    add(
        "--work", type=pathlib.Path, default="build/evidence/models", help="where the answers are (default %(default)s)"
    )
    add(
        "--out",
        type=pathlib.Path,
        default="docs/evidence/models",
        help="where table and picture go (default %(default)s)",
    )
    args = parser.parse_intermixed_args(words)
    try:
        _run(args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, PCDError) as error:
        raise SystemExit(f"models: {error}") from error


def _run(args: argparse.Namespace) -> None:
    folders = [model for model in args.models if pathlib.Path(model).is_dir()]
    models = {
        name + "-chat" * args.chat: model
        for name, model in names_of([model for model in args.models if model not in folders]).items()
    }
    runs = [read_run(pathlib.Path(folder)) for folder in folders]
    names = [*(run.name for run in runs), *models]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two of the models are called {name}; give one of their folders or files another name")
    if models and args.half != "second":
        raise ValueError("--half first is for folders of answers; a model is asked the second half of the questions")
    if not args.dry_run:
        plots.require()  # hours before it is needed
    for name, model in models.items():
        with _options.jobs(args) as jobs:
            notes = _survey(args, jobs, name, model)
        if not args.dry_run:
            found = read_run(args.work / name, name)
            runs.append(dataclasses.replace(found, notes=tuple(notes)))
    if not args.dry_run:
        write(runs, args.half, args.out)


def _survey(args: argparse.Namespace, jobs: Jobs, name: str, model: str) -> list[str]:
    """Ask one model. Returns what was left out, in sentences."""
    lengths = _options.lengths(args.length) if args.length else ()
    parts, methods = _options.names(args.part), _options.names(args.method)
    plan, notes = legs(model, parts=parts, methods=methods, lengths=lengths, n=args.n, chat=args.chat)
    if not plan:
        raise ValueError(f"nothing is left to ask {name}: {'; '.join(notes)}")
    folder, options = args.work / name, survey_options(plan, _options.machine_options(args), jobs)
    with contextlib.closing(pypcd.Llama(resolve_model(model), **options)) as llm:
        if args.chat and not has_template(llm):
            raise ValueError(f"{name} has no chat template, so --chat cannot be used; leave it out")
        plan, unfit = fitting(plan, ModelTokenizer(llm, chat=args.chat))
        notes += unfit
        for note in notes:
            _terminal.say(f"{name}: {note}")
        if not plan:
            raise ValueError(f"nothing is left to ask {name}")
    left = [missing(leg, folder) for leg in plan]
    if args.dry_run:
        lines = [f"{name}\n", "| part | tokens | questions | answers |", "| --- | ---: | ---: | ---: |"]
        for leg, keys in zip(plan, left):
            lines.append(f"| {leg.part} | {leg.length} | {len({key[:3] for key in keys}):,} | {len(keys):,} |")
        _terminal.write(_table.aligned("\n".join(lines) + "\n", _table.columns()))
        return notes
    n_all, n_left = sum(len(list(leg.plan.everything())) for leg in plan), sum(map(len, left))
    if 0 < n_left < n_all:
        _terminal.say(f"{name} goes on: {n_all - n_left:,} of {n_all:,} answers are there")
    with _terminal.resumable(), _progress.following(name) as progress:
        refused = run_survey(plan, folder, jobs=jobs, options=options, progress=progress)
    return [*notes, *(f"`{method}` is refused: {reason}" for method, reason in refused.items())]


def write(runs: Sequence[Run], half: str, out: pathlib.Path) -> None:
    rows = [row for run in runs for row in balance(run, half)]
    if not rows:
        raise ValueError(f"there are no answers to questions of the {half} half; run pypcd eval with --half {half}")
    text = balance_markdown(runs, half)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(text, encoding="utf-8")
    record = {run.name: {"left_out": run.notes, "runs": run.facts} for run in runs}
    (out / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    columns = _table.columns()
    _terminal.write(text if columns is None else _table.aligned(text, columns))
    try:
        plots.save(figures.balances(rows), out / "summary.png")
    except ValueError as error:
        (out / "summary.png").unlink(missing_ok=True)  # that of another run would not fit the table
        _terminal.say(f"no picture was drawn: {error}")
    _terminal.say(f"the table and what was drawn are in {out}")


if __name__ == "__main__":
    main()
