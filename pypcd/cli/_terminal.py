"""The terminal's streams: results and remarks, progress, Ctrl-C. Knows nothing of models or of the keyboard."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from pypcd.cli._text import Changed, Flow, clean, underlined, wrap


def setup() -> None:
    """Neither a closed stream nor text that a stream's encoding cannot hold must end the program."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  for as long as the program runs
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def write(text: str) -> None:
    """Part of a result, at once. A pipe gets it as it is, a terminal cleaned, and with what PCD changed underlined."""
    if sys.stdout.isatty():
        text = mark(clean(text)) if isinstance(text, Changed) else clean(text)
    _put(text)


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def mark(text: str) -> str:
    """Text of a result that PCD changed: underlined, if stdout is a terminal that can do it."""
    return underlined(text) if _has_style(sys.stdout) else text


class Printer:
    """Writes a result that comes in pieces: a terminal gets it broken between words, a pipe as it is."""

    def __init__(self) -> None:
        self._flow = Flow(width(), mark) if sys.stdout.isatty() else None

    def write(self, piece: str) -> None:
        if self._flow is not None:
            self._flow.columns = width()  # the window may have changed
            piece = self._flow.feed(piece)
        _put(piece)

    def end(self) -> None:
        """What is held back of the last word, and the end of its line."""
        _put(("" if self._flow is None else self._flow.end()) + "\n")


def note(text: str) -> None:
    """A sentence for the reader, not for a program: a warning or an error."""
    print(_fitted(f"pypcd: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A note for the reader, not for a program."""
    print(faint(_fitted(text), sys.stderr), file=sys.stderr, flush=True)


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


def progress(total: int | None, what: str, *, unit: str = " tokens", enabled: bool = True) -> Any:
    """A tqdm bar that shows after two seconds, and only where stderr is a terminal."""
    from tqdm import tqdm  # help and mistakes are answered without it

    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        disable=not (enabled and obeys_codes(sys.stderr)),
        delay=2,
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
    )


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """A block in which Ctrl-C ends the program with the advice to start it again."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
        note("run the same command again to go on")  # and main() says that it was stopped
        raise


class Interrupt:
    """Whether Ctrl-C was pressed: a flag, since an exception could hit anywhere between two steps of a decode."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self) -> bool:
        return self.pressed


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """A block in which Ctrl-C sets the flag and raises nothing."""
    flag = Interrupt()

    def handler(*_: object) -> None:
        if flag.pressed:  # the code that should check the flag does not
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt
        flag.pressed = True

    with _handling(signal.SIGINT, handler) as before:
        yield flag


@contextlib.contextmanager
def ending() -> Iterator[Interrupt]:
    """A block in which Ctrl-C and SIGTERM set a flag; a second Ctrl-C raises."""
    with interruptible() as flag:

        def handler(*_: object) -> None:
            flag.pressed = True

        with _handling(signal.SIGTERM, handler):
            yield flag


@contextlib.contextmanager
def _handling(number: signal.Signals, handler: Callable[..., None]) -> Iterator[Any]:
    """A block in which a signal has another handler; it gets the one from before."""
    before = signal.signal(number, handler)
    try:
        yield before
    finally:
        signal.signal(number, before)
