"""One token that PCD changes, as a picture: what L and L* see of the prompt, where the answers stand in it, and the token's candidates
in L, in L* and after the contrast.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import itertools
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pypcd.cli import _terminal
from pypcd.cli.explain import add_prompt, asked, written
from pypcd.decode import Session
from pypcd.decode.vocabulary import END, SKIPPED, Vocabulary
from pypcd.errors import PCDError
from pypcd.explain import Step, explain
from pypcd.settings.config import PCDConfig
from research import plots
from research.command import command
from research.figures import drawable
from research.plots import BLACK, BLUE, VERMILLION

N_CANDIDATES = 4
N_CHARACTERS = 68  # of a text are shown
PLAIN, PCD = "plain decoding", "PCD"
COLOURS = {PLAIN: VERMILLION, PCD: BLUE}


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        line: the rest of a line, from the word on in which it differs from another answer; "…" if it was cut.
        is_right: whether a right answer is in it; None: it may still come, or is not known.
    """

    line: str
    is_right: bool | None

    @classmethod
    def of(cls, text: str, n_shared: int, is_ended: bool, gold: str) -> Answer:
        """
        Args:
            n_shared: so many characters are those of the other answer.
            is_ended: whether it goes no further.
            gold: the right answer; empty if it is not known.
        """
        start = n_shared - len(re.findall(r"\w*$", text[:n_shared])[0])
        line, newline, _ = text[start:].lstrip(SKIPPED.decode() + "\n\t").partition("\n")
        is_over = is_ended or bool(newline)
        is_right = None if not gold or (gold not in text and not is_over) else gold in text
        return cls(line.rstrip() + " …" * (not is_over), is_right)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A text that stands in the prompt, or should.

    Attributes:
        text: what it is, and its line.
        spans: the tokens of each place where it stands.
    """

    text: str
    colour: str
    spans: tuple[range, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    parser.add_argument("--out", metavar="FILE", type=pathlib.Path, required=True, help="a .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    plots.require()
    llm, setting, tokens, right = asked(args)
    gold = (right or "").strip()
    session, vocabulary = Session(llm), Vocabulary(llm)
    # with beta=0 the contrast is L itself, so this is what plain decoding writes
    steps = {
        name: list(explain(session, tokens, s, vocabulary, n_tokens=args.max_tokens, n_top=N_CANDIDATES, gold=right))
        for name, s in ((PLAIN, setting.replace(beta=0.0)), (PCD, setting))
    }
    ours = steps[PCD]
    step = decisive(ours)
    if step is None:
        raise PCDError(f"{args.out} was not drawn: plain decoding writes the same {len(ours)} tokens")

    def text(steps: Sequence[Step]) -> str:
        return written(vocabulary, steps).decode("utf-8", "replace")

    n_shared = len(text(list(itertools.takewhile(lambda s: not s.is_changed, ours))))
    answers = {name: Answer.of(text(some), n_shared, some[-1].chosen.text == END, gold) for name, some in steps.items()}
    pieces = [vocabulary.text(token) for token in tokens]
    before = b"".join(pieces).decode("utf-8", "replace") + text(ours[: step.index])
    n_read = len(tokens) + step.index
    plots.save(draw(step, n_read, seen(n_read, setting), marks(pieces, answers, gold), answers, before), args.out)
    _terminal.say(f"drawn in {args.out}")
    return 0


def decisive(steps: Sequence[Step]) -> Step | None:
    """The first token of the right answer that plain decoding would not have written, else the first such token of all."""
    changed = [step for step in steps if step.is_changed]
    return next((step for step in changed if step.chosen.is_gold), changed[0] if changed else None)


def seen(n_tokens: int, setting: PCDConfig) -> tuple[range, ...]:
    """The positions that the twin of the last of n tokens sees, as ranges that do not touch.

    It attends to no others, in any layer. The keys and values of those that it sees were made with all of the text before them.
    """
    first = 0 if setting.window is None else max(n_tokens - setting.window, 0)
    n_sink = min(setting.n_sink, n_tokens)
    if first <= n_sink:
        return (range(n_tokens),)
    return (range(n_sink), range(first, n_tokens)) if n_sink else (range(first, n_tokens),)


def find(pieces: Sequence[bytes], text: str) -> tuple[range, ...]:
    """The tokens of each place where a text stands, but not as a part of a longer word or number.

    Args:
        pieces: the tokens' texts; control tokens have none.
    """
    ends = list(itertools.accumulate(map(len, pieces)))
    places = re.finditer(rb"(?<!\w)%s(?!\w)" % re.escape(text.encode()), b"".join(pieces)) if text else ()
    return tuple(range(bisect.bisect_right(ends, m.start()), bisect.bisect_left(ends, m.end()) + 1) for m in places)


def named(pieces: Sequence[bytes], line: str) -> str:
    """The longest beginning of a line, in whole words, that stands in the prompt; "" if none does."""
    parts = [line[: word.end()] for word in re.finditer(r"\w+", line)]
    return next((part for part in reversed(parts) if find(pieces, part)), "")


def marks(pieces: Sequence[bytes], answers: dict[str, Answer], gold: str) -> list[Mark]:
    """The right answer and what is written in its place; without a right answer ("") what each writes.

    An answer that does not stand in the prompt is left out, but for the right one.

    Args:
        pieces: the prompt's tokens.
        answers: by who writes them.
    """
    right = [COLOURS[name] for name, answer in answers.items() if answer.is_right]
    texts = [("the right answer", gold, (*right, BLACK)[0])] if gold else []
    for name, answer in answers.items():
        if not answer.is_right and (part := named(pieces, answer.line)):
            texts.append((f"{name} writes", part, COLOURS[name]))
    made = []
    for what, text, colour in texts[:2]:
        spans = find(pieces, text)
        if spans:
            before = b"".join(pieces[: spans[-1].stop]).decode("utf-8", "ignore")
            made.append(Mark(f"{what}: {_end(before.rpartition(chr(10))[2])}", colour, spans))
        else:
            made.append(Mark(f"{what}, {drawable(text, 20)}, does not stand in the prompt", colour, ()))
    return made


def _end(text: str) -> str:
    """The last of a text, from the beginning of a word on."""
    kept = drawable(text[-N_CHARACTERS:], 10 * N_CHARACTERS)  # escaped, a character is ten at most
    is_cut = max(len(text), len(kept)) > N_CHARACTERS
    return "…" + kept[1 - N_CHARACTERS :].partition(" ")[2] if is_cut else kept


def draw(
    step: Step,
    n_tokens: int,
    seen: Sequence[range],
    marks: Sequence[Mark],
    answers: dict[str, Answer],
    text: str,
) -> Any:
    """
    Args:
        step: one with is_changed.
        n_tokens: how many are read before it.
        seen: those of them that its twin sees.
        marks: at most two.
        answers: of plain decoding and of PCD.
        text: what is read.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    others = sorted({*step.candidates} - {step.plain, step.chosen}, key=lambda c: c.rank_before)
    shown = [step.plain, step.chosen, *others[: N_CANDIDATES - 2]]
    names = [*(drawable(c.text, 12) for c in shown), "all others"]
    signs = {None: "{}", True: "✓ {} (right)", False: "✗ {} (wrong)"}
    plain, pcd = (
        f"{name} writes\n{signs[answer.is_right].format(drawable(answer.line, 20))}" for name, answer in answers.items()
    )
    beta = step.beta or 0.0
    columns = (
        ("L\nthe model", [c.before for c in shown], plain, VERMILLION),
        # where the contrast changes a token, L* was evaluated
        ("L*\nthe local-aware evaluation", [c.local or 0.0 for c in shown], "this is subtracted", "0.35"),
        (f"{1 + beta:g} L − {beta:g} L*\nafter the contrast", [c.after for c in shown], pcd, BLUE),
    )
    y = np.arange(len(names))[::-1]
    with plots.drawing():
        figure = Figure(figsize=(7.2, 0.24 * len(names) + 3.5), layout="constrained")
        grid = figure.subplot_mosaic("ppp;LSC", height_ratios=(1.7, 0.24 * len(names) + 1.2))
        prompt, *panels = (grid[name] for name in "pLSC")
        _strip(prompt, n_tokens, seen, marks)
        prompt.set_xlabel(f"The next token, after “{_end(text)}”:", fontsize=9, loc="left", parse_math=False)
        for axes, (title, values, result, colour) in zip(panels, columns):
            shares = [*values, max(1 - sum(values), 0.0)]
            bars = axes.barh(y, [100 * p for p in shares], 0.72, color=[VERMILLION, BLUE] + ["0.65"] * (len(names) - 2),
                             edgecolor="white")  # fmt: skip
            bars[0].set_hatch("////")
            axes.bar_label(bars, [f"{100 * p:.1f}%" if p < 0.9995 else "100%" for p in shares], padding=3, fontsize=8.5)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel(result, fontsize=9, color=colour, loc="left", parse_math=False, labelpad=2)
            axes.set_xlim(0, 128)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines["bottom"].set_visible(False)
        panels[0].set_yticks(y, names, parse_math=False, fontsize=9)
        panels[0].tick_params(left=False)
        for label, colour in zip(panels[0].get_yticklabels(), COLOURS.values()):
            label.set(color=colour, weight="bold")
        return figure


def _strip(axes: Any, n: int, seen: Sequence[range], marks: Sequence[Mark]) -> None:
    """The prompt from left to right, once as L and once as L* sees it, with the answers that stand in it: in dots where they are not
    seen."""
    for y, parts in ((1.0, (range(n),)), (0.0, seen)):
        axes.barh(y, n, 0.62, color="white", edgecolor="0.7", linewidth=0.6)
        for part in parts:
            axes.barh(y, len(part), 0.62, part.start, color="0.82", linewidth=0)
        for colour, span in ((mark.colour, span) for mark in marks for span in mark.spans):
            width = max(len(span), 0.006 * n)  # a long prompt's answer is to be seen too
            left = min(span.start, n - width)
            if not any(span.start in part and span.stop - 1 in part for part in parts):
                axes.barh(y, width, 0.62, left, color="white", edgecolor=colour, linestyle=":", linewidth=0.8)
                continue
            axes.barh(y, width, 0.62, left, color=colour, linewidth=0)
    for mark, (y, side) in zip(marks, ((1.7, "bottom"), (-0.72, "top"))):
        axes.text(0, y, mark.text, va=side, color=mark.colour, fontsize=8.5, parse_math=False, in_layout=False)
    axes.set_xlim(0, n)
    axes.set_ylim(-1.5, 2.4)
    axes.set_xticks([])
    axes.set_yticks([1, 0], ["L sees", "L* sees"], fontsize=9)
    axes.tick_params(left=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    parts = [f"the {'last' if part.stop == n else 'first'} {len(part)}" for part in seen]
    only = (
        f"L sees all {n} tokens, L* only {' and '.join(parts)}"
        if sum(map(len, seen)) < n
        else f"L and L* see all {n} tokens"
    )
    axes.set_title(f"The text so far: {only}", fontsize=9, loc="left")


if __name__ == "__main__":
    sys.exit(command("one_answer", add_arguments, run))
