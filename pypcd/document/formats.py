"""Which format a file is in, and what reads it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

from pypcd.document import markup, office, pdf
from pypcd.document.parts import Archive, Converted, left_out
from pypcd.errors import InputError

__all__ = ["ALLOWED", "converted", "format_of"]

ALLOWED = "texts in UTF-8, HTML, PDF, DOCX, PPTX, XLSX, XLS, ODS, EPUB"

# of a zip archive: by the names of its parts, and by the type that it gives itself
PARTS = {"word/": "DOCX", "ppt/": "PPTX", "xl/": "XLSX", "META-INF/container.xml": "EPUB"}
TYPES = {
    b"application/epub+zip": "EPUB",
    b"application/vnd.oasis.opendocument.presentation": "ODP",
    b"application/vnd.oasis.opendocument.spreadsheet": "ODS",
    b"application/vnd.oasis.opendocument.text": "ODT",
}
ZIP = b"PK\x03\x04"
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # the files of Office 97, and encrypted ones of later versions, by the names of their streams
STREAMS = {
    "Book": "XLS",
    "EncryptedPackage": "encrypted",
    "PowerPoint Document": "PPT",
    "WordDocument": "DOC",
    "Workbook": "XLS",
}
INSTEAD = {"DOC": "DOCX", "ODP": "PPTX", "ODT": "DOCX", "PPT": "PPTX", "RTF": "DOCX"}  # what to save as
HTML = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*|<!--(?:(?!-->).)*-->\s*)*<(!doctype\s+html|html)[\s>]",
    re.IGNORECASE | re.DOTALL,
)


def _html(data: bytes) -> Converted:
    title, body, kinds = markup.of_bytes(data)
    return Converted(body if title in body else f"{title}\n\n{body}", note=left_out(kinds))


READERS: dict[str, Callable[[bytes], Converted]] = {
    "DOCX": office.docx,
    "EPUB": office.epub,
    "HTML": _html,
    "ODS": office.sheets,
    "PDF": pdf.text_of,
    "PPTX": office.pptx,
    "XLS": office.sheets,
    "XLSX": office.sheets,
}


def format_of(name: str, data: bytes) -> str:
    """A file's format by its content, and by its name if that tells nothing; "": it is a text, if anything. What a zip archive has in it
    is for converted() to see, which may be held to limits."""
    suffix = pathlib.PurePath(name).suffix[1:].upper()
    if data.startswith(b"%PDF-") or (b"%PDF-" in data[:1024] and b"%%EOF" in data[-1024:]):
        return "PDF"  # before it other bytes may stand
    if data.startswith(ZIP) and (suffix in READERS or b"\0" in data[:64]):
        return suffix if suffix in READERS else "ZIP"
    if data.startswith(OLE):
        places = {kind: data.find(stream.encode("utf-16-le")) for stream, kind in STREAMS.items()}
        return min(((at, kind) for kind, at in places.items() if at >= 0), default=(0, ""))[1]
    if data.startswith(b"{\\rtf"):
        return "RTF"
    return "HTML" if HTML.match(data[:4096]) or suffix in ("HTM", "HTML", "XHTML") else ""


def _of_archive(data: bytes) -> str:
    archive = Archive(data)
    if "mimetype" in archive.names:
        return TYPES.get(archive.read("mimetype").strip(), "")
    return next((kind for begin, kind in PARTS.items() if archive.has(begin)), "")


def converted(kind: str, data: bytes) -> Converted:
    """The text of a file in a format that format_of() tells.

    Raises:
        InputError: it is not read, or is damaged, encrypted or too large.
    """
    try:
        if data.startswith(ZIP):
            kind = _of_archive(data) or kind
        if kind == "ZIP":
            raise InputError(f"is a zip archive without a document; allowed: {ALLOWED}")
        if kind == "encrypted":
            raise InputError("is encrypted; save it without a password")
        if kind in INSTEAD:
            raise InputError(f"is in the format {kind}, which is not read; save it as {INSTEAD[kind]}")
        return READERS[kind](data)
    except InputError:
        raise
    except MemoryError as error:
        raise InputError("takes more memory than there is to read it") from error
    except Exception as error:  # damaged files end in errors of any kind
        article = "an" if kind[0] in "EHOX" else "a"
        raise InputError(f"cannot be read as {article} {kind}: {error}; it may be encrypted or damaged") from error
