"""The text of HTML: paragraphs with an empty line between them, and a line for each item of a list and each row of a table."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import re
from html.parser import HTMLParser
from typing import NamedTuple

from pypcd.document.parts import decoded, row

__all__ = ["Text", "of_bytes", "of_html"]

PARAGRAPH = re.compile(
    "address|article|aside|blockquote|body|caption|center|details|dialog|div|dl|dt|fieldset|figcaption|figure|footer|form|h[1-6]|header|hgroup|"
    "hr|legend|main|nav|[ou]l|p|pre|section|summary|table"
)
LINE = re.compile("dd|li|option|tr")
HIDDEN = {"math", "noscript", "rp", "script", "style", "svg", "template"}
LEFT_OUT = {"img": "pictures", "svg": "pictures", "math": "equations", "iframe": "frames"}
LONGEST_ROW = 1200  # characters; the cells of a longer one are no record but parts of a page
MOST_COLUMNS = 1000  # that a cell may take, as in browsers
CHARSET = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?([\w-]+)""", re.IGNORECASE)
BLANK = re.compile(r"[\s\0]+")


class Text(NamedTuple):
    """
    Attributes:
        left_out: what is not in it.
    """

    title: str
    body: str
    left_out: set[str]


def of_bytes(data: bytes) -> Text:
    """The text of a page in the encoding that it names."""
    found = CHARSET.search(data[:1024])
    charset = found.group(1).decode().lower() if found and not data.startswith(codecs.BOM_UTF8) else "utf-8"
    with contextlib.suppress(LookupError):
        # what says Latin-1 is Windows-1252, as in browsers
        charset = {"iso8859-1": "cp1252", "ascii": "cp1252"}.get(codecs.lookup(charset).name, charset)
        return of_html(decoded(data, "utf-8-sig" if charset == "utf-8" else charset))
    return of_html(decoded(data))


def of_html(html: str, *, is_numbered: bool = True) -> Text:
    """
    Args:
        is_numbered: whether the items of an ordered list have numbers. An item's attribute `mark` is what stands before it.
    """
    parser = _Parser(is_numbered)
    parser.feed(html)
    parser.close()
    while parser.tables:
        parser.end_table()
    return Text(parser.title.whole(), parser.flows[0].whole(), parser.left_out)


class _Flow:
    """Text as it comes."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._gap = 0  # line ends that are due before the next text
        self._mark = ""  # what is due behind them

    def gap(self, n: int) -> None:
        if not self._mark:  # an item's first paragraph is in the item's line
            self._gap = max(self._gap, n)

    def line_break(self) -> None:
        self._gap = min(self._gap + 1, 2)

    def mark(self, text: str) -> None:
        self._mark = text

    def text(self, text: str, *, is_kept: bool = False) -> None:
        """
        Args:
            is_kept: with its white space.
        """
        text = text.replace("\xad", "")  # where a word may be hyphenated
        if not is_kept:
            text = BLANK.sub(" ", text)
            if self._gap or not self._parts or self._parts[-1][-1] in " \n":
                text = text.removeprefix(" ")
        if not text:
            return
        if self._gap and self._parts:
            self._parts[-1] = self._parts[-1].rstrip(" ")
            self._parts.append("\n" * self._gap)
        self._parts += [self._mark, text] if self._mark else [text]
        self._gap, self._mark = 0, ""

    def whole(self) -> str:
        return "".join(self._parts).strip()


@dataclasses.dataclass
class _Table:
    """
    Attributes:
        cells: those of its row, one for each column.
        width, height: of the cell that is read, in columns and rows; 0: none is.
        below: how many more rows the cells above reach down, by their column.
    """

    cells: list[str] = dataclasses.field(default_factory=list)
    width: int = 0
    height: int = 0
    below: dict[int, int] = dataclasses.field(default_factory=dict)


class _Parser(HTMLParser):
    def __init__(self, is_numbered: bool) -> None:
        super().__init__()
        self.flows, self.title, self.tables = [_Flow()], _Flow(), list[_Table]()
        self.left_out = set[str]()
        self._is_numbered = is_numbered
        self._lists: list[int] = []  # the last number of each; -1: it has none
        self._hidden, self._depth = "", 0  # what is, and how deep in itself
        self._n_kept = 0  # elements around that keep white space
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in LEFT_OUT:
            self.left_out.add(LEFT_OUT[tag])
        if self._depth:
            self._depth += tag == self._hidden
            return
        given, flow = dict(attrs), self.flows[-1]
        if tag in ("td", "th", "tr") and self.tables:
            self._end_cell()
            if tag == "tr":
                self._end_row()
            else:
                self.tables[-1].width = _number(given.get("colspan"), 1, MOST_COLUMNS)
                self.tables[-1].height = _number(given.get("rowspan"), 1, 1 << 16)
                self.flows.append(_Flow())
        else:
            self._gap(tag)
        if tag in HIDDEN:
            self._hidden, self._depth = tag, 1
        elif tag == "table":
            self.tables.append(_Table())
        elif tag in ("ol", "ul"):
            is_numbered = tag == "ol" and self._is_numbered
            self._lists.append(_number(given.get("start"), 1, 1 << 31) - 1 if is_numbered else -1)
        elif tag == "li":
            mark = "- "
            if self._lists and self._lists[-1] >= 0:
                self._lists[-1] = _number(given.get("value"), self._lists[-1] + 1, 1 << 31)
                mark = f"{self._lists[-1]}. "
            flow.mark("  " * (len(self._lists) - 1) + (given.get("mark") or mark))
        elif tag == "br":
            flow.line_break()
        elif tag == "input" and given.get("type") in ("checkbox", "radio"):
            flow.text("[x] " if "checked" in given else "[ ] ")
        elif tag == "input" and given.get("type") in (None, "text", "email", "tel", "number", "date", "url"):
            flow.text(f" {given.get('value') or ''} ")
        elif tag == "rt":  # how the letters before it are read
            flow.text("(")
        elif tag in ("pre", "textarea"):
            self._n_kept += 1
        self._in_title = tag == "title"

    def handle_endtag(self, tag: str) -> None:
        if self._depth:
            self._depth -= tag == self._hidden
            return
        self._in_title = False
        if tag == "table" and self.tables:
            self.end_table()
        elif tag in ("td", "th", "tr") and self.tables:
            self._end_cell()
            if tag == "tr":
                self._end_row()
        elif tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        if tag in ("li", "ol", "ul"):
            self.flows[-1].mark("")  # of an empty item
        self._gap(tag)
        if tag == "rt":
            self.flows[-1].text(")")
        if tag in ("pre", "textarea") and self._n_kept:
            self._n_kept -= 1

    def handle_data(self, data: str) -> None:
        if not self._depth:
            flow = self.title if self._in_title else self.flows[-1]
            flow.text(data, is_kept=bool(self._n_kept))

    def unknown_decl(self, data: str) -> None:
        if data.startswith("CDATA["):
            self.handle_data(data[6:])

    def _gap(self, tag: str) -> None:
        if LINE.fullmatch(tag) or PARAGRAPH.fullmatch(tag):
            self.flows[-1].gap(1 if self._lists or LINE.fullmatch(tag) else 2)

    def end_table(self) -> None:
        self._end_cell()
        self._end_row()
        self.tables.pop()
        self.flows[-1].gap(2)

    def _end_cell(self) -> None:
        table = self.tables[-1]
        if table.width:
            self._pass(table)
            column = len(table.cells)
            for i in range(column, column + table.width) if table.height > 1 else ():
                table.below[i] = table.height  # with this row, whose end counts too
            table.cells += [self.flows.pop().whole(), *[""] * (table.width - 1)]
            table.width = 0

    def _pass(self, table: _Table) -> None:
        """Leave the columns empty that a cell above reaches into."""
        while table.below.get(len(table.cells)):
            table.cells.append("")

    def _end_row(self) -> None:
        table, flow = self.tables[-1], self.flows[-1]
        if not table.cells:
            return
        cells, table.cells = table.cells, []
        table.below = {column: n - 1 for column, n in table.below.items() if n > 1}
        while cells and not cells[-1]:
            cells.pop()
        if len(cells) == 1 or sum(map(len, cells)) > LONGEST_ROW:
            text = "\n\n".join(filter(None, cells))
            n = 2 if "\n" in text else 1
        else:
            text, n = row(cells), 1
        flow.gap(n)
        flow.text(text, is_kept=True)
        flow.gap(n)


def _number(text: str | None, default: int, most: int) -> int:
    return min(max(int(text), 1), most) if text and text.isascii() and text.isdigit() else default
