"""A conversation with a model: messages, settings, what is saved of them. Knows nothing of the terminal."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pypcd
from pypcd import PCDConfig, PCDError, ask, files
from pypcd.ask import Answer, Message, documents_in
from pypcd.cli import _options
from pypcd.cli._figures import takes
from pypcd.decode import Replay, Session
from pypcd.decode.prompt_cache import PromptCache
from pypcd.document import Document
from pypcd.errors import InputError
from pypcd.prompt import Laid, chat_formatter, has_template, lay
from pypcd.settings.config import PCDSetting, typed


class Conversation:
    """Messages, settings and the model that answers. It neither reads nor writes the terminal.

    A message is part of `messages` once an answer to it has begun; until then `draft` keeps it and `attached` its documents, so that
    nothing is lost to an error.
    """

    def __init__(
        self,
        llm: pypcd.Llama,
        sampling: _options.GenerationSettings | None = None,
        system: str = "",
        cache: PromptCache | None = None,
    ) -> None:
        self.llm = llm
        self.cache = cache or PromptCache(limit=0)  # where documents that were read stay on disk
        self.session = Session(llm, repeatable=False, cache=cache)
        self.sampling = sampling or _options.GenerationSettings()
        self.system = system
        self.messages: list[Message] = []
        self.draft: str | None = None
        self.attached: list[Document] = []  # documents of the next message
        self.read: ask.Read = None  # how much of them is read
        self.replay: Replay | None = Replay()  # what is repeated of them; None: nothing
        self.answer: Answer | None = None  # the last one
        self._last_on = llm.pcd  # the setting that a mapping changes after PCD was switched off
        self.chat = has_template(llm)  # else messages are plain text, one behind the other
        if self.chat:
            chat_formatter(llm)  # raises now if the template is broken

    def send(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Answer a message, with the attached documents in front of it."""
        self.draft = text
        yield from self.regen(stopped)

    def regen(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Answer the draft if there is one, else the last message once more."""
        messages = self._question()
        asking = self._asking(messages)
        try:
            yield from ask.stoppable(self.llm, asking, stopped)
        finally:
            answer = asking.answer
            if answer.text or answer.written.end != "interrupted":
                if self.draft is not None:
                    self.draft, self.attached = None, []
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
                self.answer = answer

    def compare(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[tuple[str, Iterator[str], ask.Asking]]:
        """The last message answered in two ways, each a title, the pieces of an answer to iterate over before the next, and the answer. If
        there are documents and replay is on: with replay and without; else with the PCD setting in force (or the last one that was, or
        the preset unsure) and without. History and settings stay as they are."""
        messages, before = self._question(), (self.llm.pcd, self.replay)
        seed = self.sampling.draw_seed()
        ways: list[tuple[str, PCDConfig | None, Replay | None]]
        if self.replay and documents_in(messages) and self.llm.pcd is None:
            ways = [("replay", None, self.replay), ("plain", None, None)]
        else:
            config = self.llm.pcd or self._last_on or PCDConfig.preset("unsure")
            ways = [(f"PCD {typed(one)}", one, self.replay) for one in (config, None)]
        try:
            for title, self.llm.pcd, self.replay in ways:
                asking = self._asking(messages, seed)
                yield title, ask.stoppable(self.llm, asking, stopped), asking
        finally:
            self.llm.pcd, self.replay = before

    def undo(self) -> str:
        """Take back the last turn; returns its message. Its documents go in front of the next one."""
        if not self.messages:
            raise InputError("there is no turn to take back")
        self.messages, last = self.messages[:-2], self.messages[-2]
        self.answer = None
        self.attached = [*last.get("documents", ()), *self.attached]
        return str(last["content"])

    def clear(self) -> None:
        """Forget all but a draft, which may now have room."""
        self.messages, self.answer = [], None
        if self.draft is None:
            self.attached = []

    def reading_takes(self) -> str:
        """How long the next message's documents take to read, as far as it is known, in words."""
        messages = self._with_system([*self.messages, self._message("?")])
        if not ask.is_whole(self.llm, messages, self.read, self.llm.n_ctx()):
            return "; parts of it will be read"
        return takes(self.llm, self._laid(messages), self.cache)

    def set_pcd(self, setting: PCDSetting) -> None:
        """Put a setting in force, as --pcd does. A mapping changes the setting in force, or the last one that was."""
        self.llm.pcd = PCDConfig.resolve(setting, self._last_on)
        self._last_on = self.llm.pcd or self._last_on

    def save(self, path: str) -> pathlib.Path:
        """Write messages and settings as JSON."""
        target = pathlib.Path(path).expanduser()
        if target.exists():
            raise InputError(f"{target} is there already; give another name")
        record = {
            "model": self.llm.model_path,
            "system": self.system,
            "messages": [
                {**message, "documents": [dataclasses.asdict(one) for one in documents_in([message])]}
                for message in self.messages
            ],
            "settings": dataclasses.asdict(self.sampling),
            "pcd": self.llm.pcd.as_dict() if self.llm.pcd else None,
        }
        files.write(target, files.json_text(record, indent=2) + b"\n")
        return target

    def _question(self) -> list[Message]:
        """The messages up to the one to be answered."""
        if self.draft is not None:
            return [*self.messages, self._message(self.draft)]
        if not self.messages:
            raise InputError("there is no message yet")
        return self.messages[:-1]

    def _message(self, text: str) -> Message:
        """The user's next message."""
        return {"role": "user", "content": text, **({"documents": list(self.attached)} if self.attached else {})}

    def _with_system(self, messages: list[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def _laid(self, messages: list[Message]) -> Laid:
        return lay(self.llm, ask.prompt_of(messages).turns, chat=self.chat)

    def _asking(self, messages: list[Message], seed: int | None = None) -> ask.Asking:
        messages, n_ctx = self._with_system(messages), self.llm.n_ctx()
        turns, read = ask.chosen(self.llm, messages, self.read, n_ctx)
        n = len(self._laid(turns).tokens)
        if n >= n_ctx:
            room = "/undo or /clear makes room and /regen then sends it again; or start" if self.messages else "start"
            names = ", ".join(document.name for document in self.attached)
            without = f"; /file none takes back {names}, and /read auto reads parts" if names else ""
            raise PCDError(
                f"the context is full: {n} tokens do not fit in the context of {n_ctx}; {room} with a larger --n-ctx{without}"
            )
        has_question = documents_in(messages) and messages[-1]["content"].strip()
        seed = self.sampling.draw_seed() if seed is None else seed
        method = self.sampling.method(self.llm, seed, self.replay if has_question else None)
        self.session.names = list(dict.fromkeys(document.name for document in documents_in(turns)))
        how: dict[str, Any] = {"max_tokens": self.sampling.max_tokens, "chat": self.chat}
        return ask.Asking(messages, (turns, read), method.stream(self.session, ask.prompt_of(turns), **how))
