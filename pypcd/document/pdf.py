"""The text of a PDF: characters with their boxes, as pdfium finds them, put together to lines and paragraphs."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import itertools
import math
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pypcd.document.letters import ENDS, WIDE, paired
from pypcd.document.parts import Converted, left_out, listed
from pypcd.errors import InputError

__all__ = ["text_of"]

GAP = 1.5  # font sizes between two words of which each is a column's
NARROW = 0.75  # of the width between even margins: less is lines that were not wrapped, such as a poem's
# an item of a list begins with; the second may stand in a text
SYMBOL, COUNT = r"[•‣▪◦●○■□·*]", r"(?:[-–—]|\(?\w{1,3}[.)])"
BULLET, NUMBER, MARK = re.compile(rf"{SYMBOL}\s"), re.compile(rf"{COUNT}\s"), re.compile(f"{SYMBOL}|{COUNT}")
HYPHEN = re.compile(r"(?<=\w)[-‐\u00ad]$")
# pdfium has either of two characters in place of a hyphen and a line's end
LINE, LINE_HYPHEN = re.compile(r"[^\r\n\x02\ufffe]*[\x02\ufffe]|[^\r\n]+"), re.compile(r"[\x02\ufffe]$")
WORD = re.compile(r"\S+")
WIDE_CHARACTER = re.compile(f"[{WIDE}]")

ALONE = threading.Lock()  # pdfium allows one thread at a time


@dataclasses.dataclass
class Line:
    """
    Attributes:
        begin, end: its edges in points, from where its script begins to write.
        baseline: in points from the page's bottom.
        size: of its font, in points.
        word: the width of its first word.
        has_columns: whether words stand far apart in it.
        limit: where the lines around it end.
    """

    text: str
    begin: float
    end: float
    baseline: float
    size: float
    word: float
    has_columns: bool
    limit: float = 0.0


class Page(NamedTuple):
    """
    Attributes:
        entered: what was filled in, in fields of a form and on top of the page.
        is_blank: whether nothing is drawn on it.
    """

    lines: list[Line]
    entered: str
    is_blank: bool
    has_pictures: bool


def text_of(data: bytes) -> Converted:
    """A PDF's text.

    Raises:
        InputError: its pages are pictures.
        PdfiumError: the file is damaged or encrypted.
    """
    import pypdfium2 as pdfium  # type: ignore[import-untyped]

    with ALONE, contextlib.closing(pdfium.PdfDocument(data)) as document:
        document.init_forms()
        pages = [_page(page, document.formenv) for page in document]
    pitches = _pitches([page.lines for page in pages])
    parts, firsts = list[str](), list[int]()  # of each page, the first of its parts
    last: Line | None = None
    for page in pages:
        firsts.append(len(parts))
        blocks: list[tuple[Line | None, str]] = [(line, line.text) for line in page.lines]
        if page.entered:
            blocks.append((None, page.entered))
        for i, (line, text) in enumerate(blocks):
            if parts:
                between = _between(last, line, pitches, i == 0) if last and line else "\n\n"
                is_cut = not between and HYPHEN.search(parts[-1]) is not None
                if is_cut and (parts[-1][-1] == "\u00ad" or text[0].islower()):
                    parts[-1] = parts[-1][:-1]
                parts[-1] += between
            parts.append(text)
            last = line
    lengths = [0, *itertools.accumulate(map(len, parts))]
    return Converted("".join(parts), [lengths[first] for first in firsts], note=_note(pages))


def _note(pages: Sequence[Page]) -> str:
    unread = [i for i, page in enumerate(pages, 1) if not (page.lines or page.entered or page.is_blank)]
    if unread and not any(page.lines or page.entered for page in pages):
        raise InputError(
            f"is a scan: none of its {len(pages)} pages has a text layer, and pictures are not read; "
            "a program such as ocrmypdf adds the text"
        )
    if unread:
        return f"not read, since there is no text layer: page {listed(unread)}"
    return left_out({"pictures"} if any(page.has_pictures for page in pages) else ())


def _page(page: Any, form: Any) -> Page:
    import pypdfium2 as pdfium

    raw, width = pdfium.raw, page.get_width()
    with contextlib.closing(page), contextlib.closing(page.get_textpage()) as text:
        characters = "".join(chr(raw.FPDFText_GetUnicode(text.raw, i)) for i in range(text.count_chars()))
        lines = list[Line]()
        for line in LINE.finditer(characters):
            words = [(word.start(), word[0]) for word in WORD.finditer(characters, *line.span())]
            if words:
                lines.append(_line(raw, text.raw, words, width))
        entered = "\n".join(dict.fromkeys(filter(None, _entered(raw, page.raw, form))))
        is_blank = not raw.FPDFPage_CountObjects(page.raw)
        has_pictures = any(True for _ in page.get_objects([raw.FPDF_PAGEOBJ_IMAGE], max_depth=3))
    _limit(lines, width)
    return Page(lines, entered, is_blank, has_pictures)


def _entered(raw: Any, page: Any, form: Any) -> Iterator[str]:
    """The names and values of a form's fields, and texts that were put on top of a page."""
    for i in range(raw.FPDFPage_GetAnnotCount(page)):
        note = raw.FPDFPage_GetAnnot(page, i)
        kind = raw.FPDFAnnot_GetSubtype(note)
        if raw.FPDFAnnot_GetFlags(note) & raw.FPDF_ANNOT_FLAG_HIDDEN:
            pass
        elif kind == raw.FPDF_ANNOT_FREETEXT:
            yield _string(raw, raw.FPDFAnnot_GetStringValue, note, b"Contents")
        elif kind == raw.FPDF_ANNOT_WIDGET and form:
            field = form.raw, note
            name = _string(raw, raw.FPDFAnnot_GetFormFieldAlternateName, *field)
            name = name or _string(raw, raw.FPDFAnnot_GetFormFieldName, *field)
            if value := _string(raw, raw.FPDFAnnot_GetFormFieldValue, *field):
                yield f"{name}: {value}"
        raw.FPDFPage_CloseAnnot(note)


def _string(raw: Any, call: Any, *of: Any) -> str:
    n = call(*of, None, 0)
    made = ctypes.create_string_buffer(n)
    call(*of, ctypes.cast(made, ctypes.POINTER(raw.FPDF_WCHAR)), n)
    return made.raw.decode("utf-16-le", "replace").replace("\r\n", "\n").replace("\r", "\n").rstrip("\0").strip()


def _line(raw: Any, handle: Any, words: Sequence[tuple[int, str]], width: float) -> Line:
    """
    Args:
        words: the index of each one's first character, and its text.
    """
    box, matrix, x, y = raw.FS_RECTF(), raw.FS_MATRIX(), ctypes.c_double(), ctypes.c_double()

    def edges(i: int) -> tuple[float, float]:
        return (box.left, box.right) if raw.FPDFText_GetLooseCharBox(handle, i, box) else (0.0, 0.0)

    middle = words[len(words) // 2][0]
    raw.FPDFText_GetCharOrigin(handle, middle, x, y)
    raw.FPDFText_GetMatrix(handle, middle, matrix)
    size = raw.FPDFText_GetFontSize(handle, middle) * math.hypot(matrix.c, matrix.d) or 10.0
    places = [(*edges(at), *edges(at + len(word) - 1)) for at, word in words]
    if places[0][0] > places[-1][2]:  # written to the left
        places = [(width - right, width - left, width - end, width - begin) for left, right, begin, end in places]
    text, has_columns, end = "", False, 0.0
    for (_, word), place in zip(words, places):
        if text:
            is_gap = place[0] - end > GAP * size and not MARK.fullmatch(text)
            has_columns = has_columns or is_gap
            text += "  " if is_gap else " "
        text, end = text + word, place[3]
    text = paired(LINE_HYPHEN.sub("-", text))
    first = places[0][1] if WIDE_CHARACTER.match(text) else places[0][3]
    return Line(text, places[0][0], end, y.value, size, first - places[0][0], has_columns)


def _limit(lines: Sequence[Line], width: float) -> None:
    """Set each line's limit: the end of the longest line of its font size that begins near it, such as in the same column."""
    ends = dict[tuple[int, int], float]()
    for line in lines:
        for near in (-1, 0, 1):
            key = round(line.size), round(line.begin / line.size / 3) + near
            ends[key] = max(ends.get(key, 0.0), line.end)
    first, last = min((line.begin for line in lines), default=0.0), max((line.begin for line in lines), default=0.0)
    for line in lines:
        line.limit = ends[round(line.size), round(line.begin / line.size / 3)]
        if line.limit - first < NARROW * (width - 2 * first) and last < line.limit:
            line.limit = width - first


def _pitches(pages: Sequence[Sequence[Line]]) -> dict[int, float]:
    """The usual distance of lines by their font size."""
    found = collections.defaultdict[int, list[float]](list)
    for lines in pages:
        for line, below in itertools.pairwise(lines):
            if round(line.size) == round(below.size) and line.baseline > below.baseline:
                found[round(line.size)].append(line.baseline - below.baseline)
    return {size: sorted(distances)[len(distances) // 4] for size, distances in found.items()}


def _between(line: Line, below: Line, pitches: dict[int, float], is_page: bool) -> str:
    """What stands between two lines: an empty line between paragraphs, a line's end in a list or table, else a space or nothing."""
    is_end, distance = bool(ENDS.search(line.text)), line.baseline - below.baseline
    if line.has_columns and below.has_columns and distance < 4 * line.size:  # also a table that goes on overleaf
        return "\n"
    has_room = line.end + 0.25 * line.size + below.word <= line.limit  # for the next word
    if is_page or distance < 0:  # the next page or column
        if is_end or has_room or not below.text[0].islower():
            return "\n\n"
    elif (
        distance > 1.3 * min(pitches.get(round(line.size), math.inf), 2 * line.size)
        or abs(line.size - below.size) > 0.1 * line.size
        or (
            is_end
            and below.begin - line.begin > 0.7 * line.size
            and not (BULLET.match(line.text) or NUMBER.match(line.text))
        )
    ):
        return "\n\n"
    elif has_room:
        return "\n\n" if is_end and not below.has_columns else "\n"
    if line.has_columns or below.has_columns or BULLET.match(below.text):
        return "\n"
    if NUMBER.match(below.text) and (is_end or line.text.endswith((":", ";"))):
        return "\n"
    if HYPHEN.search(line.text) or (WIDE_CHARACTER.match(line.text[-1]) and WIDE_CHARACTER.match(below.text)):
        return ""
    return " "
