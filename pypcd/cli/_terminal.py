"""The terminal's streams: results and remarks, progress, Ctrl-C. Knows nothing of models or of the keyboard."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
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
    with _without_bars():
        print(_fitted(f"pypcd: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A note for the reader, not for a program."""
    with _without_bars():
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


_drawing = threading.RLock()
_bars: list[Bar] = []  # that are drawn now
_open: list[Bar] = []  # in whose blocks the program is


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """A block that writes whole lines: bars are taken away, also those of a work that was stopped."""
    with _drawing:
        for bar in tuple(_bars):
            bar.clear()
            bar.is_hidden = bar not in _open
        yield


class Bar:
    """How far something is, drawn by rich. In a block it shows after half a second, and moves whatever is done meanwhile; only where stderr
    is a terminal that can move its cursor.

    Attributes:
        n: what is done of the total.
        text: what stands before the bar.
        is_hidden: until the next update().
    """

    delay, pause = 0.5, 0.1

    def __init__(
        self, total: float | None, what: str, *, unit: str = " tokens", enabled: bool = True, tells_time: bool = True
    ) -> None:
        self.n, self.text, self.is_hidden = 0.0, what, False
        self.disable = not (enabled and obeys_codes(sys.stderr))
        self._total, self._unit, self._tells_time = total, unit, tells_time
        self._part: tuple[str, float, float] | None = None
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._bar: Any = None
        self._ended = threading.Event()

    def update(self, n: float = 1) -> None:
        self.n += n
        self.is_hidden = False
        self._draw()

    def show_part(self, text: str, n: float, total: float) -> None:
        """Show how far a part of it is in its place, until that is done."""
        self._part = (text, n, total) if n < total else None
        self._draw()

    def _draw(self) -> None:
        with _drawing:
            now = time.monotonic()
            if self.disable or self.is_hidden or now - self._begun < self.delay or now - self._drawn < self.pause:
                return
            self._drawn = now
            self._bar = self._bar or self._make()
            counted = f"{self.text}: {self.n:,.0f}{self._unit}" if self.n and not self._total else self.text
            text, n, total = self._part or (counted, self.n, self._total)
            [task] = self._bar.tasks
            if total != task.total:
                self._bar.reset(task.id)
                task.total = total
            self._bar.update(task.id, completed=n, description=clean(text))
            self._bar.start()
            self._bar.refresh()
            if self not in _bars:
                _bars.append(self)

    def _make(self) -> Any:
        from rich import progress as parts  # slow to import, and most bars are never seen
        from rich.text import Text

        class Share(parts.ProgressColumn):
            def render(self, task: parts.Task) -> Text:
                return Text("" if task.total is None else f"{task.percentage:>3.0f}%")

        shown = [parts.SpinnerColumn("line"), parts.TextColumn("{task.description}", markup=False)]
        shown += [parts.BarColumn(), Share(), *([parts.TimeRemainingColumn()] if self._tells_time else [])]
        made = parts.Progress(
            *shown,
            console=console(sys.stderr),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        made.add_task("", total=None)
        return made

    def clear(self) -> None:
        """Take it away, for a line of text; the next update() brings it back."""
        with _drawing:
            self.is_hidden = True
            if self in _bars:
                _bars.remove(self)
                with contextlib.suppress(ValueError):  # what it was drawn on is closed
                    self._bar.stop()

    def end(self) -> None:
        """Take it away for good."""
        self._ended.set()
        self.clear()
        if self in _open:
            _open.remove(self)

    def __enter__(self) -> Self:
        _open.append(self)
        if not self.disable:
            threading.Thread(target=self._move, name="pypcd bar", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _move(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            while not self._ended.wait(0.2):
                self._draw()


class Reading:
    """How far a model is with a prompt, for its `progress`: in the bar in whose block that happens, or in one of its own."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def __call__(self, n: int, total: int) -> None:
        if _open:
            _open[-1].show_part("reading the prompt", n, total)
            return
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
