"""Documents: files that are handed over for questions about them.

python -m pypcd.document    # llama-server has the documents of a request read so (cpp/server/server-pcd-documents.cpp)
"""

from __future__ import annotations

import base64
import binascii
import codecs
import dataclasses
import io
import json
import logging
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from pypcd.errors import MENDABLE, InputError, require
from pypcd.prompt import Prompt, split_context

__all__ = ["SPACE", "Document", "read_document"]

SPACE = "\n\n"  # between documents, passages and the question


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's text.

    Attributes:
        name: the file's, for people.
        segments: its parts, which joined by `joiner` are the text (prompt.split_context).
    """

    name: str
    segments: tuple[str, ...]
    joiner: str

    @classmethod
    def of(cls, name: str, text: str) -> Document:
        """
        Raises:
            ValueError: the text is empty.
        """
        text = text.replace("\r\n", "\n").replace("\0", "").strip()
        if not text:
            raise InputError(f"{name} has no text; pictures of pages, such as a scan, are not read")
        return cls(name, *split_context(text))

    @property
    def text(self) -> str:
        return self.joiner.join(self.segments)

    def prompt(self, question: str = "") -> Prompt:
        """The text and a question about it, for decoding methods."""
        return Prompt(segments=self.segments, joiner=self.joiner, after=SPACE + question)


def read_document(path: str | os.PathLike[str]) -> Document:
    """A document from a file: PDF, DOCX (without headers and footers), or a text such as Markdown, in UTF-8 or in UTF-16 with a byte
    order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of these, is damaged or encrypted, or has no text.
        PCDError: the package that reads such files is not installed.
    """
    if not str(path):
        raise InputError("the name of the document's file is empty")
    place = pathlib.Path(path).expanduser()
    return _of_bytes(place.name, place.read_bytes(), str(path))


def _of_bytes(name: str, data: bytes, path: str) -> Document:
    """
    Args:
        path: what an error calls it.
    """
    if data.startswith(b"%PDF-"):
        return Document.of(name, _pdf(data, path))
    if data.startswith(b"PK\x03\x04") and (b"word/document.xml" in data or name.lower().endswith(".docx")):
        return Document.of(name, _docx(data, path))
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in data[:8192] and not is_wide:
        raise InputError(f"{path} is not a text file; allowed: texts in UTF-8, PDF, DOCX")
    try:
        return Document.of(name, data.decode("utf-16" if is_wide else "utf-8-sig"))
    except UnicodeDecodeError as error:
        wrong = data[error.start : error.start + 1].hex()
        raise InputError(
            f"{path} is not in UTF-8: its byte {error.start + 1} is {wrong}; save it as UTF-8, such as with "
            "iconv -f windows-1252 -t utf-8, if it is in Windows-1252"
        ) from error


def _pdf(data: bytes, path: str) -> str:
    pypdf = require("pypdf", "a PDF")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of what it mends
    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages)
    except pypdf.errors.DependencyError as error:
        raise InputError(f"{path} is an encrypted PDF: {error}; pip install cryptography") from error
    except Exception as error:  # damaged files end in errors of any kind
        raise InputError(f"{path} cannot be read as a PDF: {error}; it may be encrypted or damaged") from error


def _docx(data: bytes, path: str) -> str:
    docx = require("docx", "a DOCX", package="python-docx")
    try:
        parts = docx.Document(io.BytesIO(data)).iter_inner_content()
        return "\n\n".join(text for part in parts if (text := _of_part(part)).strip())
    except Exception as error:  # damaged files end in errors of any kind
        raise InputError(f"{path} cannot be read as a DOCX: {error}; it may be damaged") from error


def _of_part(part: Any) -> str:
    """The text of a paragraph, or of a table: a line for each row."""
    if not hasattr(part, "rows"):
        return str(part.text)
    return "\n".join(" | ".join(cell.text.strip() for cell in _cells(row)) for row in part.rows)


def _cells(row: Any) -> list[Any]:
    """A row's cells; one that was merged of several is in it as often, and is taken once."""
    cells = row.cells
    return [cell for i, cell in enumerate(cells) if i == 0 or cell._tc is not cells[i - 1]._tc]


# -- for llama-server -------------------------------------------------------------------------------------------------


def _sent(made: Mapping[str, str]) -> Document:
    """A document of a request: its name, and its text or its bytes in base64, as they are or in a data URL."""
    name = made["name"]
    if "text" in made:
        return Document.of(name, made["text"])
    given = made["file_data"]
    try:
        text = given.partition(",")[2] if given.startswith("data:") else given
        data = base64.b64decode("".join(text.split()), validate=True)  # with lines, as the command base64 writes it
    except binascii.Error as error:
        raise InputError(
            f"file_data of {name} is not base64 ({error}); allowed: the file's bytes in base64, or a data URL with them"
        ) from error
    return _of_bytes(name, data, name)


def _answer(made: Mapping[str, str]) -> dict[str, Any]:
    try:
        return dataclasses.asdict(_sent(made))
    except MENDABLE as error:
        return {"error": str(error)}


if __name__ == "__main__":
    json.dump([_answer(made) for made in json.load(sys.stdin)], sys.stdout)
