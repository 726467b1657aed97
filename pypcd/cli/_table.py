"""Tables for a terminal: aligned, folded if they are too wide. Knows nothing of their content."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from pypcd.cli import _terminal, _text

__all__ = ["aligned", "columns", "paragraph", "table"]

_GAP = 2
_NARROWEST = 8  # of a label


def columns() -> int | None:
    """How wide a result on stdout may be; None for a file or a pipe, which has no width."""
    return _terminal.width() if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def paragraph(text: str) -> str:
    """Text for stdout: broken between words where that has a width."""
    return _wrapped(text, columns())


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], n_keys: int, width: int | None
) -> str:
    """Columns side by side. Where they do not fit, the heads are broken at spaces, then the labels after a colon or
    comma; then the table is folded: parts below one another, each with the key columns in front.

    Args:
        right: for each column whether it is aligned to the right.
        n_keys: columns that say what a row is; the last of them is its label.
        width: of the terminal; None: as wide as need be.
    """
    cells = [[_text.clean(cell) for cell in row] for row in rows]
    natural = [max([_text.cells(name), *(_text.cells(row[i]) for row in cells)]) for i, name in enumerate(head)]
    if width is None or _total(natural) <= width:
        return _part(head, cells, right, natural, range(len(head)))
    widths = [
        max([*map(_text.cells, name.split() or [""]), *(_text.cells(row[i]) for row in cells)])
        for i, name in enumerate(head)
    ]
    label = n_keys - 1
    fixed, others = widths[:label], widths[n_keys:]
    room = width - _total([*fixed, max(others, default=0)]) - _GAP
    narrowest = max(_NARROWEST, min(max((_longest(row[label]) for row in cells), default=0), room))

    def folded(label_width: int) -> list[list[int]]:
        keys, parts = _total([*fixed, label_width]), [[0][:0]]
        used = keys
        for i in range(n_keys, len(head)):
            if parts[-1] and used + _GAP + widths[i] > width:
                parts.append([])
                used = keys
            parts[-1].append(i)
            used += _GAP + widths[i]
        return parts

    best = narrowest
    for tried in range(narrowest, widths[label] + 1):  # as wide as it can be without one more part
        if len(folded(tried)) == len(folded(narrowest)) and _fits(folded(tried), [*fixed, tried], widths, width):
            best = tried
    widths[label] = min(best, max(widths[label], narrowest))
    return "\n\n".join(_part(head, cells, right, widths, [*range(n_keys), *part]) for part in folded(widths[label]))


def _fits(parts: Sequence[Sequence[int]], keys: Sequence[int], widths: Sequence[int], width: int) -> bool:
    return all(_total([*keys, *(widths[i] for i in part)]) <= width for part in parts)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _longest(label: str) -> int:
    return max(map(_text.cells, _pieces(label)), default=0)


def _pieces(label: str) -> list[str]:
    """A label in pieces; a line may end after each of them."""
    return re.findall(r"[^\s:,+=]*[\s:,+=]*", label)[:-1]


def _part(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[bool],
    widths: Sequence[int],
    shown: Sequence[int],
) -> str:
    heads = [_broken(head[i], widths[i]) for i in shown]
    n = max(map(len, heads))
    lines = [[*[""] * (n - len(cell)), *cell] for cell in heads]
    blocks = [lines, [["-" * widths[i]] for i in shown]]
    for row in rows:
        cell_lines = [_broken(row[i], widths[i]) for i in shown]
        n = max(map(len, cell_lines))
        blocks.append([[*cell, *[""] * (n - len(cell))] for cell in cell_lines])
    text = []
    for block in blocks:
        for line in zip(*block):
            padded = (
                " " * (widths[i] - _text.cells(cell)) + cell
                if right[i]
                else cell + " " * (widths[i] - _text.cells(cell))
                for i, cell in zip(shown, line)
            )
            text.append((" " * _GAP).join(padded).rstrip())
    return "\n".join(text)


def _broken(text: str, width: int) -> list[str]:
    """A cell's lines of at most `width`."""
    if _text.cells(text) <= width:
        return [text]
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and _text.cells(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        while _text.cells(piece.rstrip()) > width:
            cut = max(1, next((n for n in range(len(piece), 0, -1) if _text.cells(piece[:n]) <= width), 1))
            lines[-1], piece = piece[:cut], piece[cut:]
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines if line.strip()]


def aligned(markdown: str, width: int | None) -> str:
    """Markdown for a terminal: headings without marks, paragraphs and list items wrapped, tables aligned."""
    out: list[str] = []
    for block in re.split(r"\n{2,}", markdown.strip("\n")):
        lines = block.split("\n")
        while lines:
            n = next((i for i, line in enumerate(lines) if _kind(line) != _kind(lines[0])), len(lines))
            run, lines, kind = lines[:n], lines[n:], _kind(lines[0])
            if kind == "table":
                out.append(_read_table(run, width))
            elif kind == "item":
                items = re.split(r"\n(?=- )", "\n".join(run))
                out.append("\n".join(_indented(item, width) for item in items))
            elif kind == "heading":
                out += [_wrapped(line.lstrip("# "), width) for line in run]
            else:
                out.append(_wrapped("\n".join(run) if width is None else " ".join(run), width))
        out.append("")
    return "\n".join(out).rstrip("\n") + "\n"


def _kind(line: str) -> str:
    starts = {"|": "table", "-": "item", " ": "item", "#": "heading"}
    return starts.get(line[:1], "text")


def _wrapped(text: str, width: int | None) -> str:
    return _text.clean(text) if width is None else "\n".join(_text.wrap(text, min(width, 120)))


def _indented(item: str, width: int | None) -> str:
    if width is None:
        return _text.clean(item)
    text = " ".join(line.strip() for line in item.removeprefix("- ").split("\n"))
    return "- " + "\n  ".join(_text.wrap(text, min(width, 120) - 2))


def _read_table(lines: Sequence[str], width: int | None) -> str:
    head, marks, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
    right = [mark.endswith(":") for mark in marks]
    first = right.index(False) if False in right else 0
    behind = next((i for i in range(first, len(right)) if right[i]), None)  # the first number after the labels
    return table(head, rows, right, first + 1 if behind is None else behind, width)
