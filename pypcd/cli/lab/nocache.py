"""pypcd lab nocache: checks that PCD with the KV cache gives the same as without it."""

from __future__ import annotations

import argparse
import dataclasses
import json

import llama_cpp

from pypcd.cli import _loading, _options
from pypcd.decode import setting_of
from pypcd.errors import InputError
from pypcd.evaluation import ModelTokenizer, task
from pypcd.lab.nocache import METHODS, CacheCheck, check_cache
from pypcd.lab.questions import questions
from pypcd.prompt import prompt_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd lab nocache MODEL [options]"
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
