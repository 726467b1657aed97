"""Text for a terminal: made safe to write, its width, and lines broken between words.

Knows nothing of streams.
"""

from __future__ import annotations

__all__ = ["Flow", "cells", "clean", "sentence", "wrap"]

# C0 (but newline and tab), DEL and C1 could move the cursor, retitle the window or worse; bidirectional overrides
# make text look like what it is not
_UNSAFE = {
    c: 0xFFFD
    for c in [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    if chr(c) not in "\n\t"
}
_UNSAFE.update({c: 0x2400 + c for c in range(0x20) if chr(c) not in "\n\t\r"})  # their visible pictures: ESC is ␛
_UNSAFE[ord("\r")] = None  # type: ignore[assignment]


def clean(text: str) -> str:
    """Text of a model or a file without control codes a terminal would obey."""
    return text.translate(_UNSAFE)


def cells(text: str) -> int:
    """How many columns text takes: East Asian wide characters take two, combining marks none."""
    from wcwidth import wcswidth, wcwidth  # slow to import, and most messages go to no terminal

    width = wcswidth(text)
    return width if width >= 0 else sum(max(wcwidth(c), 0) for c in text)  # below 0: it has control codes


def sentence(error: BaseException) -> str:
    """What an error says; of a file that cannot be used its name and why, without the error's number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return "there is not enough memory" if isinstance(error, MemoryError) else str(error)


class Flow:
    """Breaks text that comes in pieces into lines of at most `columns` cells, at spaces and next to wide characters.

    The last word is held back until its end has come, so nothing that was written has to be taken back.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._word = ""
        self._gap = 0  # spaces before that word
        self._column = 0  # where they begin

    def feed(self, text: str) -> str:
        """The next piece, cleaned; returns what can be written now."""
        return "".join(map(self._next, clean(text)))

    def end(self) -> str:
        """The word held back. The next piece begins a line."""
        rest = self._place()
        self._gap = self._column = 0
        return rest

    def _next(self, character: str) -> str:
        if character == "\n":
            return self.end() + "\n"
        if character in " \t":
            done = self._place()
            self._gap += 1 if character == " " else 4 - (self._column + self._gap) % 4
            return done
        before, after = cells(self._word), cells(self._word + character)
        done = ""
        if self._word and after > before:  # else it combines with the character before it
            wide = after - before == 2 or cells(self._word[0]) == 2  # a line may break before these and after them
            if wide or after > self.columns:
                done = self._place()
        self._word += character
        return done

    def _place(self) -> str:
        """The word, on the next line if it does not fit on this one."""
        word, size = self._word, cells(self._word)
        if not word:
            return ""
        self._word = ""
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
