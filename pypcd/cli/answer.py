"""pypcd answer: a question about a text, with any decoding method."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pypcd import Llama, PCDAnswer, ask
from pypcd.ask import Answer
from pypcd.cli import _figures, _loading, _options, _terminal
from pypcd.cli.generate import read_prompt
from pypcd.decode import Method, parse
from pypcd.decode.prompt_cache import PromptCache
from pypcd.document import Document
from pypcd.errors import InputError, PCDError, UnsupportedError
from pypcd.prompt import has_template, lay

DEFAULT_METHODS = "greedy,replay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd answer MODEL -p QUESTION [--context FILE] [--method NAME] [options]"
    _options.add_model(parser)
    add = parser.add_argument
    add("-p", "--prompt", metavar="QUESTION", help="the question (default: stdin, without its last newline)")
    add(
        "--context",
        metavar="FILE",
        action="append",
        default=[],
        help="what it is about: a text, PDF, DOCX, XLSX, PPTX, EPUB or HTML, or a folder",
    )
    _options.add_read(parser)
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
    llm: Llama,
    method: Method,
    documents: Sequence[Document],
    question: str,
    args: argparse.Namespace,
    chat: bool,
    what: str,
) -> Answer | PCDError | InputError:
    """A method's answer, or why it has none. `what`: what the bar says beside the method's name."""
    bar = _terminal.Bar(args.max_tokens, f"{method.name}, {what}")
    with bar, _terminal.interruptible() as stopped:
        try:
            how: Any = {"method": method, "read": args.read, "max_tokens": args.max_tokens, "chat": chat}
            asking = ask.stream(llm, documents, question, **how)
            for _ in ask.stoppable(llm, asking, stopped):
                bar.update(len(asking.answer.written.tokens) - bar.n)
        except (PCDError, InputError) as error:
            return error
    if stopped():
        raise KeyboardInterrupt
    return asking.answer


def note_failure(method: Method, error: PCDError | InputError) -> None:
    _terminal.note(str(error) if isinstance(error, UnsupportedError) else f"{method.name}: {error}")


def run(args: argparse.Namespace) -> int:
    args.read = ask.read_of(args.read)
    methods = methods_of(args, DEFAULT_METHODS)
    question = read_prompt(args.prompt)
    documents, left_out = _loading.read(args.context)
    if left_out:
        _terminal.note(left_out)
    messages: list[ask.Message] = [{"role": "user", "content": question, "documents": documents}]
    llm = _loading.open_for(args, methods, args.n_ctx)
    chat = has_template(llm) and not args.no_chat
    turns, read = ask.chosen(llm, messages, args.read, llm.n_ctx())
    laid = lay(llm, ask.prompt_of(turns).turns, chat=chat)
    n = len(laid.tokens)
    _options.check_room(llm, n)
    _options.note_of_demo(args.model, "".join([*(document.text for document in documents), question]))
    if documents:
        name = documents[0].name if len(documents) == 1 else f"{len(documents)} documents"
        said = f"{read}, " if read else ""
        _terminal.say(f"{name}: {said}{n} tokens with the question{_figures.takes(llm, laid, PromptCache())}")
    failed = False
    for method in methods:
        found = answer(llm, method, documents, question, args, chat, f"{n} tokens")
        if isinstance(found, Answer):
            _show(method.name, found, args, alone=len(methods) == 1)
        elif len(methods) == 1:
            raise found
        else:
            failed |= args.method is not None or not isinstance(found, UnsupportedError)
            note_failure(method, found)
    return 1 if failed else 0


def _show(name: str, answer: Answer, args: argparse.Namespace, *, alone: bool) -> None:
    written = answer.written
    if args.json:
        record = {
            "model": args.model,
            "method": name,
            "text": answer.text,
            "n_prompt": written.n_prompt,
            "n_evaluated": written.n_evaluated,
            "n_tokens": len(written.tokens),
            "seconds": round(written.seconds, 3),
            **(written.pcd or PCDAnswer()).as_dict(),
            **_figures.passages(answer),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
        return
    if not alone:
        print(f"--- {name} ---")
    _terminal.write(answer.text + "\n")
    for line in _figures.lines(answer, answer.note, _terminal.width()):
        _terminal.say(line)
    figures = f"{written.n_prompt} tokens, {written.n_evaluated} evaluated | answer {len(written.tokens)} | {written.seconds:.1f} s"
    _terminal.say(f"{figures} | {written.pcd}" if written.pcd else figures)
