"""The workflows and the container files, read: what they name is there. None of them runs here."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_pip import ROOT

from pypcd import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.skipif(os.name == "nt", reason="some commands are for sh")

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CONTAINERS = sorted(ROOT.glob("Dockerfile*"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# --- what is required ---

# the package that a module is of, where it has another name
PACKAGE_OF = {"llama_cpp": "llama-cpp-python", "lm_eval": "lm-eval"}
# imported only behind somebody else's import of the same
THEIRS = {"fastapi": "llama_cpp.server", "pydantic": "llama_cpp.server", "anyio": "mcp", "openai": "type checkers"}


def package(requirement: str) -> str:
    return re.split(r"[\[<>=!;\s]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each top-level module that a file imports, and whether it does so in a function; `require` and import_module count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
            "require",
            "import_module",
            "__import__",
        ):
            names = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
        yield from ((name.partition(".")[0], id(node) in inside) for name in names)


def test_what_is_imported_is_required_or_an_extra_and_nothing_else_is_required() -> None:
    required = {
        package(name) for name in runpy.run_path(str(ROOT / "cmake/pin.py"))["dynamic_metadata"]("dependencies")
    }
    extras = PYPROJECT["project"]["optional-dependencies"]
    optional = {package(name) for extra, names in extras.items() if extra not in ("test", "docs") for name in names}
    seen = set()
    for path in (ROOT / "pypcd").rglob("*.py"):
        for module, in_a_function in imports(path):
            if module in sys.stdlib_module_names or module == "pypcd" or module in THEIRS:
                continue
            name = PACKAGE_OF.get(module, module).lower().replace("_", "-")
            assert name in required | optional, f"{path} imports {module}, which is required nowhere"
            only_there = path.name in ("harness.py", "lm_eval.py")  # lm_eval alone imports it
            assert name in required or in_a_function or only_there, (
                f"{path} imports {module}, of an extra, for everybody"
            )
            seen.add(name)
    assert required - seen == set(), "required, and imported nowhere"


# --- workflows ---


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_has_a_version_and_every_command_is_there(path: Path) -> None:
    assert list(steps(path))
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"(actions|pypa)/[\w-]+@(v\d+(\.\d+\.\d+)?|release/v\d+)", step["uses"])
            continue
        command, *words = shlex.split(step["run"], comments=True)
        assert command in {"pip", "pipx", "pytest", "grep", "pypcd"} or (ROOT / command).is_file(), command
        for extra in re.findall(r"\[(\w+)\]", step["run"]) if command == "pip" else []:
            assert extra in PYPROJECT["project"]["optional-dependencies"]
        for word in words if command == "grep" else []:
            assert not word.endswith(".toml") or (ROOT / word).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_may_write_is_publishing_alone_and_there_is_no_secret(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text(encoding="utf-8")
    for name, job in read(path)["jobs"].items():
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})


def test_what_is_published_is_what_was_uploaded_and_the_tag_is_the_version() -> None:
    jobs = read(ROOT / ".github/workflows/wheels.yml")["jobs"]
    publish = jobs["publish"]
    assert set(publish["needs"]) == set(jobs) - {"publish", "beside"} and publish["if"] == "github.ref_type == 'tag'"
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    (check,) = (step["run"].partition(" #")[0] for step in jobs["sources"]["steps"] if "grep" in step.get("run", ""))
    version = PYPROJECT["project"]["version"]
    for tag, status in ((f"v{version}", 0), ("v99", 1), (version.replace(".", "x"), 1)):
        done = subprocess.run(
            ["sh", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}, check=False
        )
        assert done.returncode == status, tag


# --- container files ---


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text(encoding="utf-8"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    return found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]


def sent(name: str) -> bool:
    """Whether .dockerignore lets a file of the project through; the last line that fits it, or a folder of it, decides."""
    found, parts = True, name.split("/")
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        pattern = line.lstrip("!")
        folders = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if pattern.removeprefix("**/") in parts if pattern.startswith("**/") else set(fnmatch.filter(folders, pattern)):
            found = line.startswith("!")
    return found


def test_all_that_the_wheel_is_made_of_is_sent_and_nothing_that_was_built() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False).stdout
    files = tracked.splitlines() or [path.relative_to(ROOT).as_posix() for path in (ROOT / "cpp").rglob("*")]
    wanted = ("cpp/", "cmake/", "pypcd/", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
    for name in files:
        assert sent(name) == name.startswith(wanted), name
    for name in (
        ".venv/bin/python",
        "build/x/libllama.so",
        "pypcd/lib/libllama.so",
        "pypcd/__pycache__/a.pyc",
        ".git/config",
    ):
        assert not sent(name), name


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_the_build_has_what_pyproject_asks_for(path: Path) -> None:
    (command,) = (
        rest.partition(">")[0] for name, rest in instructions(path) if name == "RUN" and rest.startswith("sed")
    )
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.split() == [
        *PYPROJECT["build-system"]["requires"],
        *PYPROJECT["tool"]["pypcd"]["native-requires"],
    ]
    sources = [word for name, rest in instructions(path) if name == "COPY" for word in rest.split()[:-1]]
    assert sources == ["pyproject.toml", "cmake", "."]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_the_last_stage_has_no_build_tools_and_is_nobodys_root(path: Path) -> None:
    stage = last_stage(path)
    ran = " ".join(rest for name, rest in stage if name == "RUN")
    assert not re.search(r"g\+\+|gcc|build-essential|cmake|ninja|\bgit\b|-dev\b|devel", ran + stage[0][1])
    assert f"--no-index --find-links /wheels {PYPROJECT['project']['name']} " in ran
    assert not [name for name, _ in stage if name in ("COPY", "ADD")]
    names = [name for name, _ in stage]
    (user,) = (rest for name, rest in stage if name == "USER")
    assert f"--uid {user} " in ran and int(user) > 0
    assert "RUN" not in names[names.index("USER") :], "whatever runs after it runs as that user"


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_what_a_container_runs_is_a_command_of_pypcd(path: Path) -> None:
    stage = dict(last_stage(path))
    assert yaml.safe_load(stage["ENTRYPOINT"]) == ["pypcd"]
    words = yaml.safe_load(stage["CMD"])
    args = cli._parse(words)
    assert args.run.__module__ == "pypcd.cli.serve"
    assert (args.model, args.host, str(args.port)) == (["demo"], "0.0.0.0", stage["EXPOSE"])
    assert f"http://127.0.0.1:{stage['EXPOSE']}/health" in stage["HEALTHCHECK"]
    for text in (path.read_text(encoding="utf-8"), (ROOT / "docs/install.md").read_text(encoding="utf-8")):
        assert f"-p 127.0.0.1:{stage['EXPOSE']}:{stage['EXPOSE']}" in text, "reachable from this machine alone"
