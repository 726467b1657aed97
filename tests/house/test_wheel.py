"""scripts/wheel: what is in the wheel, what its name promises, and that it works where there is no compiler."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
BUILT = sorted((ROOT / ".cache/wheel").glob("llama_pcd-*.whl"))
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux"),
    pytest.mark.skipif(not BUILT, reason="scripts/install made no wheel"),
]


def built(*words: str | Path) -> Path:
    """The wheel that scripts/wheel makes, with what is installed; the last word is its folder."""
    *options, out = words
    command, env = [ROOT / "scripts/wheel", *options, "--out", out], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = Path(out).iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("a dist"))


def libraries(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return {name: data for name, data in files.items() if data.startswith(b"\x7fELF")}


# --- the wheel ---


def test_it_is_for_every_python_and_a_named_system(wheel: Path) -> None:
    assert re.fullmatch(r"llama_pcd-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)


def test_ggml_is_left_to_llama_cpp_python(wheel: Path) -> None:
    found = libraries(wheel)
    assert {"pypcd/lib/libllama.so", "pypcd/bin/llama-server"} <= set(found)
    assert not [name for name in found if re.search("ggml-(base|cpu)|libmtmd|libggml.so|[.]libs/", name)]
    for name, data in found.items():
        assert b"$ORIGIN/../../llama_cpp/lib" in data, name
    with zipfile.ZipFile(wheel) as archive:
        assert set(json.loads(archive.read("pypcd/lib/ggml.json"))) == {"version", "commit"}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert re.search(r"^Requires-Dist: llama-cpp-python==[\d.]+$", archive.read(metadata).decode(), re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "refused"), [("c++ -DX=a-march=native -c a.cpp", ""), ("c++ -march=native b.c", " -march=native")]
)
def test_a_library_for_this_cpu_alone_is_refused(command: str, refused: str, tmp_path: Path) -> None:
    """In a folder of its own, with another compiler's command and no auditwheel."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/wheel", tmp_path / "scripts/wheel")
    (tmp_path / "build/py3-none-any").mkdir(parents=True)
    (tmp_path / "build/py3-none-any/compile_commands.json").write_text(json.dumps([{"command": command}]))
    run = [tmp_path / "scripts/wheel"]
    done = subprocess.run(run, env={**os.environ, "PYTHON": "/bin/true"}, capture_output=True, text=True, check=False)
    assert done.returncode == bool(refused)
    assert (f"libllama was compiled with{refused}; allowed: nothing" in done.stderr) == bool(refused)


def test_it_is_made_as_cibuildwheel_makes_it() -> None:
    said = re.search(
        r"^repair-wheel-command = \"(auditwheel.*)\"$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert said
    command = said[1].replace("{dest_dir}", '"$out"').replace("{wheel}", ".cache/wheel/llama_pcd-*.whl")
    assert f'"$python" -m {command}\n' in (ROOT / "scripts/wheel").read_text()


# --- an environment without a compiler ---


def required(name: str) -> set[str]:
    """The distributions that one requires, and those that these require."""
    found, new = set[str](), {name}
    while new:
        found |= new
        lines = [Requirement(line) for one in new for line in importlib.metadata.requires(one) or []]
        new = {
            canonicalize_name(one.name) for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})
        } - found
    return found - {name}


class Environment:
    """A virtual environment with a wheel and links to what it requires, as this environment has that; on PATH is nothing else."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for about in map(importlib.metadata.distribution, required("llama-pcd")):
            for name in {file.parts[0] for file in about.files or []} - {"..", "__pycache__"}:
                (site / name).symlink_to(Path(str(about.locate_file(name))).resolve())
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python"]
        subprocess.run([*pip, "install", "--quiet", "--no-compile", "--no-index", wheel], check=True)
        self.variables = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",  # packages are those of this environment
        }
        for tool in ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "make"):
            assert not shutil.which(tool, path=self.variables["PATH"]), tool

    def start(self, *words: Any) -> subprocess.Popen[str]:
        command = [str(self.bin / str(words[0])), *map(str, words[1:])]
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.bin, env=self.variables, text=True, **pipes)

    def run(self, *words: Any, status: int = 0) -> str:
        process = self.start(*words)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == status, said
        return said


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("a fresh") / "environment", wheel)


def test_it_answers(environment: Environment) -> None:
    assert "self-test" in environment.run("pypcd", "info", "demo")
    assert environment.run("pypcd", "generate", "demo", "-p", "The value of", "--max-tokens", "4")


def test_it_serves(environment: Environment) -> None:
    process = environment.start("pypcd", "serve", "demo", "--port", 0)
    try:
        assert process.stdout
        late, said = threading.Timer(60, process.kill), list[str]()
        late.start()
        for line in process.stdout:
            said.append(line)
            if line.startswith("  OpenAI"):
                break
        late.cancel()
        assert said and said[-1].startswith("  OpenAI"), "".join(said)
        url = said[-1].split()[1]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "pcd": True}
        with urllib.request.urlopen(f"{url}/chat/completions", json.dumps(body).encode()) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


# --- without a native part ---


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("--pure", tmp_path_factory.mktemp("pure"))


@pytest.fixture(scope="module")
def pure_environment(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("a pure") / "environment", pure)


def test_the_pure_wheel_is_for_any_machine_and_a_range_of_versions(pure: Path) -> None:
    assert re.fullmatch(r"llama_pcd-[\d.]+-py3-none-any\.whl", pure.name)
    with zipfile.ZipFile(pure) as archive:
        names = set(archive.namelist())
        beside = "pypcd/lib/", "pypcd/bin/", "research/"
        assert not [name for name in names if name.startswith(beside) or name.endswith(".so")]
        assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "pypcd").rglob("*.py")} | {
            "pypcd/py.typed"
        } <= names
        assert archive.read("pypcd.pth") == (ROOT / "cmake/pypcd.pth").read_bytes()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        required = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    native = {Requirement(line).name: line for line in importlib.metadata.requires("llama-pcd") or []}
    for line in required:
        if not line.startswith("llama-cpp-python>="):
            assert native[Requirement(line).name], line
    assert Requirement(next(line for line in required if line.startswith("llama-cpp"))).specifier.contains(
        importlib.metadata.version("llama-cpp-python")
    )


def test_the_pure_one_answers_with_the_stock_library(pure_environment: Environment) -> None:
    said = pure_environment.run("pypcd", "info", "demo")
    assert "engine         stock: " in said and said.count("PASS") == 4 and "FAIL" not in said
    assert "PCD            yes" in said
    answer = ("pypcd", "generate", "demo", "-p", "The value of", "--max-tokens", "4", "--pcd")
    assert "PCD (window)" in pure_environment.run(*answer, "window")
    assert "PCD (paper)" in pure_environment.run(*answer, "paper")
    refusal = pure_environment.run(*answer, "paper:type_k_over=q8_0", status=1)
    assert "installed without its native part; docs/install.md" in refusal


def test_programs_get_pcd_from_the_pure_one(pure_environment: Environment) -> None:
    code = """if True:
        import llama_cpp, pathlib, sys
        import pypcd
        llm = llama_cpp.Llama(str(pathlib.Path(pypcd.__file__).parent / "models/demo.gguf"), n_ctx=512, verbose=False)
        llm("ab " * 150, max_tokens=4)
        print(type(llm).__module__, llm.engine, llm.pcd == pypcd.PCDConfig.preset("window"), llm.pcd_stats().n_twins > 0)"""
    pure_environment.variables["PYPCD"] = "window"
    try:
        assert pure_environment.run("python", "-c", code) == "pypcd.llama stock True True\n"
    finally:
        del pure_environment.variables["PYPCD"]
