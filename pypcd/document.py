"""Documents: files that are handed over for questions about them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import zipfile
from typing import Any

from pypcd.errors import InputError
from pypcd.extras import require
from pypcd.prompt import split_context

__all__ = ["Document", "read_document"]


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
        text = text.replace("\r\n", "\n").strip()
        if not text:
            raise InputError(f"{name} has no text; pictures of pages, such as a scan, are not read")
        return cls(name, *split_context(text))

    @property
    def text(self) -> str:
        return self.joiner.join(self.segments)


def read_document(path: str | os.PathLike[str]) -> Document:
    """A document from a file: PDF, DOCX, or a text such as Markdown, in UTF-8. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        OSError: it cannot be read.
        ValueError: it is neither, is damaged or encrypted, or has no text.
        PCDError: the package that reads such files is not installed.
    """
    place = pathlib.Path(path).expanduser()
    data = place.read_bytes()
    if data.startswith(b"%PDF-"):
        return Document.of(place.name, _pdf(place))
    if data.startswith(b"PK\x03\x04") and place.suffix.lower() == ".docx":
        return Document.of(place.name, _docx(place))
    if b"\0" in data[:8192]:
        raise InputError(f"{path} is not a text file; allowed: texts in UTF-8, PDF, DOCX")
    return Document.of(place.name, data.decode("utf-8-sig", "replace"))


def _pdf(path: pathlib.Path) -> str:
    pypdf = require("pypdf", "a PDF")
    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)
    except (pypdf.errors.PyPdfError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read as a PDF: {error}; it may be encrypted or damaged") from error


def _docx(path: pathlib.Path) -> str:
    docx = require("docx", "a DOCX", package="python-docx")
    try:
        parts = docx.Document(str(path)).iter_inner_content()
        return "\n\n".join(text for part in parts if (text := _of_part(part)).strip())
    except (docx.opc.exceptions.OpcError, zipfile.BadZipFile, SyntaxError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read as a DOCX: {error}; it may be damaged") from error


def _of_part(part: Any) -> str:
    """The text of a paragraph, or of a table: a line for each row."""
    if not hasattr(part, "rows"):
        return str(part.text)
    return "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in part.rows)
