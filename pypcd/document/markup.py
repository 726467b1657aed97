"""The text of HTML: paragraphs with an empty line between them, and a line for each item of a list and each row of a table."""

from __future__ import annotations

import codecs
import contextlib
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
HIDDEN = {"math", "noscript", "script", "style", "svg", "template"}
LEFT_OUT = {"img": "pictures", "svg": "pictures", "math": "equations", "iframe": "frames"}
LONGEST_ROW = 1200  # characters; the cells of a longer one are no record but parts of a page
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
    charset = "utf-8"
    if found and not data.startswith(codecs.BOM_UTF8):
        with contextlib.suppress(LookupError):
            charset = codecs.lookup(found.group(1).decode()).name
    # as in browsers, what says Latin-1 is Windows-1252, and what says UTF-16 in single bytes is UTF-8
    charset = {"iso8859-1": "cp1252", "ascii": "cp1252"}.get(charset, charset)
    return of_html(decoded(data, "utf-8-sig" if charset.startswith("utf") else charset))


def of_html(html: str) -> Text:
    parser = _Parser()
    parser.feed(html)
    parser.close()
    while parser.tables:
        parser.end("table")
    return Text(parser.title.whole(), parser.flows[0].whole(), parser.left_out)


class _Flow:
    """Text as it comes."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.due = 0  # line ends that are due before the next text
        self.mark = ""  # what is due behind them

    def gap(self, n: int) -> None:
        if not self.mark:  # an item's first paragraph is in the item's line
            self.due = max(self.due, n)

    def text(self, text: str, *, is_kept: bool = False) -> None:
        """
        Args:
            is_kept: with its white space.
        """
        text = text.replace("\xad", "")  # where a word may be hyphenated
        if not is_kept:
            text = BLANK.sub(" ", text)
            if self.due or not self._parts or self._parts[-1][-1] in " \n":
                text = text.removeprefix(" ")
        if not text:
            return
        if self.due and self._parts:
            self._parts[-1] = self._parts[-1].rstrip(" ")
            self._parts.append("\n" * self.due)
        self._parts += [self.mark, text] if self.mark else [text]
        self.due, self.mark = 0, ""

    def whole(self) -> str:
        return "".join(self._parts).strip()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.flows, self.title = [_Flow()], _Flow()
        self.tables = list[list[str]]()  # the cells of each one's row
        self._opened = list[bool]()  # whether a cell of each is; then its text is the last flow
        self.left_out = set[str]()
        self._lists: list[int] = []  # the last number of each; -1: it has none
        self._hidden, self._depth = "", 0  # what is, and how deep in itself
        self._n_kept = 0  # elements around that keep white space
        self._within = ""  # the tag behind which a text is

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in LEFT_OUT:
            self.left_out.add(LEFT_OUT[tag])
        if self._depth:
            self._depth += tag == self._hidden
            return
        given, flow = dict(attrs), self.flows[-1]
        if tag in ("td", "th", "tr") and self.tables:
            self.end(tag)
            if tag != "tr":
                self.flows.append(_Flow())
                self._opened[-1] = True
        else:
            self._gap(tag)
        if tag in HIDDEN:
            self._hidden, self._depth = tag, 1
        elif tag == "table":
            self.tables.append([])
            self._opened.append(False)
        elif tag in ("ol", "ul"):
            self._lists.append(_number(given.get("start"), 1) - 1 if tag == "ol" else -1)
        elif tag == "li":
            mark = "- "
            if self._lists and self._lists[-1] >= 0:
                self._lists[-1] = _number(given.get("value"), self._lists[-1] + 1)
                mark = f"{self._lists[-1]}. "
            flow.mark = "  " * (len(self._lists) - 1) + mark
        elif tag == "br":
            flow.due = min(flow.due + 1, 2)
        elif tag == "input" and given.get("type") in ("checkbox", "radio"):
            flow.text("[x] " if "checked" in given else "[ ] ")
        elif tag == "input" and given.get("type") in (None, "text", "email", "tel", "number", "date", "url"):
            flow.text(f" {given.get('value') or ''} ")
        elif tag == "rt":  # how the letters before it are read
            flow.text("(")
        elif tag in ("pre", "textarea"):
            self._n_kept += 1
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        if self._depth:
            self._depth -= tag == self._hidden
            return
        self._within = ""
        if tag in ("td", "th", "tr", "table") and self.tables:
            self.end(tag)
        elif tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        if tag in ("li", "ol", "ul"):
            self.flows[-1].mark = ""  # of an empty item
        self._gap(tag)
        if tag == "rt":
            self.flows[-1].text(")")
        if tag in ("pre", "textarea") and self._n_kept:
            self._n_kept -= 1

    def handle_data(self, data: str) -> None:
        if not self._depth and self._within != "rp":  # brackets, for those who do not know <rt>
            if self.tables and not self._opened[-1] and not data.isspace():
                self.end("tr")  # what stands between cells stands between rows
            flow = self.title if self._within == "title" else self.flows[-1]
            flow.text(data, is_kept=bool(self._n_kept))

    def unknown_decl(self, data: str) -> None:
        if data.startswith("CDATA["):
            self.handle_data(data[6:])

    def _gap(self, tag: str) -> None:
        if LINE.fullmatch(tag) or PARAGRAPH.fullmatch(tag):
            self.flows[-1].gap(1 if self._lists or LINE.fullmatch(tag) else 2)

    def end(self, tag: str) -> None:
        """End a table's cell, and its row or itself too if the tag is theirs."""
        if self._opened[-1]:
            self._opened[-1] = False
            cell = self.flows.pop().whole()
            self.tables[-1].append(cell)
        cells, flow = self.tables[-1], self.flows[-1]
        if tag in ("tr", "table"):
            is_layout = len(cells) == 1 or sum(map(len, cells)) > LONGEST_ROW
            text = "\n\n".join(filter(None, cells)) if is_layout else row(cells)
            cells.clear()
            flow.gap(2 if "\n" in text else 1)
            flow.text(text, is_kept=True)
            flow.gap(2 if "\n" in text or tag == "table" else 1)
        if tag == "table":
            self.tables.pop()
            self._opened.pop()


def _number(text: str | None, default: int) -> int:
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else default
