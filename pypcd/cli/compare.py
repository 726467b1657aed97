"""pypcd compare: your own questions, answered by several methods side by side."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from pypcd import PCDAnswer, files
from pypcd.cli import _loading, _options, _table, _terminal
from pypcd.cli._text import sentence, wrap
from pypcd.decode import Answer, Method, Session, parse
from pypcd.document import Document, read_document
from pypcd.errors import InputError, PCDError
from pypcd.prompt import Prompt, has_template

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
    add("--method", metavar="NAME,...", default=DEFAULT_METHODS, help=f"see --list (default: {DEFAULT_METHODS})")
    add("--max-tokens", metavar="N", type=_options.at_least(1), default=64, help="longest answer (%(default)s)")
    add("--no-chat", action="store_true", help="plain text, also if the model has a chat template")
    _options.add_machine(parser)
    _options.add_list(parser)
    add("--json", action="store_true", help="print one JSON object for each answer")


@dataclasses.dataclass(frozen=True)
class Question:
    """
    Attributes:
        answer: what a right answer contains; empty: nothing is judged.
    """

    text: str
    answer: str = ""
    document: Document | None = None

    @property
    def prompt(self) -> Prompt:
        if self.document is None:
            return Prompt(after=self.text)
        return self.document.prompt(self.text)

    def is_right(self, text: str) -> bool:
        return _plain(self.answer) in _plain(text)


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
    document = None
    if "file" in given:
        document = read_document(folder / given["file"])
    elif "document" in given:
        document = Document.of("document", given["document"])
    text = given.get("question", given.get("prompt", ""))
    if not text.strip():
        raise InputError("the question is empty")
    return Question(text, given.get("answer", "").strip(), document)


def run(args: argparse.Namespace) -> int:
    questions = read_questions(args.questions)
    methods = [parse(name) for name in _options.names(args.method)]
    if not methods:
        raise InputError(f"--method is empty; give at least one, such as {DEFAULT_METHODS}")
    llm = _loading.open_for(args, methods, [question.prompt for question in questions])
    chat = has_template(llm) and not args.no_chat
    session, tally = Session(llm), Tally(methods)
    try:
        for number, question in enumerate(questions, 1):
            if not args.json:
                name = f" ({question.document.name})" if question.document else ""
                print(f"\n{number} of {len(questions)}: {question.text.strip()}{name}", flush=True)
            for method in methods:
                with _terminal.progress(args.max_tokens, f"{number} of {len(questions)}, {method.name}") as bar:
                    try:
                        answer = method.generate(
                            session,
                            question.prompt,
                            max_tokens=args.max_tokens,
                            chat=chat,
                            look=lambda *_, bar=bar: bar.update(1),  # type: ignore[misc]
                        )
                    except (PCDError, InputError) as error:
                        answer = None
                        _terminal.note(f"{method.name}: {error}")
                tally.add(question, method, answer)
                _show(number, question, method, answer, tally, args)
    except KeyboardInterrupt:
        if not args.json:
            print("\nstopped; so far:")
            tally.show(questions)
        raise
    if not args.json:
        tally.show(questions)
    return 1 if tally.failed else 0


class Tally:
    """What has been answered. The first method is what the others are compared with."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = methods
        self.right, self.judged, self.changed, self.compared, self.answered, self.failed = (
            collections.Counter[str]() for _ in range(6)
        )
        self.first: str | None = None  # the first method's answer to the present question; None: it failed

    def add(self, question: Question, method: Method, answer: Answer | None) -> None:
        name = method.name
        if method is self.methods[0]:
            self.first = None if answer is None else answer.text.strip()
        if answer is None:
            self.failed[name] += 1
            return
        self.answered[name] += 1
        if self.first is not None:
            self.compared[name] += 1
            self.changed[name] += answer.text.strip() != self.first
        if question.answer:
            self.judged[name] += 1
            self.right[name] += question.is_right(answer.text)

    def show(self, questions: Sequence[Question]) -> None:
        judged = any(question.answer for question in questions)
        head = ["method", *(["right"] if judged else []), "other answers"]
        rows = []
        for method in self.methods:
            name = method.name
            if self.answered[name]:
                right = [f"{self.right[name]} of {self.judged[name]}"] if judged else []
                rows.append([name, *right, f"{self.changed[name]} of {self.compared[name]}"])
        print()
        print(_table.table(head, rows, (False, *(True,) * (len(head) - 1)), 2, _table.columns()))
        if judged:
            legend = (
                f"An answer is right if it contains what the file says. {FEWEST} questions on which a method alone is right, and none "
                "on which it alone is wrong, show a difference; fewer may be chance."
            )
            print("\n" + _table.paragraph(legend))


FEWEST = 6  # a sign test's p is then below 0.05


def _show(
    number: int, question: Question, method: Method, answer: Answer | None, tally: Tally, args: argparse.Namespace
) -> None:
    if args.json:
        record = {
            "question": number,
            "method": method.name,
            "text": None if answer is None else answer.text,
            "right": question.is_right(answer.text) if answer and question.answer else None,
            "n_prompt": answer.n_prompt if answer else None,
            **((answer and answer.pcd) or PCDAnswer()).as_dict(),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
    elif answer is not None:
        is_same = method is not tally.methods[0] and answer.text.strip() == tally.first
        verdict = ("right: " if question.is_right(answer.text) else "wrong: ") if question.answer else ""
        text = f"as {tally.methods[0].name}" if is_same else " ".join(answer.text.split()) or "(nothing)"
        head = f"  {method.name:<12.12}  "
        indent = "\n" + " " * len(head)
        room = max(_terminal.width() - len(head), 24)
        print(head + indent.join(wrap(verdict + text, room)), flush=True)
        for line in wrap(str(answer.pcd), room) if answer.pcd else ():
            print(indent[1:] + _terminal.faint(line, sys.stdout), file=_terminal.raw(sys.stdout), flush=True)
