"""A project folder with a fake pip in its .venv, for the tests of scripts/install.py."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from conftest import module_at

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> Any:
    return module_at(ROOT / "scripts/install.py")


PIP = """
import os, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
site = Path(__file__).parent / "lib/python3.11/site-packages"
if sys.argv[-2].endswith("_amx_probe.py"):
    with open(root / "probes", "a") as probes:
        print(*(a.replace(str(root), "ROOT") for a in sys.argv[1:]), file=probes)
    found = (root / "amx").read_text().split("\\n")
    (root / "amx").write_text("\\n".join(found[1:] or found))  # the next probe finds the next one, the last one stays
    if found[0] == "crash":
        os.kill(os.getpid(), 4)
    sys.exit(print(found[0]))
with open(root / "defines", "a") as defines:
    print(os.environ["SKBUILD_CMAKE_DEFINE"].replace(str(root), "ROOT"), file=defines)
if (root / "hang").exists():
    import subprocess
    import time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (root / "hanging").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
arguments = sys.argv[sys.argv.index("--verbose") + 1 :]
with open(root / "calls", "a") as calls:
    print(*(a.replace(str(root), "ROOT") for a in arguments), file=calls)
if (root / "fail").exists():
    sys.exit("x.cpp:3: error: it does not compile\\n" + "\\n".join(f"line {i}" for i in range(100)))

def package(name):
    folder = site / name
    folder.mkdir(parents=True, exist_ok=True)
    # as a build has them, which is never the same twice
    (folder / "RECORD").write_text(f"files of {name}, {os.urandom(8)}")

if arguments[0] == "wheel":
    folder = Path(arguments[arguments.index("--wheel-dir") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    name = "llama_pcd-0.1.0" if Path(arguments[-1]) == root else "llama_cpp_python-0.3.36"
    (folder / f"{name}-py3-none-any.whl").write_text(os.environ.get("CMAKE_ARGS", ""))
elif "--force-reinstall" in arguments and "llama_pcd-" in arguments[-1]:
    package("llama_pcd-0.1.0.dist-info")
elif "llama-cpp-python==" in arguments[-1] or "llama_cpp_python" in arguments[-1]:
    package("llama_cpp_python-0.3.36.dist-info")
    lib = site / "llama_cpp/lib"
    lib.mkdir(parents=True, exist_ok=True)
    for name in ("libggml.so", "libggml-base.so", "libggml-cpu.so"):
        (lib / name).write_text("")
"""

TOOLS = "install scikit-build-core>=0.11 pip setuptools>=70.1"
FIRST = f"{TOOLS} llama-cpp-python==0.3.36"
BUILD = "wheel --no-deps --no-build-isolation --wheel-dir ROOT/.cache/wheel ROOT"
PACKAGE = "install --force-reinstall --no-deps ROOT/.cache/wheel/llama_pcd-0.1.0-py3-none-any.whl"
REQUIRED = "install --no-build-isolation ROOT/.cache/wheel/llama_pcd-0.1.0-py3-none-any.whl"
KEPT = "ROOT/.cache/llama-cpp-python/0.3.36-cpu-KEY"
HERE = f"-C build-dir=ROOT/build/llama-cpp-python-cpu-KEY --wheel-dir {KEPT} ROOT/build/llama_cpp_python-0.3.36"
AGAIN = [
    f"wheel --no-deps --no-build-isolation {HERE}",
    f"install --force-reinstall --no-deps {KEPT}/llama_cpp_python-0.3.36-py3-none-any.whl",
]


class Project:
    """A project folder with a .venv whose Python records the arguments of pip."""

    def __init__(self, root: Path, program: Any) -> None:
        self.root, self.program = root, program
        for name in ("cpp/a.cpp", "pypcd/__init__.py", "pypcd/_amx_probe.py", "CMakeLists.txt", "scripts/install.py"):
            self.change(name)
        self.change("pyproject.toml", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        self.change("scripts/recipes/sdist", '#!/bin/sh\necho "${0%/*}/a.tar.gz"\n').chmod(0o755)
        with tarfile.open(root / "scripts/recipes/a.tar.gz", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("llama_cpp_python-0.3.36/a.c"), io.BytesIO())
        self.cpu("an old one")
        self.amx("right")
        self.make_venv()

    def cpu(self, flags: str) -> None:
        self.program.CPUINFO = self.change("cpuinfo", f"flags : fpu {flags} sse\n")

    def amx(self, *found: str) -> None:
        """What each probe finds, the last one from then on: "right", "crash" and so on."""
        self.change("amx", "\n".join(found))

    def make_venv(self, name: str = ".venv") -> None:
        self.change(f"{name}/pyvenv.cfg", f"version = {sys.version.split()[0]}\n")
        self.change(f"{name}/pip.py", PIP)
        python = self.change(f"{name}/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "${{0%/*}}/../pip.py" "$@"\n')
        python.chmod(0o755)

    def change(self, name: str, text: str = "x") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def install(self, *extras: str, backend: str | None = None) -> None:
        self.program.Environment(self.root, backend).install(extras)

    def lines(self, name: str = "calls") -> list[str]:
        """The arguments of pip since the last call, or what else it has noted."""
        path = self.root / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        path.unlink()
        return [re.sub(r"-(cpu|vulkan|cuda)-[0-9a-f]{12}", r"-\1-KEY", line) for line in lines]


@pytest.fixture
def project(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in ("PYTHON", "PYPCD_LLAMA_CPP_SOURCE", "SKBUILD_CMAKE_DEFINE", "CMAKE_ARGS", "CPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(program, "CPUINFO", program.CPUINFO)
    return Project(tmp_path / "père noël" / "pypcd", program)


@pytest.fixture
def installed(project: Project) -> Project:
    """The project after its first run; what pip was told then is forgotten."""
    project.install()
    project.lines()
    return project
