"""What clients of the server send: messages with files in them, and documents. Knows their JSON, but no model."""

from __future__ import annotations

import base64
import binascii
import collections
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pypcd.document import Document, document_of
from pypcd.errors import InputError

__all__ = ["document_in", "field", "is_text", "talk_of"]

KEPT = 64 << 20  # characters of documents that are kept: a conversation sends its documents with each question
TEXTS = '{"name": "report.txt", "text": "…"}'
BYTES = '{"filename": "report.pdf", "file_data": the file\'s bytes in base64, or a data URL with them}'

# those read last at its end
_kept: collections.OrderedDict[tuple[str, str, str, tuple[int, ...], str, str], Document] = collections.OrderedDict()


def talk_of(messages: Sequence[dict[str, Any]], documents: Any) -> list[dict[str, Any]]:
    """Messages as pypcd.ask has them, with their documents, and content None if there is more than text in one; from the given ones
    the files are taken out.

    Args:
        documents: {"name", "text"} of those before the last message of the user; or None.

    Raises:
        ValueError: it is not as it should be, or a document cannot be read.
    """
    talk: list[dict[str, Any]] = []
    for message in messages:
        content, role, found = message.setdefault("content", ""), _text(message, "role"), list[Document]()
        if isinstance(content, list):
            with field("file"):
                found = [document_in(part.get("file")) for part in content if _text(part, "type") == "file"]
                if found and role not in ("user", "system"):
                    raise InputError(f'it is in a message of role {json.dumps(role)}; allowed: "user", "system"')
            message["content"] = content = [part for part in content if _text(part, "type") != "file"]
        talk.append({"role": role, "content": _said(content), "documents": found})
    with field("documents"):
        if documents is not None and not isinstance(documents, list):
            raise InputError(f"it is {json.dumps(documents)[:80]}; allowed: a list of {TEXTS}")
        last = next((message for message in reversed(talk) if message["role"] == "user"), None)
        if last is None:
            raise InputError("there is no message of the user that they could stand in front of")
        last["documents"] = [*map(_plain, documents or ()), *last["documents"]]
    return talk


def is_text(talk: Sequence[Mapping[str, Any]]) -> bool:
    return all(message["content"] is not None for message in talk)


def document_in(given: Any) -> Document:
    """A document of a file of OpenAI's API, or one of Anthropic's, which has a source; or of a text with a name.

    Raises:
        ValueError: it is none, or cannot be read.
    """
    if isinstance(given, dict) and isinstance(given.get("source"), dict):
        source, kind = given["source"], given["source"].get("type")
        if kind not in ("text", "base64"):
            raise InputError(
                f'a document\'s source has type {json.dumps(kind)}; allowed: "text", "base64"; this server fetches no files'
            )
        data = _text(source, "data")
        sent = {"text": data} if kind == "text" else {"file_data": f"data:{_text(source, 'media_type')};base64,{data}"}
        given = {"filename": _text(given, "title"), **sent}
    if isinstance(given, dict) and "text" in given:
        return _plain({"name": given.get("filename"), **given})
    data = _text(given, "file_data")
    if not data:
        has_id = isinstance(given, dict) and {"file_id", "file_url"} & given.keys()
        raise InputError(
            f"a file has no file_data{' but an id or an address' if has_id else ''}; allowed: {BYTES}; this server keeps no files "
            "and fetches none"
        )
    return _read(_text(given, "filename") or "document", "file_data", data)


def _plain(given: Any) -> Document:
    if not _text(given, "text"):
        raise InputError(
            f"it has {json.dumps(given)[:80]}; allowed: a list of {TEXTS}; files such as PDF are parts of a message, or "
            "POST /documents reads them"
        )
    pages = given.get("pages") or []
    n = len(given["text"])
    if not (
        isinstance(pages, list)
        and all(type(page) is int for page in pages)
        and pages == sorted(pages)
        and (not pages or (pages[0] == 0 and pages[-1] <= n))
    ):
        raise InputError(
            f"pages is {json.dumps(pages)[:80]}; allowed: the offsets at which the text's pages begin, in order, from 0 to at most {n}"
        )
    unit, note = str(given.get("unit") or "page"), _text(given, "note")
    return _read(_text(given, "name") or "document", "text", given["text"], tuple(pages), unit, note)


def _read(name: str, kind: str, data: str, pages: tuple[int, ...] = (), unit: str = "page", note: str = "") -> Document:
    key = name, kind, data, pages, unit, note
    if key not in _kept and kind == "text":
        _kept[key] = Document.of(name, data, pages, unit, note)
    elif key not in _kept:
        coded = data.partition(",")[2] if data.startswith("data:") else data
        try:  # with lines, as the command base64 writes it
            _kept[key] = document_of(name, base64.b64decode("".join(coded.split()), validate=True), name)
        except binascii.Error as error:
            raise InputError(f"file_data of {name} is not base64 ({error}); allowed: {BYTES}") from error
    _kept.move_to_end(key)
    while len(_kept) > 1 and sum(len(key[2]) for key in _kept) > KEPT:
        _kept.popitem(last=False)
    return _kept[key]


def _text(given: Any, name: str) -> str:
    found = given.get(name) if isinstance(given, dict) else None
    return found if isinstance(found, str) else ""


def _said(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [{}]
    texts = [part["text"] for part in parts if _text(part, "type") == "text" and isinstance(part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(parts) else None  # as llama.cpp joins them


@contextlib.contextmanager
def field(name: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"Field '{name}': {error}") from error
