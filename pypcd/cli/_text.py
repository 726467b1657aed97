"""Text for a terminal: made safe to write, and in lines broken between words.

Knows nothing of streams.
"""

from __future__ import annotations

import textwrap

__all__ = ["clean", "counted", "sentence", "wrap"]

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


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` characters, broken at spaces where there are any."""
    lines = clean(text).split("\n")
    return [part for line in lines for part in textwrap.wrap(line, columns, break_on_hyphens=False) or [""]]
