"""Typed messages, with line editing on a terminal; or line by line from a pipe. Knows nothing of what is done with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pypcd.cli import _terminal

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


class Lines:
    """Messages from the keyboard, or line by line from a pipe.

    Args:
        commands: what a line that begins with "/" can be completed to.

    Attributes:
        stopped: whether Ctrl-C has come since the last line ended.
    """

    def __init__(self, commands: Sequence[str] = ()) -> None:
        self.typed, self.stopped = sys.stdin.isatty(), False
        self._commands = commands
        self._editor: PromptSession[str] | None = None

    def read(self, prompt: str) -> tuple[str, bool] | None:
        '''The next message, and whether it was typed between """; None at the end. A pasted page is one message.'''
        line = self._line(prompt)
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
                return self._edited(prompt) if _terminal.obeys_codes(sys.stdout) else input(prompt)
            except EOFError:
                return None
        if self.typed:  # the answers go to a file: keep the prompt out of it
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def _edited(self, prompt: str) -> str:
        from pypcd.cli import _editor  # slow to import, and of no use to a pipe

        if self._editor is None:
            self._editor = _editor.editor(self._commands)
        text = self._editor.prompt(prompt).strip("\n")  # several lines if they were pasted together
        self.stopped = _editor.is_stopped(self._editor)
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # keys need not be UTF-8
