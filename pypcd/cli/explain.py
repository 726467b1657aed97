"""pypcd explain: for each generated token, the candidates before and after the contrast."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from pypcd import PCDAnswer, PCDConfig, PCDError, files
from pypcd.cli import _loading, _options, _terminal
from pypcd.cli._text import wrap
from pypcd.cli.eval import DEFAULT_N
from pypcd.cli.generate import read_prompt
from pypcd.decode import Session
from pypcd.decode.vocabulary import END, Vocabulary
from pypcd.engine import Change
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, plots, task
from pypcd.evaluation.tasks.sample import Task
from pypcd.explain.page import page
from pypcd.explain.places import Reading, Written, marks, seen
from pypcd.explain.steps import Candidate, Step, explain, strength_of
from pypcd.prompt import Prompt, prompt_tokens
from pypcd.settings.ranges import Integer

LEGEND = "> chosen   L: the model   L*: local-aware   PCD: after the contrast"
GOLD = "   * leads to the right answer"
STRENGTH = "   beta: how strong the contrast is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd explain MODEL [-p TEXT | -f FILE] [options] [< FILE]"
    _options.add_model(parser)
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    add("-f", "--file", metavar="FILE", type=pathlib.Path, help="read the prompt from a file")
    add("--question", metavar="TASK:N:I", help="or question I, from 0, of eval's at N tokens")
    add("--chat", action="store_true", help="use the model's chat template")
    add("--gold", metavar="TEXT", help="the right answer; its tokens are marked")
    add("--pcd", metavar="SETTING", default="on", help="unsure (default), or beta=1.5:window=64 ...")
    add("--max-tokens", metavar="N", type=_options.at_least(1), default=12, help="tokens at most (default %(default)s)")
    add("--top", metavar="N", type=_options.at_least(1), default=4, help="candidates of each row (default %(default)s)")
    _options.add_n_ctx(parser)
    _options.add_machine(parser)
    add("--html", metavar="FILE", type=pathlib.Path, help="also write an HTML page")
    add("--picture", metavar="FILE", type=pathlib.Path, help="draw a token that plain decoding would not write")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    setting = _options.pcd_setting(args.pcd, args.model)
    if setting is None:
        raise InputError("--pcd is off, so there is nothing to explain; allowed: on, a preset, or values")
    if args.gold is not None and not args.gold.strip():
        raise InputError("--gold is empty; give the right answer, or leave it out")
    asked = None if args.question is None else _question(args.question)
    prompt = _prompt(args)
    for option, path in (("--html", args.html), ("--picture", args.picture)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{option}: there is no folder {path.parent}")
    if args.picture is not None:
        plots.require()
        plots.kind(args.picture)

    llm = _loading.open_model(args.model, n_ctx=args.n_ctx, **_options.machine_options(args))
    llm.check_pcd(setting)
    gold = args.gold
    if asked is not None:
        made, n, length, index = asked
        sample = made.samples(n, length, ModelTokenizer(llm, chat=args.chat), 0)[index]
        prompt, gold = sample.prompt, gold or sample.gold.strip()
    # as in generate, control tokens in a plain prompt of the user's are read as control tokens
    tokens = (
        llm.tokenize(prompt.text.encode(), special=True)
        if asked is None and not args.chat
        else prompt_tokens(llm, prompt, chat=args.chat)
    )
    _options.check_room(llm, len(tokens))

    vocabulary = Vocabulary(llm)
    session = Session(llm)
    told = explain(session, tokens, setting, vocabulary, n_tokens=args.max_tokens, n_top=args.top, gold=gold)
    steps: list[Step] = []
    for step in told:
        if not args.json:
            if not steps:
                legend = LEGEND + GOLD * (gold is not None) + STRENGTH * (setting.adaptive is not None)
                print("\n".join(wrap(legend, _terminal.width())))
            note = strength_of(step) if setting.adaptive or step.below else ""
            print("\n" + table(step, _terminal.width(), note), flush=True)
        steps.append(step)
    answer = written(vocabulary, steps)
    did = what_pcd_did(steps, setting, len(tokens))
    what = f"{did}{which_changed(steps)}"
    is_cut = steps[-1].text != END
    if not args.json:
        is_longest = len(steps) == args.max_tokens
        end = f" | cut at {len(steps)} tokens, --max-tokens" if is_longest else " | the context is full"
        print("\n".join(["", *wrap(what + end * is_cut, _terminal.width())]))
        if not any(step.beta is not None for step in steps) and args.pcd == "on":
            _terminal.say("--pcd window:relative_top=0.1 contrasts every answer")
    record = {
        "model": args.model,
        "pcd": setting.as_dict(),
        "n_prompt": len(tokens),
        "gold": gold,
        "text": answer.decode("utf-8", "replace"),
        "is_cut": is_cut,
        **did.as_dict(),
        "steps": [step.as_dict() for step in steps],
    }
    if args.html is not None:
        facts = {"model": args.model, "prompt": f"{len(tokens)} tokens", "what PCD did": what}
        if gold is not None:
            facts["right answer"] = gold
        read = prompt.text + prompt.answer_prefix
        facts["answer"] = record["text"] + f" … (cut at {len(steps)} tokens)" * is_cut
        shown_page = page(facts, read, steps, with_strength=setting.adaptive is not None)
        files.write(args.html, shown_page.encode("utf-8", "replace"))
        _terminal.say(f"written to {args.html}")
    if args.json:
        json.dump(record, sys.stdout, ensure_ascii=False)
        print()
    if args.picture is not None:
        # with beta=0 the contrast is L itself, so this is what plain decoding writes
        plain = explain(session, tokens, setting.replace(beta=0.0), vocabulary, n_tokens=args.max_tokens, n_top=1)
        draw(args.picture, vocabulary, tokens, setting, list(plain), steps, gold)
        _terminal.say(f"drawn in {args.picture}")
    return 0


def _prompt(args: argparse.Namespace) -> Prompt:
    """The user's own prompt; empty if it is a question of a task."""
    given = {"-p": args.prompt, "-f": args.file, "--question": args.question}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InputError(f"there are {len(names)} prompts, {' and '.join(names)}; give one of them")
    if args.question is not None:
        return Prompt()
    if args.file is None:
        return Prompt(after=read_prompt(args.prompt))
    text = args.file.read_bytes().decode("utf-8", "replace").removesuffix("\n")
    if not text:
        raise InputError(f"{args.file} is empty")
    return Prompt(after=text)


def _question(text: str) -> tuple[Task, int, int, int]:
    """A task, how many questions `pypcd eval` asks of it, their length, and the index of one.

    Raises:
        ValueError: the text is not that, or there is no such task or question.
    """
    name, *numbers = text.split(":")
    if len(numbers) != 2 or "," in text:
        raise InputError(
            f"--question is {text!r}; allowed: a task, a length and an index, such as niah-multikey-2:600:0"
        )
    made = task(name)
    n = min(DEFAULT_N, made.n_questions or DEFAULT_N)
    [length] = _options.lengths(numbers[0], "--question")
    [index] = _options.integers("--question", numbers[1], Integer(0, n - 1), "0")
    return made, n, length, index


def what_pcd_did(steps: Sequence[Step], setting: PCDConfig, n_prompt: int) -> PCDAnswer:
    chosen = chosen_of(steps)
    plain = [min(step.candidates, key=lambda c: c.rank_before).token for step in steps]
    return PCDAnswer(
        setting,
        n_tokens=len(steps),
        n_contrasted=sum(step.beta is not None for step in steps),
        changes=tuple(Change(step.index, chosen[step.index], plain[step.index]) for step in steps if step.is_changed),
        n_prompt=n_prompt,
    )


def which_changed(steps: Sequence[Step]) -> str:
    """Which tokens PCD changed, counted from 1, for behind its sentence; empty if it changed none."""
    changed = [str(step.index + 1) for step in steps if step.is_changed]
    return f": token{'s' * (len(changed) > 1)} {', '.join(changed)}" if changed else ""


def chosen_of(steps: Sequence[Step]) -> list[int]:
    return [c.token for step in steps for c in step.candidates if c.is_chosen]


def written(vocabulary: Vocabulary, steps: Sequence[Step]) -> bytes:
    return b"".join(map(vocabulary.text, chosen_of(steps)))


def draw(
    path: pathlib.Path,
    vocabulary: Vocabulary,
    tokens: Sequence[int],
    setting: PCDConfig,
    plain: Sequence[Step],
    steps: Sequence[Step],
    gold: str | None,
) -> None:
    """The first token of the right answer that plain decoding would not have written, else the first token of all.

    Raises:
        PCDError: there is no such token.
    """
    changed = [step for step in steps if step.is_changed]
    if not changed:
        raise PCDError(f"{path} was not drawn: plain decoding writes the same {len(steps)} tokens")
    drawn = next((s for s in changed if any(c.is_gold and c.is_chosen for c in s.candidates)), changed[0])
    first = changed[0].index  # up to here both write the same
    before = written(vocabulary, steps[: drawn.index])
    shared = len(written(vocabulary, steps[:first]).decode("utf-8", "replace"))
    ours, theirs = (
        Written(written(vocabulary, answer).decode("utf-8", "replace"), shared, answer[-1].text == END)
        for answer in (steps, plain)
    )
    pieces, right = [vocabulary.text(token) for token in tokens], (gold or "").strip()
    n_read = len(tokens) + drawn.index
    text = (b"".join(pieces) + before).decode("utf-8", "replace")
    figure = plots.decisive_token(
        drawn,
        theirs.line,
        ours.line,
        Reading(n_read, seen(n_read, setting), text, marks(pieces, theirs, ours, right)),
        beta=drawn.beta or 0.0,
        is_right=(theirs.is_right(right), ours.is_right(right)),
    )
    plots.save(figure, path)


def table(step: Step, columns: int, note: str = "") -> str:
    """A step's candidates in at most `columns` cells, at least 36; with their ranks if there is room. `note` goes on top."""
    ranks = columns >= 52
    space = min(max(columns - 26 - 14 * ranks, 8), 24)  # marks 3, three numbers of 7 each, a gap
    plain = min(step.candidates, key=lambda c: c.rank_before).text
    title = f"token {step.index + 1}  {step.text}" + (f"   plain: {plain}" if step.is_changed else "")
    title += f"   {note}" if note else ""
    head = f"   {_fit('', space)} {'L':>6} {'L*':>6} {'PCD':>6}" + ("   rank" if ranks else "")
    lines = [_cut(title, columns), head, *(_line(c, space, ranks) for c in step.candidates)]
    return "\n".join(line.rstrip() for line in lines)


def _line(c: Candidate, space: int, ranks: bool) -> str:
    marks = (">" if c.is_chosen else " ") + ("*" if c.is_gold else " ")
    over = "-" if c.local is None else _percent(c.local)
    after = "-" if c.rank_after is None else _percent(c.after)
    rank = f"   {c.rank_before} -> {'-' if c.rank_after is None else c.rank_after}" if ranks else ""
    return f"{marks} {_fit(c.text, space)} {_percent(c.before):>6} {over:>6} {after:>6}{rank}"


def _percent(p: float) -> str:
    return f"{100 * p:.1f}%" if p < 0.9995 else "100%"


def _cut(text: str, columns: int) -> str:
    if cell_len(text) <= columns:
        return text
    while cell_len(text) > columns - 2:
        text = text[:-1]
    return text + ".."


def _fit(text: str, columns: int) -> str:
    return set_cell_size(_cut(text, columns), columns)
