"""scripts/install.py, with a fake pip in .venv: what it builds when, and what it prints about it."""

from __future__ import annotations

import importlib.util
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("install_program", ROOT / "scripts/install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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

PIP = """
import os, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
if "_amx_probe.py" in sys.argv[-2]:
    with open(root / "probes", "a") as probes:
        print(*(a.replace(str(root), "ROOT") for a in sys.argv[1:]), file=probes)
    found = (root / "amx").read_text().split("\\n")
    (root / "amx").write_text("\\n".join(found[1:] or found))  # the next probe finds the next one, the last one stays
    if found[0] == "crash":
        os.kill(os.getpid(), 4)
    sys.exit(print(found[0]))
with open(root / "defines", "a") as defines:
    if "cache" not in sys.argv:
        print(os.environ["SKBUILD_CMAKE_DEFINE"].replace(str(root), "ROOT"), file=defines)
if (root / "hang").exists():
    import time
    (root / "hanging").write_text(str(os.getpid()))
    time.sleep(600)
arguments = sys.argv[sys.argv.index("--verbose") + 1 :]
with open(root / "calls", "a") as calls:
    print(*(a.replace(str(root), "ROOT") for a in arguments), file=calls)
if (root / "fail").exists():
    sys.exit("error: it does not compile")

def package(name):
    folder = root / ".venv/lib/python3.11/site-packages" / name
    folder.mkdir(parents=True, exist_ok=True)
    # as a build has them, which is never the same twice
    (folder / "RECORD").write_text(f"files of {name}, {os.urandom(8)}")

if arguments[0] == "cache":
    sys.exit("" if (root / "no cache").exists() else 0)
if arguments[0] == "wheel":
    folder = Path(arguments[arguments.index("--wheel-dir") + 1])
    folder.mkdir(parents=True)
    (folder / "pypcd-0.1.0-py3-none-any.whl").write_text("")
elif "--force-reinstall" in arguments and arguments[-1].endswith(".whl"):
    package("pypcd-0.1.0.dist-info")
elif "setuptools" in arguments[-1] or "--force-reinstall" in arguments:
    package("llama_cpp_python-0.3.36.dist-info")
    lib = root / ".venv/lib/python3.11/site-packages/llama_cpp/lib"
    lib.mkdir(parents=True, exist_ok=True)
    for name in ("libggml.so", "libggml-base.so", "libggml-cpu.so"):
        (lib / name).write_text("")
"""

PIN = "scikit-build-core>=0.11 llama-cpp-python==0.3.36 pip setuptools>=70.1"
FIRST = f"install {PIN}"
BUILD = "wheel --no-deps --no-build-isolation --wheel-dir ROOT/.cache/wheel ROOT"
PACKAGE = "install --force-reinstall --no-deps ROOT/.cache/wheel/pypcd-0.1.0-py3-none-any.whl"
AGAIN = ["cache remove llama_cpp_python-0.3.36-*", "install --force-reinstall --no-deps llama-cpp-python==0.3.36"]
REQUIRED = "install --no-build-isolation ROOT/.cache/wheel/pypcd-0.1.0-py3-none-any.whl"


class Project:
    """A project folder with a .venv whose Python records the arguments of pip."""

    def __init__(self, root: Path, program: Any) -> None:
        self.root, self.program = root, program
        for name in ("cpp/a.cpp", "cmake/pin.py", "pypcd/__init__.py", "CMakeLists.txt", "scripts/install.py"):
            self.change(name)
        self.change("pyproject.toml", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        self.cpu("an old one")
        self.amx("right")
        self.make_venv()

    def cpu(self, flags: str) -> None:
        self.program.CPUINFO = self.change("cpuinfo", f"flags : fpu {flags} sse\n")

    def amx(self, *found: str) -> None:
        """What each probe finds, the last one from then on: "right", "crash" and so on."""
        self.change("amx", "\n".join(found))

    def probes(self) -> list[str]:
        return self._lines("probes")

    def make_venv(self) -> None:
        self.change(".venv/pyvenv.cfg", f"version = {sys.version.split()[0]}\n")
        self.change(".venv/pip.py", PIP)
        python = self.change(".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "${{0%/*}}/../pip.py" "$@"\n')
        python.chmod(0o755)

    def change(self, name: str, text: str = "x") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def install(self, *extras: str) -> str:
        out = io.StringIO()
        self.program.install(self.root, extras, out)
        return out.getvalue()

    def calls(self) -> list[str]:
        """The arguments of pip since the last call."""
        return self._lines("calls")

    def _lines(self, name: str) -> list[str]:
        path = self.root / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        path.unlink()
        return lines


@pytest.fixture
def project(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in ("PYTHON", "PYPCD_LLAMA_CPP_SOURCE", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(program, "CPUINFO", program.CPUINFO)
    return Project(tmp_path / "père noël" / "pypcd", program)


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


# --- AMX ---


def test_builds_of_llama_cpp_python_are_told_of_the_cure(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable that scikit-build-core splits at semicolons: a path may have spaces."""
    project.install()
    cure = "CMAKE_PROJECT_ggml_INCLUDE=ROOT/cmake/amx.cmake"
    assert set(project._lines("defines")) == {cure}
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", "GGML_CUDA=ON;A=b c")
    project.change("cpp/a.cpp", "y")
    project.install()
    assert set(project._lines("defines")) == {f"GGML_CUDA=ON;A=b c;{cure}"}


def test_without_amx_in_the_cpu_nothing_is_probed(project: Project, tmp_path: Path) -> None:
    project.amx("crash")
    project.install()
    project.program.CPUINFO = tmp_path / "no such file"
    project.change("cpp/a.cpp", "y")
    project.install()
    assert project.probes() == []


def test_a_llama_cpp_python_that_works_is_probed_once(project: Project) -> None:
    project.cpu("amx_tile amx_int8")
    for found in ("right", "none"):
        project.amx(found)
        project.install()
        assert project.calls() == [FIRST, BUILD, PACKAGE, REQUIRED]
        assert len(probes := project.probes()) == 1
        site = "ROOT/.venv/lib/python3.11/site-packages"
        assert probes == [f"-I -S ROOT/pypcd/_engine/_amx_probe.py {site}/llama_cpp/lib"]
        project.change("cpp/a.cpp", found)
        project.install()
        assert project.probes() == [] and project.calls() == [BUILD, PACKAGE, REQUIRED]
        shutil.rmtree(project.root / ".venv")
        project.make_venv()


@pytest.mark.parametrize(("found", "told"), [("crash", "crashes"), ("wrong: Q4_0, 1 tokens", "computes wrongly")])
def test_one_that_crashes_is_taken_out_of_pips_cache_and_built_again_once(
    found: str, told: str, project: Project
) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx(found, "right")
    said = project.install()
    title = "1/3 llama-cpp-python 0.3.36"
    assert f"{title}: {told} with this CPU's AMX, so it is taken out of pip's cache and built anew\n" in said
    assert said.count(f"{title}: done in") == 2 and "still" not in said
    assert project.calls() == [FIRST, *AGAIN, BUILD, PACKAGE, REQUIRED] and len(project.probes()) == 2
    assert project.install() == "Nothing to install: .venv is up to date\n" and project.probes() == []


def test_one_from_before_there_was_a_probe_is_probed_too(project: Project) -> None:
    project.install()
    project.calls()
    state = project.root / ".venv/pypcd-installed.json"
    noted = json.loads(state.read_text(encoding="utf-8"))
    assert noted.pop("probed") == noted["llama-cpp-python"]
    state.write_text(json.dumps(noted), encoding="utf-8")
    project.cpu("amx_tile amx_int8")
    project.amx("crash", "right")
    project.change("scripts/install.py", "new")
    assert "1/3 llama-cpp-python 0.3.36: there already" in project.install("eval")
    assert project.calls() == [*AGAIN, BUILD, PACKAGE, f"{REQUIRED}[eval]"]


def test_libllama_is_built_for_the_ggml_that_was_built_again(project: Project) -> None:
    """Also where nothing else has changed."""
    project.install()
    project.calls()
    state = project.root / ".venv/pypcd-installed.json"
    noted = json.loads(state.read_text(encoding="utf-8"))
    state.write_text(json.dumps({**noted, "probed": ""}), encoding="utf-8")
    project.cpu("amx_int8")
    project.amx("crash", "right")
    project.install("eval")
    assert project.calls() == [*AGAIN, BUILD, PACKAGE, f"{REQUIRED}[eval]"]


def test_where_the_cure_does_not_help_it_is_tried_once(project: Project) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx("crash")
    said = project.install()
    assert "1/3 llama-cpp-python 0.3.36: still crashes with AMX; models will not use it\n" in said
    project.calls()
    project.change("cpp/a.cpp", "y")
    project.install()
    assert project.calls() == [BUILD, PACKAGE, REQUIRED]


def test_one_with_other_backends_is_left_alone(project: Project) -> None:
    """Built anew without its options, it would have no GPU."""
    project.cpu("amx_tile amx_int8")
    project.amx("crash")
    project.change(".venv/lib/python3.11/site-packages/llama_cpp/lib/libggml-cuda.so")
    said = project.install()
    assert "crashes with this CPU's AMX; left as it is, since it was built with libggml-cuda\n" in said
    assert project.calls() == [FIRST, BUILD, PACKAGE, REQUIRED]


def test_without_a_cache_of_pips_it_is_built_again_all_the_same(project: Project) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx("crash", "right")
    project.change("no cache")
    project.install()
    assert project.calls() == [FIRST, *AGAIN, BUILD, PACKAGE, REQUIRED]


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
    for name in ("install", "install.py"):
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
