"""One line on a terminal: keys, completion, pasted pages and a history that outlives the program, by prompt_toolkit.

Slow to import: only what reads from a terminal does.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from pypcd import files
from pypcd.cli import _terminal
from pypcd.cli._text import sentence

_LONGEST_KEPT = 10_000  # characters; a longer message, such as a pasted page, is forgotten when the program ends


def editor(commands: Sequence[str]) -> PromptSession[str]:
    """What reads lines. `commands`: what a line that begins with "/" can be completed to."""
    return PromptSession(
        history=_history(),
        output=create_output(_terminal.raw(sys.stdout)),
        completer=_Completer(commands),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
    )


def is_stopped(session: PromptSession[str]) -> bool:
    """Whether Ctrl-C came so soon after Enter that the terminal took it for a key, which would wait for the next line."""
    keys = [*get_typeahead(session.input), *session.input.read_keys()]
    others = [press for press in keys if press.key != Keys.ControlC]
    store_typeahead(session.input, others)
    return len(others) < len(keys)


class _Completer(Completer):
    """Completes commands at the beginning of a line, and file names after that."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        line = document.current_line_before_cursor
        first, space, rest = line.partition(" ")
        if not space:
            found = [f"/{name} " for name in self._commands if line and f"/{name}".startswith(line)]
            word = line
        else:
            word = rest.lstrip() if first.startswith("/") else line.rpartition(" ")[2]  # a command takes one file
            paths = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
            found = [path + "/" * os.path.isdir(path) for path in paths]
        yield from (Completion(text, start_position=-len(word)) for text in found)


def _history() -> History:
    """A history in a file that only the user can read; kept for this run only if the file cannot be made."""
    try:
        path = files.state() / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError as error:
        _terminal.note(f"what you type is not kept for the next chat: {sentence(error)}")
        return InMemoryHistory()
    return _ShortHistory(path)


class _ShortHistory(FileHistory):
    """A history in a file, without pasted pages."""

    def store_string(self, string: str) -> None:
        if len(string) <= _LONGEST_KEPT:
            super().store_string(string)
