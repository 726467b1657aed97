"""scripts/check_gpu, as far as it can be tested without a GPU and without building: the archive's content, the
stages and their results, the report."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import find_sdist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts/gpu"))

import archive
import check  # it puts scripts/ on the path

# isort: split
import backends
import report

# --- the archive ---


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-cpp-python's source as it is in the archive."""
    found, folder = find_sdist(), tmp_path_factory.mktemp("source")
    for name, content, _ in archive.source_files(found):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_the_archive_has_what_cmake_and_the_compiler_ask_for(source: Path) -> None:
    """Every source named in a CMakeLists.txt of a built target is there, and every file it includes."""
    llama = source / "vendor/llama.cpp"
    named = 0
    for folder in ("src", "common", "ggml/src", "ggml/src/ggml-cpu", "vendor/hash", "vendor/cpp-httplib"):
        text = (llama / folder / "CMakeLists.txt").read_text()
        for name in re.findall(r"^\s+([\w./-]+\.(?:c|h|cpp|hpp|in))\s*$", text, re.MULTILINE):
            at = llama / folder if (llama / folder / name).exists() else llama / "ggml/src"  # as ggml-cpu is listed
            assert (at / name).exists() or "$" in name, f"{folder}/CMakeLists.txt names {name}"
            named += 1
    assert named > 100
    for name in ("ggml/src/ggml-cuda/template-instances/mmq-instance-q4_0.cu", "ggml/include/ggml-cuda.h", "LICENSE"):
        assert (llama / name).exists()
    have = {path.name for path in source.rglob("*") if path.is_file()}
    missing = set()
    for path in [
        *llama.glob("src/**/*.cpp"),
        *llama.glob("common/**/*.cpp"),
        *llama.glob("ggml/src/ggml-cuda/**/*.cu*"),
    ]:
        missing |= {
            Path(name).name for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        } - have
    assert missing == {"llama-version.h", "mudnn.cuh"}, "other than what CMake writes, and another backend's"


def test_the_archive_leaves_out_what_is_not_built(source: Path) -> None:
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert size < 30 * 2**20
    left = {path.name for path in (source / "vendor/llama.cpp/ggml/src").iterdir() if path.is_dir()}
    assert left == {"ggml-cpu", "ggml-cuda"}
    assert {path.name for path in (source / "vendor/llama.cpp").iterdir() if path.is_dir()} == {
        *("cmake", "common", "ggml", "include", "licenses", "src", "vendor")
    }


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("llama_cpp/llama.py", True),
        ("llama_cpp/lib/libllama.so", False),
        ("vendor/llama.cpp/src/models/llama.cpp", True),
        ("vendor/llama.cpp/ggml/src/ggml.c", True),
        ("vendor/llama.cpp/ggml/src/ggml-cuda/template-instances/a.cu", True),
        ("vendor/llama.cpp/ggml/src/ggml-vulkan/ggml-vulkan.cpp", False),
        ("vendor/llama.cpp/tools/mtmd/CMakeLists.txt", False),
        ("vendor/llama.cpp/models/ggml-vocab.gguf", False),
        ("tests/llama/test_llama.py", False),
    ],
)
def test_what_goes_into_the_archive(name: str, goes: bool) -> None:
    assert archive.wanted(name) == goes


def test_the_archive_has_wheels_of_all_that_pypcd_imports() -> None:
    """But of what is built there, and of extras."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "pypcd").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in names} - {"pypcd", "llama_cpp"}
    tops -= {"distributed", "huggingface_hub", "jieba", "lm_eval", "matplotlib", "openai"}
    tops -= {"fastapi", "pydantic"}  # of llama_cpp.server, which imports them first
    installed = {top for top in tops if "site-packages" in str(getattr(importlib.util.find_spec(top), "origin", ""))}
    assert installed >= {"numpy", "tqdm", "prompt_toolkit", "wcwidth", "wonderwords"}
    assert installed <= {re.split("[<>=]", package)[0].replace("-", "_") for package in archive.PACKAGES}


# --- a run ---


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        file=Path(__file__), out=tmp_path / "out", work=tmp_path / "work", backend="cpu", jobs=1, minutes=0, shapes="1b",
        lengths="64", bench="--rounds 1",
    )  # fmt: skip


@pytest.fixture
def run(options: argparse.Namespace) -> check.Run:
    options.work.mkdir()
    return check.Run(options)


def test_a_commands_output_is_read_and_its_failure_told(run: check.Run) -> None:
    code = "import sys; print(1); print('so it is', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    assert run.execute([sys.executable, "-c", code, 0], "x") == "1\n"
    with pytest.raises(check.Failed, match=r"^exit status 3 of .*(?s:.)*so it is"):
        run.execute([sys.executable, "-c", code, 3], "x")
    assert "so it is" in (run.logs / "x.log").read_text() and "\n1\n" in (run.logs / "x.log").read_text()
    with pytest.raises(check.Failed, match="^SIGABRT of "):
        run.execute([sys.executable, "-c", "import os; os.abort()"], "x")


def test_when_the_time_is_over_a_command_ends_with_all_it_started(run: check.Run) -> None:
    run.deadline = check.time.monotonic() + 2
    with pytest.raises(check.OutOfTime):
        run.execute(["sh", "-c", "sleep 60 & echo $! >child; wait"], "x")
    stat = Path("/proc", (run.work / "child").read_text().strip(), "stat")

    def has_ended() -> bool:
        try:
            return stat.read_text().split()[2] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    end = time.monotonic() + 20  # it would sleep for 60; a killed process takes a moment to be gone
    while not has_ended():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stage_that_fails_is_reported_and_what_was_done_is_not_done_again(
    run: check.Run, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(self: check.Run) -> None:
        calls.append("llama")
        raise check.Failed("no compiler")

    monkeypatch.setattr(check.Run, "unpack", lambda self: calls.append("unpack"))
    monkeypatch.setattr(check.Run, "llama", fails)
    assert run.run() == 1 and check.Run(options).run() == 1
    assert calls == ["unpack", "llama", "llama"]
    text = (options.out / "check_gpu.md").read_text()
    assert "| unpack | done |" in text and "**llama: failed.**" in text and "no compiler" in text
    assert "| pypcd | not begun |" in text
    options.backend = "cuda"  # all follows from it
    assert check.Run(options).run() == 1 and calls[3:] == ["unpack", "llama"]


def test_results_stay_until_what_they_follow_from_changes(
    options: argparse.Namespace, run: check.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unpack", "llama", "pypcd", "rows", "bench"):
        monkeypatch.setattr(check.Run, name, lambda self: None)
    assert run.run() == 0
    run.results.write_text('{"test": "a", "outcome": "passed"}\n')
    run.record["bench"] = {"1b, 64 tokens": {"error": "none"}}
    run.write()
    options.bench = "--rounds 9"
    run = check.Run(options)
    assert run.run() == 0 and run.record["bench"] == {} and len(run.done()) == 1
    monkeypatch.setattr(check.Run, "build_environment", lambda self: {"CMAKE_ARGS": "-DGGML_CUDA=ON"})
    assert check.Run(options).run() == 0 and not run.results.exists()


def test_the_environment_is_the_one_that_scripts_install_makes(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its wheel of llama-cpp-python lies where scripts/install looks for it, and nothing is asked of a network."""
    options.backend = "cuda"
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    options.work.mkdir()
    run = check.Run(options)
    assert run.python == ROOT / ".venv-cuda/bin/python" and run.nvcc == nvcc
    commands: list[tuple[list[str], dict[str, str]]] = []

    def execute(self: check.Run, command: list[Any], log: str, **env: str) -> str:
        words = [str(word) for word in command]
        if check._KEPT in words:
            done = subprocess.run(
                [sys.executable, *words[1:]], env=self.environment(**env), capture_output=True, check=True
            )
            return done.stdout.decode()
        commands.append((words, self.environment(**env)))
        return '{"devices": [{"is_gpu": true}]}'

    monkeypatch.setattr(check.Run, "execute", execute)
    run.llama()
    run.pypcd()
    (build, seen), (install, asked), _ = commands
    folder = Path(build[build.index("--wheel-dir") + 1])
    assert "-DGGML_CUDA=ON" in seen["CMAKE_ARGS"] and f"-DCMAKE_CUDA_COMPILER={nvcc}" in seen["CMAKE_ARGS"]
    assert install == [str(ROOT / "scripts/install"), "--backend", "cuda"] and asked["PIP_NO_INDEX"] == "1"
    for name in ("CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "PATH"):  # as scripts/install has them
        monkeypatch.setenv(name, asked[name])
    assert folder == backends.kept_wheels("cuda", archive.pinned_version(), ROOT)
    assert folder.is_relative_to(run.work)


def test_an_environment_that_is_gone_is_made_again(
    options: argparse.Namespace, run: check.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = []
    for name in ("unpack", "llama", "pypcd", "rows", "bench"):
        monkeypatch.setattr(check.Run, name, lambda self, name=name: done.append(name))
    (tmp_path / "venv").mkdir()
    run.record["venv"] = str(tmp_path / "venv")
    assert run.run() == 0 and check.Run(options).run() == 0
    assert len(done) == 5 + 1  # bench looks for other lengths each time
    (tmp_path / "venv").rmdir()
    assert check.Run(options).run() == 0 and len(done) == 5 + 1 + 5


def test_a_trial_leaves_an_environment_alone_that_it_did_not_make(
    run: check.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    about = json.dumps({"python": "3.0", "llama_cpp_python": archive.pinned_version()}).encode()
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        member = tarfile.TarInfo("pack.json")
        member.size = len(about)
        file.addfile(member, io.BytesIO(about))
    run.options.file, run.python = tmp_path / "a.tar", tmp_path / ".venv" / "bin" / "python"
    run.python.parent.mkdir(parents=True)
    with pytest.raises(check.Failed, match=r"\.venv is there, and a trial would replace what it holds"):
        run.unpack()


def test_a_test_that_ends_the_process_is_the_only_one_lost(run: check.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was cut off continues with the stages that are not done."""
    project = run.work / "project"
    (project / "tests").mkdir(parents=True)
    (project / "pyproject.toml").write_text("")
    (project / "tests/conftest.py").write_text(
        f"import sys\nsys.path.append({str(ROOT / 'tests' / 'support')!r})\nfrom recorder import pytest_runtest_logreport\n"
    )
    (project / "tests/engine/test_backend.py").write_text(
        """
import os, pytest

@pytest.mark.parametrize("case", "abcde")
def test_x(case, record_property):
    record_property("case", case)
    open("log", "a").write(case)
    if case == "b":
        os.abort()
    assert case != "d", "wrong"
"""
    )
    monkeypatch.setattr(check, "ROOT", project)
    run.python = Path(sys.executable)
    run.results.write_text('{"test": "tests/engine/test_backend.py::test_x[a]", "outcome": "passed"}\n')
    with pytest.raises(check.Failed, match="^2 of 5 tests$"):
        run.rows()
    assert (run.work / "log").read_text() == "bcde"
    got = {name[-2]: result for name, result in run.done().items()}
    outcomes = {name: result["outcome"] for name, result in got.items()}
    assert outcomes == {"a": "passed", "b": "crashed", "c": "passed", "d": "failed", "e": "passed"}
    assert got["b"]["why"].startswith("SIGABRT") and "wrong" in got["d"]["why"] and got["e"]["case"] == "e"


def test_each_shape_and_length_is_measured_and_what_failed_is_tried_again(
    run: check.Run, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def execute(self: check.Run, command: list[Any], log: str) -> str:
        if "bench" not in command:
            Path(command[-1]).touch()  # the random model
            return ""
        shape, length = Path(command[4]).stem, command[command.index("--length") + 1]
        asked.append((shape, length))
        if (shape, length) == ("random-8b", "128") and asked.count((shape, length)) == 1:
            raise check.Failed("memory")
        return '{"measurements": [{"ratio": 1.5}]}'

    monkeypatch.setattr(check.Run, "execute", execute)
    options.shapes, options.lengths = "1b,8b", "64,128"
    with pytest.raises(check.Failed, match="^no measurements of 8b, 128 tokens$"):
        run.bench()
    assert asked == [(f"random-{shape}", length) for shape in ("1b", "8b") for length in ("64", "128")]
    assert run.record["bench"]["8b, 128 tokens"] == {"error": "memory"}
    run.bench()
    assert asked[4:] == [("random-8b", "128")] and run.record["bench"]["8b, 128 tokens"]["measurements"]


# --- the report ---


def test_the_report_has_rows_and_costs(run: check.Run) -> None:
    good: dict[str, Any] = {"setting": "rerotated", "kv": "f16", "work": "steps", "placement": "gpu", "model": "llama"}
    good.update(
        standard=1e-6, plain=1e-6, over=6e-6, plain_over=2e-6, effect=0.5, outcome="passed", test="t[1]", why=""
    )
    good.update(left={}, splits=[2, 3])
    bad = {
        **good,
        "left": {"ACC of node": 2},
        "splits": [2, 14],
        "over": 0.25,
        "outcome": "failed",
        "test": "t[2]",
        "why": "E  assert 1\nE  AssertionError: L*",
    }
    crashed = {"test": "t[3]", "outcome": "crashed", "why": "SIGABRT of `pytest`:\nGGML_ASSERT(n > 0) failed"}
    measured = {"method": "window", "flash_attn": True, "ratio": 1.07321, "prefill_ratio": None}
    run.record.update(
        rows=[good, bad, crashed],
        bench={"1b, 64 tokens": {"error": "memory"}, "8b, 16384 tokens": {"measurements": [measured]}},
    )
    text = report.render(run.record)
    assert "## Rows: 3 cases, 2 failed" in text
    assert "| rerotated | 2 | 1 | 1e-06 | 1 | 0.25 | 1.25e+05 | 0.5 | 1 | 2 / 14 |" in text
    assert "- t[2]: failed; E  AssertionError: L*" in text and "- t[3]: crashed; GGML_ASSERT(n > 0) failed" in text
    assert "| method | flash_attn | ratio | prefill_ratio |" in text and "| window | True | 1.07 |  |" in text
    assert text.index("1b, 64 tokens in the context") < text.index("memory") < text.index("8b, 16384 tokens")


def test_the_table_of_rows_alone(tmp_path: Path) -> None:
    row = {"test": "t[1]", "outcome": "crashed", "why": "SIGABRT"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, ROOT / "scripts/gpu/report.py", tmp_path / "rows.jsonl"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "\n".join(report.rows([row])).strip() and "## Rows: 1 cases, 1 failed" in said
