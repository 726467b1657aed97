"""What the contrast does, token by token: the candidates' probabilities in L, in L* and after the contrast.

L are the model's own logits, L* those of PCD's second, local-aware evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import Llama, PCDAnswer, PCDConfig
from pypcd.cli import _loading, _options, _table, _terminal
from pypcd.cli.eval import DEFAULT_N
from pypcd.cli.generate import read_prompt
from pypcd.decode import Session
from pypcd.engine import Change
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.evaluation.tasks.sample import Task
from pypcd.prompt import Prompt, prompt_tokens
from pypcd.settings.formula import log_softmax
from pypcd.settings.ranges import Integer, literal
from research.command import command
from research.vocabulary import END, Vocabulary, rank

LEGEND = "> chosen   L: the model   L*: local-aware   PCD: after the contrast"
GOLD = "   * leads to the right answer"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token that could come next.

    Attributes:
        token: its id.
        text: in quotes, safe for a terminal; "(end)" for the end of the answer.
        before: its probability in L.
        rank_before: its rank in L, from 1.
        local: its probability in L*; None if L* was not evaluated, as where only one token was plausible.
        after: its probability in the contrasted logits; 0 if it is excluded.
        rank_after: its rank there; None if it is excluded.
        is_chosen: whether it is the token that was written.
        is_gold: whether it continues the right answer.
    """

    token: int
    text: str
    before: float
    rank_before: int
    local: float | None
    after: float
    rank_after: int | None
    is_chosen: bool
    is_gold: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """One generated token.

    Attributes:
        index: from 0.
        candidates: the best ones before and after the contrast, and the best gold one, sorted as after the contrast.
        beta: the strength of the contrast here (PCDLogits.beta); None if nothing was contrasted.
    """

    index: int
    candidates: tuple[Candidate, ...]
    beta: float | None

    @property
    def chosen(self) -> Candidate:
        """What was written."""
        return next(c for c in self.candidates if c.is_chosen)

    @property
    def plain(self) -> Candidate:
        """What plain decoding would have written here."""
        return min(self.candidates, key=lambda c: (c.rank_before, c.token))

    @property
    def is_changed(self) -> bool:
        return self.chosen != self.plain


def explain(
    session: Session,
    tokens: Sequence[int],
    setting: PCDConfig,
    vocabulary: Vocabulary,
    *,
    n_tokens: int = 16,
    n_top: int = 5,
    gold: str | None = None,
) -> Iterator[Step]:
    """Answer a prompt greedily with PCD, and give the candidates of every token.

    Args:
        tokens: the prompt's tokens.
        n_tokens: at most so many are generated; the end of the answer is the last.
        n_top: number of candidates from L, and from the contrasted logits.
        gold: the right answer; its tokens are marked as long as the answer follows it.

    Raises:
        ValueError: the prompt is empty or does not fit, or gold is empty.
        UnsupportedError: this model cannot run the setting.
    """
    if gold is not None and not gold.strip():
        raise InputError("gold is empty; give the right answer, or leave it out")
    written, right = b"", (gold or "").strip().encode()
    session.start(tokens, setting)
    try:
        for index in range(min(n_tokens, session.llm.n_ctx() - len(tokens))):
            marked = vocabulary.next_tokens(written, right) if gold is not None else []
            step = _step(session.llm.pcd_logits(), vocabulary, index, n_top, set(marked))
            yield step
            chosen = step.chosen.token
            if session.is_end(chosen):
                return
            written += vocabulary.text(chosen)
            if index + 1 < n_tokens:
                session.step({0: chosen})
    finally:
        session.finish()


def _step(rows: Any, vocabulary: Vocabulary, index: int, n_top: int, gold: set[int]) -> Step:
    standard, contrasted = rows.standard, rows.contrasted
    chosen = int(contrasted.argmax())
    tops = [np.argsort(-row, kind="stable")[:n_top] for row in (standard, contrasted)]
    listed = {int(t) for top in tops for t in top if top is tops[0] or np.isfinite(contrasted[t])}
    if gold:
        listed.add(max(gold, key=lambda t: (contrasted[t], standard[t], -t)))
    p_before, p_after = (np.exp(log_softmax(row)) for row in (standard, contrasted))
    p_local = None if rows.local is None else np.exp(log_softmax(rows.local))
    candidates = [
        Candidate(
            token=token,
            text=vocabulary.shown(token),
            before=float(p_before[token]),
            rank_before=rank(standard, token),
            local=None if p_local is None else float(p_local[token]),
            after=float(p_after[token]),
            rank_after=rank(contrasted, token) if np.isfinite(contrasted[token]) else None,
            is_chosen=token == chosen,
            is_gold=token in gold,
        )
        for token in sorted(listed, key=lambda t: (-contrasted[t], -standard[t], t))
    ]
    return Step(index, tuple(candidates), rows.beta)


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_model(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    prompts.add_argument("--question", metavar="TASK:N:I", help="or question I, from 0, of eval's at N tokens")
    add = parser.add_argument
    add("--chat", action="store_true", help="use the model's chat template")
    add("--gold", metavar="TEXT", help="the right answer; its tokens are marked")
    add("--pcd", metavar="SETTING", default="on", help="unsure (default), or paper:beta=1.5 ...")
    add("--max-tokens", metavar="N", type=_options.at_least(1), default=12, help="tokens at most (default %(default)s)")
    add("--top", metavar="N", type=_options.at_least(1), default=4, help="candidates of each row (default %(default)s)")
    _options.add_n_ctx(parser)
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def asked(args: argparse.Namespace) -> tuple[Llama, PCDConfig, list[int], str | None]:
    """The model, the setting, the prompt's tokens and the right answer, if that is known."""
    setting = _options.pcd_setting(args.pcd, args.model)
    if setting is None:
        raise InputError("--pcd is off, so there is nothing to explain; allowed: on, a preset, or values")
    question = None if args.question is None else _question(args.question)
    prompt, gold = Prompt() if question else Prompt(after=read_prompt(args.prompt)), args.gold
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
    index = Integer(0, n - 1)(f"--question {text}: the index", literal(numbers[1]))
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
                print("\n" + table(step, _table.columns()), flush=True)
            steps.append(step)

    changes = tuple(Change(s.index, s.chosen.token, s.plain.token) for s in steps if s.is_changed)
    did = PCDAnswer(setting, len(steps), sum(step.beta is not None for step in steps), changes, len(tokens))
    is_cut = steps[-1].chosen.text != END
    if args.json:
        written = b"".join(vocabulary.text(step.chosen.token) for step in steps)
        record = {
            "model": args.model,
            "pcd": setting.as_dict(),
            "n_prompt": len(tokens),
            "gold": gold,
            "text": written.decode("utf-8", "replace"),
            "is_cut": is_cut,
            **did.as_dict(),
            "steps": [
                {**dataclasses.asdict(step), "text": step.chosen.text, "is_changed": step.is_changed} for step in steps
            ],
        }
        print(json.dumps(record, ensure_ascii=False))
        return 0
    changed = [str(change.index + 1) for change in changes]
    which = f": token{'s' * (len(changed) > 1)} {', '.join(changed)}" if changed else ""
    is_longest = len(steps) == args.max_tokens
    end = f" | cut at {len(steps)} tokens, --max-tokens" if is_longest else " | the context is full"
    print("\n" + _table.paragraph(f"{did}{which}{end * is_cut}"))
    if not did.n_contrasted and args.pcd == "on":
        _terminal.say("--pcd window:relative_top=0.1 contrasts every answer")
    return 0


def table(step: Step, width: int | None) -> str:
    """A step's candidates, as wide as a terminal."""
    title = f"token {step.index + 1}  {step.chosen.text}" + f"   plain: {step.plain.text}" * step.is_changed
    if step.beta is None:
        title += "   no contrast"
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


if __name__ == "__main__":
    sys.exit(command("explain", add_arguments, run))
