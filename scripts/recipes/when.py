#!/usr/bin/env python3
"""When to contrast: many gates, judged on recorded rows of several models.

    python scripts/recipes/when.py MODEL... --work build/evidence/when --out docs/evidence/when

A *gate* is a condition on a step or an answer, such as `first>=2.25` (`pypcd/lab/formula.py`); where it is false, decoding is plain.
The rows of each question are recorded once, those of both halves, and each gate is judged with each strength. The best of those
that spoil nothing are chosen on the first half of all models together, and judged on the second. Stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import io
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pypcd.cli import _options, _progress
from pypcd.cli._text import sentence
from pypcd.evaluation import Directory, Plan
from pypcd.evaluation.plan import HALVES
from pypcd.evaluation.stats import Paired, interval, paired
from pypcd.gguf import read_gguf, resolve_model
from pypcd.lab.formula import Formula
from pypcd.lab.recorded import record
from pypcd.lab.screen import Screen

VIEW = "pcd:perturbation=none:window=64"
GROUPS = ("about a text", "the same, chat template", "unrelated to the text", "many examples", "short", "chats")
ABOUT, CHAT, UNRELATED, SHOTS, SHORT, CHATS = GROUPS
EVERYDAY = (UNRELATED, SHOTS, SHORT, CHATS)
MODES = ("", "with a document")  # everywhere, or only if the prompt has a text
MOST_SPOILT = 0.01


@dataclasses.dataclass(frozen=True)
class Cell:
    """n questions of each task, of which half is asked at a time."""

    group: str
    tasks: tuple[str, ...]
    length: int
    n: int
    max_tokens: int | None = None


CELLS = (
    Cell(ABOUT, ("niah-multikey-2",), 600, 80, 40),
    Cell(ABOUT, ("niah-multikey-3",), 600, 40, 48),
    Cell(ABOUT, ("reading",), 500, 12),
    Cell(CHAT, ("niah-multikey-2",), 600, 60, 40),
    Cell(UNRELATED, ("everyday-behind",), 600, 6),
    Cell(SHOTS, ("everyday",), 800, 4),
    Cell(SHORT, ("everyday",), 300, 8),
    Cell(CHATS, ("chats",), 800, 40),
)

STRENGTHS = (
    "beta=0.75:relative_top=0.3",
    "beta=1:relative_top=0.5",
    "beta=2.5:relative_top=0.1",
    "beta=10*jsd:relative_top=0.2",
)

# {75}: the entropy in bits below which 75% of the model's short everyday answers begin; {s90}: below which 90% of all their steps are
GATES = (
    "", "first>=2.25", "first>={50}", "first>={75}", "first>={90}", "first>={97}",
    "first_word>={50}", "first_word>={75}", "first_word>={90}", "first_word>={97}",
    "most>={75}", "most>={90}", "most>={97}",
    "entropy>=2", "entropy>=3", "entropy>={s90}", "entropy>={s97}",
    "top_s<0.5", "top_s<0.8", "entropy_s>=2", "entropy_s>=entropy", "entropy_s>=entropy+1", "entropy_s<entropy",
    "margin<0.5", "margin<1", "margin<2", "rank>1", "rank<=2", "rank_back<=2", "jsd<0.2", "jsd>=0.1",
    "seen", "seen and first>={75}", "seen and first>={90}", "seen and first_word>={75}", "seen and margin<1", "seen and entropy>=2",
    "seen and entropy_s>=entropy", "seen and rank_back<=2",
    "first>={75} and entropy_s>=entropy", "first>={75} and rank>1", "first>={75} and jsd<0.2", "first>={75} and margin<1",
    "first_word>={75} and margin<1", "first_word>={75} and entropy_s>=entropy", "margin<1 and entropy_s>=entropy", "margin<1 and rank<=2",
)  # fmt: skip

# Three ways, after NWCAD: a contrast if the model is unsure, L* itself (strength -1) if that is sure and not far from L, else plain.
ROUTES = tuple(
    f"beta={beta}*(entropy>={unsure})-(1+{beta})*(entropy>={unsure})*(entropy_s<{sure})*(rank_back<=3):relative_top={cut}"
    for beta, cut in ((0.75, 0.3), (2.5, 0.1))
    for unsure in ("2", "{s90}")
    for sure in (0.5, 1)
)

LEGEND = f"""\
# When to contrast: {{n}} rules tried

Judged on recorded rows: a window of 64 tokens and the first 4, with the strengths and gates of `scripts/recipes/when.py`. Points
against greedy with 95% intervals, and wins / losses, on questions about a text. *Spoilt*: everyday questions and chats that greedy has
right and the rule has not. A rule is *safe* if it spoils at most {MOST_SPOILT:.0%} on each model. *With a document*: prompts without a text are
plain. {{{{75}}}} is the entropy in bits below which 75% of a model's short everyday answers begin, {{{{s90}}}} that below which 90% of
all their steps are:
"""

Answers = dict[str, npt.NDArray[np.bool_]]  # right or wrong, by group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL")
    add("--half", choices=HALVES, action="append", help="record only this half, and stop")
    add("--work", type=pathlib.Path, default="build/evidence/when", help="where the rows are (default %(default)s)")
    add("--out", type=pathlib.Path, default="docs/evidence/when", help="where the tables go (default %(default)s)")
    add("--threads", type=int, default=1)
    _options.add_jobs(parser)
    args = parser.parse_args()
    try:
        run(args)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        print(f"when: {sentence(error)}", file=sys.stderr)
        sys.exit(2)


def run(args: argparse.Namespace) -> None:
    rows: dict[tuple[str, str], Rows] = {}
    with _options.jobs(args) as jobs:
        how = {"options": {"n_threads": args.threads, "n_threads_batch": args.threads}, "jobs": jobs}
        for model, half in itertools.product(args.models, args.half or HALVES):
            rows[pathlib.Path(model).stem, half] = Rows.record(
                model, half, args.work / pathlib.Path(model).stem / half, how
            )
    if args.half:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    models = list(dict.fromkeys(model for model, _ in rows))
    bits = {model: rows[model, "first"].quantiles() for model in models}
    tried = [
        Tried(text, mode, {key: r.judge(text, mode, bits[key[0]]) for key, r in rows.items()})
        for text, mode in candidates()
    ]
    plain = {key: r.plain for key, r in rows.items()}
    (args.out / "summary.csv").write_text(table_of_all(tried, plain), encoding="utf-8")
    (args.out / "summary.md").write_text(report(tried, plain, models, bits), encoding="utf-8")
    print((args.out / "summary.md").read_text(encoding="utf-8"))


def candidates() -> Iterator[tuple[str, str]]:
    """Formulas, with quantiles to be filled in, and modes."""
    gated = (f"{VIEW}:{strength}" + (f":where={gate}" if gate else "") for gate in GATES for strength in STRENGTHS)
    routed = (f"{VIEW}:{route}" for route in ROUTES)
    return itertools.product([*gated, *routed], MODES)


class Rows:
    """The recorded rows of one model and half, by cell."""

    def __init__(self, screens: Sequence[tuple[str, Screen]]) -> None:
        self._screens = screens
        self.plain = self._answers(Formula(None))

    @classmethod
    def record(cls, model: str, half: str, place: pathlib.Path, how: dict[str, object]) -> Rows:
        screens = []
        for i, cell in enumerate(CELLS):
            is_chat = cell.group == CHAT
            if is_chat and "tokenizer.chat_template" not in read_gguf(resolve_model(model)).metadata:
                continue
            plan = Plan(
                model,
                cell.tasks,
                (VIEW,),
                (cell.length,),
                n=cell.n,
                half=half,
                max_tokens=cell.max_tokens,
                chat=is_chat,
            )
            with _progress.following(f"{place.parent.name}, {half} half, {cell.group}") as progress:
                outcome = record(plan, Directory(place / str(i)), progress=progress, **how)  # type: ignore[arg-type]
            screens.append((cell.group, Screen(outcome.records)))
        return cls(screens)

    def _answers(self, formula: Formula) -> Answers:
        found = collections.defaultdict(list)
        for group, screen in self._screens:
            found[group].append(screen.follow(formula)[0])
        return {group: np.concatenate(parts) for group, parts in found.items()}

    def judge(self, text: str, mode: str, bits: dict[str, float]) -> Answers:
        made = self._answers(Formula.parse(filled(text, bits)))
        return {g: self.plain[g] if mode and g in (SHOTS, SHORT, CHATS) else right for g, right in made.items()}

    def quantiles(self) -> dict[str, float]:
        """In bits: those of the entropy of short everyday answers, at their first token and (s…) at all."""
        (screen,) = (screen for group, screen in self._screens if group == SHORT)
        first, steps = screen.entropies(VIEW)
        return {
            **{f"{q}": float(np.percentile(first, q)) for q in (50, 75, 90, 97)},
            **{f"s{q}": float(np.percentile(steps, q)) for q in (90, 97)},
        }


def filled(text: str, bits: dict[str, float]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: f"{bits[found[1]]:.3f}", text)


@dataclasses.dataclass(frozen=True)
class Tried:
    """A formula's answers, by model and half."""

    text: str
    mode: str
    answers: dict[tuple[str, str], Answers]

    @property
    def name(self) -> str:
        return self.text.removeprefix(f"{VIEW}:") + (f" ({self.mode})" if self.mode else "")


Plain = dict[tuple[str, str], Answers]


def gain(one: Tried, plain: Plain, model: str, half: str, groups: Sequence[str]) -> Paired:
    known = [group for group in groups if group in plain[model, half]]
    of: Callable[[Answers], npt.NDArray[np.bool_]] = lambda answers: np.concatenate([answers[group] for group in known])
    return paired(of(one.answers[model, half]), of(plain[model, half]))


def spoilt(one: Tried, plain: Plain, model: str, half: str) -> tuple[int, int]:
    """Everyday answers that plain decoding has right and the formula has not; all that plain decoding has right."""
    result = gain(one, plain, model, half, EVERYDAY)
    right = sum(int(plain[model, half][group].sum()) for group in EVERYDAY)
    return result.losses, right


def keeps_its_promise(one: Tried, plain: Plain, model: str, half: str) -> bool:
    lost, right = spoilt(one, plain, model, half)
    return lost <= MOST_SPOILT * right


def mean_gain(one: Tried, plain: Plain, models: Sequence[str], half: str) -> float:
    return float(np.mean([gain(one, plain, model, half, (ABOUT,)).difference for model in models]))


def table_of_all(tried: Sequence[Tried], plain: Plain) -> str:
    """CSV: wins and losses of everything that was tried, on both halves."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    cells = [(m, h, g) for (m, h), answers in plain.items() for g in answers]
    writer.writerow(
        ["formula", "mode", *(f"{m}, {h}, {g}: {what}" for m, h, g in cells for what in ("n", "wins", "losses"))]
    )
    for one in tried:
        found = [gain(one, plain, m, h, (g,)) for m, h, g in cells]
        writer.writerow([one.text, one.mode, *(v for p in found for v in (p.n, p.wins, p.losses))])
    return text.getvalue()


def report(tried: Sequence[Tried], plain: Plain, models: Sequence[str], bits: dict[str, dict[str, float]]) -> str:
    ordered = sorted(tried, key=lambda one: -mean_gain(one, plain, models, "first"))
    safe = [one for one in ordered if all(keeps_its_promise(one, plain, model, "first") for model in models)]
    also = [
        one
        for one in tried
        if one.name in ("beta=0.75:relative_top=0.3:where=first>=2.25", "beta=2.5:relative_top=0.1")
    ]
    quantiles = [f"- {model}: " + ", ".join(f"{{{q}}} {v:.2f}" for q, v in of.items()) for model, of in bits.items()]
    anywhere = [one for one in tried if all(keeps_its_promise(one, plain, m, h) for m, h in plain)]
    lines = [
        LEGEND.format(n=len(tried)),
        *quantiles,
        "",
        f"{len(safe)} rules are safe on the first half. Of these {len(anywhere)} are safe on the second half too.",
        "",
        "## Safe on the first half, the 15 with the highest gain there",
        "",
        *_table(safe[:15], plain, models),
        "",
        "## All, the 10 with the highest gain on the first half",
        "",
        *_table(ordered[:10], plain, models),
        "",
        "## As a comparison",
        "",
        *_table(also, plain, models),
    ]
    return "\n".join(lines) + "\n"


def _table(some: Sequence[Tried], plain: Plain, models: Sequence[str]) -> list[str]:
    lines = [
        "| rule | "
        + " | ".join(f"{m}, {h}" + what for m in models for h in HALVES for what in ("", ": spoilt"))
        + " | chat template |",
        "| --- " * (2 + 4 * len(models)) + "|",
    ]
    for one in some:
        cells = []
        for model, half in itertools.product(models, HALVES):
            p, (lost, right) = gain(one, plain, model, half, (ABOUT,)), spoilt(one, plain, model, half)
            cells += [f"{interval(p)}, {p.wins} / {p.losses}", f"{lost} of {right}"]
        chats = [gain(one, plain, m, "second", (CHAT,)) for m in models if CHAT in plain[m, "second"]]
        cells.append("; ".join(f"{interval(p)}, {p.wins} / {p.losses}" for p in chats))
        lines.append(f"| `{one.name}` | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
