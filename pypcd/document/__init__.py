"""Documents: files that are handed over for questions about them."""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import functools
import io
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from pypcd.document import pdf
from pypcd.errors import InputError, PCDError, require
from pypcd.find.segments import pieces

__all__ = ["SPACE", "Document", "document_of", "read_document"]

SPACE = "\n\n"  # between documents, passages and the question


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's text.

    Attributes:
        name: the file's, for people.
        pages: the offsets in the text at which its pages begin; empty: it has none, as only PDFs have.
        first_line: the file's line on which the text begins, if there are no pages.
        chosen: which of its segments are read, in order; None: all.
    """

    name: str
    text: str
    pages: tuple[int, ...] = ()
    first_line: int = 1
    chosen: tuple[int, ...] | None = None

    @classmethod
    def of(cls, name: str, text: str, pages: Sequence[int] = ()) -> Document:
        """A document of a text as a file has it: without white space around it, and with one kind of line ends.

        Raises:
            ValueError: the text is empty.
        """
        parts = [text[begin:end] for begin, end in zip((0, *pages), (*pages, None))]
        parts = [part.replace("\r\n", "\n").replace("\0", "") for part in parts]
        whole = "".join(parts)
        text = whole.strip()
        if not text:
            raise InputError(f"{name} has no text; pictures of pages, such as a scan, are not read")
        n_before = whole.index(text[0])
        begins = itertools.accumulate(map(len, parts[:-1]))
        if not pages:
            return cls(name, text, first_line=whole.count("\n", 0, n_before) + 1)
        return cls(name, text, tuple(min(max(begin - n_before, 0), len(text)) for begin in begins))

    @functools.cached_property
    def segments(self) -> tuple[str, ...]:
        """Its pieces, one behind the other (find.segments)."""
        return pieces(self.text)

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The offsets of its segments in the text."""
        return tuple(itertools.pairwise([0, *itertools.accumulate(map(len, self.segments))]))

    def part(self, chosen: Sequence[int]) -> Document:
        """The same, of which these segments alone are read."""
        part = dataclasses.replace(self, chosen=tuple(chosen))
        vars(part).update(segments=self.segments, spans=self.spans)
        return part

    @property
    def read(self) -> tuple[tuple[int, int], ...]:
        """The offsets of the segments that are read."""
        return self.spans if self.chosen is None else tuple(self.spans[i] for i in self.chosen)

    def place(self, begin: int, end: int) -> str:
        """Where a part of the text stands, for people: "page 3", "pages 3-4", or without pages "line 12", "lines 12-14" of the file,
        from 1. White space at the part's end does not count.

        Args:
            begin, end: its offsets in the text.

        Raises:
            ValueError: they are none, or nothing is between them.
        """
        if not 0 <= begin < end <= len(self.text):
            raise InputError(
                f"{begin} to {end} is no part of a text of {len(self.text)} characters; allowed: 0 <= begin < end"
            )
        last = begin + max(len(self.text[begin:end].rstrip()), 1) - 1
        if self.pages:
            what, numbers = "page", [bisect.bisect_right(self.pages, at) for at in (begin, last)]
        else:
            what, numbers = "line", [self.text.count("\n", 0, at) + self.first_line for at in (begin, last)]
        return f"{what} {numbers[0]}" if numbers[0] == numbers[1] else f"{what}s {numbers[0]}-{numbers[1]}"


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
    return document_of(place.name, place.read_bytes(), str(path))


def document_of(name: str, data: bytes, path: str) -> Document:
    """A document from a file's bytes, as read_document() makes it.

    Args:
        path: what an error calls it.
    """
    if data.startswith(b"%PDF-") or (
        b"%PDF-" in data[:1024] and b"%%EOF" in data[-1024:]
    ):  # other bytes may stand before
        try:
            text, pages = pdf.text_of(data)
        except PCDError:
            raise
        except Exception as error:  # damaged files end in errors of any kind
            raise InputError(f"{path} cannot be read as a PDF: {error}; it may be encrypted or damaged") from error
        return Document.of(name, text, pages)
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


def _docx(data: bytes, path: str) -> str:
    docx = require("docx", "a DOCX", package="python-docx")
    try:
        parts = docx.Document(io.BytesIO(data)).iter_inner_content()
        return "\n\n".join(text for part in parts if (text := _of_part(part)).strip())
    except MemoryError as error:
        raise InputError(f"{path} unpacks to more than there is memory for") from error
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
