"""Which parts of documents are read, if they do not fit in the context, or nobody wants to wait for all of them.

Each question of a conversation is answered from the parts that keyword search puts first, in the order in which they stand. Those of a
later question come behind the earlier ones, which the context holds already. What is read follows from the messages alone, so a
conversation that is sent anew reads the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from pypcd.ask.messages import Message, documents_in
from pypcd.document import Document
from pypcd.errors import InputError
from pypcd.find.bm25 import ranked
from pypcd.settings.ranges import literal

__all__ = ["PARTS", "Read", "chosen", "is_whole", "read_of", "size"]

Read = int | Literal["all"] | None

PARTS = 4096  # tokens that are read of what does not fit
WIDEST = 64  # bytes that the tokens of a long text have on average at most
SLICE = 1 << 16  # characters whose tokens are counted at once

Part = tuple[int, int]  # a document and a segment of it, both counted from 0


def read_of(given: object) -> Read:
    """How much to read: "all"; at most so many tokens, in parts; or None: all if it fits in the context, else parts of PARTS tokens. A
    text may name these too.

    Raises:
        ValueError: it is none of these.
    """
    value = literal(given) if isinstance(given, str) and given != "all" else given
    if value is None or value == "all" or (type(value) is int and value > 0):
        return value  # type: ignore[return-value]
    raise InputError(f'read is {given!r}; allowed: "all", or the most tokens to read of the documents, such as {PARTS}')


def size(llm: Any, document: Document) -> str:
    """How many tokens a document has, for people."""
    n, n_ctx = _n_tokens(llm, [document], llm.n_ctx()), llm.n_ctx()
    return f"{n} tokens" if n <= n_ctx else f"more than {n_ctx} tokens"


def is_whole(llm: Any, messages: Sequence[Message], read: Read, n_ctx: int) -> bool:
    """Whether chosen() takes the documents whole, with the same arguments and errors."""
    documents = documents_in(messages)
    if read == "all":
        n = sum(len(document.text.encode("utf-8", "replace")) for document in documents) // WIDEST
        if n > n_ctx:
            raise InputError(
                f'read is "all", but the documents have more than {n} tokens, and the context {n_ctx}; leave it out, and parts are '
                "read, or name a number of tokens"
            )
        return True
    most = n_ctx - _spared(n_ctx) - sum(_count(llm, message["content"]) for message in messages)
    if read is not None:
        most = min(read, most)
    return not documents or _n_tokens(llm, documents, most) <= most


def _spared(n_ctx: int) -> int:
    """Tokens for passages, a template and the answer."""
    return min(1024, n_ctx // 4)


def chosen(llm: Any, messages: Sequence[Message], read: Read, n_ctx: int) -> tuple[list[Message], str]:
    """Messages with the parts of their documents that are read; and what that is, in words, such as "24 of 310 pages, in part". "": all.

    Args:
        llm: a Llama, or prompt.Elsewhere.
        messages: with whole documents. The last one is the question.

    Raises:
        ValueError: all is to be read, but cannot fit in the context; or no part can.
    """
    if is_whole(llm, messages, read, n_ctx):
        return list(messages), ""
    assert read != "all"
    room = n_ctx - _spared(n_ctx)
    known, n_asked, earlier = list[Document](), 0, ""  # n_asked: how many documents questions were asked about
    done = dict[Part, int]()  # what is read, and its tokens
    turns = list[Message]()
    for message in messages:
        known += message.get("documents", ())
        room -= _count(llm, message["content"])
        new = list[Part]()
        if message["role"] == "user" and message["content"].strip() and known:
            most = read or min(PARTS, room // 2)  # so that later questions find room
            new = _for(llm, known, n_asked, message["content"], earlier, done, most, room)
            earlier, n_asked = message["content"].strip(), len(known)
        groups = itertools.groupby(sorted(new), lambda part: part[0])
        turns.append({**message, "documents": [known[i].part([j for _, j in parts]) for i, parts in groups]})
    if known and not done and messages[-1]["content"].strip():
        raise InputError(
            f"no part of the documents fits in a context of {n_ctx} tokens, with room for the answer; use a larger n_ctx"
        )
    return turns, _said(known, done)


def _for(
    llm: Any,
    known: Sequence[Document],
    n_asked: int,
    question: str,
    earlier: str,
    done: dict[Part, int],
    most: int,
    room: int,
) -> list[Part]:
    """The parts that are read for a question, and were not for those before it; they are done then. If there is room, the beginning of the
    documents that no question was asked about yet is among them.

    Args:
        n_asked: the first of these documents.
        most: tokens for this question.
        room: for all questions together.
    """
    segments = {(i, j): text for i, document in enumerate(known) for j, text in enumerate(document.segments)}
    scores, parts = ranked(tuple(segments.values()), question, earlier), list(segments)
    best = [parts[at] for at in np.argsort(-scores, kind="stable") if scores[at] > 0]
    new, left, free = list[Part](), most, room - sum(done.values())
    for part in dict.fromkeys([*best, *(part for part in parts if part[0] >= n_asked)]):
        is_new = part not in done
        n = _count(llm, segments[part]) if is_new else done[part]
        if n > room:
            continue  # it is larger than the context
        if (n > left and left < most) or (is_new and n > free):
            break
        left -= n
        if is_new:
            done[part], free = n, free - n
            new.append(part)
    return new


def _said(documents: Sequence[Document], parts: Iterable[Part]) -> str:
    parts = set(parts)
    units = {document.unit for document in documents}
    if all(document.pages for document in documents) and len(units) == 1:
        unit, n = f"{units.pop()}s", sum(len(document.pages) for document in documents)
        read = _pages(documents, parts)
        rest = {(i, j) for i, document in enumerate(documents) for j in range(len(document.spans))} - parts
        partly = ", in part" if read & _pages(documents, rest) else ""
    else:
        unit, n, read, partly = "parts", sum(len(document.segments) for document in documents), parts, ""
    of = f", of {len({i for i, _ in parts})} of {len(documents)} documents" if len(documents) > 1 else ""
    return f"{len(read)} of {n} {unit}{partly}{of}"


def _pages(documents: Sequence[Document], parts: Iterable[Part]) -> set[tuple[int, int]]:
    """The pages that parts are on, each as the document's index and the page's number."""
    ends = ((i, documents[i].page_numbers(*documents[i].spans[j])) for i, j in parts)
    return {(i, page) for i, (first, last) in ends for page in range(first, last + 1)}


def _n_tokens(llm: Any, documents: Iterable[Document], most: int) -> int:
    """How many tokens documents have. Since counting takes seconds, it ends soon after `most`."""
    n = 0
    for text in (document.text for document in documents):
        for at in range(0, len(text), SLICE):
            n += _count(llm, text[at : at + SLICE])
            if n > most:
                return n
    return n


def _count(llm: Any, text: str) -> int:
    return len(llm.tokenize(text.encode("utf-8", "replace"), add_bos=False, special=False))
