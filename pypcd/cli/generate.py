"""pypcd generate: continue a prompt."""

from __future__ import annotations

import argparse
import json
import sys

from pypcd.ask import Answer, stoppable
from pypcd.cli import _loading, _options, _terminal
from pypcd.cli._figures import Figures
from pypcd.decode import Session
from pypcd.errors import InputError
from pypcd.prompt import Laid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd generate MODEL [-p TEXT] [options] [< FILE]"
    _options.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: stdin, without its last newline)")
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="stop before this text; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: the text and its figures")
    _options.add_common(parser)


def read_prompt(given: str | None) -> str:
    if given is not None:
        text = given.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    elif sys.stdin.isatty():
        raise InputError("there is no prompt; give one with -p TEXT or on standard input")
    else:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
        text = text.removesuffix("\n")
    if not text:
        raise InputError("the prompt is empty")
    return text


def run(args: argparse.Namespace) -> int:
    sampling = _options.sampling_from(args)
    prompt = read_prompt(args.prompt)
    llm = _loading.load_model(args)
    if args.pcd is None:
        _terminal.say(_options.how_to_turn_on("--pcd"))
    _options.note_of_demo(args.model, prompt)
    tokens = llm.tokenize(prompt.encode(), add_bos=True, special=True)
    _options.check_room(llm, len(tokens))
    seed = sampling.draw_seed()
    with _terminal.interruptible() as stopped:
        how = {"max_tokens": sampling.max_tokens, "stop": args.stop}
        session = Session(llm, repeatable=False)
        writing = sampling.method(llm, seed).stream(session, Laid(tokens, [], None, 0, []), **how)
        _terminal.write_pieces(stoppable(llm, writing, stopped), "generating", unseen=args.json)
    figures = Figures(llm, Answer(writing.answer.text, (), "", (), writing.answer))
    if args.json:
        record = {"model": args.model, "text": writing.answer.text, "seed": seed, **figures.as_dict()}
        print(json.dumps(record, ensure_ascii=False))
    else:
        if not writing.answer.text and not sys.stdout.isatty():
            print()
        _terminal.say(figures.line())
    return 130 if writing.answer.end == "interrupted" else 0
