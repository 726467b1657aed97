"""Questions about documents: read, find the passages, answer, and say where they stand.

    answer = llm.ask("report.pdf", "Who signed it?")
    answer.text
    answer.passages[0].document, answer.passages[0].place      # "report.pdf", "page 3"
    llm.ask(question="And when?", after=answer)

The terminal's `answer`, `compare` and `chat` ask here too, so that the same question is the same prompt everywhere.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

from pypcd import engine
from pypcd.ask.messages import Message, Source, documents_in, notes_of, prompt_of, sources_of
from pypcd.ask.reading import PARTS, Read, chosen, is_whole, read_of, size
from pypcd.decode import Answer as Written
from pypcd.decode import Method, Session, parse
from pypcd.decode.method import Writing
from pypcd.decode.prompt_cache import PromptCache
from pypcd.decode.rows import PCD, Plain
from pypcd.document import Document
from pypcd.document.folder import read_files
from pypcd.errors import ArgumentError, InputError, PCDError
from pypcd.prompt import has_template

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pypcd.llama import Llama

__all__ = [
    "PARTS",
    "Answer",
    "Asking",
    "Message",
    "Read",
    "Source",
    "ask",
    "chosen",
    "documents_in",
    "is_whole",
    "prompt_of",
    "read_of",
    "size",
    "sources_of",
    "stoppable",
    "stream",
]

Documents = str | os.PathLike[str] | Document | Sequence[str | os.PathLike[str] | Document]


@dataclasses.dataclass(frozen=True)
class Answer:
    """
    Attributes:
        text: the answer.
        passages: that were repeated before the question, and where they stand; empty if none were. If they would be all parts that
            were read, these, which are not repeated.
        note: what was done in another way than asked for, or why nothing was repeated; empty: all is as asked.
        messages: the conversation up to this answer.
        written: figures: tokens, seconds, what PCD did.
        read: what was read of the documents, such as "24 of 310 pages, in part"; empty: all of them.
    """

    text: str
    passages: tuple[Source, ...]
    note: str
    messages: tuple[Message, ...]
    written: Written
    read: str = ""


@dataclasses.dataclass(eq=False, repr=False)
class Asking:
    """An answer while it is written: iterate over the pieces of its text.

    Args:
        read: as chosen() gives it for the messages.
    """

    messages: Sequence[Message]
    read: tuple[Sequence[Message], str]
    writing: Writing
    note: str = ""

    def __iter__(self) -> Iterator[str]:
        return iter(self.writing)

    def close(self) -> None:
        """End it here."""
        self.writing.close()

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        written, (turns, said) = self.writing.answer, self.read
        messages = (*self.messages, {"role": "assistant", "content": written.text})
        passages, note = sources_of(written.found, turns, said)
        notes = "; ".join(filter(None, (self.note, notes_of(turns), note)))
        return Answer(written.text, passages, notes, messages, written, said)


def stoppable(llm: Llama, writing: Asking | Writing, stopped: Callable[[], bool]) -> Iterator[str]:
    """The pieces of an answer until `stopped` says so, also in the middle of reading (on the CPU; llama.cpp's GPU backends finish their
    batch). A batch that was not finished is forgotten."""
    engine.set_abort(llm, stopped)
    try:
        for piece in writing:
            engine.set_abort(llm, None)  # a token is soon done, and the callback would slow it down
            yield piece
            if stopped():
                return
    except PCDError:
        if not stopped():
            raise
    finally:
        engine.set_abort(llm, None)
        writing.close()


class Options(TypedDict, total=False):
    """The arguments of stream() besides the question."""

    text: str | None
    after: Answer | None
    read: Read
    method: str | Method
    system: str
    max_tokens: int
    stop: str | Sequence[str] | None
    chat: bool | None
    cache: bool


def ask(llm: Llama, documents: Documents = (), question: str = "", **how: Unpack[Options]) -> Answer:
    """Answer a question about documents. The arguments and the errors are stream()'s."""
    asking = stream(llm, documents, question, **how)
    for _ in asking:
        pass
    return asking.answer


def stream(
    llm: Llama,
    documents: Documents = (),
    question: str = "",
    *,
    text: str | None = None,
    after: Answer | None = None,
    read: Read = None,
    method: str | Method = "replay",
    system: str = "",
    max_tokens: int = 256,
    stop: str | Sequence[str] | None = (),
    chat: bool | None = None,
    cache: bool = True,
) -> Asking:
    """Answer a question about documents, piece by piece.

    Args:
        documents: a file, a folder with files, a Document, or several of these.
        text: the text itself, in place of documents.
        after: an answer that the question goes on from; its documents need not be given again.
        read: how much is read: "all"; at most so many tokens, of the parts that keyword search puts first; None: all if it fits in the
            context, else such parts.
        method: "replay", "plain", "recite", or any name that pypcd.decode.parse() reads. If PCD is on (llm.pcd), it contrasts.
        system: the system message, in front of the first question.
        max_tokens: the longest answer; 0: until the context is full.
        stop: texts that end it.
        chat: whether the model's chat template is used; None: if it has one.
        cache: whether what was read is kept on disk, and read back from there.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a document is in no format that is read, is damaged or empty; the question is empty; a value is out of range; or
            documents and question do not fit in the context.
        PCDError: the model has no chat template, but it is asked for; or llama_decode failed.
        UnsupportedError: this model cannot run the method.
    """
    for name, value, is_one, allowed in (
        ("question", question, isinstance(question, str), "a text"),
        ("system", system, isinstance(system, str), "a text"),
        ("after", after, after is None or isinstance(after, Answer), "an answer, or None"),
        ("method", method, isinstance(method, (str, Method)), "a method's name, or a Method"),
    ):
        if not is_one:
            raise ArgumentError(f"{name} is {value!r}; allowed: {allowed}")
    if not question.strip():
        raise InputError("the question is empty")
    many = [documents] if isinstance(documents, (str, os.PathLike, Document)) else list(documents)
    if text is not None and many:
        raise InputError("documents and text are both given; allowed: one of them")
    if system and after:
        raise InputError(
            "system and after are both given; allowed: one of them, since after has its own system message"
        )
    own, note = read_files(many if text is None else [Document.of("text", text)])
    before = [{"role": "system", "content": system}] if system else []
    messages = [*before, *(after.messages if after else ()), {"role": "user", "content": question, "documents": own}]
    turns, said = chosen(llm, messages, read_of(read), llm.n_ctx())
    # the parts of a document may stand in several turns
    names = list(dict.fromkeys(document.name for document in documents_in(turns)))
    session = Session(llm, cache=PromptCache() if cache else None, names=names)
    made = parse("greedy" if method == "plain" else method) if isinstance(method, str) else method
    if isinstance(made.rows, Plain) and llm.pcd is not None:
        made = dataclasses.replace(made, rows=PCD(llm.pcd))
    chat = has_template(llm) if chat is None else chat
    writing = made.stream(session, prompt_of(turns), max_tokens=max_tokens, stop=stop, chat=chat)
    return Asking(messages, (turns, said), writing, note)
