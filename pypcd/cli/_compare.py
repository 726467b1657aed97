"""Two answers as they come: in two columns if the terminal is wide enough, else one under the other."""

from __future__ import annotations

import abc
import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pypcd.cli import _terminal
from pypcd.cli._text import Flow, cells, wrap

__all__ = ["View", "view"]

_NARROW = 60  # with fewer columns, half of them are too few for a text
_PAUSE = 0.1  # seconds between two drawings


class View(abc.ABC):
    """Shows two titled answers that come in pieces."""

    begun = False

    @abc.abstractmethod
    def write(self, side: int, piece: str) -> None:
        """The next piece of answer 0 or 1."""

    @abc.abstractmethod
    def end(self) -> None:
        """What is held back."""


@contextlib.contextmanager
def view(titles: Sequence[str]) -> Iterator[View]:
    """What shows two answers on this terminal."""
    columns = _terminal.width()
    shown: View
    if columns < _NARROW:
        shown = _Stacked(titles)
    elif _terminal.obeys_codes(sys.stdout):
        shown = _Drawn(titles, columns)
    else:
        shown = _Printed(titles, columns)
    try:
        yield shown
    except BaseException:
        if shown.begun:  # else the error is all there is to show
            shown.end()
        raise
    shown.end()


class _Stacked(View):
    """One answer under the other."""

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles, self._printer = titles, _terminal.Printer()
        self._n = 0  # answers begun

    def write(self, side: int, piece: str) -> None:
        self._begin(side + 1)
        self._printer.write(piece)

    def end(self) -> None:
        self._begin(len(self._titles))
        self._printer.end()

    def _begin(self, n: int) -> None:
        self.begun = True
        for title in self._titles[self._n : n]:
            if self._n:
                self._printer.end()
                _terminal.write("\n")
            _terminal.write(f"--- {title} ---\n")
            self._n += 1


class _Columns(View):
    """Two answers side by side."""

    def __init__(self, titles: Sequence[str], columns: int) -> None:
        self._width = (columns - 3) // 2
        self._flows = [Flow(self._width, _terminal.mark) for _ in titles]
        heads = [wrap(title, self._width) for title in titles]
        self._head = max(map(len, heads)) + 1  # lines above the answers
        self._texts = ["\n".join(h + [""] * (self._head - 1 - len(h)) + ["-" * self._width, ""]) for h in heads]

    def write(self, side: int, piece: str) -> None:
        self.begun = True
        self._texts[side] += self._flows[side].feed(piece)

    def end(self) -> None:
        self._texts = [text + flow.end() for text, flow in zip(self._texts, self._flows)]

    def lines(self) -> list[str]:
        sides = itertools.zip_longest(*(text.split("\n") for text in self._texts), fillvalue="")
        return [f"{a}{' ' * (self._width - cells(a))} | {b}".rstrip() for a, b in sides]


class _Printed(_Columns):
    """Written at the end: into a file, or on a terminal whose cursor cannot be moved."""

    def __init__(self, titles: Sequence[str], columns: int) -> None:
        super().__init__(titles, columns)
        self._bar = _terminal.progress(None, "answering twice", enabled=not sys.stdout.isatty())

    def write(self, side: int, piece: str) -> None:
        super().write(side, piece)
        self._bar.update(1)

    def end(self) -> None:
        super().end()
        self._bar.close()
        print("\n".join(self.lines()), flush=True)


class _Drawn(_Columns):
    """Drawn as they come, over what was drawn before."""

    def __init__(self, titles: Sequence[str], columns: int) -> None:
        from prompt_toolkit.output import create_output  # knows how to move the cursor, on Windows too

        super().__init__(titles, columns)
        self._output: Any = create_output(sys.stdout)
        self._n, self._when = 0, 0.0  # lines on the screen, and since when

    def write(self, side: int, piece: str) -> None:
        super().write(side, piece)
        if time.perf_counter() - self._when > _PAUSE:
            lines = self.lines()  # of a long answer the end: what has left the screen cannot be drawn over
            room = max(shutil.get_terminal_size().lines - 1 - self._head, 1)
            self._draw([*lines[: self._head], *lines[self._head :][-room:]])
            self._when = time.perf_counter()

    def end(self) -> None:
        super().end()
        self._draw(self.lines())

    def _draw(self, lines: Sequence[str]) -> None:
        if self._n:
            self._output.cursor_up(self._n)
        self._output.erase_down()
        self._output.write_raw("".join(line + "\n" for line in lines))  # which keeps the codes of what is underlined
        self._output.flush()
        self._n = len(lines)
