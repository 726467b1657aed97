"""pypcd explain: for each generated token, the candidates before and after the contrast."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence

from pypcd import Llama, PCDAnswer, PCDConfig
from pypcd.cli import _loading, _options, _table, _terminal
from pypcd.cli.eval import DEFAULT_N
from pypcd.cli.generate import read_prompt
from pypcd.decode import Session
from pypcd.decode.vocabulary import END, Vocabulary
from pypcd.engine import Change
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.evaluation.tasks.sample import Task
from pypcd.explain import Candidate, Step, explain
from pypcd.prompt import Prompt, prompt_tokens
from pypcd.settings.ranges import Integer

LEGEND = "> chosen   L: the model   L*: local-aware   PCD: after the contrast"
GOLD = "   * leads to the right answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd explain MODEL [-p TEXT | -f FILE] [options] [< FILE]"
    add_prompt(parser)
    parser.add_argument(
        "--top", metavar="N", type=_options.at_least(1), default=4, help="candidates of each row (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """What asked() needs."""
    _options.add_model(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    prompts.add_argument("-f", "--file", metavar="FILE", type=pathlib.Path, help="read the prompt from a file")
    prompts.add_argument("--question", metavar="TASK:N:I", help="or question I, from 0, of eval's at N tokens")
    add = parser.add_argument
    add("--chat", action="store_true", help="use the model's chat template")
    add("--gold", metavar="TEXT", help="the right answer; its tokens are marked")
    add("--pcd", metavar="SETTING", default="on", help="unsure (default), or paper:beta=1.5 ...")
    add("--max-tokens", metavar="N", type=_options.at_least(1), default=12, help="tokens at most (default %(default)s)")
    _options.add_n_ctx(parser)
    _options.add_machine(parser)


def asked(args: argparse.Namespace) -> tuple[Llama, PCDConfig, list[int], str | None]:
    """The model, the setting, the prompt's tokens and the right answer, if that is known."""
    setting = _options.pcd_setting(args.pcd, args.model)
    if setting is None:
        raise InputError("--pcd is off, so there is nothing to explain; allowed: on, a preset, or values")
    question = None if args.question is None else _question(args.question)
    prompt, gold = Prompt() if question else Prompt(after=_text(args)), args.gold
    llm = _loading.open_model(args.model, setting, n_ctx=args.n_ctx, **_options.machine_options(args))
    llm.check_pcd(setting)
    if question:
        made, n, length, index = question
        sample = made.samples(n, length, ModelTokenizer(llm, chat=args.chat), 0)[index]
        prompt, gold = sample.prompt, sample.gold.strip() if gold is None else gold
    # as in generate, control tokens in a plain prompt of the user's are read as control tokens
    is_plain = not question and not args.chat
    tokens = (
        llm.tokenize(prompt.text.encode(), special=True) if is_plain else prompt_tokens(llm, prompt, chat=args.chat)
    )
    _options.check_room(llm, len(tokens))
    return llm, setting, tokens, gold


def _text(args: argparse.Namespace) -> str:
    """The user's own prompt."""
    if args.file is None:
        return read_prompt(args.prompt)
    return read_prompt(args.file.read_bytes().decode("utf-8", "replace").removesuffix("\n"))


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


def run(args: argparse.Namespace) -> int:
    llm, setting, tokens, gold = asked(args)
    vocabulary, steps = Vocabulary(llm), list[Step]()
    how = {"n_tokens": args.max_tokens, "n_top": args.top, "gold": gold}
    with _terminal.Bar(None, "answering") as bar:
        for step in explain(Session(llm), tokens, setting, vocabulary, **how):
            if not args.json:
                bar.end()
                if not steps:
                    print(_table.paragraph(LEGEND + GOLD * (gold is not None)))
                print("\n" + table(step, _table.columns(), is_adaptive=setting.adaptive is not None), flush=True)
            steps.append(step)

    did = what_pcd_did(steps, setting, len(tokens))
    is_cut = steps[-1].chosen.text != END
    if args.json:
        record = {
            "model": args.model,
            "pcd": setting.as_dict(),
            "n_prompt": len(tokens),
            "gold": gold,
            "text": written(vocabulary, steps).decode("utf-8", "replace"),
            "is_cut": is_cut,
            **did.as_dict(),
            "steps": [
                {**dataclasses.asdict(step), "text": step.chosen.text, "is_changed": step.is_changed} for step in steps
            ],
        }
        print(json.dumps(record, ensure_ascii=False))
        return 0
    changed = [str(change.index + 1) for change in did.changes]
    which = f": token{'s' * (len(changed) > 1)} {', '.join(changed)}" if changed else ""
    is_longest = len(steps) == args.max_tokens
    end = f" | cut at {len(steps)} tokens, --max-tokens" if is_longest else " | the context is full"
    print("\n" + _table.paragraph(f"{did}{which}{end * is_cut}"))
    if not did.n_contrasted and args.pcd == "on":
        _terminal.say("--pcd window:relative_top=0.1 contrasts every answer")
    return 0


def what_pcd_did(steps: Sequence[Step], setting: PCDConfig, n_prompt: int) -> PCDAnswer:
    return PCDAnswer(
        setting,
        n_tokens=len(steps),
        n_contrasted=sum(step.beta is not None for step in steps),
        changes=tuple(Change(s.index, s.chosen.token, s.plain.token) for s in steps if s.is_changed),
        n_prompt=n_prompt,
    )


def written(vocabulary: Vocabulary, steps: Sequence[Step]) -> bytes:
    return b"".join(vocabulary.text(step.chosen.token) for step in steps)


def table(step: Step, width: int | None, *, is_adaptive: bool = False) -> str:
    """A step's candidates, as wide as a terminal.

    Args:
        is_adaptive: whether the strength of the contrast differs from step to step, and is told.
    """
    title = f"token {step.index + 1}  {step.chosen.text}" + f"   plain: {step.plain.text}" * step.is_changed
    if step.beta is None:
        title += "   no contrast"
    elif is_adaptive:
        title += f"   strength of the contrast: beta {step.beta:.2f}"
    head = ("", "token", "L", "L*", "PCD", "rank")
    is_right = (False, False, True, True, True, False)
    return _table.paragraph(title, width) + "\n" + _table.table(head, [*map(_row, step.candidates)], is_right, width)


def _row(c: Candidate) -> tuple[str, ...]:
    return (
        ">" * c.is_chosen + "*" * c.is_gold,
        c.text,
        _percent(c.before),
        "-" if c.local is None else _percent(c.local),
        "-" if c.rank_after is None else _percent(c.after),
        f"{c.rank_before} -> {c.rank_after or '-'}",
    )


def _percent(p: float) -> str:
    return f"{100 * p:.1f}%" if p < 0.9995 else "100%"
