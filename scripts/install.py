"""Makes .venv in the project folder and installs pypcd into it; with --backend NAME .venv-NAME, whose llama-cpp-python has that backend.

Three runs of pip, whose output goes to .cache/install.log: llama-cpp-python, compiled once and then in pip's cache; a wheel of
pypcd, built without isolation, so that a second build compiles only what changed; that wheel and what it requires. What was
installed is noted in the environment: as long as nothing of it has changed, there is nothing to do. If the CPU has AMX and the
installed llama-cpp-python crashes with it, as some compilers build it, it is built again (cmake/amx.cmake). Only the standard library
is used.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("cpp", "cmake", "pypcd", "CMakeLists.txt", "pyproject.toml", "scripts/install.py")
# of these, what the compiled part depends on
NATIVE = (
    "cpp",
    "cmake",
    "CMakeLists.txt",
    "pyproject.toml",
    "scripts/install.py",
    "pypcd/settings/fields.py",
    "pypcd/settings/ranges.py",
    "pypcd/library/ggml.py",
)
NO_SOURCES = ("/__pycache__/", "/pypcd/lib/", "/pypcd/bin/")
CPUINFO = Path("/proc/cpuinfo")
LAST_LINES, ERROR_LINES = 15, 10  # of the log, shown after a failure


class Backend(NamedTuple):
    """A backend of ggml that llama-cpp-python is not built with by default.

    Attributes:
        options: CMake's; rows need no pictures, so libmtmd is left out.
        program: what it is compiled with.
        packages: Debian's, with all that it needs.
    """

    options: str
    program: str
    packages: str


BACKENDS = {
    "vulkan": Backend(
        "-DGGML_VULKAN=ON -DLLAVA_BUILD=OFF", "glslc", "libvulkan-dev glslc spirv-headers mesa-vulkan-drivers"
    ),
    "cuda": Backend("-DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DLLAVA_BUILD=OFF", "nvcc", "nvidia-cuda-toolkit"),
}


class Failed(Exception):
    """Nothing more can be done; the message is for the user."""


def build_requirements(pyproject: str) -> list[str]:
    found = re.findall(r"^(?:native-)?requires = \[(.*)\]$", pyproject, re.MULTILINE)
    requirements = re.findall(r'"([^"]+)"', ", ".join(found))
    if not any(name.startswith("llama-cpp-python==") for name in requirements):
        raise Failed("pyproject.toml has no line native-requires = [...] with llama-cpp-python==VERSION")
    return requirements


def known_extras(pyproject: str) -> list[str]:
    section = pyproject.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)


def digest(root: Path, files: Iterable[Path]) -> str:
    """Of the names and contents of files."""
    found = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def with_cure(root: Path) -> str:
    """SKBUILD_CMAKE_DEFINE for llama-cpp-python: without what nobody uses, and with the cure for AMX if the compiler needs it."""
    define = f"CMAKE_PROJECT_llama_cpp_INCLUDE={(root / 'cmake' / 'llama-cpp-python.cmake').as_posix()}"
    before = os.environ.get("SKBUILD_CMAKE_DEFINE")
    return f"{before};{define}" if before else define


class Environment:
    """.venv, or that of a backend, and what the project folder would put there."""

    def __init__(self, root: Path, backend: str | None = None) -> None:
        suffix = f"-{backend}" if backend else ""
        self.root, self.backend = root, backend
        self.venv, self.cache = root / f".venv{suffix}", root / ".cache"
        self.python, self.note = self.venv / "bin" / "python", self.venv / "pypcd-installed.json"
        self.log, self.wheels = self.cache / f"install{suffix}.log", self.cache / f"wheel{suffix}"
        self.pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
        self.requires = build_requirements(self.pyproject)
        self.llama = next(name for name in self.requires if name.startswith("llama-cpp-python=="))

    # -- what is there -----------------------------------------------------------------------------------------------

    def noted(self) -> dict[str, Any]:
        try:
            return json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # never written, or cut off
            return {}

    def files(self, names: Iterable[str]) -> Iterable[Path]:
        """Those of these names, and in these folders, that are sources."""
        paths = (path for name in names for path in [self.root / name, *(self.root / name).rglob("*")])
        inside = ((path, f"/{path.relative_to(self.root).as_posix()}") for path in paths if path.is_file())
        return (path for path, name in inside if not any(part in name for part in NO_SOURCES))

    def now(self) -> dict[str, str]:
        """All that an installation depends on but its extras; console scripts hold the folder's name."""
        packages = self.site("llama_cpp_python-*.dist-info/RECORD") + self.site("llama_pcd-*.dist-info/RECORD")
        return {
            "folder": str(self.root),
            "python": self.python_version(),
            "sources": digest(self.root, self.files(SOURCES)),
            "native": digest(self.root, self.files(NATIVE)),
            "packages": digest(self.root, packages),
        }

    def python_version(self) -> str:
        """From a file, which is quicker than running it; empty without an environment."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.venv / "pyvenv.cfg").read_text(encoding="utf-8")
            if found := re.search(r"^version(?:_info)? *= *(\d+\.\d+)", text, re.MULTILINE):
                return found[1]
        return ""

    def site(self, pattern: str) -> list[Path]:
        return list(self.venv.glob(f"lib*/python*/site-packages/{pattern}"))

    def in_place(self, wanted: Sequence[str]) -> None:
        """What runs the sources as they stand in the folder: an installation whose compiled part is theirs, and that part beside them."""
        before, now = self.noted(), self.now()
        same = all(before.get(name) == now[name] for name in ("folder", "python", "packages", "native"))
        if not same or not {*wanted} <= {*before.get("extras", [])}:
            self.install(wanted)
        for installed in (*self.site("pypcd/lib"), *self.site("pypcd/bin")):
            here = self.root / "pypcd" / installed.name
            shutil.rmtree(here, ignore_errors=True)
            shutil.copytree(installed, here, symlinks=True)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def install(self, wanted: Sequence[str]) -> None:
        """Everything that is not installed as the folder has it now."""
        allowed = known_extras(self.pyproject)
        for name in wanted:
            if name not in allowed:
                raise Failed(f"the extra is {name!r}; allowed: {', '.join(allowed)}")
        for name in ("lib", "bin"):  # of in_place(): a program that is started in the folder would load them
            shutil.rmtree(self.root / "pypcd" / name, ignore_errors=True)
        before = self.noted()
        if before.get("folder", str(self.root)) != str(self.root):
            print(f"{self.venv.name} was made for {before['folder']} and is made again", file=sys.stderr)
            shutil.rmtree(self.venv)
            before = {}
        extras, own_source = sorted({*wanted, *before.get("extras", [])}), os.environ.get("PYPCD_LLAMA_CPP_SOURCE")
        now = self.now()
        if before == {**now, "extras": extras} and not own_source:  # what changed in one's own source only CMake knows
            print(f"Nothing to install: {self.venv.name} is up to date", file=sys.stderr)
            return
        self.check()
        self.cache.mkdir(exist_ok=True)
        self.log.write_text("")
        if not os.access(self.python, os.X_OK):
            self.make_venv()
        same = before.get("packages") == now["packages"]
        if not same:
            self.install_llama_cpp_python()
        wheel = next(self.wheels.glob("llama_pcd-*.whl"), None)
        if wheel is None or not same or own_source or before.get("sources") != now["sources"]:
            wheel = self.build_wheel()
        named = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        # pip leaves a wheel alone whose version is installed already, so first the package by force
        self.pip("", "install", "--force-reinstall", "--no-deps", wheel)
        self.pip("3/3 the Python packages", "install", "--no-build-isolation", named)
        self.note.write_text(json.dumps({**self.now(), "extras": extras}, indent=1), encoding="utf-8")

    def check(self) -> None:
        """Before minutes pass.

        Raises:
            Failed: something is missing, or PYTHON is another one than the environment's.
        """
        asked, found = ".".join(map(str, sys.version_info[:2])), self.python_version()
        if os.environ.get("PYTHON") and found not in ("", asked):
            raise Failed(
                f"PYTHON is {os.environ['PYTHON']}, of version {asked}, but {self.venv.name} was made with {found}; remove "
                f"{self.venv.name} to have it made again"
            )
        compiler = os.environ.get("CXX", "c++").split()[0]
        if not shutil.which(compiler):
            raise Failed(
                f"there is no C++ compiler ({compiler}); on Debian and Ubuntu: apt-get install build-essential"
            )
        if self.backend and not shutil.which(BACKENDS[self.backend].program, path=self.path()):
            raise Failed(f"there is no {BACKENDS[self.backend].program}; {self.hint()}")

    def path(self) -> str:
        """PATH, with CUDA's usual places."""
        places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        folders = [os.path.join(place, "bin") for place in places if place and self.backend == "cuda"]
        return os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])

    def hint(self) -> str:
        packages = BACKENDS[self.backend].packages if self.backend else ""
        return f"the {self.backend} backend needs Debian's packages {packages}, or what they hold"

    def make_venv(self) -> None:
        try:
            self.run(self.venv.name, sys.executable, "-m", "venv", "--clear", self.venv)
        except BaseException:
            shutil.rmtree(self.venv, ignore_errors=True)  # half an environment would be taken for a whole one
            raise

    def install_llama_cpp_python(self) -> None:
        title = f"1/3 {self.llama}" + (f" with {self.backend}" if self.backend else "")
        # setuptools: some requirements of the extras come as sources, and are built without isolation too
        tools = [name for name in self.requires if name != self.llama] + ["setuptools>=70.1"]
        tools += [] if shutil.which("cmake") else ["cmake", "ninja"]
        if self.backend:
            self.pip(title, "install", *tools)
            self.pip("", "install", self.built_here("compiling it, 7 minutes on two cores or more, once"))
            return
        self.pip(f"{title}, 3 minutes on two cores if it has to be compiled", "install", *tools, self.llama)
        if not (wrong := self.broken_amx()):
            return
        others = {path.stem for path in self.site("llama_cpp/lib/libggml-*.so")} - {"libggml-base", "libggml-cpu"}
        if others:
            print(f"It {wrong} with this CPU's AMX; left as it is, since it has {min(others)}", file=sys.stderr)
            return
        print(f"It {wrong} with this CPU's AMX, so it is built again", file=sys.stderr)
        self.pip(
            "",
            "install",
            "--force-reinstall",
            "--no-deps",
            self.built_here("compiling it, 3 minutes on two cores, once"),
        )
        if wrong := self.broken_amx():
            print(f"It still {wrong} with AMX; models will not use it", file=sys.stderr)

    def built_here(self, title: str) -> Path:
        """llama-cpp-python's wheel for this backend, or with the cure for AMX, kept in .cache: pip's own cache stays as it is. A
        build that was stopped goes on."""
        options = [BACKENDS[self.backend].options] if self.backend else []
        env = {"CMAKE_ARGS": " ".join([*options, os.environ.get("CMAKE_ARGS", "")]).strip()}
        if self.backend == "vulkan":  # for headers that are too old
            env["CPATH"] = os.pathsep.join(filter(None, [str(self.root / "cmake/vulkan"), os.environ.get("CPATH", "")]))
        name = f"{self.backend or 'cpu'}-{hashlib.sha256(json.dumps(env).encode()).hexdigest()[:12]}"
        kept = self.cache / "llama-cpp-python" / f"{self.llama.partition('==')[2]}-{name}"
        if not any(kept.glob("*.whl")):
            source, build = self.unpacked(), self.root / "build" / f"llama-cpp-python-{name}"
            built = ["--no-deps", "--no-build-isolation", "-C", f"build-dir={build}", "--wheel-dir", kept]
            self.pip(title, "wheel", *built, source, **env)
        return next(kept.glob("*.whl"))

    def unpacked(self) -> Path:
        """The source of llama-cpp-python."""
        tree = self.root / "build" / self.llama.replace("-", "_").replace("==", "-")
        if not tree.exists():
            command = [self.root / "scripts/recipes/sdist", self.python]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise Failed(f"the source of {self.llama} cannot be downloaded; the lines above say why")
            tree.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=tree.parent) as folder, tarfile.open(done.stdout.strip()) as archive:
                archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
                (Path(folder) / tree.name).rename(tree)
        return tree

    def broken_amx(self) -> str:
        """What the installed llama-cpp-python does with this CPU's AMX if it cannot use it; empty if it can, or there is none."""
        try:
            if " amx_int8" not in CPUINFO.read_text(encoding="utf-8"):
                return ""
        except OSError:  # not Linux: ggml uses AMX on Linux only
            return ""
        probe = next((self.root / "pypcd").rglob("_amx_probe.py"))
        command = [self.python, "-I", probe, self.root / "pypcd/models/demo.gguf"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
        return "crashes" if done.returncode < 0 else "computes wrongly" if done.stdout.startswith("wrong") else ""

    def build_wheel(self) -> Path:
        shutil.rmtree(self.wheels, ignore_errors=True)
        # a build of its own, against another ggml; llama-server needs libmtmd, which is not there
        own = [f"-Cbuild-dir=build/{self.backend}", "-Ccmake.define.PYPCD_SERVER=OFF"] if self.backend else []
        title = f"2/3 libllama{'' if self.backend else ' and llama-server'}, 5 minutes on two cores the first time"
        self.pip(title, "wheel", "--no-deps", "--no-build-isolation", *own, "--wheel-dir", self.wheels, self.root)
        return next(self.wheels.glob("llama_pcd-*.whl"))

    # -- running pip -------------------------------------------------------------------------------------------------

    def pip(self, title: str, *words: str | Path, **more: str) -> None:
        self.run(title, self.python, "-m", "pip", "--verbose", *words, **more)

    def run(self, title: str, *words: str | Path, **more: str) -> None:
        """Runs a command to its end, its output in the log, under a title if it begins a step. Nothing that it started is left
        behind, however this ends."""
        env = {**os.environ, "PATH": self.path(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        env["SKBUILD_CMAKE_DEFINE"] = with_cure(self.root)
        env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))  # make would take one core
        if shutil.which("ccache"):
            ours = {"CCACHE_BASEDIR": str(self.root), "CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": "time_macros"}
            launcher = {"CMAKE_C_COMPILER_LAUNCHER": "ccache", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
            env = {**ours, **launcher, **env}
        if title:
            print(title, end=" … ", file=sys.stderr, flush=True)
        start = time.monotonic()
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(map(str, words))}\n")
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                [str(word) for word in words],
                cwd=self.root,
                env={**env, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to be ended as a whole
            )
            try:
                process.wait()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode:
            print("FAILED", file=sys.stderr)
            raise Failed(self.why(begin, process.returncode))
        if title:
            seconds = int(time.monotonic() - start)
            print(f"{seconds // 60}:{seconds % 60:02d}", file=sys.stderr)

    def why(self, begin: int, code: int) -> str:
        """The errors and the last lines of a command that failed, and where all of it stands."""
        with self.log.open("rb") as file:
            file.seek(begin)
            lines = file.read().decode("utf-8", "replace").splitlines()
        errors = [line for line in lines[:-LAST_LINES] if re.search(r"\berror\b", line, re.IGNORECASE)][:ERROR_LINES]
        shown = [f"    {line}" for line in [*errors, *["..."] * bool(errors), *lines[-LAST_LINES:]]]
        last = f"It ended with exit code {code}; the whole log is {self.log}"
        return "\n".join([*shown, last + (f"; {self.hint()}" if self.backend else "")])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/install", description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="of pyproject.toml's optional dependencies")
    parser.add_argument("--backend", choices=BACKENDS, help="into .venv-BACKEND, with this backend of ggml")
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="beside the sources, to run these: a change of Python alone builds nothing",
    )
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        environment, extras = Environment(ROOT, args.backend), [n for text in args.extras for n in text.split(",") if n]
        (environment.in_place if args.in_place else environment.install)(extras)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
