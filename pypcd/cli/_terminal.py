"""The terminal's streams: results and remarks, progress, Ctrl-C. Knows nothing of models or of the keyboard."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from pypcd.cli._text import Flow, clean, wrap

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Self


class _Cleaned:
    """A terminal's stream on which no text has control codes, whoever prints it: names of files, what a model or a client wrote, errors,
    help. What has codes of our own is written to `raw`."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        return self.raw.write(clean(text))

    def writelines(self, lines: Any) -> None:
        self.raw.writelines(map(clean, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: Any) -> TextIO:
    """The stream that obeys codes, for text that was cleaned and then got some of our own."""
    return stream.raw if isinstance(stream, _Cleaned) else stream


def setup() -> None:
    """No text that is printed can drive the terminal, and neither a closed stream nor text that a stream's encoding cannot hold ends the
    program."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for as long as the program runs
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    for name in ("stdout", "stderr"):
        stream = raw(getattr(sys, name))
        setattr(sys, name, _Cleaned(stream) if stream.isatty() else stream)


def write(text: str) -> None:
    """Part of a result, at once. A pipe gets it as it is, a terminal cleaned."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Printer:
    """Writes a result that comes in pieces: a terminal gets it broken between words, a pipe as it is."""

    def __init__(self) -> None:
        self._flow = Flow(width()) if sys.stdout.isatty() else None

    def write(self, piece: str) -> None:
        if self._flow is not None:
            self._flow.columns = width()  # the window may have changed
            piece = self._flow.feed(piece)
        write(piece)

    def end(self) -> None:
        """What is held back of the last word, and the end of its line."""
        write(("" if self._flow is None else self._flow.end()) + "\n")


def note(text: str) -> None:
    """A sentence for the reader, not for a program: a warning or an error."""
    _clear_bars()
    print(_fitted(f"pypcd: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A note for the reader, not for a program."""
    _clear_bars()
    print(faint(_fitted(text), sys.stderr), file=raw(sys.stderr), flush=True)


def _fitted(text: str) -> str:
    return "\n".join(wrap(text, width())) if sys.stderr.isatty() else clean(text)


def faint(text: str, stream: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[0m" if _has_style(stream) else text


def _has_style(stream: TextIO) -> bool:
    return obeys_codes(stream) and not os.environ.get("NO_COLOR")


def obeys_codes(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def console(stream: TextIO) -> Console:
    """What draws on a stream: rich, which finds no markup in a text, and uses no colours where none are wanted."""
    from rich.console import Console

    style: Any = "auto" if _has_style(stream) else None
    return Console(
        file=raw(stream), color_system=style, markup=False, emoji=False, highlight=False, force_jupyter=False
    )


_bars: list[Bar] = []  # that are drawn now


def _clear_bars() -> None:
    """Take bars away for a line of text, also those of a work that was stopped."""
    for bar in tuple(_bars):
        bar.clear()


class Bar:
    """How far something is, drawn by rich. It shows after two seconds, and only where stderr is a terminal that can move its cursor.

    Attributes:
        n: what is done of the total.
        text: what stands before the bar.
    """

    delay, pause = 2.0, 0.1

    def __init__(
        self, total: float | None, what: str, *, unit: str = " tokens", enabled: bool = True, tells_time: bool = True
    ) -> None:
        self.n, self.text = 0.0, what
        self.disable = not (enabled and obeys_codes(sys.stderr))
        self._total, self._unit, self._tells_time = total, unit, tells_time
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._bar: Any = None

    def update(self, n: float = 1) -> None:
        self.n += n
        now = time.monotonic()
        if self.disable or now - self._begun < self.delay or now - self._drawn < self.pause:
            return
        self._drawn = now
        if self._bar is None:
            self._bar = self._make()
        text = self.text if self._total else f"{self.text}: {self.n:,.0f}{self._unit}"
        self._bar.update(0, completed=self.n, description=clean(text))
        self._bar.start()
        self._bar.refresh()
        if self not in _bars:
            _bars.append(self)

    def _make(self) -> Any:
        from rich import progress as parts  # slow to import, and most bars are never seen

        shown = [
            parts.TextColumn("{task.description}", markup=False),
            parts.BarColumn(),
            parts.TaskProgressColumn("{task.percentage:>3.0f}%"),
        ]
        shown += [parts.TimeRemainingColumn()] if self._tells_time and self._total else []
        made = parts.Progress(
            *shown,
            console=console(sys.stderr),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        made.add_task("", total=self._total)
        return made

    def clear(self) -> None:
        """Take it away, for a line of text; the next update() brings it back."""
        if self in _bars:
            _bars.remove(self)
            with contextlib.suppress(ValueError):  # what it was drawn on is closed
                self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class Reading:
    """A bar for each prompt that a model reads: its `progress`."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def __call__(self, n: int, total: int) -> None:
        if self._bar is None or n <= self._bar.n:  # of a prompt that was stopped
            self.clear()
            self._bar = Bar(total, "reading the prompt")
        bar = self._bar
        bar.update(n - bar.n)
        if n >= total:
            self.clear()

    def clear(self) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._bar = None


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """A block in which Ctrl-C ends the program with the advice to start it again."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
        note("run the same command again to go on")  # and main() says that it was stopped
        raise


@contextlib.contextmanager
def interruptible(*others: signal.Signals) -> Iterator[Callable[[], bool]]:
    """A block in which Ctrl-C, like other signals, raises nothing; with what says whether one has come: an exception could hit anywhere
    between two steps of a decode. Another Ctrl-C raises, since the code that should ask does not."""
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        if came and number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, *others)}
    try:
        yield lambda: bool(came)
    finally:
        for number, former in before.items():
            signal.signal(number, former)
