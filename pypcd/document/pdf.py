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
from collections.abc import Sequence
from typing import Any

from pypcd.errors import require
from pypcd.find.segments import ENDS, WIDE

__all__ = ["text_of"]

GAP = 1.5  # font sizes between two words of which each is a column's
NARROW = 0.75  # of the width between even margins: less is lines that were not wrapped, such as a poem's
# an item of a list begins with; the second may stand in a text
SYMBOL, COUNT = r"[•‣▪◦●○■□·*]", r"(?:[-–—]|\(?\w{1,3}[.)])"
BULLET, NUMBER, MARK = re.compile(rf"{SYMBOL}\s"), re.compile(rf"{COUNT}\s"), re.compile(f"{SYMBOL}|{COUNT}")
HYPHEN = re.compile(r"(?<=\w)[-‐\u00ad]$")
LINE_HYPHEN = "\x02\ufffe"  # pdfium has it in place of a hyphen and a line's end
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


def text_of(data: bytes) -> tuple[str, tuple[int, ...]]:
    """A PDF's text, and the offsets in it at which its pages begin.

    Raises:
        PCDError: pypdfium2 is not installed.
        PdfiumError: the file is damaged or encrypted.
    """
    pdfium = require("pypdfium2", "a PDF")
    with ALONE, contextlib.closing(pdfium.PdfDocument(data)) as document:
        pages = [_lines(page) for page in document]
    pitches = _pitches(pages)
    parts, length, begins = list[str](), 0, list[int]()
    last: Line | None = None
    for lines in pages:
        begins.append(length)
        for i, line in enumerate(lines):
            if last:
                between = _between(last, line, pitches, i == 0)
                if not between and HYPHEN.search(last.text) and (last.text[-1] == "\u00ad" or line.text[0].islower()):
                    parts[-1], length = parts[-1][:-1], length - 1
                parts.append(between)
                length += len(between)
            if i == 0:
                begins[-1] = length
            parts.append(line.text)
            length += len(line.text)
            last = line
    return "".join(parts), tuple(begins)


def _lines(page: Any) -> list[Line]:
    raw = require("pypdfium2", "a PDF").raw
    width, found, words, word = page.get_width(), list[Line](), list[tuple[int, str]](), ""
    with contextlib.closing(page), contextlib.closing(page.get_textpage()) as text:
        n, code_at, handle = text.count_chars(), raw.FPDFText_GetUnicode, text.raw
        for i in range(n + 1):
            character = chr(code_at(handle, i)) if i < n else "\n"
            is_last = character in "\r\n" or character in LINE_HYPHEN
            if character in LINE_HYPHEN:
                word, i = word + "-", i + 1
            elif not character.isspace():
                word += character
                continue
            if word:
                words.append((i - len(word), word))
            if words and is_last:
                found.append(_line(raw, handle, words, width))
            word, words = "", [] if is_last else words
    _limit(found, width)
    return found


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
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half of a pair stays no half
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
