"""A project folder with a fake pip in its .venv, for the tests of scripts/install.py; conftest has the fixtures."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


sys.path.insert(0, str(ROOT / "scripts"))  # where install.py finds backends.py


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("install_program", ROOT / "scripts/install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PIP = """
import os, sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
if "_amx_probe.py" in sys.argv[-2]:
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

if arguments[0] == "wheel":
    folder = Path(arguments[arguments.index("--wheel-dir") + 1])
    folder.mkdir(parents=True, exist_ok="--no-cache-dir" in arguments)
    name = "llama_cpp_python-0.3.36" if "--no-cache-dir" in arguments else "pypcd-0.1.0"
    (folder / f"{name}-py3-none-any.whl").write_text(os.environ.get("CMAKE_ARGS", ""))
elif "--force-reinstall" in arguments and "pypcd-" in arguments[-1]:
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
AGAIN = [
    "wheel --no-deps --no-cache-dir --wheel-dir KEPT --no-binary llama-cpp-python llama-cpp-python==0.3.36",
    "install --force-reinstall --no-deps KEPT/llama_cpp_python-0.3.36-py3-none-any.whl",
]
REQUIRED = "install --no-build-isolation ROOT/.cache/wheel/pypcd-0.1.0-py3-none-any.whl"


class Project:
    """A project folder with a .venv whose Python records the arguments of pip."""

    def __init__(self, root: Path, program: Any) -> None:
        self.root, self.program = root, program
        names = (
            "cpp/a.cpp",
            "cmake/pin.py",
            "cmake/amx.cmake",
            "cmake/llama-cpp-python.cmake",
            "pypcd/__init__.py",
            "CMakeLists.txt",
            "scripts/install.py",
        )
        for name in names:
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

    def make_venv(self, name: str = ".venv") -> None:
        self.change(f"{name}/pyvenv.cfg", f"version = {sys.version.split()[0]}\n")
        self.change(f"{name}/pip.py", PIP.replace(".venv/", f"{name}/"))
        python = self.change(f"{name}/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "${{0%/*}}/../pip.py" "$@"\n')
        python.chmod(0o755)

    def change(self, name: str, text: str = "x") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def install(self, *extras: str, backend: str | None = None) -> str:
        out = io.StringIO()
        self.program.install(self.root, extras, out, backend)
        return out.getvalue()

    def calls(self) -> list[str]:
        """The arguments of pip since the last call; KEPT is a folder of the user's cache."""
        return [re.sub(r"\S*/cache/pypcd/backends/[^/ ]+", "KEPT", line) for line in self._lines("calls")]

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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path / "père noël" / "pypcd", program)
