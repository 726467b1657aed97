"""A terminal for tests: the command runs on a pseudo-terminal, and pyte keeps the screen that a user would see."""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pexpect
import pyte

TIMEOUT = 60  # for one expectation, on a machine that is busy
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"


class Terminal:
    """`pypcd ARGS` in a window of the given columns and lines."""

    def __init__(self, *args: str, columns: int = 100, lines: int = 40, **env: str) -> None:
        self.columns = columns
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=0.5)
        self.stream = pyte.Stream(self.screen)
        self.raw = ""
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.child = pexpect.spawn(
            sys.executable, ["-m", "pypcd", *args], dimensions=(lines, columns), encoding="utf-8", codec_errors="replace",
            env={**clean, "TERM": "xterm-256color", "PYTHONUTF8": "1", "GGML_NO_BACKTRACE": "1", **env}, timeout=TIMEOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore Ctrl-C
        )  # fmt: skip
        attributes = termios.tcgetattr(self.child.fileno())
        attributes[3] |= termios.NOFLSH  # else Ctrl-C drops what was written and not yet read here
        termios.tcsetattr(self.child.fileno(), termios.TCSANOW, attributes)

    def close(self) -> None:
        try:
            self.child.close(force=True)
        except pexpect.ExceptionPexpect:  # it is killed, which may take a busy machine longer than pexpect waits
            self.child.wait()

    def text(self) -> str:
        """All lines so far, including those scrolled off the screen."""
        above = ["".join(row[x].data for x in range(self.columns)) for row in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display])

    def read(self, seconds: float = 0.2) -> bool:
        """Put on the screen what the command writes within some seconds. False: it has ended."""
        try:
            text = self.child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += text
        if "\x1b[6n" in text:  # prompt_toolkit asks where the cursor is
            self.child.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
        self.stream.feed(text)
        return True

    def wait(self, condition: Callable[[Terminal], Any]) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + TIMEOUT
        while not condition(self):
            assert self.read() or condition(self), f"it ended:\n{self.text()}"
            assert time.monotonic() < end, f"waited in vain:\n{self.text()}"

    def prompt(self, n: int, name: str = "") -> None:
        """Wait for the n-th prompt, with nothing typed after it."""
        self.wait(lambda t: t.text().count(">>>") >= n and t.text().rstrip().endswith(f"{name} >>>".strip()))

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def enter(self, text: str) -> None:
        """Type a line at the prompt, and wait for its answer and the next prompt."""
        n = self.text().count(">>>")
        self.send(text + "\r")
        self.prompt(n + 1)

    def paste(self, text: str) -> None:
        """Paste text as a terminal with bracketed paste does."""
        self.send(PASTE_BEGIN + text.replace("\n", "\r") + PASTE_END)

    def leave(self) -> int:
        """Press Ctrl-D; returns the exit status."""
        self.send("\x04")
        while self.read():
            pass
        self.child.close()
        assert self.child.exitstatus is not None
        return self.child.exitstatus
