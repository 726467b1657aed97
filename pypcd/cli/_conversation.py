"""A conversation with a model: messages, settings, what is saved of them. Knows nothing of the terminal."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pypcd
from pypcd import PCDConfig, UnsupportedError
from pypcd.cli import _options
from pypcd.cli._generation import ContextFull, Figures, Generation
from pypcd.config import PCDSetting
from pypcd.errors import InputError
from pypcd.prompt import chat_formatter, chat_tokens

Message = dict  # {"role": ..., "content": ...}


def never() -> bool:
    return False


def ignore(*_: object) -> None:
    pass


class Conversation:
    """Messages, settings and the model that answers. It neither reads nor writes the terminal.

    A message is part of `messages` once an answer to it has begun; until then `draft` keeps it, so that nothing
    is lost to an error.
    """

    def __init__(self, llm: pypcd.Llama, sampling: _options.GenerationSettings | None = None, system: str = "") -> None:
        self.llm = llm
        self.sampling = sampling or _options.GenerationSettings()
        self.system = system
        self.messages: list[Message] = []
        self.draft: str | None = None
        self.attached: list[str] = []
        self.figures: list[Figures] = []
        self._last_on = llm.pcd  # the setting that a mapping changes after PCD was switched off
        chat_formatter(llm)  # raises now if the template is broken

    def send(self, text: str, stopped: Callable[[], bool] = never) -> Iterator[str]:
        """Answer a message, with the attached files in front of it; they may be all there is."""
        self.draft = "\n\n".join([*self.attached, *([text] if text.strip() else [])])
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

    @property
    def compared(self) -> tuple[PCDConfig, None]:
        """The settings that compare() compares: the one in force (or the last one that was, or unsure), and None: off."""
        return self.llm.pcd or self._last_on or PCDConfig.preset("unsure"), None

    def compare(
        self, stopped: Callable[[], bool] = never, look: Callable[[int, str], object] = ignore
    ) -> list[Generation]:
        """The last message answered with PCD and without; history and settings stay as they are.

        Args:
            look: called with the number of the answer, 0 or 1, and each piece of its text.
        """
        messages, before = self._question(), self.llm.pcd
        sampling = dataclasses.replace(self.sampling, seed=self.sampling.draw_seed())
        answers = []
        try:
            for i, config in enumerate(self.compared):
                self.llm.pcd = config
                answers.append(self._generation(messages, stopped, sampling))
                for piece in answers[-1]:
                    look(i, piece)
        finally:
            self.llm.pcd = before
        return answers

    def undo(self) -> str:
        """Take back the last turn; returns its message."""
        if not self.messages:
            raise InputError("there is no turn to take back")
        self.messages, last = self.messages[:-2], self.messages[-2]
        return last["content"]

    def clear(self) -> None:
        self.messages, self.attached = [], []

    def read(self, path: str) -> str:
        """Put a file's text in front of the next message; returns what was read, in words."""
        data = pathlib.Path(path).expanduser().read_bytes()
        if b"\0" in data[:8192]:
            raise InputError(f"{path} is not a text file")
        text = data.decode("utf-8", "replace")
        n = len(self.llm.tokenize(text.encode(), add_bos=False, special=False))
        self.attached.append(text)
        return f"{path} ({n} tokens) goes in front of your next message; Enter sends it alone"

    def set_pcd(self, setting: PCDSetting) -> None:
        """Put a setting in force, as --pcd does. A mapping changes the setting in force, or the last one that was."""
        self.llm.pcd = PCDConfig.resolve(setting, self._last_on)
        self._last_on = self.llm.pcd or self._last_on

    def save(self, path: str) -> pathlib.Path:
        target = pathlib.Path(path).expanduser()
        if target.exists():
            _load_json(target)  # raises rather than overwrite another file
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
            ValueError: the file is not a saved conversation; nothing has changed then.
        """
        record = _load_json(pathlib.Path(path).expanduser())
        sampling = _options.GenerationSettings()
        messages, system, pcd = record["messages"], record["system"], record["pcd"]
        if not _is_turns(messages) or not isinstance(system, str):
            raise InputError(f"{path} is damaged: its messages are not turns of user and assistant")
        for name, value in record["settings"].items():
            sampling.set(name, value)
        config, said = PCDConfig().replace(**pcd) if pcd else None, ""
        try:
            self.llm.pcd = config
            self._last_on = config or self._last_on
        except UnsupportedError as error:
            said = f"; its PCD setting is left out: {error}"
        self.messages, self.system, self.sampling = messages, system, sampling
        return f"{len(messages) // 2} turns from {path}{said}"

    def _question(self) -> list[Message]:
        """The messages up to the one to be answered."""
        if self.draft is not None:
            return [*self.messages, {"role": "user", "content": self.draft}]
        if not self.messages:
            raise InputError("there is no message yet")
        return self.messages[:-1]

    def _generation(self, messages: list[Message], stopped: Callable[[], bool], sampling: Any = None) -> Generation:
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt, stop = chat_tokens(self.llm, [*system, *messages])
        try:
            return Generation(self.llm, prompt, sampling or self.sampling, stop=stop, stopped=stopped)
        except ContextFull as error:
            room = "/undo or /clear makes room and /regen then sends it again; or start" if self.messages else "start"
            raise ContextFull(f"the context is full: {error}; {room} with a larger --n-ctx") from None


def _load_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("pypcd_session") != 1:
        raise InputError(f"{path} is not a conversation saved by pypcd chat")
    empty: dict[str, Any] = {"system": "", "messages": [], "settings": {}, "pcd": None}
    record = {name: value for name, value in record.items() if value is not None}
    for name in ("settings", "pcd"):
        if not isinstance(record.get(name) or {}, dict):
            raise InputError(f"{path} is damaged: its {name} is not a mapping")
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
