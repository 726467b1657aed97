"""Tables and Markdown for a terminal, drawn by rich. Knows nothing of their content."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pypcd.cli import _terminal, _text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["aligned", "columns", "paragraph", "table"]


def columns() -> int | None:
    """How wide a result on stdout may be; None for a file or a pipe, which has no width."""
    return _terminal.width() if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def paragraph(text: str, width: int | None = None) -> str:
    """Text for stdout: broken between words where that has a width."""
    width = width or columns()
    return _text.clean(text) if width is None else "\n".join(_text.wrap(text, min(width, 120)))


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], n_keys: int, width: int | None
) -> str:
    """Columns side by side. Where they do not fit, heads and labels are broken between words; where they still do not, each row is
    a list of its cells.

    Args:
        right: for each column whether it is aligned to the right.
        n_keys: columns that say what a row is; the last of them is its label.
        width: of the terminal; None: as wide as need be.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = _console(width)
    head, *cells = ([_text.clean(cell) for cell in row] for row in (head, *rows))
    label = n_keys - 1

    columns = list(zip(head, *cells))
    natural = [max(map(_text.cells, column)) for column in columns]
    narrow = []  # with heads and labels in pieces
    for i, column in enumerate(columns):
        n = len(column) if i == label else 1
        broken = [piece for text in column[:n] for piece in _pieces(text)]
        narrow.append(max(_text.cells(text.rstrip()) for text in (*broken, *column[n:])))
    gaps = 2 * (len(head) - 1)
    if min(sum(natural), sum(narrow)) + gaps <= console.width:
        is_natural = sum(natural) + gaps <= console.width
        room = console.width - gaps - sum(narrow) + narrow[label]
        made = Table(box=box.Box("    \n    \n -  \n" + "    \n" * 5), show_edge=False, pad_edge=False)
        made.padding = (0, 1, 0, 0)
        for i, name in enumerate(head):
            title = name if is_natural else _broken(name, room if i == label else narrow[i])
            made.add_column(Text(title), justify="right" if right[i] else "left", no_wrap=True)
        for row in cells:
            shown = [_broken(cell, room) if i == label and not is_natural else cell for i, cell in enumerate(row)]
            made.add_row(*map(Text, shown))
        return _shown(console, made)
    lists = []
    for row in cells:
        made = Table.grid(padding=(0, 2, 0, 0))
        for name, cell in zip(head, row):
            if cell:
                made.add_row(Text(name), Text(cell, overflow="fold"))
        lists.append(_shown(console, made))
    return "\n\n".join(lists)


def _pieces(text: str) -> list[str]:
    """Of a label or a head; a line may end after each of them."""
    return re.findall(r"[^\s:,+=]*[\s:,+=]*", text)


def _broken(text: str, width: int) -> str:
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and _text.cells(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _console(width: int | None) -> Console:
    from rich.console import Console

    return Console(file=io.StringIO(), width=width or 100_000, color_system=None, force_jupyter=False)


def _shown(console: Console, made: Any) -> str:
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def aligned(markdown: str, width: int | None) -> str:
    """Markdown for a terminal: headings without marks, paragraphs and list items wrapped, tables aligned. A pipe gets it as it is."""
    markdown = markdown.rstrip("\n") + "\n"
    if width is None:
        return _text.clean(markdown)
    out = []
    for kind, run in itertools.groupby(markdown.split("\n"), _kind):
        lines = list(run)
        if kind == "table":
            out.append(_read_table(lines, width))
        elif kind == "item":
            items = (" ".join(item.split()) for item in "\n".join(lines).removeprefix("- ").split("\n- "))
            out += ["- " + paragraph(item, min(width, 120) - 2).replace("\n", "\n  ") for item in items]
        elif kind == "heading":
            out += [paragraph(line.lstrip("# "), width) for line in lines]
        elif kind == "text":
            out.append(paragraph(" ".join(lines), width))
        else:
            out.append("")
    return "\n".join(out).strip("\n") + "\n"


def _kind(line: str) -> str:
    starts = {"|": "table", "-": "item", " ": "item", "#": "heading", "": ""}
    return starts.get(line[:1], "text")


def _read_table(lines: Sequence[str], width: int | None) -> str:
    head, marks, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
    right = [mark.endswith(":") for mark in marks]
    first = right.index(False) if False in right else 0
    behind = next((i for i in range(first, len(right)) if right[i]), None)  # the first number after the labels
    return table(head, rows, right, first + 1 if behind is None else behind, width)
