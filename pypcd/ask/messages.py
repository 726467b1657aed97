"""A conversation about documents as a prompt, and where its passages stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pypcd.document import SPACE, Document
from pypcd.find import Found, Passage
from pypcd.find.bm25 import ranked
from pypcd.prompt import Messages, Piece, Prompt, Turn

__all__ = ["Message", "Source", "documents_in", "notes_of", "prompt_of", "sources_of"]

# {"role": ..., "content": ...}; one of the user's may have "documents", a list of Document, which the model gets in front of the content
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """A passage that was repeated before a question, or, if these would be all parts that were read, one of the parts.

    Attributes:
        text: the passage.
        document: the name of the document.
        place: where it stands there, for people: "page 3", "lines 12-14".
        begin, end: its offsets in the document's text.
        score: how well it fits the question, in its finder's own units.
        finder: what found it.
    """

    text: str
    document: str
    place: str
    begin: int
    end: int
    score: float
    finder: str


def documents_in(messages: Iterable[Message]) -> list[Document]:
    return [document for message in messages for document in message.get("documents", ())]


def prompt_of(messages: Sequence[Message]) -> Prompt | Messages:
    """The prompt for the answer to the last message: each message is its documents, and behind them what it says."""
    if len(messages) == 1:
        return Prompt(segments=tuple(_texts(messages[0])), after=_asked(messages[0]))
    turns = list[Turn]()
    for message in messages:
        asked = Piece(_asked(message), "question" if message["role"] == "user" else "")
        turns.append((message["role"], (*(Piece(text, "segment") for text in _texts(message)), asked)))
    return Messages(tuple(turns))


def _asked(message: Message) -> str:
    content = message["content"] if message["content"].strip() else ""
    return SPACE + content if content and message.get("documents") else content


def _texts(message: Message) -> list[str]:
    """The pieces of a message's documents that are read. Joined, they are these with a space between them; there is one too where parts
    are left out."""
    found: list[str] = []
    last: Any = None
    for document in message.get("documents", ()):
        for begin, end in document.read:
            if last and last != (document, begin):
                found[-1] = found[-1].rstrip() + SPACE
            found.append(document.text[begin:end])
            last = document, end
    return [*found[:-1], *(text.rstrip() for text in found[-1:])]


def notes_of(messages: Sequence[Message]) -> str:
    """What is left out of the last message's documents."""
    return "; ".join(f"{document.name}: {document.note}" for document in documents_in(messages[-1:]) if document.note)


def sources_of(found: Found, messages: Sequence[Message], read: str) -> tuple[tuple[Source, ...], str]:
    """The passages with their places in the documents of a conversation, and the note that is left to say.

    Args:
        read: which parts of the documents are read, in words; empty: all.
    """
    places = [(document, *span) for document in documents_in(messages) for span in document.read]
    passages = found.passages
    if read and found.is_all:  # keyword search has found them, but for those that only stand at the beginning
        texts = tuple(document.text[begin:end] for document, begin, end in places)
        questions = ["", *(message["content"] for message in messages if message["role"] == "user")]
        scores = ranked(texts, questions[-1], questions[-2])
        hits = (Passage(i, text.strip(), float(scores[i]), "bm25") for i, text in enumerate(texts))
        passages = tuple(hit for hit in hits if hit.score > 0)
    sources = []
    for passage in passages:
        document, begin, end = places[passage.index]
        begin = document.text.index(passage.text, begin)  # behind white space
        end = begin + len(passage.text)
        place = document.place(begin, end)
        sources.append(Source(passage.text, document.name, place, begin, end, passage.score, passage.finder))
    return tuple(sources), "" if sources and not found.passages else found.note
