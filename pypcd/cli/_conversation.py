"""A conversation with a model: messages, settings, what is saved of them. Knows nothing of the terminal."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import pypcd
from pypcd import PCDConfig, PCDError, UnsupportedError, engine, files
from pypcd.cli import _options
from pypcd.cli._generation import ContextFull, Figures, Generation
from pypcd.cli._reading import Kept, Reading, evaluating, go_back, read, takes
from pypcd.cli._text import counted
from pypcd.decode import Replay
from pypcd.decode.prompt_cache import PromptCache
from pypcd.decode.replay import attention_weights, repeated
from pypcd.document import SPACE, Document
from pypcd.errors import InputError
from pypcd.prompt import chat_formatter, chat_tokens
from pypcd.settings.config import PCDSetting, typed

# {"role": ..., "content": ...}; one of the user's may have "documents", a list of Document, which the model gets in front of the content
Message = dict


def never() -> bool:
    return False


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
        self.cache = cache  # where documents that were read stay on disk; None: nowhere
        self.sampling = sampling or _options.GenerationSettings()
        self.system = system
        self.messages: list[Message] = []
        self.draft: str | None = None
        self.attached: list[Document] = []  # documents of the next message
        self.replay: Replay | None = Replay()  # what is repeated of them; None: nothing
        self.passages: list[str] = []  # that were repeated for the last answer
        self.left_out = ""  # why nothing was, if not by choice
        self.figures: list[Figures] = []
        self._last_on = llm.pcd  # the setting that a mapping changes after PCD was switched off
        chat_formatter(llm)  # raises now if the template is broken

    def send(self, text: str, stopped: Callable[[], bool] = never) -> Iterator[str]:
        """Answer a message, with the attached documents in front of it."""
        self.draft = text
        yield from self.regen(stopped)

    def regen(self, stopped: Callable[[], bool] = never) -> Iterator[str]:
        """Answer the draft if there is one, else the last message once more."""
        messages = self._question()
        answer = self._generation(messages, stopped)
        try:
            yield from answer
        finally:
            if answer.text or answer.figures.finish_reason != "interrupted":
                if self.draft is not None:
                    self.draft, self.attached = None, []
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
                self.figures.append(answer.figures)

    def compare(self, stopped: Callable[[], bool] = never) -> Iterator[tuple[str, Generation]]:
        """The last message answered in two ways, each a title and an answer to iterate over before the next: the PCD setting in force
        (or the last one that was), and none. If none ever was, replay and none where there are documents, else the preset unsure.
        History and settings stay as they are."""
        messages, before = self._question(), (self.llm.pcd, self.replay, self.passages, self.left_out)
        sampling = dataclasses.replace(self.sampling, seed=self.sampling.draw_seed())
        config = self.llm.pcd or self._last_on
        ways: list[tuple[str, PCDConfig | None, Replay | None]]
        if config is None and self.replay and documents_in(messages):
            ways = [("replay", None, self.replay), ("plain", None, None)]
        else:
            config = config or PCDConfig.preset("unsure")
            ways = [(f"PCD {typed(one)}", one, self.replay) for one in (config, None)]
        try:
            for title, self.llm.pcd, self.replay in ways:
                yield title, self._generation(messages, stopped, sampling)
        finally:
            self.llm.pcd, self.replay, self.passages, self.left_out = before

    def undo(self) -> str:
        """Take back the last turn; returns its message."""
        if not self.messages:
            raise InputError("there is no turn to take back")
        self.messages, last = self.messages[:-2], self.messages[-2]
        self.passages = []
        return last["content"]

    def clear(self) -> None:
        """Forget all but a draft, which may now have room."""
        self.messages, self.passages = [], []
        if self.draft is None:
            self.attached = []

    def attach(self, document: Document) -> int:
        """Put a document in front of the next message; returns its number of tokens.

        Raises:
            ContextFull: it does not fit in the context.
        """
        n, n_ctx = len(self.llm.tokenize(document.text.encode(), add_bos=False, special=False)), self.llm.n_ctx()
        if n >= n_ctx:
            raise ContextFull(
                f"{document.name} has {n} tokens, which do not fit in the context of {n_ctx}; start with a larger --n-ctx or "
                "hand over a part of it. Nothing is cut"
            )
        self.attached.append(document)
        return n

    def reading_takes(self) -> str:
        """How long the next message's documents take to read, as far as it is known, in words."""
        messages = [*self.messages, self._message("?")]
        prompt, _ = self._prompt(messages)
        return takes(self.llm, prompt, Kept.of(self.cache, self.llm, prompt, documents_in(messages)))

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
            "messages": [_as_saved(message) for message in self.messages],
            "settings": dataclasses.asdict(self.sampling),
            "pcd": self.llm.pcd.as_dict() if self.llm.pcd else None,
        }
        files.write(target, files.json_text(record, indent=2) + b"\n")
        return target

    def load(self, path: str) -> str:
        """Replace messages and settings by saved ones; returns what was loaded, in words.

        Raises:
            ValueError: the file is not a saved conversation; nothing has changed then.
        """
        record = _load_json(pathlib.Path(path).expanduser())
        sampling = _options.GenerationSettings()
        system, pcd = record["system"], record["pcd"]
        if not _is_turns(record["messages"]) or not isinstance(system, str):
            raise InputError(f"{path} is damaged: its messages are not turns of user and assistant")
        try:
            messages = [_of_saved(message) for message in record["messages"]]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is damaged: its documents are not names and texts") from error
        for name, value in record["settings"].items():
            sampling.set(name, value)
        config, said = PCDConfig().replace(**pcd) if pcd else None, ""
        try:
            self.llm.pcd = config
            self._last_on = config or self._last_on
        except UnsupportedError as error:
            said = f"; its PCD setting is left out: {error}"
        self.messages, self.system, self.sampling = messages, system, sampling
        self.draft, self.attached, self.passages = None, [], []
        return f"{counted(len(messages) // 2, 'turn')} from {path}{said}"

    def _question(self) -> list[Message]:
        """The messages up to the one to be answered."""
        if self.draft is not None:
            return [*self.messages, self._message(self.draft)]
        if not self.messages:
            raise InputError("there is no message yet")
        return self.messages[:-1]

    def _message(self, text: str) -> Message:
        """The user's next message."""
        documents = {"documents": list(self.attached)} if self.attached else {}
        return {"role": "user", "content": text, **documents}

    def _prompt(self, messages: list[Message], passages: Sequence[str] = ()) -> tuple[list[int], list[str]]:
        """The tokens of messages, the last one with passages in front of its question, and the texts that end an answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        *others, last = messages
        texts = [*map(_text_of, others), _text_of(last, passages)]
        plain = [{"role": message["role"], "content": text} for message, text in zip(messages, texts)]
        return chat_tokens(self.llm, [*system, *plain])

    def _generation(self, messages: list[Message], stopped: Callable[[], bool], sampling: Any = None) -> Generation:
        prompt, stop = self._prompt(messages)
        reading = None
        self.passages, self.left_out = [], ""
        try:
            kept = None
            if len(prompt) < self.llm.n_ctx():
                kept = Kept.of(self.cache, self.llm, prompt, documents_in(messages))
                if self.replay:
                    reading = self._find_passages(prompt, messages, stopped, kept)
            if self.passages:
                prompt, stop = self._prompt(messages, self.passages)
            return Generation(
                self.llm, prompt, sampling or self.sampling, stop=stop, stopped=stopped, kept=kept, before=reading
            )
        except ContextFull as error:
            room = "/undo or /clear makes room and /regen then sends it again; or start" if self.messages else "start"
            names = ", ".join(document.name for document in self.attached)
            without = f"; /file none takes back {names}" if names else ""
            raise ContextFull(f"the context is full: {error}; {room} with a larger --n-ctx{without}") from None

    def _find_passages(
        self, prompt: list[int], messages: list[Message], stopped: Callable[[], bool], kept: Kept | None
    ) -> Reading | None:
        """Set `passages` to what the question is answered from, if the messages have documents."""
        texts = [document.prompt() for document in documents_in(messages)]
        if sum(len(text.segments) for text in texts) < 2 or not messages[-1]["content"].strip():
            return None
        assert self.replay is not None
        try:
            found = _attended(self.llm, prompt, self.replay.n_last, stopped, kept)
            if found is None:
                return None
            self.passages = self.replay.passages(self.llm, prompt, texts, found[0])
            n = len(self.llm.tokenize(repeated(self.passages).encode(), add_bos=False, special=False))
            if len(prompt) + n + 2 >= self.llm.n_ctx():
                self.passages, self.left_out = [], "the context has no room for them"
            return found[1]
        except PCDError as error:
            self.left_out = str(error)
            return None


def documents_in(messages: Sequence[Message]) -> list[Document]:
    return [document for message in messages for document in message.get("documents", ())]


def _text_of(message: Message, passages: Sequence[str] = ()) -> str:
    """What the model gets of a message: its documents, passages of them, the question."""
    asked = message["content"] if message["content"].strip() else ""
    if passages:
        asked = repeated(passages) + asked
    texts = [document.text for document in message.get("documents", ())]
    return SPACE.join([*texts, asked] if asked else texts)


def _as_saved(message: Message) -> dict[str, Any]:
    documents = [{"name": document.name, "text": document.text} for document in documents_in([message])]
    return {**message, **({"documents": documents} if documents else {})}


def _of_saved(message: dict[str, Any]) -> Message:
    documents = [Document.of(made["name"], made["text"]) for made in message.get("documents", ())]
    return {**message, **({"documents": documents} if documents else {})}


def _attended(
    llm: pypcd.Llama, prompt: Sequence[int], n_last: int, stopped: Callable[[], bool], kept: Kept | None
) -> tuple[npt.NDArray[np.float64], Reading] | None:
    """attention_weights() of a prompt's last tokens, whose others are evaluated for it and stay in the cache; None if it was stopped.

    Raises:
        UnsupportedError: as attention_weights().
        PCDError: llama_decode failed.
    """
    n = max(len(prompt) - n_last, 0)
    found = None
    with evaluating(llm, stopped):
        go_back(llm, n)  # before reading: what cannot go back is read again
        reading = read(llm, prompt[:n], n, stopped, kept)
        started = time.perf_counter()
        with engine.pcd(llm).suspended():
            weights = attention_weights(llm, prompt[:n], prompt[n:])
        found = weights, Reading(reading.n_cached, reading.seconds + time.perf_counter() - started)
    go_back(llm, n)
    return found


def _load_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = files.parsed(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("pypcd_session") != 1:
        raise InputError(f"{path} is not a conversation saved by pypcd chat")
    empty: dict[str, Any] = {"system": "", "messages": [], "settings": {}, "pcd": None}
    record = {**empty, **{name: value for name, value in record.items() if value is not None}}
    for name in ("settings", "pcd"):
        if not isinstance(record[name] or {}, dict):
            raise InputError(f"{path} is damaged: its {name} is not a mapping")
    return record


def _is_turns(messages: Any) -> bool:
    """Whether these are messages of user and assistant in turn."""
    if not isinstance(messages, list) or len(messages) % 2:
        return False
    roles = ("user", "assistant") * (len(messages) // 2)
    return all(
        isinstance(m, dict) and m.get("role") == role and isinstance(m.get("content"), str)
        for m, role in zip(messages, roles)
    )
