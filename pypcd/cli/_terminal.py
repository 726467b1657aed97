"""The terminal's streams: results and remarks, progress, Ctrl-C. Knows nothing of models or of the keyboard."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from pypcd.cli._text import Flow, clean, wrap

if TYPE_CHECKING:
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


def note(text: str) -> None:
    """A sentence for the reader, not for a program: a warning or an error."""
    with _above_bars():
        print(_fitted(f"pypcd: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A note for the reader, not for a program."""
    with _above_bars():
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


_drawing = threading.RLock()
_open: list[Bar] = []  # in whose blocks the program is


@contextlib.contextmanager
def _above_bars() -> Iterator[None]:
    """A block that writes whole lines, for which bars make room."""
    with _drawing:
        drawn = [bar.drawn for bar in _open if bar.drawn is not None]
        for one in drawn:
            one.stop()
        yield
        for one in drawn:
            one.start()


class Bar:
    """How far something is, drawn by rich. In its block it shows after a short while, and moves whatever is done meanwhile; only where
    stderr is a terminal that can move its cursor.

    Attributes:
        n: what is done of the total.
        text: what stands before the bar.
    """

    delay = 0.5  # s

    def __init__(
        self, total: float | None, what: str, *, unit: str = " tokens", enabled: bool = True, tells_time: bool = True
    ) -> None:
        self.n, self.text = 0.0, what
        self.drawn: Any = None  # a rich.progress.Progress, once it shows
        self._enabled = enabled and obeys_codes(sys.stderr)
        self._total, self._unit, self._tells_time = total, unit, tells_time
        self._part: tuple[str, float, float] | None = None
        self._timer = threading.Timer(self.delay, self._show)
        self._timer.daemon = True

    def update(self, n: float = 1) -> None:
        self.n += n
        self._change()

    def show_part(self, text: str, n: float, total: float) -> None:
        """Show how far a part of it is in its place, until that is done."""
        self._part = (text, n, total) if n < total else None
        self._change()

    def _change(self) -> None:
        with _drawing:  # the timer's thread may be at it
            if self.drawn is not None:
                self._draw(self.drawn)

    def _draw(self, drawn: Any) -> None:
        counted = f"{self.text}: {self.n:,.0f}{self._unit}" if self.n and not self._total else self.text
        text, n, total = self._part or (counted, self.n, self._total)
        [task] = drawn.tasks
        number = task.id
        if total != task.total:  # a part has a speed of its own
            drawn.remove_task(number)
            number = drawn.add_task("", total=total)
        share = f" {n / total:.0%}" if total else ""
        drawn.update(number, completed=n, description=clean(text) + share)

    def _show(self) -> None:
        from rich import progress as parts  # slow to import, and most bars are never seen
        from rich.console import Console

        shown = [parts.SpinnerColumn("line"), parts.TextColumn("{task.description}", markup=False), parts.BarColumn()]
        shown += [parts.TimeRemainingColumn()] * self._tells_time
        style: Any = "auto" if _has_style(sys.stderr) else None
        with _drawing:
            if self in _open:
                console = Console(file=raw(sys.stderr), color_system=style, force_jupyter=False)
                quiet: Any = {"redirect_stdout": False, "redirect_stderr": False}
                self.drawn = parts.Progress(*shown, console=console, transient=True, **quiet)
                self.drawn.add_task("", total=self._total)
                self._change()
                self.drawn.start()

    def end(self) -> None:
        """Take it away."""
        with _drawing:
            self._timer.cancel()
            if self in _open:
                _open.remove(self)
            if self.drawn is not None:
                with contextlib.suppress(ValueError):  # what it was drawn on is closed
                    self.drawn.stop()

    def __enter__(self) -> Self:
        if self._enabled:
            _open.append(self)
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def write_pieces(pieces: Iterable[str], what: str, *, unseen: bool = False) -> None:
    """A result that comes in pieces: a terminal gets it broken between words, a pipe as it is. Until something is seen of it, a bar says
    what is done.

    Args:
        unseen: it is not written.
    """
    flow = Flow(width()) if sys.stdout.isatty() else None
    begun = False
    with Bar(None, what) as bar:
        try:
            for piece in pieces:
                if unseen or flow is None:
                    bar.update()
                else:
                    bar.end()
                    flow.columns = width()  # the window may have changed
                if not unseen:
                    write(piece if flow is None else flow.feed(piece))
                    begun = True
        finally:
            if begun:
                write(("" if flow is None else flow.end()) + "\n")


def show_reading(n: int, total: int) -> None:
    """How far a model is with a prompt, for its `progress`: in the bar in whose block that happens."""
    if _open:
        _open[-1].show_part("reading the prompt", n, total)


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
