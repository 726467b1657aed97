"""Text for a terminal: made safe to write, its width, and lines broken between words.

Knows nothing of streams.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

__all__ = ["Changed", "Flow", "cells", "clean", "counted", "sentence", "underlined", "wrap"]

_UNDERLINE, _NO_UNDERLINE = "\x1b[4m", "\x1b[24m"

# C0 (but newline and tab), DEL and C1 could move the cursor, retitle the window or worse; bidirectional overrides
# make text look like what it is not
_UNSAFE = {
    c: 0xFFFD
    for c in [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    if chr(c) not in "\n\t"
}
_UNSAFE.update({c: 0x2400 + c for c in range(0x20) if chr(c) not in "\n\t\r"})  # their visible pictures: ESC is ␛
_UNSAFE[ord("\r")] = None  # type: ignore[assignment]


class Changed(str):
    """A piece of an answer whose token PCD changed."""


def underlined(text: str) -> str:
    """Text with the codes that underline its words; the spaces between them stay as they are."""
    return re.sub(r"\S+", rf"{_UNDERLINE}\g<0>{_NO_UNDERLINE}", text)


def clean(text: str) -> str:
    """Text of a model or a file without control codes a terminal would obey."""
    return text.translate(_UNSAFE)


def cells(text: str) -> int:
    """How many columns text takes: East Asian wide characters take two, combining marks and our own codes none."""
    from rich.cells import cell_len  # slow to import, and most messages go to no terminal

    return cell_len(text.replace(_UNDERLINE, "").replace(_NO_UNDERLINE, ""))


def counted(n: int, what: str) -> str:
    """Such as "1 turn" or "2 turns"."""
    return f"{n} {what}{'s' * (n != 1)}"


def sentence(error: BaseException) -> str:
    """What an error says; of a file that cannot be used its name and why, without the error's number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return "there is not enough memory" if isinstance(error, MemoryError) else str(error)


class Flow:
    """Breaks text that comes in pieces into lines of at most `columns` cells, at spaces and next to wide characters.

    The last word is held back until its end has come, so nothing that was written has to be taken back.

    Args:
        mark: what becomes of the parts of a word that PCD changed, such as underlined.
    """

    def __init__(self, columns: int, mark: Callable[[str], str] = str) -> None:
        self.columns, self._mark = columns, mark
        self._word = ""
        # of the word: its characters, each with what combines with it, and whether one of these is changed
        self._parts: list[tuple[str, bool]] = []
        self._gap = 0  # spaces before that word
        self._column = 0  # where they begin

    def feed(self, text: str) -> str:
        """The next piece, cleaned; returns what can be written now."""
        is_changed = isinstance(text, Changed)
        return "".join(self._next(character, is_changed) for character in clean(text))

    def end(self) -> str:
        """The word held back. The next piece begins a line."""
        rest = self._place()
        self._gap = self._column = 0
        return rest

    def _next(self, character: str, is_changed: bool) -> str:
        if character == "\n":
            return self.end() + "\n"
        if character in " \t":
            done = self._place()
            self._gap += 1 if character == " " else 4 - (self._column + self._gap) % 4
            return done
        before, after = cells(self._word), cells(self._word + character)
        done = ""
        if self._word and after <= before:  # it combines with the character before it
            base, was_changed = self._parts.pop()
            character, is_changed = base + character, was_changed or is_changed
            self._word = self._word[: -len(base)]
        elif self._word:
            wide = after - before == 2 or cells(self._word[0]) == 2  # a line may break before these and after them
            if wide or after > self.columns:
                done = self._place()
        self._word += character
        self._parts.append((character, is_changed))
        return done

    def _place(self) -> str:
        """The word, on the next line if it does not fit on this one."""
        size = cells(self._word)
        if not self._word:
            return ""
        runs = itertools.groupby(self._parts, lambda part: part[1])
        texts = ((is_changed, "".join(text for text, _ in run)) for is_changed, run in runs)
        word = "".join(self._mark(text) if is_changed else text for is_changed, text in texts)
        self._word, self._parts = "", []
        if self._column and self._column + self._gap + size > self.columns:
            self._gap, self._column = 0, size
            return "\n" + word
        gap = max(min(self._gap, self.columns - size), 0)
        self._gap = 0
        self._column += gap + size
        return " " * gap + word


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` cells, broken at spaces where there are any."""
    flow = Flow(columns)
    return (flow.feed(text) + flow.end()).split("\n")
