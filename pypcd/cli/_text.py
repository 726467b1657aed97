"""Text for a terminal: made safe to write, and in lines broken between words.

Knows nothing of streams.
"""

from __future__ import annotations

import re

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


def counted(n: int, what: str) -> str:
    """Such as "1 turn" or "2 turns"."""
    return f"{n} {what}{'s' * (n != 1)}"


def sentence(error: BaseException) -> str:
    """What an error says; of a file that cannot be used its name and why, without the error's number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return "there is not enough memory" if isinstance(error, MemoryError) else str(error)


# a run that no line may break in, white space, or a wide character (of Chinese, Japanese, Korean; an emoji), beside which it may
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6\U0001f300-\U0003fffd"
)
_PARTS = re.compile(rf"[^\s{_WIDE}]+|\s|.")


class Flow:
    """Breaks text that comes in pieces into lines of at most `columns` cells, between words and next to wide characters. A word is
    held back until its end has come, so that nothing written has to be taken back."""

    def __init__(self, columns: int) -> None:
        self.columns, self._word, self._column = columns, "", 0

    def feed(self, text: str) -> str:
        """The next piece, cleaned; returns what can be written now."""
        parts = _PARTS.findall(self._word + clean(text).expandtabs(4))
        self._word = parts.pop() if parts and not parts[-1].isspace() else ""
        return "".join(map(self._placed, parts))

    def end(self) -> str:
        """The word held back. The next piece begins a line."""
        rest, self._word = self._placed(self._word), ""
        self._column = 0
        return rest

    def _placed(self, part: str) -> str:
        from rich.cells import cell_len, chop_cells  # slow to import, and most messages go to no terminal

        size = cell_len(part)
        if part == "\n":
            self._column = 0
        elif self._column + size <= self.columns:
            self._column += size
        elif part.isspace():  # it ends the line
            return ""
        else:
            lines = chop_cells(part, self.columns)
            part, self._column = "\n" * bool(self._column) + "\n".join(lines), cell_len(lines[-1])
        return part


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` cells, broken at spaces where there are any."""
    flow = Flow(columns)
    return [line.rstrip() for line in (flow.feed(text) + flow.end()).split("\n")]
