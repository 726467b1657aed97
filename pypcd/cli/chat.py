"""pypcd chat: a conversation in the terminal. Conversation is the logic, Chat the terminal around it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pypcd import PCDError, ask
from pypcd.ask import documents_in
from pypcd.cli import _figures, _keyboard, _loading, _options, _terminal
from pypcd.cli._conversation import Conversation
from pypcd.cli._figures import Figures
from pypcd.cli._terminal import say
from pypcd.cli._text import counted, sentence, wrap
from pypcd.decode import Replay
from pypcd.decode.prompt_cache import PromptCache
from pypcd.document import SPACE, Document
from pypcd.errors import InputError, did_you_mean
from pypcd.prompt import has_template
from pypcd.settings.config import PRESETS, load, typed

# command -> (its argument, what it does)
COMMANDS = {
    "help": ("", "this list"),
    "pcd": ("on|off|unsure:beta=…", "switch PCD, or give it another setting; alone: show it"),
    "compare": (
        "",
        "answer the last message with PCD and then without; with a document, while PCD is off: with replay and without",
    ),
    "regen": ("", "answer the last message again"),
    "undo": ("", "take back the last turn"),
    "clear": ("", "forget the conversation"),
    "system": ("TEXT", "set the system message; 'none' removes it; alone: show it"),
    "set": ("NAME VALUE", "change temperature, top_p, top_k, min_p, max_tokens, …; alone: show them"),
    "file": (
        "FILE",
        "hand over a document (text, PDF, DOCX, …) or a folder, then ask about it; 'none' takes it back. Alone: the passages of the last answer",
    ),
    "read": ("N|all|auto", "read N tokens of the documents, the best parts, or all; auto: all if they fit"),
    "replay": ("on|off", "repeat the passages that a question about a document is about; on unless you turn it off"),
    "save": ("FILE", "save the conversation and its settings"),
    "exit": ("", "leave (or Ctrl-D)"),
}
LEFT = {
    "load": "left the chat; the page of 'pypcd serve' keeps conversations",
    "demo": "left the chat; 'pypcd demo K' prints question K",
}
ALIASES = {"quit": "exit", "bye": "exit", "?": "help"}
ERRORS = (PCDError, ValueError, TypeError, OSError, NotImplementedError)


class Chat:
    """Reads messages and commands, writes answers to stdout and everything else to stderr."""

    def __init__(self, session: Conversation, *, as_json: bool = False) -> None:
        self.session, self.as_json = session, as_json
        self.lines = _keyboard.Lines(list(COMMANDS))
        self.status = 0
        self._noted = ""  # the note on the last answer's passages

    def greet(self, *, no_setting: bool) -> None:
        """Say what is in force. `no_setting`: the user chose none."""
        llm = self.session.llm
        if self.lines.typed:
            name = llm.metadata.get("general.name") or pathlib.Path(llm.model_path).name
            state = f"context {llm.n_ctx()} | replay for documents, PCD {typed(llm.pcd)}"
            say(f"{name} | {state} | /help for commands, Ctrl-D to leave")
        if no_setting:
            say(_options.how_to_turn_on("/pcd" if self.lines.typed else "--pcd"))

    def run(self) -> int:
        while True:
            try:
                message = self.lines.read(self.prompt())
            except KeyboardInterrupt:
                say("\nCtrl-D or /exit leaves; Ctrl-C stops an answer")
                continue
            if message is None:
                if self.lines.typed:
                    say("")
                return self.status
            try:
                if not self.handle(*message):
                    return self.status
            except BrokenPipeError:
                raise  # the reader of the answers is gone
            except ERRORS as error:
                self.fail(error)
            except KeyboardInterrupt:
                say("\nstopped")
            if self.status == 130:
                return self.status

    def prompt(self) -> str:
        """The prompt before a typed line: the name of the PCD setting in force, unless it is off, and >>>."""
        if self.session.llm.pcd is None:
            return ">>> "
        setting = typed(self.session.llm.pcd)
        return f"{setting if len(setting) <= 24 else 'custom'} >>> "

    def handle(self, text: str, literal: bool) -> bool:
        """One message or command. False: leave."""
        if not text.strip():
            return True
        literal = literal or ("\n" in text and not text.startswith("/system "))  # other commands take one line
        if literal or not text.startswith("/") or text.startswith("//"):
            message = text[1:] if text.startswith("//") and not literal else text
            self.answer(lambda stopped: self.session.send(message, stopped))
            return True
        name, _, argument = text[1:].strip().partition(" ")
        name = ALIASES.get(name, name)
        if name in LEFT:
            raise InputError(f"/{name} {LEFT[name]}")
        if name not in COMMANDS:
            hint = "/help lists them, // sends a message that starts with /"
            raise InputError(f"there is no command /{name}{did_you_mean(name, COMMANDS)}; {hint}")
        return getattr(self, f"do_{name}")(argument.strip()) is not False

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """As _terminal.interruptible(); Ctrl-C counts from the line's end on."""
        with _terminal.interruptible() as stopped:
            if self.lines.stopped:
                signal.raise_signal(signal.SIGINT)
            yield stopped

    def answer(self, make: Callable[[Callable[[], bool]], Iterator[str]]) -> None:
        before = self.session.answer
        with self.interruptible() as stopped:
            _terminal.write_pieces(make(stopped), "answering", unseen=self.as_json)
        found = self.session.answer
        if found is None or found is before:
            say("stopped before the first word; /regen sends the message again")
        elif self.as_json:
            *_, asked, answer = messages = self.session.messages
            names = [document.name for document in documents_in(messages)]
            record = {"message": asked["content"], "documents": names, "text": answer["content"]}
            self.print_json({**record, **Figures(self.session.llm, found).as_dict()})
        else:
            note = "" if found.note == self._noted else found.note  # how it was found is said once
            self._noted = found.note
            below = _figures.lines(found, note, _terminal.width(), "/read")
            say("\n".join([*below, Figures(self.session.llm, found).line()]) + "\n" * self.lines.typed)
        if stopped() and not self.lines.typed:
            self.status = 130

    def fail(self, error: BaseException) -> None:
        _terminal.note(sentence(error))
        if not self.lines.typed:
            self.status = 1

    def print_json(self, record: dict[str, Any]) -> None:
        print(json.dumps(record, ensure_ascii=False), flush=True)

    # -- commands --------------------------------------------------------------------------------------------------

    def do_help(self, _: str) -> None:
        column = max(len(f"/{name} {argument}") for name, (argument, _) in COMMANDS.items()) + 2
        for name, (argument, what) in COMMANDS.items():
            lines = wrap(what, max(_terminal.width() - column, 16))
            say(f"/{name} {argument}".ljust(column) + f"\n{' ' * column}".join(lines))
        say('a pasted page is one message; """ begins and ends one that you type over several lines')
        say("Ctrl-C stops an answer and keeps it")

    def do_pcd(self, argument: str) -> None:
        if argument:
            setting = load(argument)
            self.session.set_pcd(setting)
            _options.note_of_profile(setting, self.session.llm.model_path)
        config = self.session.llm.pcd
        say(f"PCD {typed(config)}")
        if config and not argument:
            values = "  ".join(f"{name}={value}" for name, value in config.differences().items())
            say(f"values that are not the paper's: {values}" if values else PRESETS["paper"].what)

    def do_compare(self, _: str) -> None:
        answers: list[tuple[str, Figures]] = []
        with self.interruptible() as stopped:
            for title, pieces, asking in self.session.compare(stopped):
                if not self.as_json:
                    _terminal.write("\n" * bool(answers) + f"--- {title} ---\n")
                _terminal.write_pieces(pieces, "answering", unseen=self.as_json)
                answers.append((title, Figures(self.session.llm, asking.answer)))
        if self.as_json:
            self.print_json({"compare": [{"title": t, "text": a.answer.text, **a.as_dict()} for t, a in answers]})
            return
        if len({figures.answer.text for _, figures in answers}) == 1:
            say("both answers are the same")
        for title, figures in answers:
            say(f"{title}: {figures.line()}")

    def do_regen(self, _: str) -> None:
        self.answer(self.session.regen)

    def do_undo(self, _: str) -> None:
        first = self.session.undo().strip().split("\n")[0]
        say(f"taken back: {first if len(first) < 60 else first[:57] + '...'}")

    def do_clear(self, _: str) -> None:
        self.session.clear()
        say("the conversation is forgotten")

    def do_system(self, argument: str) -> None:
        if argument:
            self.session.system = "" if argument == "none" else argument
        say(f"system message: {self.session.system or 'none'}")

    def do_set(self, argument: str) -> None:
        words = argument.replace("=", " ").split()
        if words and len(words) != 2:
            raise InputError("write /set NAME VALUE, such as /set temperature 0.8")
        if words:
            name = self.session.sampling.set(*words)
            say(f"{name} is {words[1]}")
        else:
            say(self.session.sampling.describe())

    def do_file(self, argument: str) -> None:
        if argument == "none":
            self.session.attached = []
            say("no document goes in front of your next message")
        elif argument:
            self.attach(*_loading.read([_path(argument)]))
        else:
            found = self.session.answer.passages if self.session.answer else ()
            texts = [f"{source.document}, {source.place}:\n{source.text}" for source in found]
            say(SPACE.join(texts) or "nothing was repeated for the last answer")

    def attach(self, documents: Sequence[Document], left_out: str) -> None:
        if left_out:
            _terminal.note(left_out)
        self.session.attached += documents
        n_parts = sum(len(document.segments) for document in documents)
        what = f"{len(documents)} documents"
        if len(documents) == 1:
            what = f"{documents[0].name}: {ask.size(self.session.llm, documents[0])}"
        takes = self.session.reading_takes()
        say(f"{what}, {counted(n_parts, 'part')}; in front of your next message{takes}")

    def do_read(self, argument: str) -> None:
        if argument:
            self.session.read = None if argument == "auto" else ask.read_of(argument)
        read = self.session.read
        say(f"read {read or f'all of the documents if they fit, else parts of {ask.PARTS} tokens'}")

    def do_replay(self, argument: str) -> None:
        if argument not in ("", "on", "off"):
            raise InputError(f"/replay is {argument!r}; allowed: on, off")
        if argument:
            self.session.replay = Replay() if argument == "on" else None
        say(f"replay {'on' if self.session.replay else 'off'}")

    def do_save(self, argument: str) -> None:
        if not argument:
            raise InputError("/save needs a file name")
        say(f"saved to {self.session.save(argument)}")

    def do_exit(self, _: str) -> bool:
        return False


def _path(text: str) -> str:
    """A file's name as it was typed; or as a terminal pastes one that was dragged there, quoted or with backslashes."""
    if not os.path.exists(os.path.expanduser(text)):  # pathlib fails on `~name` if there is no such user
        with contextlib.suppress(ValueError):  # a quotation that does not end
            words = shlex.split(text)
            return words[0] if len(words) == 1 else text
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd chat MODEL [-p TEXT] [options]"
    parser.epilog = "A pipe's lines are answered one by one. /help in the chat: its commands."
    _options.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this one message and leave")
    parser.add_argument(
        "--file",
        metavar="FILE",
        action="append",
        default=[],
        help="a document (text, PDF, Office, HTML) or a folder",
    )
    _options.add_read(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each answer")
    _options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    args.read = ask.read_of(args.read)
    sampling = _options.sampling_from(args)
    if args.prompt is not None and not args.prompt.strip():
        raise InputError("the prompt is empty")
    read = _loading.read(args.file)
    llm = _loading.load_model(args)
    if not has_template(llm):
        _terminal.note(
            "this model has no chat template, so it may be a base model: it goes on with your messages as plain text; "
            "'pypcd generate' continues one text"
        )
    chat = Chat(Conversation(llm, sampling, args.system, PromptCache()), as_json=args.json)
    if args.prompt is not None:
        chat.lines.typed = False
    chat.greet(no_setting=args.pcd is None)
    chat.session.read = args.read
    if args.file:
        chat.attach(*read)
    if args.prompt is not None or chat.lines.typed:
        _options.note_of_demo(args.model, args.prompt or "")
    if args.prompt is None:
        return chat.run()
    chat.handle(args.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), literal=True)
    return chat.status
