"""pypcd answer: a question about a text, with any decoding method."""

from __future__ import annotations

import argparse
import json
import pathlib

from pypcd.cli import _loading, _options, _terminal
from pypcd.cli.generate import read_prompt
from pypcd.decode import Answer, Session, parse
from pypcd.errors import InputError, UnsupportedError
from pypcd.prompt import Prompt, prompt_tokens, split_context

DEFAULT_METHODS = "greedy,replay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd answer MODEL -p QUESTION [--context FILE] [--method NAME] [options]"
    _options.add_model(parser)
    add = parser.add_argument
    add("-p", "--prompt", metavar="QUESTION", help="the question (default: stdin, without its last newline)")
    add("--context", metavar="FILE", type=pathlib.Path, help="the text it is about; put before the question")
    add("--method", metavar="NAME,...", help=f"see --list (default: {DEFAULT_METHODS})")
    add("--chat", action="store_true", help="use the model's chat template")
    add("--max-tokens", metavar="N", type=_options.at_least(1), default=256, help="longest answer (%(default)s)")
    add(
        "--n-ctx",
        metavar="N",
        type=_options.at_least(0),
        default=0,
        help="context (default: the model's, or what fits)",
    )
    _options.add_machine(parser)
    _options.add_list(parser)
    add("--json", action="store_true", help="print one JSON object for each method")


def run(args: argparse.Namespace) -> int:
    methods = [parse(name) for name in _options.names(DEFAULT_METHODS if args.method is None else args.method)]
    if not methods:
        raise InputError(f"--method is empty; give at least one, such as {DEFAULT_METHODS}")
    question = read_prompt(args.prompt)
    prompt = Prompt(after=question)
    if args.context is not None:
        segments, joiner = split_context(
            args.context.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n").strip()
        )
        prompt = Prompt(segments=segments, joiner=joiner, after=f"\n\n{question}")
    options = _options.machine_options(args)
    if any(method.rows.whole_prompt for method in methods):  # a token has a byte at least
        options["n_batch"] = options["n_ubatch"] = len(prompt.text.encode()) + 1024
    llm = _loading.open_model(
        args.model,
        n_ctx=args.n_ctx,
        n_seq_max=max(method.n_sequences for method in methods),
        **options,
    )
    n_prompt = len(prompt_tokens(llm, prompt, chat=args.chat))
    failed = False
    session = Session(llm)
    for method in methods:
        with _terminal.progress(args.max_tokens, f"{method.name}, {n_prompt} tokens") as bar:
            try:
                answer = method.generate(
                    session, prompt, max_tokens=args.max_tokens, chat=args.chat, look=lambda *_: bar.update(1)
                )
            except (UnsupportedError, InputError) as error:
                if len(methods) == 1:
                    raise
                # replay was not asked for by name, and some models lack what it reads
                failed |= args.method is not None or not isinstance(error, UnsupportedError)
                _terminal.note(f"{method.name}: {error}" if isinstance(error, InputError) else str(error))
                continue
        _show(method.name, answer, args, alone=len(methods) == 1)
    return 1 if failed else 0


def _show(name: str, answer: Answer, args: argparse.Namespace, *, alone: bool) -> None:
    if args.json:
        record = {
            "model": args.model,
            "method": name,
            "text": answer.text,
            "n_prompt": answer.n_prompt,
            "n_evaluated": answer.n_evaluated,
            "n_tokens": len(answer.tokens),
            "seconds": round(answer.seconds, 3),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
        return
    if not alone:
        print(f"--- {name} ---")
    _terminal.write(answer.text + "\n")
    figures = f"{answer.n_prompt} tokens, {answer.n_evaluated} evaluated | answer {len(answer.tokens)} | {answer.seconds:.1f} s"
    _terminal.say(figures)
