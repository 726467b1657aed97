"""What the readers of all formats share: the text they make, how much they may take, and zip archives and XML that keep to that."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import os
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pypcd.errors import InputError

__all__ = ["Archive", "Converted", "bound", "decoded", "has", "left_out", "listed", "local", "most", "named", "row"]


class Converted(NamedTuple):
    """What Document.of() takes besides a name."""

    text: str
    begins: Sequence[int] = ()
    unit: str = "page"
    note: str = ""

    @classmethod
    def of(cls, parts: Sequence[str], unit: str, note: str) -> Converted:
        """A text of parts with an empty line between them, each of which is a `unit`."""
        begins = itertools.accumulate((len(part) + 2 for part in parts[:-1]), initial=0)
        return cls("\n\n".join(parts), list(begins), unit, note)


def listed(words: Iterable[object]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def row(cells: Iterable[str]) -> str:
    """A table's row as a line."""
    texts = [" ".join(cell.split()) for cell in cells]
    while texts and not texts[-1]:
        texts.pop()
    return " | ".join(texts).strip()


def left_out(kinds: Iterable[str]) -> str:
    return f"{listed(sorted(kinds))} are left out" if kinds else ""


def bound(name: str, usual: int) -> float:
    """A limit, which the environment variable PYPCD_DOCUMENT_<name> sets."""
    given = os.environ.get(f"PYPCD_DOCUMENT_{name}", usual)
    with contextlib.suppress(ValueError):
        if 0 < float(given) < float("inf"):
            return float(given)
    raise InputError(f"PYPCD_DOCUMENT_{name} is {given!r}; allowed: a number above 0, such as {usual}")


def most() -> int:
    """Bytes that a file may have, and may unpack to."""
    return min(int(bound("MIB", 256) * (1 << 20)), 1 << 62)


class Archive:
    """A zip archive. Its directory says how much it unpacks to, and no part is read beyond what it says there.

    Raises:
        InputError: that is too much, or it is encrypted.
        BadZipFile: it is damaged.
    """

    def __init__(self, data: bytes) -> None:
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        entries = self._zip.infolist()
        n_bytes, n_most = sum(entry.file_size for entry in entries), most()
        if n_bytes > n_most:
            raise InputError(
                f"unpacks to {n_bytes} bytes; at most {n_most} are read; PYPCD_DOCUMENT_MIB={(n_bytes >> 20) + 1} allows them"
            )
        if any(entry.flag_bits & 1 for entry in entries):
            raise InputError("is encrypted; save it without a password")
        self.names = self._zip.namelist()

    def read(self, name: str) -> bytes:
        entry = self._zip.getinfo(name)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # zipfile unpacks others at once
            raise InputError(f"has a part {name} that is packed in a way that no such file is")
        with self._zip.open(entry) as file:
            return file.read(entry.file_size + 1)

    def xml(self, name: str) -> ET.Element:
        return ET.fromstring(self.read(name), ET.XMLParser(target=_Tree()))

    def has(self, *begins: str) -> bool:
        """Whether a part's name begins so."""
        return any(name.startswith(begins) for name in self.names)


class _Tree(ET.TreeBuilder):
    """XML without a document type, so without entities of its own."""

    def doctype(self, *_: object) -> None:
        raise InputError("declares a type of document in its XML, which can be a trap and is in no such file")


def local(element: ET.Element) -> str:
    """Its name without a namespace, of which office files have two."""
    return element.tag.rpartition("}")[2]


def named(root: ET.Element, *names: str) -> Iterator[ET.Element]:
    return (element for element in root.iter() if local(element) in names)


def has(root: ET.Element, name: str) -> bool:
    return next(named(root, name), None) is not None


def decoded(data: bytes, charset: str = "utf-8-sig") -> str:
    """A text in UTF-8, in UTF-16 with a byte order mark, or in `charset`.

    Raises:
        InputError: it is not.
    """
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if is_wide else charset)
    except UnicodeDecodeError as error:
        wrong = data[error.start : error.start + 1].hex()
        raise InputError(
            f"is not in {charset.upper().removesuffix('-SIG')}: its byte {error.start + 1} is {wrong}; save it as UTF-8, such as with "
            "iconv -f windows-1252 -t utf-8, if it is in Windows-1252"
        ) from error
