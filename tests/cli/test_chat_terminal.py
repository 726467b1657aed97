"""The chat as a user sees it on a capable terminal: keys, pastes, history, answers."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from rich.cells import cell_len
from tiny_gguf import CHAT_TEMPLATE

from pypcd.cli import _terminal
from pypcd.cli._text import clean, wrap
from pypcd.cli.chat import Chat as ChatCommand

pytest.importorskip("pexpect")
pytest.importorskip("pyte")
from terminal import Terminal

# Python 3.12 warns of forks beside threads, which are llama.cpp's
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")

Chat = Callable[..., contextlib.AbstractContextManager[Terminal]]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> str:
    sizes = {"n_ctx_train": 16384, "n_layer": 2, "n_vocab": 500}  # enough for pieces that begin a word
    return str(tiny(seed=3, chat_template=CHAT_TEMPLATE, **sizes))


@pytest.fixture
def chat(model: str, tmp_path: Path) -> Chat:
    @contextlib.contextmanager
    def start(*args: str, name: str = model, columns: int = 100, lines: int = 40, **env: str) -> Iterator[Terminal]:
        state = {"XDG_STATE_HOME": str(tmp_path / "state")}
        args = ("chat", name, "--threads=1", "--max-tokens=8", *args)
        terminal = Terminal(*args, columns=columns, lines=lines, **{**state, **env})
        try:
            terminal.prompt(1)
            yield terminal
        finally:
            terminal.close()

    return start


def saved(terminal: Terminal, path: Path) -> list[dict[str, str]]:
    terminal.enter(f"/save {path}")
    return json.loads(path.read_text(encoding="utf-8"))["messages"]


# -- typing ----------------------------------------------------------------------------------------------------------


def test_a_pasted_page_is_one_message(chat: Chat, tmp_path: Path) -> None:
    page = "first line\n\n  /second line\nthe last"
    with chat() as terminal:
        terminal.paste(page)
        terminal.wait(lambda t: "the last" in t.text())
        assert "8 tokens" not in terminal.text()  # nothing is sent before Enter
        terminal.enter("!")
        assert terminal.text().count("8 tokens") == 1
        terminal.paste("/usr/share is a folder\nand no command\n")
        terminal.wait(lambda t: "and no command" in t.text())
        terminal.enter("")
        messages = saved(terminal, tmp_path / "talk.json")
        assert [m["content"] for m in messages[::2]] == [page + "!", "/usr/share is a folder\nand no command"]
        assert terminal.leave() == 0


def test_history_goes_on_in_the_next_run(chat: Chat, tmp_path: Path) -> None:
    up, talk = "\x1b[A", tmp_path / "talk.json"
    with chat() as terminal:
        terminal.enter("remember me")
        terminal.paste("a page\nof two lines")
        terminal.enter("")
        terminal.paste("long " * 4000)
        terminal.wait(lambda t: "long" in t.text())
        terminal.enter("")
        assert terminal.leave() == 0
    file = tmp_path / "state/pypcd/chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert "remember me" in file.read_text() and "long" not in file.read_text()
    with chat() as terminal:
        terminal.send(up)
        terminal.wait(lambda t: "of two lines" in t.text())
        terminal.send(up + up)  # within the page, then before it
        terminal.wait(lambda t: "remember me" in t.text())
        terminal.enter("")
        assert saved(terminal, talk)[0]["content"] == "remember me"
        assert terminal.leave() == 0


def test_history_that_cannot_be_written_is_said_and_does_not_matter(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with chat(XDG_STATE_HOME=str(tmp_path / "file")) as terminal:
        assert "what you type is not kept for the next chat" in terminal.text()
        terminal.enter("hello")
        assert "8 tokens" in terminal.text() and terminal.leave() == 0


def test_lines_from_a_pipe_leave_no_history(model: str, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "PYPCD_AMX": "0"}
    command = [sys.executable, "-m", "pypcd", "chat", model, "--threads=1", "--max-tokens=2"]
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, env=env, timeout=60, check=True)
    assert "2 tokens" in done.stderr and not list(tmp_path.iterdir())


def test_tab_completes_commands_and_files(chat: Chat, tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("words")
    with chat() as terminal:
        terminal.send("/fi\t")
        terminal.wait(lambda t: t.text().rstrip().endswith(">>> /file"))
        terminal.send(str(tmp_path / "my") + "\t")
        terminal.wait(lambda t: "notes.txt" in t.text().replace("\n", ""))
        terminal.enter("")
        assert "in front of your next message" in " ".join(terminal.text().split())


def test_ctrl_c_at_the_prompt_forgets_the_line_and_stays(chat: Chat, tmp_path: Path) -> None:
    with chat() as terminal:
        terminal.send("half a line")
        terminal.wait(lambda t: "half a line" in t.text())
        terminal.send("\x03")
        terminal.prompt(2)
        assert "Ctrl-D or /exit leaves" in terminal.text()
        terminal.enter("hello")
        assert saved(terminal, tmp_path / "talk.json")[0]["content"] == "hello"
        assert terminal.leave() == 0


# -- the setting in force --------------------------------------------------------------------------------------------


def test_the_prompt_says_what_is_in_force_and_on_means_the_recommended_preset(chat: Chat) -> None:
    with chat() as terminal:
        for command, name in (
            ("hello", ""),
            ("/pcd unsure", "unsure"),
            ("/pcd off", ""),
            ("/pcd on", "unsure"),
            ("/pcd paper", "paper"),
            ("/pcd paper:beta=1", r"paper\W+beta=1.0\W?"),
            ("/pcd paper:gamma=9", r"paper\W+gamma=9\W?"),
            ("/pcd paper:beta=1:gamma=9:window=64", "custom"),  # too long for a prompt
            ("/pcd window:relative_top=0.1", "window:relative_top=0.1"),
            ("/pcd on", "unsure"),
        ):
            terminal.enter(command)
            assert re.fullmatch(f"{name} >>>".strip(), terminal.text().rstrip().split("\n")[-1])


# -- answers ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_has_come_with_the_word_it_stopped_in(chat: Chat, tmp_path: Path) -> None:
    with chat("--max-tokens=0", columns=40) as terminal:
        terminal.send("hello\r")
        terminal.wait(lambda t: len(t.text().partition(">>> hello")[2].split()) > 5)
        terminal.send("\x03")
        terminal.prompt(2)
        assert "stopped" in terminal.text()
        rows = answer_rows(terminal, "hello")
        answer = clean(saved(terminal, tmp_path / "talk.json")[1]["content"])
    shown = "".join("".join(rows).split()).replace("^C", "")  # which the terminal itself writes
    assert shown == "".join(answer.split())


def test_ctrl_c_directly_after_enter_stops_that_answer(chat: Chat) -> None:
    with chat("--max-tokens=0", "--n-ctx=16384") as terminal:
        for n in range(2, 5):
            terminal.send("hello\r\x03")
            terminal.prompt(n)
        assert "cut at" not in terminal.text() and "the context is full" not in terminal.text()
        assert terminal.text().count("stopped") == 3 and "Ctrl-D or /exit leaves" not in terminal.text()
        terminal.enter("/set max_tokens 8")
        terminal.enter("/regen")
        assert "8 tokens" in terminal.text()


def test_a_files_name_cannot_drive_the_terminal_through_an_error() -> None:
    terminal = Terminal("info", "a\x1b]0;evil\x07\x1b[7mb.gguf")
    while terminal.read():
        pass
    assert "there is no model file a\u241b]0;evil\u2407\u241b[7mb.gguf" in terminal.text().replace("\n", "")
    assert terminal.screen.title == "" and "\x1b" not in terminal.raw


def test_a_terminal_that_cannot_move_its_cursor_has_the_same_chat(chat: Chat, tmp_path: Path) -> None:
    with chat("--max-tokens=0", "--n-ctx=16384", columns=40, TERM="dumb") as terminal:
        terminal.send('"""two\r')
        terminal.wait(lambda t: t.text().rstrip().endswith("..."))
        terminal.send('lines"""\r')
        terminal.wait(lambda t: len(t.text().partition('lines"""')[2].split()) > 5)
        terminal.send("\x03")
        terminal.prompt(2)
        question, answer = saved(terminal, tmp_path / "talk.json")
        assert question["content"] == "two\nlines" and len(answer["content"]) > 5
        terminal.enter("/set max_tokens 8")
        terminal.enter("/compare")
        unsure, off = (terminal.text().index(f"--- PCD {name} ---") for name in ("unsure", "off"))
        assert unsure < off
        n = terminal.text().count(">>>")
        terminal.send("\x03")
        terminal.prompt(n + 1)
        assert "Ctrl-D or /exit leaves" in terminal.text() and terminal.leave() == 0


class Seen(io.StringIO):
    """A terminal as stderr, and what it has shown in its first line, one state after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pyte

        super().__init__()
        self.screen = pyte.Screen(100, 9)
        self._stream, self._n = pyte.Stream(self.screen), 0
        self.states: list[str] = []
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", self)

    def isatty(self) -> bool:
        return True

    def look(self) -> str:
        """The state now."""
        text, self._n = self.getvalue()[self._n :], len(self.getvalue())
        for part in re.split(r"(?=\r)", text.replace("\n", "\r\n")):
            self._stream.feed(part)
            line = self.screen.display[0].rstrip()
            if line not in self.states[-1:]:
                self.states.append(line)
        return self.states[-1]

    def wait(self, condition: Callable[[str], Any]) -> None:
        end = time.monotonic() + 60
        while not condition(self.look()):
            assert time.monotonic() < end, self.states
            time.sleep(0.05)


def test_the_prompt_is_a_part_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, reading = Seen(monkeypatch), _terminal.show_reading
    with _terminal.Bar(9, "greedy") as bar:
        seen.wait(lambda line: "greedy" in line)
        reading(512, 1024)
        seen.wait(lambda line: "reading the prompt" in line and " 50%" in line)
        reading(1024, 1024)
        bar.update(3)
        seen.wait(lambda line: "greedy" in line and " 33%" in line)
    assert seen.look() == ""


def test_something_moves_while_nothing_comes_and_a_line_that_is_said_stands_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen(monkeypatch)
    assert _terminal.Bar.delay < 1
    with _terminal.Bar(None, "answering"):
        seen.wait(lambda _: len({line for line in seen.states if "answering" in line and "%" not in line}) > 3)
        _terminal.say("said")
        seen.wait(lambda line: line == "said" and "answering" in seen.screen.display[1])
    assert seen.look() == "said" and not seen.screen.display[1].strip()


def test_a_chat_moves_until_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    def answer(stopped: object) -> Iterator[str]:
        seen.wait(lambda line: "answering" in line)
        yield "hello"
        assert seen.look() == ""
        time.sleep(1.0)
        assert seen.look() == ""

    ChatCommand(types.SimpleNamespace(answer=None)).answer(answer)  # type: ignore[arg-type]


# -- lines ------------------------------------------------------------------------------------------------------------


def answer_rows(terminal: Terminal, question: str) -> list[str]:
    """The lines between a question and the figures after its answer."""
    lines = terminal.text().split("\n")
    first = next(i for i, line in enumerate(lines) if line.endswith(question)) + 1
    return lines[first : next(i for i, line in enumerate(lines) if i > first and " tok/s" in line)]


def test_answers_wrap_between_words(chat: Chat, tmp_path: Path) -> None:
    columns = 40
    with chat("--max-tokens=300", "--pcd=cautious", columns=columns) as terminal:
        terminal.enter("hello")
        rows = answer_rows(terminal, "hello")
        answer = clean(saved(terminal, tmp_path / "talk.json")[1]["content"])
    assert "".join("".join(rows).split()) == "".join(answer.split())  # nothing is lost on the way
    words = answer.split()
    assert max(map(cell_len, words)) <= columns and len(words) > 40  # so none of them needs to be cut
    assert [word for row in rows for word in row.split()] == words
    full = [row for row, below in itertools.pairwise(rows) if below and cell_len(f"{row} {below.split()[0]}") > columns]
    assert len(full) > 3  # the rows that end where the next word would not fit


def test_words_stay_whole_and_wide_characters_fill_the_line() -> None:
    assert wrap("aaa bbb ccc", 7) == ["aaa bbb", "ccc"]
    assert wrap("aaa bbb ccc", 6) == ["aaa", "bbb", "ccc"]
    assert wrap("  aaa\n\nbbb ", 6) == ["  aaa", "", "bbb"]
    assert wrap("漢字漢字漢字", 5) == ["漢字", "漢字", "漢字"]
    assert wrap("ab漢字", 4) == ["ab漢", "字"]
    assert wrap("abcdefgh ij", 4) == ["abcd", "efgh", "ij"]
