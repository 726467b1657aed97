"""Tables and Markdown for a terminal, drawn by rich. Knows nothing of their content."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pypcd.cli import _terminal, _text

if TYPE_CHECKING:
    from rich.console import Console


_NARROWEST = 24  # of a column that is folded: a figure with its interval is not


def columns() -> int | None:
    """How wide a result on stdout may be; None for a file or a pipe, which has no width."""
    return _terminal.width() if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def paragraph(text: str, width: int | None = None) -> str:
    """Text for stdout: broken between words where that has a width."""
    width = width or columns()
    return _text.clean(text) if width is None else "\n".join(_text.wrap(text, min(width, 120)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int | None) -> str:
    """Columns side by side, with the words of a head on several lines if its cells are narrower. If the columns do not fit, the widest is
    folded; if it would be too narrow then, each row is a list of its cells.

    Args:
        right: for each column whether it is aligned to the right.
        width: of the terminal; None: as wide as need be.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    head, *rows = ([_text.clean(cell) for cell in row] for row in (head, *rows))
    console = _console(width)
    made = Table(
        box=box.Box("    \n    \n -  \n" + "    \n" * 5), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    widths = [max(map(cell_len, (*name.split(), *cells))) for name, *cells in zip(head, *rows)]
    excess = sum(widths) + 2 * (len(widths) - 1) - console.width
    widest = widths.index(max(widths))
    if excess <= max(widths[widest] - _NARROWEST, 0):
        widths[widest] -= max(excess, 0)
        for name, is_right, n in zip(head, right, widths):
            made.add_column(Text(name), justify="right" if is_right else "left", width=n, overflow="fold")
        for row in rows:
            made.add_row(*map(Text, row))
        return _shown(console, made)
    lists = []
    for row in rows:
        made = Table.grid(padding=(0, 2, 0, 0))
        for name, cell in zip(head, row):
            if cell:
                made.add_row(Text(name), Text(cell, overflow="fold"))
        lists.append(_shown(console, made))
    return "\n\n".join(lists)


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
    return table(head, rows, [mark.endswith(":") for mark in marks], width)
