"""pypcd compare: your own questions, answered by several methods side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from pypcd import PCDAnswer, files
from pypcd.ask import Answer, read_of
from pypcd.cli import _figures, _loading, _options, _table, _terminal
from pypcd.cli._text import sentence, wrap
from pypcd.cli.answer import add_methods, answer, methods_of, note_failure
from pypcd.decode import Method
from pypcd.document import Document
from pypcd.errors import InputError
from pypcd.evaluation.stats import MIN_N, Paired, advised, paired
from pypcd.prompt import has_template

DEFAULT_METHODS = "greedy,replay,recite,pcd:unsure,pcd:window:relative_top=0.1"
LINE = '{"file": "report.txt", "question": "Who signed it?", "answer": "Ruth Amsel"}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd compare MODEL FILE.jsonl [options]"
    parser.epilog = (
        f'A line of FILE.jsonl: {LINE}; "document" has the text itself, and without "answer" nothing is judged.'
    )
    _options.add_model(parser)
    add = parser.add_argument
    parser._optionals.add_argument(
        "questions", metavar="FILE.jsonl", type=pathlib.Path, help="a question a line; ten are enough to see something"
    )
    add_methods(parser, DEFAULT_METHODS, max_tokens=64)
    _options.add_read(parser)
    add("--json", action="store_true", help="print one JSON object for each answer")


@dataclasses.dataclass(frozen=True)
class Question:
    """
    Attributes:
        answer: what a right answer contains; empty: nothing is judged.
        left_out: a sentence on the files of a folder that are not read.
    """

    text: str
    answer: str = ""
    documents: tuple[Document, ...] = ()
    left_out: str = ""

    def is_right(self, text: str) -> bool:
        return _plain(self.answer) in _plain(text)


Done = tuple[Question, dict[str, Answer]]  # a question, and its answers by those methods that have one


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def read_questions(path: pathlib.Path) -> list[Question]:
    """
    Raises:
        OSError: it cannot be read.
        ValueError: a line is no question, or its file cannot be read; the message has its number.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                found.append(_question(files.parsed(line.decode("utf-8-sig")), path.parent))
            except OSError as error:
                raise InputError(f"{path}, line {number}: {sentence(error)}") from None
            except ValueError as error:
                raise InputError(f"{path}, line {number}: {error}; write lines such as {LINE}") from None
    if not found:
        raise InputError(f"{path} has no questions; write lines such as {LINE}")
    return found


def _question(made: object, folder: pathlib.Path) -> Question:
    if not isinstance(made, dict):
        raise InputError(f"it is a {type(made).__name__}")
    given: dict[str, str] = made
    known = {"file", "document", "question", "prompt", "answer"}
    if unknown := made.keys() - known:
        raise InputError(f"there is no {min(unknown)!r}; allowed: {', '.join(sorted(known))}")
    if other := [name for name, value in made.items() if not isinstance(value, str)]:
        raise InputError(f"{other[0]} is no text")
    if ("question" in made) == ("prompt" in made) or ("file" in made and "document" in made):
        raise InputError('it needs one of "question" and "prompt", and at most one of "file" and "document"')
    documents, left_out = _loading.read([given["file"] and folder / given["file"]] if "file" in given else [])
    if "document" in given:
        documents = [Document.of("document", given["document"])]
    text = given.get("question", given.get("prompt", ""))
    if not text.strip():
        raise InputError("the question is empty")
    return Question(text, given.get("answer", "").strip(), tuple(documents), left_out)


def run(args: argparse.Namespace) -> int:
    args.read = read_of(args.read)
    questions = read_questions(args.questions)
    for left_out in dict.fromkeys(question.left_out for question in questions if question.left_out):
        _terminal.note(left_out)
    methods = methods_of(args, DEFAULT_METHODS)
    llm = _loading.open_for(args, methods)
    chat = has_template(llm) and not args.no_chat
    done, is_complete = list[Done](), True
    try:
        for number, question in enumerate(questions, 1):
            what = f"{number} of {len(questions)}"
            if not args.json:
                name = f" ({question.documents[0].name})" if len(question.documents) == 1 else ""
                print(f"\n{what}: {question.text.strip()}{name}", flush=True)
            done.append((question, {}))
            for method in methods:
                found = answer(llm, method, question.documents, question.text, args, chat, what)
                if isinstance(found, Answer):
                    done[-1][1][method.name] = found
                else:
                    is_complete = False
                    note_failure(method, found)
                if args.json:
                    _print_json(number, *done[-1], method.name)
                elif isinstance(found, Answer):
                    _show(*done[-1], method.name, methods[0].name)
    except KeyboardInterrupt:
        if not args.json:
            print("\nstopped; so far:")
        raise
    finally:
        if not args.json:
            _summarize(methods, done)
    return 0 if is_complete else 1


def _summarize(methods: Sequence[Method], done: Sequence[Done]) -> None:
    """A table, and a sentence of advice. The first method is what the others are compared with."""
    first, rows, compared = methods[0].name, [], dict[str, Paired]()
    judges = any(question.answer for question, _ in done)
    for name in (method.name for method in methods):
        found = [(question, answers.get(first), answers[name]) for question, answers in done if name in answers]
        judged = [question.is_right(one.text) for question, _, one in found if question.answer]
        others = [one.text.strip() != plain.text.strip() for _, plain, one in found if plain]
        counts = [judged, others] if judges else [others]
        if found:
            rows.append([name, *(f"{sum(count)} of {len(count)}" for count in counts)])
        both = [(q.is_right(one.text), q.is_right(plain.text)) for q, plain, one in found if q.answer and plain]
        if both:
            compared[name] = paired(*zip(*both))
    head = ["method", *["right"] * judges, "other answers"]
    print()
    print(_table.table(head, rows, [column > 0 for column in range(len(head))], _table.columns()))
    if judges:
        legend = (
            f"An answer is right if it contains what the file says. {MIN_N} questions on which a method alone is right, and none "
            "on which it alone is wrong, show a difference; fewer may be chance."
        )
        print("\n" + _table.paragraph(legend))
        if len(compared) > 1:
            print("\n" + _table.paragraph(advised(first, compared)))


def _print_json(number: int, question: Question, answers: dict[str, Answer], name: str) -> None:
    answer = answers.get(name)
    record = {
        "question": number,
        "method": name,
        "text": answer and answer.text,
        "right": question.is_right(answer.text) if answer and question.answer else None,
        "n_prompt": answer and answer.written.n_prompt,
        **((answer and answer.written.pcd) or PCDAnswer()).as_dict(),
        **(_figures.passages(answer) if answer else {}),
    }
    print(json.dumps(record, ensure_ascii=False), flush=True)


def _show(question: Question, answers: dict[str, Answer], name: str, first: str) -> None:
    """One method's answer. `first`: the method that it is compared with."""
    answer, plain = answers[name], answers.get(first)
    verdict = ("right: " if question.is_right(answer.text) else "wrong: ") if question.answer else ""
    is_same = name != first and plain is not None and answer.text.strip() == plain.text.strip()
    text = f"as {first}" if is_same else " ".join(answer.text.split()) or "(nothing)"
    head = f"  {name:<12.12}  "
    indent = "\n" + " " * len(head)
    room = max(_terminal.width() - len(head), 24)
    print(head + indent.join(wrap(verdict + text, room)), flush=True)
    below = _figures.lines(answer, answer.note, room)
    for line in below + (wrap(str(answer.written.pcd), room) if answer.written.pcd else []):
        print(indent[1:] + _terminal.faint(line, sys.stdout), file=_terminal.raw(sys.stdout), flush=True)
