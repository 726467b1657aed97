"""Checks whether PCD computes the same numbers with the KV cache as without it.

With the cache, a prompt is evaluated once and each generated token by itself. Without it, every step evaluates the whole
text again from an empty cache. So a difference can only come from the cache, or from rounding in other batch sizes.

    python -m research.nocache MODEL --help
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.cli import _loading, _options
from pypcd.decode import Session, setting_of
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.llama import Llama
from pypcd.prompt import prompt_tokens
from pypcd.settings.config import PCDConfig
from research.command import command
from research.questions import questions

__all__ = ["METHODS", "CacheCheck", "check_cache"]

Logits = npt.NDArray[np.float32]

METHODS = {name: setting_of(name) for name in ("greedy", "pcd", "pcd:cache=shared", "pcd:cache=separate", "pcd:window")}


@dataclasses.dataclass(frozen=True)
class CacheCheck:
    """The result for one method.

    Attributes:
        method: its name.
        refusal: why this model cannot run it; then everything else is 0 or None.
        n_steps: number of tokens compared, over all prompts.
        n_equal: number of steps at which both choose the same token.
        standard: the largest difference in L, with and without the cache.
        local: the same in L*; None without PCD.
        effect: the largest difference between L* and L, for comparison; None without PCD.
        spread: the standard deviation of L over the vocabulary, mean over steps.
    """

    method: str
    refusal: str | None = None
    n_steps: int = 0
    n_equal: int = 0
    standard: float = 0.0
    local: float | None = None
    effect: float | None = None
    spread: float = 0.0

    @property
    def is_same(self) -> bool:
        return self.n_equal == self.n_steps


def check_cache(
    llm: Llama,
    prompts: Sequence[Sequence[int]],
    methods: Mapping[str, PCDConfig | None] = METHODS,
    *,
    n_tokens: int = 4,
) -> list[CacheCheck]:
    """Answer prompts with the cache, and evaluate the same texts without it.

    Args:
        prompts: the tokens of each prompt.
        methods: names and settings.
        n_tokens: tokens of each answer.

    Raises:
        ValueError: there is no prompt, or one does not fit in the context with n_tokens more.
    """
    if not prompts:
        raise InputError("there are no prompts; give at least one")
    longest = max(map(len, prompts))
    if longest + n_tokens > llm.n_ctx():
        raise InputError(
            f"a prompt of {longest} tokens and {n_tokens} steps do not fit in the context of {llm.n_ctx()}; allowed: "
            f"{llm.n_ctx()} together; load the model with a larger n_ctx"
        )
    session = Session(llm)
    results = []
    for method, setting in methods.items():
        refusal = engine.pcd_refusal(llm, setting)
        if refusal is not None:
            results.append(CacheCheck(method, refusal))
            continue
        pairs = [pair for prompt in prompts for pair in _both(session, list(prompt), setting, n_tokens)]
        results.append(_compare(method, pairs))
    session.clear()
    llm.pcd = None
    return results


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The result of one evaluation: the logits that tokens are chosen from, L, and with PCD also L*."""

    seen: Logits
    standard: Logits
    local: Logits | None


def _both(session: Session, prompt: list[int], setting: PCDConfig | None, n_tokens: int) -> list[tuple[_Rows, _Rows]]:
    cached, tokens = [], list(prompt)
    row = session.start(prompt, setting)
    for i in range(n_tokens):
        cached.append(_rows(session.llm, row, setting))
        tokens.append(int(row.argmax()))
        if session.is_end(tokens[-1]):
            break
        if i + 1 < n_tokens:
            row = session.step({0: tokens[-1]})[0]
    session.finish()

    fresh = []
    for i in range(len(cached)):
        session.clear()
        session.llm.pcd = setting and setting.repeatable()
        session.llm.eval(tokens[: len(prompt) + i])
        fresh.append(_rows(session.llm, engine.row(session.llm), setting))
    session.clear()
    return list(zip(cached, fresh))


def _rows(llm: Llama, row: Logits, setting: PCDConfig | None) -> _Rows:
    if setting is None:
        return _Rows(row.copy(), row.copy(), None)
    rows = llm.pcd_logits()
    return _Rows(row.copy(), rows.standard, rows.local)


def _compare(method: str, pairs: Sequence[tuple[_Rows, _Rows]]) -> CacheCheck:
    def largest(rows: Sequence[tuple[Logits | None, Logits | None]]) -> float | None:
        # if only one token is plausible, there is no L*
        both = [(a, b) for a, b in rows if a is not None and b is not None]
        return max((float(np.abs(a - b).max()) for a, b in both), default=None)

    return CacheCheck(
        method=method,
        n_steps=len(pairs),
        n_equal=sum(int(a.seen.argmax()) == int(b.seen.argmax()) for a, b in pairs),
        standard=largest([(a.standard, b.standard) for a, b in pairs]) or 0.0,
        local=largest([(a.local, b.local) for a, b in pairs]),
        effect=largest([(a.local, a.standard) for a, _ in pairs]),
        spread=float(np.mean([a.standard.std() for a, _ in pairs])),
    )


# -- the command --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m research.nocache MODEL [options]"
    parser.epilog = "The exit status is 1 where a method writes other tokens without the cache."
    _options.add_model(parser)
    add = parser.add_argument
    add("--length", metavar="N", default="256", help="tokens of a prompt (default %(default)s)")
    add("--n", metavar="N", type=_options.at_least(1), default=3, help="prompts (default %(default)s)")
    add("--n-tokens", metavar="N", type=_options.at_least(1), default=4, help="tokens of each answer (%(default)s)")
    add(
        "--method",
        metavar="NAME,...",
        default=",".join(METHODS),
        help="greedy, or pcd with any setting (default: greedy, each cache and the window)",
    )
    add("--seed", metavar="N", type=_options.at_least(0), default=0, help="other prompts (default %(default)s)")
    add("--f32", action="store_true", help="keep keys and values unrounded (default: f16)")
    _options.add_machine(parser)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    lengths = _options.lengths(args.length)
    if len(lengths) != 1:
        raise InputError(f"--length is {args.length!r}; allowed: one length")
    methods = {name: setting_of(name) for name in _options.names(args.method)}
    if not methods:
        raise InputError("--method is empty; give at least one, such as greedy,pcd")

    n_ctx = lengths[0] + args.n_tokens + 8
    unrounded = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if args.f32 else {}
    llm = _loading.open_model(args.model, n_ctx=n_ctx, **unrounded, **_options.machine_options(args))
    asked = questions(task("kv-short"), args.n, lengths[0], ModelTokenizer(llm), args.seed)
    prompts = [prompt_tokens(llm, prompt) for prompt, _ in asked]
    results = check_cache(llm, prompts, methods, n_tokens=args.n_tokens)
    if args.json:
        record = {"model": args.model, "n_prompts": len(prompts), "checks": [vars_of(r) for r in results]}
        print(json.dumps(record, indent=2))
    else:
        print(report(args, results))
    return 0 if all(r.is_same for r in results) else 1


def vars_of(result: CacheCheck) -> dict[str, object]:
    return {**dataclasses.asdict(result), "is_same": result.is_same}


def report(args: argparse.Namespace, results: list[CacheCheck]) -> str:
    width = max(len(r.method) for r in results)
    lines = [
        f"{args.model}, {args.n} prompts of about {args.length} tokens: the largest difference of logits between a run",
        "with the cache and one that evaluates the whole text again at each step; and L* - L, for comparison",
        "",
        f"{'method':<{width}} {'steps':>6} {'same token':>11} {'L':>9} {'L*':>9} {'L* - L':>9}",
    ]
    for r in results:
        if r.refusal is not None:
            lines.append(f"{r.method:<{width}} {r.refusal}")
            continue
        over, effect = ("-" if value is None else f"{value:.1e}" for value in (r.local, r.effect))
        lines.append(
            f"{r.method:<{width}} {r.n_steps:>6} {f'{r.n_equal}/{r.n_steps}':>11} {r.standard:>9.1e} {over:>9} {effect:>9}"
        )
    spread = max((r.spread for r in results), default=0.0)
    return "\n".join([*lines, "", f"logits have a standard deviation of {spread:.2g}"])


if __name__ == "__main__":
    sys.exit(command("nocache", add_arguments, run))
