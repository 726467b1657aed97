#!/usr/bin/env python3
"""What the preset `gentle` was chosen from: every formula tried on the first half of the questions, in one table.

    python scripts/recipes/search.py build/evidence/smollm2.gguf
    python scripts/recipes/search.py demo --out docs/evidence/search-demo --work build/evidence/search-demo

`scripts/evidence search` calls it. Records the rows along the right answers (pypcd/lab/recorded.py) of retrieval and
everyday questions, a few hundred of each, and judges all formulas on them: summary.csv has them all, summary.md the best of
each kind. Stopped, it goes on where it was. The best of many flatters itself; what was chosen is judged on the other half,
by decoding.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from pypcd.cli import _options, _progress, _terminal
from pypcd.decode import PCD
from pypcd.errors import PCDError, did_you_mean
from pypcd.evaluation import Directory, Paired, Plan
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import Key
from pypcd.evaluation.run import Record
from pypcd.evaluation.stats import NOT_SHOWN, interval, paired_counts
from pypcd.evaluation.tasks import parts_of
from pypcd.evaluation.tasks.everyday import SHORT
from pypcd.gguf import read_gguf, resolve_model
from pypcd.lab.balance import LONG, RETRIEVAL, SHORT_PROMPTS, greedys, group_of
from pypcd.lab.formula import Formula
from pypcd.lab.recorded import record
from pypcd.lab.screen import Screen
from pypcd.lab.survey import FAR

FAR_RETRIEVAL = f"retrieval, over {FAR} tokens"
GROUPS = (RETRIEVAL, FAR_RETRIEVAL, LONG, SHORT_PROMPTS)

WINDOWS = tuple(f"pcd:window:window={n}" for n in (32, 64, 128, 256))
NARROW = "pcd:window:window=16"
TURNED = ("pcd:base_ratio=0.5", "pcd:base_ratio=0.1", "pcd:base_ratio=0.01", "pcd:base_ratio=0.1:cache=shared")


class Part(NamedTuple):
    """Questions of which the first half is recorded, in a folder of the part's name.

    Attributes:
        max_tokens: the longest answer; None: the task's own.
        views: those that are recorded.
    """

    tasks: tuple[str, ...]
    length: int
    n: int
    max_tokens: int | None
    views: tuple[str, ...]

    @property
    def group(self) -> str | None:
        group = group_of(parts_of(self.tasks)[0], self.length)
        return FAR_RETRIEVAL if group == RETRIEVAL and self.length > FAR else group


PARTS = {
    "needles600": Part(("niah-multikey-2",), 600, 160, 40, WINDOWS),
    "needles1500": Part(("niah-multikey-2",), 1500, 60, 40, WINDOWS),
    "needles3000": Part(("niah-multikey-2",), 3000, 40, 40, WINDOWS[1::2]),
    "needles6000": Part(("niah-multikey-2",), 6000, 24, 40, WINDOWS[1::2]),
    "uuids600": Part(("niah-multikey-3",), 600, 80, 48, WINDOWS),
    "kv600": Part(("kv-short",), 600, 60, None, WINDOWS),
    "short": Part(("everyday",), SHORT, 24, None, WINDOWS),
    "shots1000": Part(("everyday",), 1000, 26, None, WINDOWS),
    "shots2000": Part(("everyday",), 2000, 8, None, WINDOWS),
    "behind1000": Part(("everyday-behind",), 1000, 20, None, WINDOWS),
}
# over-rotation on fewer questions: it helped nowhere
PARTS_TURNED = {
    "turned600": Part(("niah-multikey-2",), 600, 80, 40, TURNED),
    "turned-shots1000": Part(("everyday",), 1000, 4, None, TURNED),
}
# for a model that knows nothing but keys and values, such as demo
PARTS_KV = {
    "kv250": Part(("kv-short",), 250, 200, None, (NARROW, *WINDOWS, *TURNED)),
    "kv500": Part(("kv-short",), 500, 200, None, (NARROW, *WINDOWS, *TURNED)),
    "kv900": Part(("kv-short",), 900, 120, None, (NARROW, *WINDOWS, *TURNED)),
}
SETS = {"windows": PARTS, "turned": PARTS_TURNED, "kv": PARTS_KV}  # each has a table

BETAS = ("0.25", "0.5", "0.75", "1", "1.5", "2.5", "2.5*jsd", "5*jsd", "10*jsd", "20*jsd", "sqrt(jsd)", "2*sqrt(jsd)")
CUTS = ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8")
# where the model is unsure: of each token, of the answer's first one
SURE = (
    "",
    *(f"entropy>={bits}" for bits in (1.5, 2, 2.5, 3)),
    *(f"first>={bits}" for bits in (1.5, 2, 2.25, 2.5, 2.75, 3)),
)
# safeguards, each alone: on the model's or the twin's sureness, on how much or how the rows disagree, on what is lifted
GUARDS = (
    *(f"top<{p}" for p in (0.3, 0.4, 0.5, 0.6)),
    *(f"top_s<{p}" for p in (0.3, 0.5, 0.6, 0.8)),
    *(f"entropy_s>{bits}" for bits in (1, 1.5, 2, 3)),
    *(f"jsd>{d}" for d in (0.05, 0.1, 0.2, 0.4, 0.6)),
    *(f"(l-s)>{nats}" for nats in (0, 0.5, 1, 2, 3, 4)),
    *("jsd<0.1", "jsd<0.2", "jsd<0.3", "rank>1", "rank<=2", "rank<=3", "rank_back>1", "rank_back<=2", "rank_back>3"),
    *("entropy>entropy_s", "entropy<entropy_s", "entropy<entropy_s+1", "step<3"),
    *("entropy>=2 and jsd>0.05", "entropy>=2 and top_s<0.8", "entropy>=1.5 and top<0.5"),
    *(f"entropy>={bits} and jsd<{d}" for bits in (1.5, 2, 2.5) for d in (0.1, 0.2)),
    *(
        "entropy>=2 and entropy_s>=2",
        "entropy>=2.5 and entropy_s>=2.5",
        "step<1 and entropy>=2",
        "step<3 and entropy>=2",
    ),
)


def formulas(view: str) -> Iterator[str]:
    for beta, cut in itertools.product(BETAS, CUTS):
        guards = GUARDS if view == WINDOWS[1] and beta in ("0.5", "1", "2.5", "10*jsd") else ()
        for where in (*(SURE[:1] if view in TURNED else SURE), *guards):
            yield f"{view}:beta={beta}:relative_top={cut}" + (f":where={where}" if where else "")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", help="a GGUF file, or 'demo'")
    add("--part", metavar="NAME,...", help=f"only these: {_names()} (default: windows,turned; for demo kv)")
    add("--work", type=pathlib.Path, default="build/evidence/search", help="where the rows are (default %(default)s)")
    add("--out", type=pathlib.Path, default="docs/evidence/search", help="for the tables (default %(default)s)")
    _options.add_jobs(parser)
    args = parser.parse_args(words)

    try:
        with _terminal.resumable(), _options.jobs(args) as jobs:
            write(args, jobs)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, PCDError) as error:
        raise SystemExit(f"search: {error}") from error


def write(args: argparse.Namespace, jobs: Jobs) -> None:
    asked, notes = trained_for(chosen(_options.names(args.part) or default(args.model)), args.model)
    tables, refused = [], {}
    for parts in asked:
        found = {name: rows_of(name, part, args, jobs, refused) for name, part in parts.items()}
        made = table(parts, found, refused)
        if made:
            tables.append(made)
    notes += [f"`{view}` is refused: {why}" for view, why in refused.items()]
    for note in notes:
        _terminal.say(note)
    if not tables:
        raise ValueError(f"there is nothing to judge formulas on: {'; '.join(notes)}")
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(args.out / "summary.csv", [row for rows in tables for row in rows])
    text = "\n\n".join([*map(markdown, tables), NOT_SHOWN, *(f"- {note}" for note in notes)])
    (args.out / "summary.md").write_text(text + "\n", encoding="utf-8")
    _terminal.say(f"tables are in {args.out}")


# -- what is asked ----------------------------------------------------------------------------------------------------

Parts = Mapping[str, Part]


def default(model: str) -> tuple[str, ...]:
    return ("kv",) if model == "demo" else ("windows", "turned")


def chosen(names: Collection[str]) -> list[Parts]:
    """The parts with these names, or of the sets with these names: those of each table.

    Raises:
        ValueError: there is no such part, or two tables would have the same formulas.
    """
    known = [*SETS, *itertools.chain(*SETS.values())]
    for name in names:
        if name not in known:
            raise ValueError(f"part is {name!r}{did_you_mean(name, known)}; allowed: {_names()}")
    found = {
        which: {name: part for name, part in parts.items() if name in names or which in names}
        for which, parts in SETS.items()
    }
    found = {which: parts for which, parts in found.items() if parts}
    if "kv" in found and len(found) > 1:
        raise ValueError(
            f"part has {next(iter(found['kv']))} and others that are not of kv, but the same formulas are judged on both; "
            "give them in two runs, with an --out each"
        )
    return list(found.values())


def _names() -> str:
    return "; ".join(f"{which}, which is {', '.join(parts)}" for which, parts in SETS.items())


def trained_for(asked: Sequence[Parts], model: str) -> tuple[list[Parts], list[str]]:
    """The parts without those longer than the model's training, and a sentence for each of these."""
    n_train = read_gguf(resolve_model(model)).shape.n_ctx_train
    left = [{name: part for name, part in parts.items() if part.length <= n_train} for parts in asked]
    out = {name: part for parts in asked for name, part in parts.items() if part.length > n_train}
    notes = [
        f"{name} is left out: it has {part.length} tokens, the model was trained for {n_train}"
        for name, part in out.items()
    ]
    return [parts for parts in left if parts], notes


def rows_of(
    name: str, part: Part, args: argparse.Namespace, jobs: Jobs, refused: dict[str, str]
) -> Mapping[Key, Record]:
    """A part's rows, recorded as far as they are missing. Views that the model cannot run go to `refused`, with the reason."""
    plan = Plan(args.model, part.tasks, part.views, (part.length,), n=part.n, max_tokens=part.max_tokens, half="first")
    options = {"n_threads": 1, "n_threads_batch": 1}
    with _progress.following(name) as progress:
        found = record(plan, Directory(args.work / name), jobs=jobs, options=options, progress=progress)
    refused.update(found.refused)
    return found.records


# -- what is found ----------------------------------------------------------------------------------------------------

Row = tuple[str, dict[str, Paired]]  # a formula, and its comparison with greedy in each group of questions


def table(parts: Parts, found: Mapping[str, Mapping[Key, Record]], refused: Collection[str]) -> list[Row]:
    """Each formula on all questions of each group that have the rows of its view."""
    views = dict.fromkeys(view for part in parts.values() for view in part.views)
    usable = [view for view in views if _recorded(view) not in refused]
    judged = {view: [Formula.parse(text) for text in formulas(view)] for view in usable}
    cells: dict[Formula, dict[str, Paired]] = {formula: {} for made in judged.values() for formula in made}
    for group in dict.fromkeys(part.group for part in parts.values()):
        names = [name for name, part in parts.items() if part.group == group]
        screen = Screen({key: row for name in names for key, row in found[name].items()})
        plain, _ = screen.follow(Formula(None))
        for view in usable:
            if all(view in parts[name].views for name in names):
                for formula in judged[view]:
                    cells[formula][group] = paired_counts(screen.follow(formula)[0], plain)
    return [(formula.name, by_group) for formula, by_group in cells.items() if by_group]


def _recorded(view: str) -> str:
    """A view's name among the records."""
    setting = Formula.parse(view).view
    assert setting is not None
    return PCD(setting).name


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for _, cells in rows for name in cells))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["formula", *(f"{name}: {what}" for name in names for what in ("n", "wins", "losses"))])
        for formula, cells in rows:
            found = [cells.get(name) for name in names]
            writer.writerow(
                [formula, *itertools.chain(*(("", "", "") if p is None else (p.n, p.wins, p.losses) for p in found))]
            )


def markdown(rows: Sequence[Row]) -> str:
    """The 15 formulas with the highest gain on retrieval, or on what there is, among those without a loss in long everyday
    prompts, and 15 of all; of those with the same figures the first one."""
    greedy = {
        name: p for _, cells in reversed(rows) for name, p in cells.items()
    }  # in all rows the same, but for rounding
    groups = [name for name in GROUPS if name in greedy]
    what = "Points against greedy with 95% intervals (over answers), on the first half of the questions; wins / losses."
    lines = [f"{len(rows)} formulas. {what}\n"]
    head = [f"{name} (greedy {greedys(greedy[name]):.1f}, n = {greedy[name].n})" for name in groups]
    titled = {"All": rows}
    if LONG in groups:
        spared = [row for row in rows if LONG not in row[1] or row[1][LONG].difference >= 0]
        titled = {"No loss in long everyday prompts": spared, **titled}
    for title, part in titled.items():
        unlike: dict[tuple, Row] = {}
        for row in part:
            if groups[0] in row[1]:
                unlike.setdefault(tuple((p.wins, p.losses) for p in row[1].values()), row)
        best = sorted(unlike.values(), key=lambda row: -row[1][groups[0]].difference)[:15]
        lines += [
            f"{title}, the 15 with the highest gain\n",
            f"| formula | {' | '.join(head)} |",
            "| --- " * (1 + len(groups)) + "|",
        ]
        lines += [f"| `{name}` | {' | '.join(_cell(cells.get(group)) for group in groups)} |" for name, cells in best]
        lines.append("")
    return "\n".join(lines)


def _cell(p: Paired | None) -> str:
    return f"{interval(p)} ({p.wins} / {p.losses})" if p else ""


if __name__ == "__main__":
    main()
