"""Makes .venv in the project folder and installs pypcd into it, telling what is built and how far it is.

With --backend NAME it makes .venv-NAME, whose llama-cpp-python is built with that backend of ggml (backends.py).

Three steps, each a run of pip: llama-cpp-python, compiled once and then in pip's cache; libllama, in a wheel of pypcd
that is built without isolation, so that a second build compiles only what changed; the wheel and what it requires.
What was installed is noted in .venv, and while that is so there is nothing to do. Where the CPU has AMX and the installed
llama-cpp-python crashes with it, as some compilers build it, it is built anew (cmake/amx.cmake). Only the standard
library is used; nothing here knows what pypcd does.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, TextIO

from backends import BACKENDS, build_environment, kept_wheels, missing_packages

ROOT = Path(__file__).resolve().parent.parent
BUILT = (("pypcd", "lib"), ("pypcd", "bin"))
SOURCES = (
    "cpp",
    "cmake",
    "pypcd",
    "CMakeLists.txt",
    "pyproject.toml",
    "scripts/install.py",
    "scripts/backends.py",
    "scripts/machine.py",
)

# Minutes of one core, as measured on a 2.1 GHz Xeon. What is quoted is divided by the cores there are.
LLAMA_CPP_PYTHON_MINUTES, LIBLLAMA_MINUTES = 6.0, 9.0  # the latter with llama-server
LIBLLAMA_ALONE_MINUTES = 4.0

CPUINFO = Path("/proc/cpuinfo")

LAST_LINES, ERROR_LINES = 15, 10  # of the log, shown after a failure
LIFE_SIGN = 60.0  # seconds between two lines in a pipe
PATIENCE = 10.0  # seconds that a stopped build gets to end by itself


class Failed(Exception):
    """Nothing more can be done; the message is for the user."""


# --- what pyproject.toml says ---


def build_requirements(text: str) -> list[str]:
    found = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    if not found:
        raise Failed("pyproject.toml has no line requires = [...]")
    return re.findall(r'"([^"]+)"', found[1])


def pinned_version(text: str) -> str:
    for requirement in build_requirements(text):
        if requirement.startswith("llama-cpp-python=="):
            return requirement.partition("==")[2]
    raise Failed("pyproject.toml does not pin llama-cpp-python")


def known_extras(text: str) -> list[str]:
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)


# --- what was installed ---


class State:
    """What .venv holds, or the environment of a backend, and what the project folder would put there."""

    def __init__(self, root: Path, backend: str | None = None) -> None:
        self.root, self.suffix = root, f"-{backend}" if backend else ""
        self.venv = root / f".venv{self.suffix}"
        self.file = self.venv / "pypcd-installed.json"

    def read(self) -> dict[str, Any]:
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # never written, or cut off
            return {}

    def write(self, extras: Sequence[str]) -> None:
        now = self.now()  # its llama-cpp-python has been probed
        self.file.write_text(
            json.dumps({**now, "probed": now["llama-cpp-python"], "extras": sorted(extras)}, indent=1), encoding="utf-8"
        )

    def now(self) -> dict[str, Any]:
        """All that an installation depends on but its extras. Console scripts hold the folder's name, so it counts."""
        return {
            "folder": str(self.root),
            "python": self.python_version(),
            "sources": self.sources(),
            "llama-cpp-python": self.record("llama_cpp_python"),  # another build of it has another ggml
            "pypcd": self.record("pypcd"),
        }

    def python_version(self) -> str:
        """From the environment's own file, which is quicker than asking its Python."""
        try:
            text = (self.venv / "pyvenv.cfg").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        found = re.search(r"^version(?:_info)? *= *([\d.]+)", text, re.MULTILINE)
        return found[1] if found else ""

    def sources(self) -> str:
        """A hash of every file that goes into the wheel, with its name."""
        digest = hashlib.sha256()
        for path in sorted(self._files()):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self.root).as_posix()}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def _files(self) -> Iterator[Path]:
        for name in SOURCES:
            path = self.root / name
            for file in path.rglob("*") if path.is_dir() else [path]:
                relative = file.relative_to(self.root)
                if file.is_file() and "__pycache__" not in relative.parts and relative.parts[:2] not in BUILT:
                    yield file

    def record(self, name: str) -> str:
        """A hash of pip's list of an installed package's files; empty where it is not installed."""
        found = sorted(self.venv.glob(f"lib*/python*/site-packages/{name}-*.dist-info/RECORD"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest() if found else ""


# --- how far a build is ---


class Progress(NamedTuple):
    what: str
    done: int = 0
    total: int = 0


def parse(line: str) -> Progress | None:
    """What a line of pip's log says of how far it is, if it says that: ninja's [12/345] or make's [ 12%]."""
    found = re.match(r"\s*\[\s*(\d+)/(\d+)\] ", line)
    if found:
        return Progress("compiling", int(found[1]), int(found[2]))
    found = re.match(r"\s*\[\s*(\d+)%\] ", line)
    if found:
        return Progress("compiling", int(found[1]), 100)
    if re.match(r"\s*Downloading ", line):
        return Progress("downloading")
    if re.match(r"\s*Building wheel for .*started", line):
        return Progress("compiling")
    if line.startswith("Installing collected packages"):  # indented, it is about what a build needs
        return Progress("installing")
    return None


def minutes_text(minutes: float, n_cores: int) -> str:
    n = math.ceil(minutes / n_cores)
    return f"about {n} minute{'s' * (n > 1)} on {n_cores} core{'s' * (n_cores > 1)}"


def clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """Tells of one step: on a terminal in a line that changes, elsewhere in a line where something changes or a minute
    has passed."""

    def __init__(self, title: str, expect: str, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.expect, self.out, self.clock = title, expect, out, clock
        self.on_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self.start = self.last = clock()
        self.progress = Progress("starting")
        self._write(f"{title}: starting")

    def update(self, progress: Progress | None) -> None:
        """Called for every line of the log, and once a second."""
        is_new = progress is not None and progress.what != self.progress.what
        self.progress = progress or self.progress
        line = self._line()
        is_due = line != self.shown if self.on_terminal else is_new or self.clock() - self.last >= LIFE_SIGN
        if is_due:
            self._write(line)

    def end(self, word: str) -> None:
        self._write(f"{self.title}: {word} {clock_text(self.clock() - self.start)}", last=True)

    def _line(self) -> str:
        what, done, total = self.progress
        parts = [f"{self.title}: {what}" + (f", {self.expect}" if what == "compiling" and self.expect else "")]
        if total:
            parts.append(f"[{done}/{total}]")
        return "  ".join([*parts, clock_text(self.clock() - self.start)])

    def _write(self, text: str, last: bool = False) -> None:
        self.last, self.shown = self.clock(), text
        if self.on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self.out.write(f"\r{text[:width]}\x1b[K" + "\n" * last)
        else:
            self.out.write(text + "\n")
        self.out.flush()


# --- running a build ---


def run(command: Sequence[str | Path], display: Display, log: Path, cwd: Path, **more: str) -> None:
    """Runs a command to its end, its output in the log; nothing that it started is left behind, however this ends.
    `more` is added to its environment."""
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1", **cure(cwd), **more}
    words = [str(word) for word in command]
    with log.open("a", encoding="utf-8") as file:
        start = file.tell()
        file.write(f"$ {' '.join(words)}\n")
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a group of its own, to be ended as a whole
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            for line in _each_second(lines):
                if line is not None:
                    file.write(line)
                    file.flush()
                display.update(parse(line) if line is not None else None)
            code = process.wait()
        finally:
            _stop(process)
            reader.join(PATIENCE)
    if code != 0:
        display.end("FAILED after")
        raise Failed(why(log, start, code))


def _read(pipe: TextIO, lines: queue.Queue[str | None]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)


def _each_second(lines: queue.Queue[str | None]) -> Iterator[str | None]:
    """The lines as they come, and None after a second without one."""
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends the process and all that it started, if it has not ended: first as Ctrl-C does, then by force."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def why(log: Path, start: int, code: int) -> str:
    """The errors and the last lines of what a command that failed has said, and where all of it stands."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode("utf-8", "replace").splitlines()
    errors = [line for line in lines[:-LAST_LINES] if re.search(r"\berror\b", line, re.IGNORECASE)][:ERROR_LINES]
    shown = [*errors, *["..."] * bool(errors), *lines[-LAST_LINES:]]
    return "\n".join([*(f"    {line}" for line in shown), f"pip ended with exit code {code}; the whole log is {log}"])


# --- AMX, which some compilers break ---


def cure(root: Path) -> dict[str, str]:
    """What builds of llama-cpp-python see in their environment; cmake/amx.cmake finds out whether the compiler needs it, and what
    nobody uses is left out."""
    before = os.environ.get("SKBUILD_CMAKE_DEFINE")
    define = f"CMAKE_PROJECT_llama_cpp_INCLUDE={(root / 'cmake' / 'llama-cpp-python.cmake').as_posix()}"
    return {"SKBUILD_CMAKE_DEFINE": f"{before};{define}" if before else define}


def broken_amx(root: Path, state: State) -> str:
    """Why the installed llama-cpp-python cannot use this CPU's AMX, in a few words; empty if it can, or has none."""
    try:
        if " amx_int8" not in CPUINFO.read_text(encoding="utf-8"):
            return ""
    except OSError:  # not Linux: ggml uses AMX on Linux only
        return ""
    for lib in state.venv.glob("lib*/python*/site-packages/llama_cpp/lib"):
        probe = root / "pypcd" / "_engine" / "_amx_probe.py"
        command = [state.venv / "bin" / "python", "-I", "-S", probe, lib]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
        if done.returncode < 0:
            return "crashes"
        if done.stdout.startswith("wrong"):
            return "computes wrongly"
    return ""


def must_be_built_anew(root: Path, state: State, title: str, out: TextIO) -> bool:
    """Whether the installed llama-cpp-python cannot use this CPU's AMX, and nobody chose how it was built."""
    why = broken_amx(root, state)
    libraries = state.venv.glob("lib*/python*/site-packages/llama_cpp/lib/libggml-*.so")
    others = sorted({path.stem for path in libraries} - {"libggml-base", "libggml-cpu"})
    if why and others:
        out.write(f"{title}: {why} with this CPU's AMX; left as it is, since it was built with {others[0]}\n")
    elif why:
        out.write(f"{title}: {why} with this CPU's AMX, so it is built anew\n")
    return bool(why and not others)


# --- the steps ---


def install(root: Path, wanted: Sequence[str], out: TextIO, backend: str | None = None) -> None:
    """Everything that is not installed as the folder has it now."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    pin, state = pinned_version(text), State(root, backend)
    wrong = sorted(set(wanted) - set(known_extras(text)))
    if wrong:
        raise Failed(f"the extra is {wrong[0]!r}; allowed: {', '.join(known_extras(text))}")
    check_python(state)
    check_packages(backend)

    before, now = state.read(), state.now()
    if before and before.get("folder") != now["folder"]:
        out.write(f"{state.venv.name} was made for {before.get('folder')} and is made again\n")
        shutil.rmtree(state.venv)
        before, now = {}, state.now()
    same = {key for key, value in now.items() if value and before.get(key) == value}
    extras = sorted({*wanted, *before.get("extras", [])})
    named_source = os.environ.get("PYPCD_LLAMA_CPP_SOURCE")  # somebody's own tree: only CMake can tell what changed
    if same == set(now) and extras == before.get("extras") and not named_source:
        out.write(f"Nothing to install: {state.venv.name} is up to date\n")
        return

    log, python = root / ".cache" / f"install{state.suffix}.log", state.venv / "bin" / "python"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pip: list[str | Path] = [python, "-m", "pip", "--verbose"]

    def step(title: str, expect: str, *commands: Sequence[str | Path], **more: str) -> None:
        display = Display(title, expect, out)
        for command in commands:
            run(command, display, log, root, **more)
        display.end("done in")

    if not os.access(python, os.X_OK):
        make_venv(state, step)

    title = f"1/3 llama-cpp-python {pin}" + (f" with {backend}" if backend else "")
    minutes = BACKENDS[backend].minutes if backend else LLAMA_CPP_PYTHON_MINUTES
    expect = f"{minutes_text(minutes, n_cores)}, once"

    def built() -> Path:
        return wheel_with(backend, pin, root, lambda *command, **env: step(title, expect, [*pip, *command], **env))

    is_there = {"folder", "python", "llama-cpp-python"} <= same
    if is_there:
        out.write(f"{title}: there already\n")
    else:
        requirements = build_requirements(text)
        if backend:
            wheel = built()
            requirements = [str(wheel) if name.startswith("llama-cpp-python==") else name for name in requirements]
        # setuptools: some requirements of the extras come as sources, and are built without isolation too
        step(title, "" if backend else expect, [*pip, "install", *requirements, "setuptools>=70.1"])
    if (not is_there or before.get("probed") != now["llama-cpp-python"]) and must_be_built_anew(
        root, state, title, out
    ):
        step(title, "", [*pip, "install", "--force-reinstall", "--no-deps", built()])
        same.discard("llama-cpp-python")
        if still := broken_amx(root, state):
            out.write(f"{title}: still {still} with AMX; models will not use it\n")

    wheels, title = root / ".cache" / f"wheel{state.suffix}", "2/3 libllama"
    # a build of its own, against another ggml; llama-server needs libmtmd, which is not there
    own = ["-C", f"build-dir=build/{backend}", "-C", "cmake.define.PYPCD_SERVER=OFF"] if backend else []
    wheel = next(iter(wheels.glob("pypcd-*.whl")), None)
    if wheel and same == set(now) and not named_source:
        out.write(f"{title}: there already\n")
    else:
        shutil.rmtree(wheels, ignore_errors=True)
        is_first = not any(root.glob(f"build/{backend or '*'}/CMakeCache.txt"))
        minutes = LIBLLAMA_ALONE_MINUTES if backend else LIBLLAMA_MINUTES
        expect = minutes_text(minutes, n_cores) if is_first else "what has changed"
        step(title, expect, [*pip, "wheel", "--no-deps", "--no-build-isolation", *own, "--wheel-dir", wheels, root])
        wheel = next(wheels.glob("pypcd-*.whl"))

    # pip leaves a wheel alone whose version is installed already, so the package by force and then what it requires
    named = str(wheel) + (f"[{','.join(extras)}]" if extras else "")
    step(
        "3/3 Python package",
        "",
        [*pip, "install", "--force-reinstall", "--no-deps", wheel],
        [*pip, "install", "--no-build-isolation", named],
    )
    state.write(extras)


def wheel_with(backend: str | None, pin: str, root: Path, pip: Callable[..., None]) -> Path:
    """llama-cpp-python's wheel with this backend, or for the CPU, from pypcd's folder in the user's cache, or built and put there.
    pip's own cache may have another build of this version, and keeps it."""
    folder = kept_wheels(backend, pin, root)
    if not any(folder.glob("llama_cpp_python-*.whl")):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as built:
            what = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={pin}"]
            pip("wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", built, *what, **build_environment(backend, root))
            folder.mkdir(exist_ok=True)
            for wheel in Path(built).glob("llama_cpp_python-*.whl"):
                wheel.replace(folder / wheel.name)
    return next(folder.glob("llama_cpp_python-*.whl"))


def check_packages(backend: str | None) -> None:
    if backend and (missing := missing_packages(backend)):
        raise Failed(
            f"the {backend} backend needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed; on Debian and Ubuntu: apt-get install {' '.join(missing)}"
        )


def make_venv(state: State, step: Callable[..., None]) -> None:
    try:
        step(state.venv.name, "", [sys.executable, "-m", "venv", "--clear", state.venv])
    except BaseException:
        shutil.rmtree(state.venv, ignore_errors=True)  # half an environment would be taken for a whole one
        raise


def check_python(state: State) -> None:
    """PYTHON is for making .venv: one that is there already must not be of another version."""
    found, asked = state.python_version().split(".")[:2], [str(n) for n in sys.version_info[:2]]
    if os.environ.get("PYTHON") and found != asked and state.python_version():
        raise Failed(
            f"PYTHON is {os.environ['PYTHON']}, of version {'.'.join(asked)}, but {state.venv.name} was made with "
            f"{'.'.join(found)}; remove {state.venv.name} to have it made again"
        )


def stopped(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/install", description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="of pyproject.toml's optional dependencies")
    parser.add_argument("--backend", choices=sorted(BACKENDS), help="into .venv-BACKEND, with this backend of ggml")
    args = parser.parse_args()
    extras = [name for text in args.extras for name in text.split(",") if name]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stopped)
    try:
        install(ROOT, extras, sys.stderr, args.backend)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
