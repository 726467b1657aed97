"""pypcd answer: a question about a text, with any decoding method."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pypcd import PCDAnswer
from pypcd.cli import _loading, _options, _reading, _terminal
from pypcd.cli.generate import read_prompt
from pypcd.decode import Answer, Session, parse
from pypcd.decode.prompt_cache import PromptCache
from pypcd.document import read_document
from pypcd.errors import InputError, PCDError, UnsupportedError
from pypcd.prompt import Prompt, has_template, prompt_tokens

DEFAULT_METHODS = "greedy,replay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd answer MODEL -p QUESTION [--context FILE] [--method NAME] [options]"
    _options.add_model(parser)
    add = parser.add_argument
    add("-p", "--prompt", metavar="QUESTION", help="the question (default: stdin, without its last newline)")
    add("--context", metavar="FILE", help="what it is about: a text, PDF or DOCX; put before the question")
    add("--method", metavar="NAME,...", help=f"see --list (default: {DEFAULT_METHODS})")
    add("--no-chat", action="store_true", help="plain text, also if the model has a chat template")
    add("--chat", action="store_true", help=argparse.SUPPRESS)
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
    prompt, document = Prompt(after=question), None
    if args.context is not None:
        document = read_document(args.context)
        prompt = document.prompt(question)
    llm = _loading.open_for(args, methods, [prompt], args.n_ctx)
    chat = (args.chat or has_template(llm)) and not args.no_chat
    asked = prompt_tokens(llm, prompt, chat=chat)
    n_prompt = len(asked)
    if n_prompt >= llm.n_ctx():
        raise PCDError(
            f"{n_prompt} tokens do not fit in the context of {llm.n_ctx()}; give a larger --n-ctx or a shorter text. Nothing is cut"
        )
    failed = False
    cache, documents = PromptCache(), [] if document is None else [document]

    def read(tokens: Sequence[int]) -> int:
        kept = _reading.Kept.of(cache, llm, tokens, documents)
        return len(tokens) - _reading.read(llm, tokens, len(tokens), lambda: False, kept).n_cached

    _options.note_of_demo(args.model, prompt.text)
    if document is not None:
        takes = _reading.takes(llm, asked, _reading.Kept.of(cache, llm, asked, documents))
        _terminal.say(f"{document.name}: {n_prompt} tokens with the question{takes}")
    session = Session(llm, read)
    for method in methods:
        with _terminal.progress(args.max_tokens, f"{method.name}, {n_prompt} tokens") as bar:
            try:
                answer = method.generate(
                    session, prompt, max_tokens=args.max_tokens, chat=chat, look=lambda *_: bar.update(1)
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
            **(answer.pcd or PCDAnswer()).as_dict(),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
        return
    if not alone:
        print(f"--- {name} ---")
    _terminal.write(answer.text + "\n")
    figures = f"{answer.n_prompt} tokens, {answer.n_evaluated} evaluated | answer {len(answer.tokens)} | {answer.seconds:.1f} s"
    _terminal.say(f"{figures} | {answer.pcd}" if answer.pcd else figures)
