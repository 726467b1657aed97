"""Documents: files that are handed over for questions about them."""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import functools
import itertools
import os
import stat
from collections.abc import Sequence

from pypcd.document.apart import converted_apart
from pypcd.document.formats import ALLOWED, format_of
from pypcd.document.letters import paired
from pypcd.document.parts import Converted, bound, decoded, most
from pypcd.errors import InputError

__all__ = ["SPACE", "Document", "document_of", "read_document"]

SPACE = "\n\n"  # between documents, passages and the question
KEPT = 64  # documents that are kept: lists of questions name the same files again
UNITS = ("page", "slide", "sheet", "chapter")


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's text.

    Attributes:
        name: the file's, for people.
        pages: the offsets in the text at which its pages begin; empty: it has none.
        first_line: the file's line on which the text begins, if there are no pages.
        unit: what the pages are: "page", "slide", "sheet" or "chapter".
        note: a sentence on what of the file is left out, such as pictures; empty: nothing is known to be.
        chosen: which of its segments are read, in order; None: all.
    """

    name: str
    text: str
    pages: tuple[int, ...] = ()
    first_line: int = 1
    unit: str = "page"
    note: str = ""
    chosen: tuple[int, ...] | None = None

    @classmethod
    def of(cls, name: str, text: str, pages: Sequence[int] = (), unit: str = "page", note: str = "") -> Document:
        """A document of a text as a file has it: without white space around it, with one kind of line ends, and as UTF-8 can hold it.

        Raises:
            ValueError: the text is empty, or there is no such unit.
        """
        if unit not in UNITS:
            raise InputError(f"unit of {name} is {unit!r}; allowed: {', '.join(UNITS)}")
        parts = [text[begin:end] for begin, end in zip((0, *pages), (*pages, None))]
        parts = [paired(part).replace("\r\n", "\n").replace("\0", "") for part in parts]
        whole = "".join(parts)
        text = whole.strip()
        if not text:
            raise InputError(f"{name} has no text{note and '; ' + note}")
        n_before = whole.index(text[0])
        begins = (begin - n_before for begin in itertools.accumulate(map(len, parts[:-1])))
        first_line = 1 if pages else whole.count("\n", 0, n_before) + 1
        return cls(name, text, tuple(min(max(begin, 0), len(text)) for begin in begins), first_line, unit, note)

    @functools.cached_property
    def segments(self) -> tuple[str, ...]:
        """Its pieces, one behind the other (find.segments)."""
        from pypcd.find.segments import pieces  # which takes longer to import than a file to read

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
        """Where a part of the text stands, for people: "page 3", "slides 3-4", or without pages "line 12", "lines 12-14" of the file,
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
        if self.pages:
            what, (first, last) = self.unit, self.page_numbers(begin, end)
        else:
            ends = begin, self._last(begin, end)
            what, (first, last) = "line", (self.text.count("\n", 0, at) + self.first_line for at in ends)
        return f"{what} {first}" if first == last else f"{what}s {first}-{last}"

    def page_numbers(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the last of its pages that a part of the text is on, from 1. White space at the part's end does not count."""
        return bisect.bisect_right(self.pages, begin), bisect.bisect_right(self.pages, self._last(begin, end))

    def _last(self, begin: int, end: int) -> int:
        return begin + max(len(self.text[begin:end].rstrip()), 1) - 1


def read_document(path: str | os.PathLike[str]) -> Document:
    """A document from a file: PDF, DOCX, PPTX, XLSX, XLS, ODS, EPUB, HTML, or any other text, such as Markdown, in UTF-8 or in UTF-16
    with a byte order mark. What is no plain text is read in a process of its own. A file that is as it was is not read again.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of these, is damaged or encrypted, is too large, or has no text.
    """
    if not str(path):
        raise InputError("the name of the document's file is empty")
    found = os.path.expanduser(path)  # pathlib fails on `~name` if there is no such user
    about = os.stat(found)
    read = _read if stat.S_ISREG(about.st_mode) else _read.__wrapped__  # what a pipe gives is gone
    return read(found, most(), about.st_ino, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=KEPT)
def _read(path: str, n_most: int, *version: int) -> Document:
    """
    Args:
        version: what tells the file as it is from others of this name.
    """
    with open(path, "rb") as file:
        data = file.read(n_most + 1)
    if len(data) > n_most:
        raise InputError(
            f"{path} has more than {n_most} bytes; PYPCD_DOCUMENT_MIB={max(n_most >> 19, 1)} allows twice as many"
        )
    return document_of(os.path.basename(path), data, path)


def document_of(name: str, data: bytes, path: str) -> Document:
    """A document from a file's bytes, as read_document() makes it.

    Args:
        path: what an error calls it.
    """
    n_seconds = bound("SECONDS", 60)
    try:
        if kind := format_of(name, data):
            made = converted_apart(kind, data, n_seconds)
        elif b"\0" in data[:8192] and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"is not a text file; allowed: {ALLOWED}")
        else:
            made = Converted(decoded(data))
    except InputError as error:
        raise InputError(f"{path} {error}") from error
    return Document.of(name, *made)
