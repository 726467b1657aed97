"""The terminal: what may be written to it, typed lines, Ctrl-C, progress, columns. Knows nothing of models."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from tqdm import tqdm

# C0 (but newline and tab), DEL and C1 could move the cursor, retitle the window or worse; bidirectional overrides
# make text look like what it is not
_UNSAFE = {
    c: 0xFFFD
    for c in [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    if chr(c) not in "\n\t"
}
_UNSAFE.update({c: 0x2400 + c for c in range(0x20) if chr(c) not in "\n\t\r"})  # their visible pictures: ESC is ␛
_UNSAFE[ord("\r")] = None  # type: ignore[assignment]


def setup() -> None:
    """Neither a closed stream nor text that a stream's encoding cannot hold must end the program."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for as long as the program runs
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def clean(text: str) -> str:
    """Text of a model or a file without control codes a terminal would obey."""
    return text.translate(_UNSAFE)


def write(text: str) -> None:
    """Part of a result, at once. A pipe gets it as it is, a terminal cleaned."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A sentence for the reader, not for a program: a warning or an error."""
    print(_fitted(f"pypcd: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Something by the way for the reader, not for a program."""
    print(faint(_fitted(text), sys.stderr), file=sys.stderr, flush=True)


def _fitted(text: str) -> str:
    return "\n".join(wrap(text, width())) if sys.stderr.isatty() else clean(text)


def faint(text: str, stream: TextIO) -> str:
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


def width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def progress(total: int | None, what: str, *, unit: str = " tokens", enabled: bool = True) -> Any:
    """A tqdm bar that shows after two seconds, and only where stderr is a terminal."""
    shown = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        disable=not shown,
        delay=2,
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
    )


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Within, Ctrl-C ends the program with the advice to start it again."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
        note("stopped; the same command goes on where it was")
        raise


class Interrupt:
    """Whether Ctrl-C was pressed: a flag, since an exception could hit anywhere between two steps of a decode."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self) -> bool:
        return self.pressed


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Within, Ctrl-C sets the flag and raises nothing."""
    flag = Interrupt()

    def handler(*_: object) -> None:
        if flag.pressed:  # whoever should look at the flag does not
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        flag.pressed = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class Lines:
    """Messages from the keyboard with line editing, or line by line from a pipe."""

    def __init__(self, commands: Sequence[str] = ()) -> None:
        self.typed = sys.stdin.isatty()
        if self.typed:
            _complete(commands)

    def read(self) -> tuple[str, bool] | None:
        '''The next message, and whether it stood between """; None at the end.'''
        line = self._line(">>> ")
        if line is None or not line.lstrip().startswith('"""'):
            return None if line is None else (line, False)
        body, lines = line.lstrip()[3:], []
        while not body.rstrip().endswith('"""'):
            lines.append(body)
            more = self._line("... ")
            if more is None:  # the end closes it: what was typed counts
                return "\n".join(lines).strip("\n"), True
            body = more
        return "\n".join([*lines, body.rstrip()[:-3]]).strip("\n"), True

    def _line(self, prompt: str) -> str | None:
        if self.typed and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.typed:  # the answers go to a file: keep the prompt out of it
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None


def _complete(commands: Sequence[str]) -> None:
    try:
        import readline  # also gives input() its line editing and history
    except ImportError:  # Windows has neither
        return

    def complete(text: str, state: int) -> str | None:
        if readline.get_begidx() == 0:
            found = [f"/{name} " for name in commands if f"/{name}".startswith(text)] if text else []
        else:
            found = [
                path + "/" * os.path.isdir(path) for path in glob.glob(glob.escape(os.path.expanduser(text)) + "*")
            ]
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")


def cells(text: str) -> int:
    """How many columns text takes: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` cells, broken at spaces where there are any."""
    lines: list[str] = []
    for paragraph in clean(text).expandtabs(4).split("\n"):
        line = ""
        for word in textwrap.TextWrapper()._split(paragraph):
            if line and cells(line) + cells(word.rstrip()) > columns:
                lines.append(line.rstrip())
                line, word = "", word.lstrip()
            while cells(word) > columns and word.strip():  # longer than a line
                cut = next(n for n in range(len(word), 0, -1) if n == 1 or cells(word[:n]) <= columns)
                lines.append(word[:cut])
                word = word[cut:]
            line += word
        lines.append(line.rstrip())
    return lines


def side_by_side(left: tuple[str, str], right: tuple[str, str], columns: int) -> str:
    """Two titled texts in columns, or one under the other where the terminal is narrow."""
    if columns < 60:
        parts = [[f"--- {title} ---", *wrap(text, columns)] for title, text in (left, right)]
        return "\n".join([*parts[0], "", *parts[1]])
    column = (columns - 3) // 2
    first, second = ([*wrap(title, column), "-" * column, *wrap(text, column)] for title, text in (left, right))
    n = max(len(first), len(second))
    first, second = first + [""] * (n - len(first)), second + [""] * (n - len(second))
    return "\n".join(f"{a}{' ' * (column - cells(a))} | {b}".rstrip() for a, b in zip(first, second))
