"""scripts/install.py, with a fake pip in .venv: what it builds when, and what it prints about it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_pip import BUILD, FIRST, PACKAGE, REQUIRED, ROOT, Project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")


# --- what pyproject.toml says ---


def test_the_pin_and_the_extras_are_pyprojects(program: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)
    assert program.build_requirements(text) == project["build-system"]["requires"]
    assert f"llama-cpp-python=={program.pinned_version(text)}" in project["build-system"]["requires"]
    assert program.known_extras(text) == list(project["project"]["optional-dependencies"])
    for broken in ("", 'requires = ["pip"]\n'):
        with pytest.raises(program.Failed, match=r"pyproject\.toml"):
            program.pinned_version(broken)


# --- how far a build is ---


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("[12/345] Building CXX object src/CMakeFiles/llama.dir/llama.cpp.o\n", ("compiling", 12, 345)),
        ("  [  3/130] Linking CXX shared library libllama.so\n", ("compiling", 3, 130)),
        ("  [ 12%] Building C object ggml/src/ggml.c.o\n", ("compiling", 12, 100)),
        ("  Building wheel for llama-cpp-python (pyproject.toml): started\n", ("compiling", 0, 0)),
        ("  Building wheel for llama-cpp-python (pyproject.toml): still running...\n", None),
        ("  Downloading llama_cpp_python-0.3.36.tar.gz (70.2 MB)\n", ("downloading", 0, 0)),
        ("Installing collected packages: numpy, pypcd\n", ("installing", 0, 0)),
        ("  Installing collected packages: scikit-build-core\n", None),  # into the isolated build
        ("  [notice] A new release of pip is available\n", None),
        ("Collecting numpy>=1.24\n", None),
        ("", None),
    ],
)
def test_how_far_it_is_stands_in_the_log(line: str, wanted: tuple[str, int, int] | None, program: Any) -> None:
    assert program.parse(line) == wanted


def test_minutes_are_those_of_the_cores_there_are(program: Any) -> None:
    assert program.minutes_text(10, 2) == "about 5 minutes on 2 cores"
    assert program.minutes_text(2.5, 1) == "about 3 minutes on 1 core"
    assert program.minutes_text(2.5, 64) == "about 1 minute on 64 cores"
    assert program.clock_text(125.9) == "2:05"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_pipe_there_is_a_line_for_what_is_new_and_one_a_minute(program: Any) -> None:
    now, out = [0.0], io.StringIO()
    display = program.Display("1/3 thing", "about 5 minutes", out, lambda: now[0])
    steps: list[tuple[float, Any]] = [
        (1, None),
        (2, program.Progress("compiling")),
        *((3 + i, program.Progress("compiling", i, 200)) for i in range(130)),
        (140, program.Progress("installing")),
    ]
    for now[0], progress in steps:
        display.update(progress)
    now[0] = 141
    display.end("done in")
    assert out.getvalue().splitlines() == [
        "1/3 thing: starting",
        "1/3 thing: compiling, about 5 minutes  0:02",
        "1/3 thing: compiling, about 5 minutes  [59/200]  1:02",
        "1/3 thing: compiling, about 5 minutes  [119/200]  2:02",
        "1/3 thing: installing  2:20",
        "1/3 thing: done in 2:21",
    ]


def test_on_a_terminal_one_line_changes_and_fits(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    now, out = [0.0], Terminal()
    display = program.Display("1/3 thing", "about 5 minutes on 2 cores", out, lambda: now[0])
    for now[0] in (1.0, 1.5, 2.0):
        display.update(program.Progress("compiling", 7, 9))
    display.end("done in")
    shown = out.getvalue()
    assert shown.count("\r") == 4, "what has not changed is not written again"
    assert shown.count("\n") == 1 and shown.endswith("done in 0:02\x1b[K\n")
    assert all(len(line.replace("\x1b[K", "").rstrip("\n")) < 40 for line in shown.split("\r"))
    monkeypatch.setenv("TERM", "dumb")
    plain = Terminal()
    program.Display("1/3 thing", "", plain).end("done in")
    assert "\r" not in plain.getvalue()


# --- running a build ---


class Silent:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.ended: list[str] = []

    def update(self, progress: Any) -> None:
        if progress:
            self.seen.append(progress)

    def end(self, word: str) -> None:
        self.ended.append(word)


def test_all_that_a_build_says_is_in_the_log(program: Any, tmp_path: Path) -> None:
    log, display = tmp_path / "log", Silent()
    code = "import sys; print('[1/2] héllo'); print('to stderr', file=sys.stderr); print('[2/2] end')"
    program.run([sys.executable, "-X", "utf8", "-c", code], display, log, tmp_path)
    text = log.read_text(encoding="utf-8")
    assert text.startswith("$ ") and all(part in text for part in ("héllo", "to stderr", "[2/2] end"))
    assert [p.done for p in display.seen] == [1, 2] and display.ended == []


def test_a_failure_shows_the_errors_the_last_lines_and_where_the_log_is(program: Any, tmp_path: Path) -> None:
    log, display = tmp_path / "log", Silent()
    log.write_text("error: of an earlier step\n")
    code = "print('x.cpp:3: error: no such thing'); [print('line', i) for i in range(100)]; raise SystemExit(3)"
    with pytest.raises(program.Failed) as failed:
        program.run([sys.executable, "-c", code], display, log, tmp_path)
    text = str(failed.value)
    assert "x.cpp:3: error: no such thing" in text and "earlier" not in text
    assert "line 99" in text and "line 85" in text and "line 84" not in text
    assert text.endswith(f"exit code 3; the whole log is {log}")
    assert display.ended == ["FAILED after"]


def test_what_a_stopped_build_started_is_stopped_too(program: Any, tmp_path: Path) -> None:
    """Also processes that ignore Ctrl-C."""
    log, pids = tmp_path / "log", tmp_path / "pids"
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
print("[1/2] going", flush=True)
time.sleep(600)
"""

    class Stopping(Silent):
        def update(self, progress: Any) -> None:
            if progress:
                raise KeyboardInterrupt

    patience, program.PATIENCE = program.PATIENCE, 0.5
    try:
        with pytest.raises(KeyboardInterrupt):
            program.run([sys.executable, "-c", code], Stopping(), log, tmp_path)
    finally:
        program.PATIENCE = patience
    for pid in map(int, pids.read_text().split()):
        assert ended(pid)


def ended(pid: int, seconds: float = 10.0) -> bool:
    """Wait until there is no such process, or only a zombie."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except ProcessLookupError:
            return True
        except FileNotFoundError:  # it ended just now, or this system has no /proc
            pass
        time.sleep(0.05)
    return False


# --- what is built when ---


def test_there_are_three_steps_and_a_second_run_has_none(project: Project) -> None:
    told = project.install("test")
    for line in ("1/3 llama-cpp-python 0.3.36: done in", "2/3 libllama: done in", "3/3 Python package: done in"):
        assert line in told
    assert project.calls() == [FIRST, BUILD, PACKAGE, f"{REQUIRED}[test]"]
    for extras in (["test"], []):
        assert project.install(*extras) == "Nothing to install: .venv is up to date\n"
        assert project.calls() == []


def test_another_extra_builds_nothing_and_those_before_stay(project: Project) -> None:
    project.install("test")
    project.calls()
    assert "2/3 libllama: there already" in project.install("eval", "plot")
    assert project.calls() == [PACKAGE, f"{REQUIRED}[eval,plot,test]"]


@pytest.mark.parametrize(
    "name", ["cpp/a.cpp", "cpp/patches/new.patch", "cmake/pin.py", "pypcd/__init__.py", "CMakeLists.txt"]
)
def test_a_change_builds_libllama_again(name: str, project: Project) -> None:
    project.install()
    project.calls()
    project.change(name, "y")
    assert "1/3 llama-cpp-python 0.3.36: there already" in project.install()
    assert project.calls() == [BUILD, PACKAGE, REQUIRED]


def test_what_is_not_in_the_wheel_builds_nothing(project: Project) -> None:
    project.install()
    project.calls()
    for name in ("pypcd/__pycache__/a.pyc", "pypcd/lib/libllama.so", "tests/test_a.py", "README.md"):
        project.change(name, "y")
    project.install()
    assert project.calls() == []


def test_files_that_change_names_or_ends_are_others(project: Project) -> None:
    state, seen = project.program.State(project.root), set()
    for names in (("ab", "c"), ("a", "bc"), ("abc", "")):
        for name, text in zip(("cpp/a.cpp", "cpp/b.cpp"), names):
            project.change(name, text)
        seen.add(state.sources())
    (project.root / "cpp/b.cpp").rename(project.root / "cpp/d.cpp")
    assert len({*seen, state.sources()}) == 4


def test_another_llama_cpp_python_is_another_ggml(project: Project) -> None:
    """Its version may be the same: a build for a GPU that replaced the first one."""
    project.install()
    project.calls()
    site = project.root / ".venv/lib/python3.11/site-packages"
    (site / "llama_cpp_python-0.3.36.dist-info/RECORD").write_text("other files")
    project.install()
    assert BUILD in project.calls()
    shutil.rmtree(site / "pypcd-0.1.0.dist-info")
    project.install()
    assert BUILD in project.calls()


def test_a_source_of_ones_own_is_always_built(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.install()
    project.calls()
    monkeypatch.setenv("PYPCD_LLAMA_CPP_SOURCE", "/some/llama.cpp")
    project.install()
    assert project.calls() == [BUILD, PACKAGE, REQUIRED]


def test_after_a_failure_everything_is_tried_again(project: Project) -> None:
    fail = project.change("fail")
    with pytest.raises(project.program.Failed, match=r"it does not compile\n.*whole log is .*install\.log"):
        project.install()
    assert project.calls() == [FIRST]
    fail.unlink()
    project.install()
    assert project.calls() == [FIRST, BUILD, PACKAGE, REQUIRED]
    project.change("cpp/a.cpp", "y")
    fail.touch()
    for _ in range(2):
        with pytest.raises(project.program.Failed):
            project.install()
        assert project.calls() == [BUILD]


def test_a_folder_that_was_moved_has_a_new_environment(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its console scripts name the old path."""
    project.install("test")
    old = project.root
    project.root = old.rename(old.with_name("elsewhere"))
    project.calls()
    made = []

    def venv(command: list[Any], *_: Any) -> None:
        if "venv" in command:
            assert not (project.root / ".venv").exists()
            made.append(command[0])
            project.make_venv()
        else:
            run(command, *_)

    run = project.program.run
    monkeypatch.setattr(project.program, "run", venv)
    assert f".venv was made for {old}" in project.install()
    assert made == [sys.executable]
    assert project.calls() == [FIRST, BUILD, PACKAGE, REQUIRED]


def test_a_stopped_environment_is_not_taken_for_a_whole_one(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(project.root / ".venv")

    def cut_off(*_: Any) -> None:
        project.make_venv()
        raise KeyboardInterrupt

    monkeypatch.setattr(project.program, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        project.install()
    assert not (project.root / ".venv").exists()


def test_wrong_words_are_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(project.program.Failed, match="the extra is 'tests'; allowed: eval, hub, .*test"):
        project.install("eval", "tests")
    project.change(".venv/pyvenv.cfg", "version = 3.2.1\n")
    project.install()
    monkeypatch.setenv("PYTHON", "python3")
    with pytest.raises(project.program.Failed, match=r"PYTHON is python3, .* \.venv was made with 3\.2; remove \.venv"):
        project.install()


HEEDING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored where a shell runs these tests in the background
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_and_what_it_started(number: signal.Signals, project: Project) -> None:
    """The real program, in a folder of its own."""
    for name in ("install", "install.py", "backends.py", "machine.py"):
        shutil.copy(ROOT / "scripts" / name, project.root / "scripts" / name)
    project.change("hang")
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDING, project.root / "scripts/install", "test"],
        env={**os.environ, "PYTHON": sys.executable},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  in the background Ctrl-C is ignored
    )
    pid = project.root / "hanging"
    try:
        while not pid.exists() or not pid.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert told.endswith("Stopped; the same command goes on from here\n") and "Traceback" not in told
    assert ended(int(pid.read_text()))
    assert not (project.root / ".venv/pypcd-installed.json").exists()


def test_what_was_noted_may_be_cut_off(project: Project) -> None:
    project.install()
    project.calls()
    state = project.root / ".venv/pypcd-installed.json"
    assert json.loads(state.read_text(encoding="utf-8"))["folder"] == str(project.root)
    state.write_text('{"folder": ')
    project.install()
    assert BUILD in project.calls()
