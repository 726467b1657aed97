"""pypcd chat: a conversation in the terminal. ChatSession is the logic, Chat the terminal around it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from llama_cpp import llama_chat_format

import pypcd
from pypcd import PCDConfig, PCDError, UnsupportedError
from pypcd._cli import _options, _terminal
from pypcd._cli._terminal import say
from pypcd._cli.generate import ContextFull, Figures, Generation
from pypcd._config import _nearest

HELP = "talk with a model in the terminal"

Message = dict  # {"role": ..., "content": ...}


def never() -> bool:
    return False


class ChatSession:
    """Messages, settings and the model that answers. It neither reads nor writes the terminal.

    A message is part of `messages` once an answer to it has begun; until then `draft` keeps it, so that nothing
    is lost to an error.
    """

    def __init__(self, llm: pypcd.Llama, sampling: _options.Sampling | None = None, system: str = "") -> None:
        self.llm = llm
        self.sampling = sampling or _options.Sampling()
        self.system = system
        self.messages: list[Message] = []
        self.draft: str | None = None
        self.attached: list[str] = []
        self.figures: list[Figures] = []
        self._on = llm.pcd  # what "on" means here
        self._formatter = _formatter(llm)

    def send(self, text: str, stopped: Callable[[], bool] = never) -> Iterator[str]:
        """Answer a message, with the attached files in front of it."""
        self.draft = "\n\n".join([*self.attached, text])
        self.attached = []
        yield from self.regen(stopped)

    def regen(self, stopped: Callable[[], bool] = never) -> Iterator[str]:
        """Answer the draft if there is one, else the last message once more."""
        messages = self._question()
        answer = self._generation(messages, stopped)
        try:
            yield from answer
        finally:
            if answer.text or answer.figures.finish_reason != "interrupted":
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
                self.draft = None
                self.figures.append(answer.figures)

    def compare(self, stopped: Callable[[], bool] = never, tick: Callable[[], object] = never) -> list[Generation]:
        """The last message answered with PCD and without; history and settings stay as they are."""
        messages, before = self._question(), self.llm.pcd
        sampling = dataclasses.replace(self.sampling, seed=self.sampling.draw_seed())
        answers = []
        try:
            for config in (before or self._on or PCDConfig(), None):
                self.llm.pcd = config
                answers.append(self._generation(messages, stopped, sampling))
                for _ in answers[-1]:
                    tick()
        finally:
            self.llm.pcd = before
        return answers

    def undo(self) -> str:
        """Take back the last turn; returns its message."""
        if not self.messages:
            raise ValueError("there is no turn to take back")
        self.messages, last = self.messages[:-2], self.messages[-2]
        return last["content"]

    def clear(self) -> None:
        self.messages, self.attached = [], []

    def read(self, path: str) -> str:
        """Put a file's text in front of the next message; returns what was read, in words."""
        data = pathlib.Path(path).expanduser().read_bytes()
        if b"\0" in data[:8192]:
            raise ValueError(f"{path} is not a text file")
        text = data.decode("utf-8", "replace")
        n = len(self.llm.tokenize(text.encode(), add_bos=False, special=False))
        self.attached.append(text)
        return f"{path} ({n} tokens) goes in front of your next message"

    def set_pcd(self, text: str) -> None:
        self.llm.pcd = _options.parse_pcd(text, self._on)
        self._on = self.llm.pcd or self._on

    def save(self, path: str) -> pathlib.Path:
        target = pathlib.Path(path).expanduser()
        if target.exists():
            _load_json(target)  # raises rather than overwrite what is no session
        record = {
            "pypcd_session": 1,
            "model": self.llm.model_path,
            "system": self.system,
            "messages": self.messages,
            "settings": dataclasses.asdict(self.sampling),
            "pcd": self.llm.pcd.as_dict() if self.llm.pcd else None,
        }
        target.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        return target

    def load(self, path: str) -> str:
        """Replace messages and settings by saved ones; returns what was loaded, in words.

        Raises:
            ValueError: the file is no session; nothing has changed then.
        """
        record = _load_json(pathlib.Path(path).expanduser())
        sampling, messages, system, pcd = _options.Sampling(), record["messages"], record["system"], record["pcd"]
        if not _is_turns(messages) or not isinstance(system, str):
            raise ValueError(f"{path} is damaged: its messages are not turns of user and assistant")
        for name, value in record["settings"].items():
            sampling.set(name, value)
        config, said = PCDConfig().replace(**pcd) if pcd else None, ""
        try:
            self.llm.pcd = config
            self._on = config or self._on
        except UnsupportedError as error:
            said = f"; its PCD setting is left out: {error}"
        self.messages, self.system, self.sampling = messages, system, sampling
        return f"{len(messages) // 2} turns from {path}{said}"

    def _question(self) -> list[Message]:
        """The messages up to the one to be answered."""
        if self.draft is not None:
            return [*self.messages, {"role": "user", "content": self.draft}]
        if not self.messages:
            raise ValueError("there is no message yet")
        return self.messages[:-1]

    def _generation(self, messages: list[Message], stopped: Callable[[], bool], sampling: Any = None) -> Generation:
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            made = self._formatter(messages=[*system, *messages])
        except (jinja2.TemplateError, ValueError) as error:
            raise PCDError(f"the model's chat template refuses these messages: {error}") from error
        prompt = self.llm.tokenize(
            made.prompt.encode("utf-8", "replace"), add_bos=not made.added_special, special=True
        )
        if prompt[:2] == [self.llm.token_bos()] * 2:
            prompt = prompt[1:]
        stop = [made.stop] if isinstance(made.stop, str) else made.stop or []
        try:
            return Generation(self.llm, prompt, sampling or self.sampling, stop=stop, stopped=stopped)
        except ContextFull as error:
            room = "/undo or /clear makes room and /regen then sends it again; or start" if self.messages else "start"
            raise ContextFull(f"the context is full: {error}; {room} with a larger --n-ctx") from None


def has_template(llm: pypcd.Llama) -> bool:
    return "tokenizer.chat_template" in llm.metadata


def _formatter(llm: pypcd.Llama) -> Any:
    if not has_template(llm):
        return llama_chat_format.format_llama2  # what llama_cpp falls back to
    bos, eos = (llm._model.token_get_text(t) if t != -1 else "" for t in (llm.token_bos(), llm.token_eos()))
    try:
        return llama_chat_format.Jinja2ChatFormatter(
            llm.metadata["tokenizer.chat_template"], eos_token=eos, bos_token=bos
        )
    except jinja2.TemplateError as error:
        raise PCDError(f"the model's chat template is broken: {error}") from error


def _load_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("pypcd_session") != 1:
        raise ValueError(f"{path} is no session saved by pypcd chat")
    empty: dict[str, Any] = {"system": "", "messages": [], "settings": {}, "pcd": None}
    for name in ("settings", "pcd"):
        if not isinstance(record.get(name) or {}, dict):
            raise ValueError(f"{path} is damaged: its {name} are no mapping")
    return {**empty, **record}


def _is_turns(messages: Any) -> bool:
    """Whether these are messages of user and assistant in turn."""
    if not isinstance(messages, list) or len(messages) % 2:
        return False
    roles = ("user", "assistant") * (len(messages) // 2)
    return all(
        isinstance(m, dict) and m.get("role") == role and isinstance(m.get("content"), str)
        for m, role in zip(messages, roles)
    )


# command -> (its argument, what it does)
COMMANDS = {
    "help": ("", "this list"),
    "pcd": ("on|off|beta=…", "switch PCD, change its values, or name a preset; alone: show it"),
    "compare": ("", "answer the last message with PCD and without, side by side"),
    "regen": ("", "answer the last message again"),
    "undo": ("", "take back the last turn"),
    "clear": ("", "forget the conversation"),
    "system": ("TEXT", "set the system message; 'none' removes it; alone: show it"),
    "set": ("NAME VALUE", "change temperature, top_p, top_k, min_p, max_tokens, …; alone: show them"),
    "read": ("FILE", "put a file's text in front of your next message"),
    "save": ("FILE", "save the conversation and its settings"),
    "load": ("FILE", "go on with a saved conversation"),
    "stats": ("", "figures of the conversation so far"),
    "exit": ("", "leave (or Ctrl-D)"),
}
ALIASES = {"quit": "exit", "bye": "exit", "?": "help"}
ERRORS = (PCDError, ValueError, TypeError, OSError, NotImplementedError)


class Chat:
    """Reads messages and commands, writes answers to stdout and everything else to stderr."""

    def __init__(self, session: ChatSession, *, as_json: bool = False) -> None:
        self.session, self.as_json = session, as_json
        self.lines = _terminal.Lines(list(COMMANDS))
        self.status = 0

    def run(self) -> int:
        llm = self.session.llm
        if self.lines.typed:
            name = llm.metadata.get("general.name") or pathlib.Path(llm.model_path).name
            state = f"context {llm.n_ctx()} | PCD {_options.describe_pcd(llm.pcd)}"
            say(f"{name} | {state} | /help for commands, Ctrl-D to leave")
        while True:
            try:
                message = self.lines.read()
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
                raise  # nobody reads the answers any more
            except ERRORS as error:
                self.fail(error)
            except KeyboardInterrupt:
                say("\nstopped")
            if self.status == 130:
                return self.status

    def handle(self, text: str, literal: bool) -> bool:
        """One message or command. False: leave."""
        if not text.strip():
            return True
        if literal or not text.startswith("/") or text.startswith("//"):
            message = text[1:] if text.startswith("//") and not literal else text
            self.answer(lambda stopped: self.session.send(message, stopped))
            return True
        name, _, argument = text[1:].strip().partition(" ")
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            hint = "/help lists them, // sends a message that starts with /"
            raise ValueError(f"there is no command /{name}{_nearest(name, COMMANDS)}; {hint}")
        if name in ("read", "save", "load") and not argument.strip():
            raise ValueError(f"/{name} needs a file name")
        return getattr(self, f"do_{name}")(argument.strip()) is not False

    def answer(self, make: Callable[[Callable[[], bool]], Iterator[str]]) -> None:
        count = len(self.session.figures)
        written = False
        try:
            with _terminal.interruptible() as stopped:
                for piece in make(stopped):
                    if not self.as_json:
                        _terminal.write(piece)
                        written = True
        finally:
            if written:
                _terminal.write("\n")
        if len(self.session.figures) == count:
            say("stopped before the first word; /regen sends the message again")
        else:
            figures, messages = self.session.figures[-1], self.session.messages
            if self.as_json:
                self.print_json(
                    {"message": messages[-2]["content"], "text": messages[-1]["content"], **figures.as_dict()}
                )
            else:
                say(figures.line() + ("\n" if self.lines.typed else ""))
        if stopped() and not self.lines.typed:
            self.status = 130

    def fail(self, error: BaseException) -> None:
        reason = (
            f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        )
        _terminal.note(reason)
        if not self.lines.typed:
            self.status = 1

    def print_json(self, record: dict[str, Any]) -> None:
        print(json.dumps(record, ensure_ascii=False), flush=True)

    # -- commands --------------------------------------------------------------------------------------------------

    def do_help(self, _: str) -> None:
        column = max(len(f"/{name} {argument}") for name, (argument, _) in COMMANDS.items()) + 2
        for name, (argument, what) in COMMANDS.items():
            lines = _terminal.wrap(what, max(_terminal.width() - column, 16))
            say(f"/{name} {argument}".ljust(column) + f"\n{' ' * column}".join(lines))
        say('""" begins and ends a message of several lines; Ctrl-C stops an answer and keeps it')

    def do_pcd(self, argument: str) -> None:
        if argument:
            self.session.set_pcd(argument)
        say(f"PCD {_options.describe_pcd(self.session.llm.pcd)}")

    def do_compare(self, _: str) -> None:
        with _terminal.interruptible() as stopped, _terminal.progress(None, "answering twice") as bar:
            answers = self.session.compare(stopped, bar.update)
        if self.as_json:
            self.print_json({"compare": [{"text": a.text, **a.figures.as_dict()} for a in answers]})
            return
        titled = [(f"PCD {_options.describe_pcd(a.figures.pcd)}", a.text.strip()) for a in answers]
        _terminal.write(_terminal.side_by_side(titled[0], titled[1], _terminal.width()) + "\n")
        if answers[0].text == answers[1].text:
            say("both answers are the same")
        for answer in answers:
            say(answer.figures.line())

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
            raise ValueError("write /set NAME VALUE, such as /set temperature 0.8")
        if words:
            name = self.session.sampling.set(*words)
            say(f"{name} is {words[1]}")
        else:
            say(self.session.sampling.describe())

    def do_read(self, argument: str) -> None:
        say(self.session.read(argument))

    def do_save(self, argument: str) -> None:
        say(f"saved to {self.session.save(argument)}")

    def do_load(self, argument: str) -> None:
        say(self.session.load(argument))

    def do_stats(self, _: str) -> None:
        figures, stats = self.session.figures, self.session.llm.pcd_stats()
        say(f"{len(figures)} answers, {sum(f.completion_tokens for f in figures)} tokens")
        keys = f"{stats.second_key_bytes / 2**20:.1f} MiB of second keys"
        say(f"PCD: {stats.n_twins} twins for {stats.n_tokens} tokens, {keys}")
        if figures:
            say(f"last: {figures[-1].line()}")

    def do_exit(self, _: str) -> bool:
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd chat MODEL [-p TEXT] [options]"
    parser.epilog = "Lines from a pipe are answered one by one. /help in the chat lists its commands."
    _options.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this one message and leave")
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each answer")
    _options.add_common(parser)


def run(args: argparse.Namespace) -> int:
    _terminal.setup()
    sampling = _options.sampling_from(args)
    llm = _options.load_model(args)
    if not has_template(llm):
        _terminal.note(
            "this model has no chat template, so it may be a base model: Llama 2's format is used; "
            "'pypcd generate' continues a text"
        )
    chat = Chat(ChatSession(llm, sampling, args.system), as_json=args.json)
    if args.prompt is None:
        return chat.run()
    chat.lines.typed = False
    chat.handle(args.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), literal=True)
    return chat.status
