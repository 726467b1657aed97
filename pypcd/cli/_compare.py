"""Two answers as they come: in two columns, by rich, where the terminal is wide and can move its cursor, else one under the other."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pypcd.cli import _terminal
from pypcd.cli._text import Changed, clean

__all__ = ["view"]

_NARROW = 60  # with fewer columns, half of them are too few for a text
_PAUSE = 0.1  # seconds between two drawings


@contextlib.contextmanager
def view(titles: Sequence[str]) -> Iterator[Callable[[int, str], None]]:
    """A block with what shows the next piece of answer 0 or 1."""
    drawn = _terminal.obeys_codes(sys.stdout) and _terminal.width() >= _NARROW
    shown = _Columns(titles) if drawn else _Stacked(titles)
    try:
        yield shown.write
    finally:
        if shown.begun:  # else an error is all there is to show
            shown.end()


class _Stacked:
    """One answer under the other."""

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles, self._printer = titles, _terminal.Printer()
        self.begun = 0  # answers

    def write(self, side: int, piece: str) -> None:
        for title in self._titles[self.begun : side + 1]:
            if self.begun:
                self._printer.end()
            _terminal.write("\n" * bool(self.begun) + f"--- {title} ---\n")
            self.begun += 1
        self._printer.write(piece)

    def end(self) -> None:
        self.write(len(self._titles) - 1, "")
        self._printer.end()


class _Columns:
    """Side by side, drawn over what was drawn before. Of a long answer the end is seen, and at last all of it."""

    def __init__(self, titles: Sequence[str]) -> None:
        from rich.live import Live
        from rich.text import Text

        self._titles, self._texts = titles, [Text(overflow="fold") for _ in titles]
        console = _terminal.console(sys.stdout)
        self._live = Live(self, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.begun, self._drawn, self._is_whole = 0, 0.0, False

    def write(self, side: int, piece: str) -> None:
        for part in re.split(r"(\s+)", clean(piece)):  # the spaces between words stay as they are
            is_marked = isinstance(piece, Changed) and not part.isspace()
            self._texts[side].append(part, style="underline" if is_marked else None)
        self.begun = 1
        self._live.start()
        if time.monotonic() - self._drawn > _PAUSE:
            self._live.refresh()
            self._drawn = time.monotonic()

    def end(self) -> None:
        self._is_whole = True
        self._live.stop()  # which draws it once more

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich import box
        from rich.segment import Segment
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ASCII, show_edge=False, pad_edge=False, expand=True, header_style="")
        for title in self._titles:
            table.add_column(Text(clean(title)), ratio=1)
        table.add_row(*self._texts)
        lines = console.render_lines(table, options.update(height=None), pad=False)
        head, room = 2, max(console.height - 3, 1)
        for line in lines if self._is_whole else [*lines[:head], *lines[head:][-room:]]:
            yield from line
            yield Segment.line()
