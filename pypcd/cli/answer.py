"""pypcd answer: a question about a text, with any decoding method."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from pypcd import PCDAnswer
from pypcd.cli import _loading, _options, _reading, _terminal
from pypcd.cli.generate import read_prompt
from pypcd.decode import Answer, Method, Session, parse
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
    add("--chat", action="store_true", help=argparse.SUPPRESS)
    _options.add_n_ctx(parser)
    add_methods(parser, DEFAULT_METHODS, max_tokens=256)
    add("--json", action="store_true", help="print one JSON object for each method")


def add_methods(parser: argparse.ArgumentParser, default: str, max_tokens: int) -> None:
    """The options of commands that answer questions by several methods."""
    add = parser.add_argument
    add("--method", metavar="NAME,...", help=f"see --list (default: {default})")
    add("--max-tokens", metavar="N", type=_options.at_least(1), default=max_tokens, help="longest answer (%(default)s)")
    add("--no-chat", action="store_true", help="plain text, also if the model has a chat template")
    _options.add_machine(parser)
    _options.add_list(parser)


def methods_of(args: argparse.Namespace, default: str) -> list[Method]:
    methods = [parse(name) for name in _options.names(default if args.method is None else args.method)]
    if not methods:
        raise InputError(f"--method is empty; give at least one, such as {default}")
    return methods


def answer(
    session: Session, method: Method, prompt: Prompt, args: argparse.Namespace, chat: bool, what: str
) -> Answer | PCDError | InputError:
    """A method's answer, or why it has none. `what`: what the bar says beside the method's name."""
    with _terminal.progress(args.max_tokens, f"{method.name}, {what}") as bar:
        try:
            return method.generate(
                session, prompt, max_tokens=args.max_tokens, chat=chat, look=lambda *_: bar.update(1)
            )
        except (PCDError, InputError) as error:
            return error


def note_failure(method: Method, error: PCDError | InputError) -> None:
    _terminal.note(str(error) if isinstance(error, UnsupportedError) else f"{method.name}: {error}")


def run(args: argparse.Namespace) -> int:
    methods = methods_of(args, DEFAULT_METHODS)
    question = read_prompt(args.prompt)
    document = None if args.context is None else read_document(args.context)
    prompt = Prompt(after=question) if document is None else document.prompt(question)
    llm = _loading.open_for(args, methods, [prompt], args.n_ctx)
    chat = (args.chat or has_template(llm)) and not args.no_chat
    asked = prompt_tokens(llm, prompt, chat=chat)
    _options.check_room(llm, len(asked))
    cache, documents = PromptCache(), [] if document is None else [document]

    def read(tokens: Sequence[int]) -> int:
        kept = _reading.Kept.of(cache, llm, tokens, documents)
        return len(tokens) - _reading.read(llm, tokens, len(tokens), lambda: False, kept).n_cached

    _options.note_of_demo(args.model, prompt.text)
    if document is not None:
        takes = _reading.takes(llm, asked, _reading.Kept.of(cache, llm, asked, documents))
        _terminal.say(f"{document.name}: {len(asked)} tokens with the question{takes}")
    failed = False
    session = Session(llm, read)
    for method in methods:
        found = answer(session, method, prompt, args, chat, f"{len(asked)} tokens")
        if isinstance(found, Answer):
            _show(method.name, found, args, alone=len(methods) == 1)
        elif len(methods) == 1:
            raise found
        else:  # replay was not asked for by name, and some models lack what it reads
            failed |= args.method is not None or not isinstance(found, UnsupportedError)
            note_failure(method, found)
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
