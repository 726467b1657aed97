"""scripts/check_gpu, as far as it can be tested without a GPU and without building: what goes into the archive, what
counts as equal rows, the stand-in for git, the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypcd import _machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_archive
import gpu_check
import gpu_git
import gpu_report
import gpu_rows

# --- the archive ---


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-cpp-python's source as the archive has it."""
    places = [os.environ.get("PYPCD_LLAMA_CPP_SOURCE", ""), *ROOT.glob("build/*/sdist/*.tar.gz")]
    places += [*ROOT.glob(".cache/llama_cpp_python-*.tar.gz")]
    found = next((Path(place) for place in places if place and Path(place).is_file()), None)
    if found is None:
        pytest.skip("no sdist of llama-cpp-python in PYPCD_LLAMA_CPP_SOURCE, build/ or .cache/")
    folder = tmp_path_factory.mktemp("source")
    for name, content, _ in gpu_archive.source_files(found):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_the_archive_has_what_cmake_and_the_compiler_ask_for(source: Path) -> None:
    """Of every source named in a CMakeLists.txt of what is built, and of every include in it."""
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


def test_the_patch_applies_as_with_git(source: Path, tmp_path: Path) -> None:
    patch = ROOT / "cpp/patches/llama-cpp-hooks.patch"
    llama = source / "vendor/llama.cpp"
    mine = gpu_git.patched(llama, patch.read_text())
    names = {path.relative_to(llama) for path in mine}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    before = {name: (tmp_path / name).read_text() for name in names}
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, env=env, check=True)
    for name in names:
        assert (tmp_path / name).read_text() == mine[llama / name]
    back = gpu_git.patched(tmp_path, patch.read_text(), reverse=True)
    assert {path.relative_to(tmp_path): text for path, text in back.items()} == before
    with pytest.raises(ValueError, match="does not fit"):
        gpu_git.patched(tmp_path, patch.read_text())


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
        ("tests/test_llama.py", False),
    ],
)
def test_what_goes_into_the_archive(name: str, goes: bool) -> None:
    assert gpu_archive.wanted(name) == goes


# --- rows ---


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, 2, 50))


def case(cpu: np.ndarray, other: np.ndarray, **more: Any) -> dict[str, Any]:
    return {**gpu_rows.compare(cpu, other), "limit": gpu_rows.LIMIT, "plain": 0.0, **more}


def test_rows_are_compared_by_their_squared_errors() -> None:
    cpu = rows(0)
    same = gpu_rows.compare(cpu, cpu)
    assert same["standard"] == same["over_rotated"] == same["largest"] == 0 and same["effect"] > 1
    off = cpu.copy()
    off[2, 1] *= 1.1
    got = gpu_rows.compare(cpu, off)
    assert got["standard"] == 0 and got["over_rotated"] == pytest.approx(0.01 / 4, rel=0.5)
    assert got["largest"] == pytest.approx(0.1 * np.abs(cpu[2, 1]).max())
    assert "over_rotated" not in gpu_rows.compare(cpu[:, :1], cpu[:, :1])
    off[0, 0, 0] = np.nan
    assert gpu_rows.compare(cpu, off)["standard"] == float("inf")


def test_what_is_wrong_is_said() -> None:
    cpu, noise = rows(0), rows(1)
    assert gpu_rows.faults(case(cpu, cpu + 1e-3 * noise)) == []
    assert gpu_rows.faults(case(cpu, cpu + 0.02 * noise))[0].startswith("standard ")
    assert gpu_rows.faults(case(cpu, cpu + 0.02 * noise, plain=4e-4)) == []  # so it is without PCD
    assert gpu_rows.faults(case(cpu, cpu + 0.02 * noise, limit=gpu_rows.LIMIT_QUANTISED)) == []
    assert gpu_rows.faults(case(cpu, cpu, alternate=1e-3)) == ["alternate 1.0e-03, limit 1.0e-04"]
    near = cpu.copy()
    near[:, 1] = near[:, 0] * (1 + 1e-3)
    other = near.copy()
    other[:, 1] = near[:, 0]
    assert "hides an effect" in gpu_rows.faults(case(near, other))[0]


def test_the_same_rows_come_from_other_micro_batches(tmp_path: Path) -> None:
    """A case of each kind, on the CPU."""
    model = gpu_rows.Model(tmp_path, "llama", "cpu")
    names = list(model.cases())
    assert len(set(names)) == len(names) > 300
    for setting in ("plain", "separate", "rerotated, base_ratio=1", "rerotated, all rows", "noise, separate"):
        got = model.check("f16", setting, "fused", "all layers")
        assert got["status"] == "ok", got
    got = model.check("q8_0, flash", "window", "alternate", "keys in RAM")
    assert got["status"] == "ok" and got["alternate"] <= gpu_rows.LIMIT and got["effect"] > 0.05


@pytest.mark.skipif(_machine.has_gpu(), reason="this library computes on a GPU")
def test_a_library_without_a_gpu_is_found_out(tmp_path: Path) -> None:
    wanted = "f16, flash; rerotated; fused; all layers"
    skip = ["; ".join(names) for names in gpu_rows.Model(tmp_path, "llama", "cpu").cases()]
    skip.remove(wanted)
    command = [sys.executable, gpu_rows.__file__, str(tmp_path), "cuda", "llama", json.dumps(skip)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
    start, got, end = map(json.loads, done.stdout.splitlines())
    assert start == {"case": wanted} and end == {"case": "end"}
    assert got["status"] == "failed" and got["why"] == ["not a bit differs: it was the CPU that computed"]
    assert got["splits"] == got["plain_splits"] == 1  # the scheduler's log was read


# --- a run ---


@pytest.fixture
def run(tmp_path: Path) -> gpu_check.Run:
    return gpu_check.Run(
        gpu_check.Options(
            file=Path(__file__), out=tmp_path / "out", work=tmp_path / "work", backend="cpu", stages=gpu_check.STAGES,
            jobs=1, minutes=0, shape="1b", lengths=(64,), modes="window", rounds=1, n_tokens=2, prompt=16, models=(),
            cuda_architectures="",
        )
    )  # fmt: skip


def test_a_command_is_read_line_by_line_and_its_failure_told(run: gpu_check.Run) -> None:
    code = "import sys; print(1); print(2); print('so it is', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    assert list(run.lines([sys.executable, "-c", code, "3"], "x")) == ["1", "2"]
    with pytest.raises(gpu_check.Failed, match=r"exit status 3 of .*(?s:.)*so it is"):
        run.execute([sys.executable, "-c", code, "3"], "x")
    assert "so it is" in (run.logs / "x.log").read_text()
    run.deadline = 0.0
    with pytest.raises(gpu_check.OutOfTime):
        run.execute([sys.executable, "-c", "import time; time.sleep(60)"], "x")


def test_a_stage_that_fails_is_reported_and_what_was_done_is_not_done_again(
    run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails() -> None:
        calls.append("llama")
        raise gpu_check.Failed("no compiler")

    monkeypatch.setattr(run, "unpack", lambda: calls.append("unpack"))
    monkeypatch.setattr(run, "build_llama", fails)
    assert run.run() == 1 and run.run() == 1
    assert calls == ["unpack", "llama", "llama"]
    text = (run.options.out / "check_gpu.md").read_text()
    assert "| unpack | done |" in text and "**llama: failed.**" in text and "no compiler" in text
    again = gpu_check.Run(run.options)
    assert again.record["stages"]["unpack"]["status"] == "done"
    again.options.backend = "cuda"  # all follows from it
    with pytest.raises(SystemExit, match="the stage unpack comes before"):
        again.options.stages = ("rows",)
        again.run()


def test_a_model_that_ends_the_process_loses_one_case(run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import json, os, sys
for case in "abc":
    if case not in json.loads(sys.argv[2]):
        print(json.dumps({"case": case}), flush=True)
        if case == "b":
            print("x.cpp:7: GGML_ASSERT(n > 0) failed", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 6)
        print(json.dumps({"case": case, "status": "ok", "why": []}), flush=True)
print(json.dumps({"case": "end"}))
"""
    run.check_model([sys.executable, "-c", script], "m", "key")
    got = {entry["case"]: entry.get("status") for entry in run.record["rows"]}
    assert got == {"a": "ok", "b": "crashed", "c": "ok", "end": None}
    crash = next(entry for entry in run.record["rows"] if entry.get("status") == "crashed")
    assert crash["why"] == ["SIGABRT: x.cpp:7: GGML_ASSERT(n > 0) failed"]


def test_the_report_has_rows_costs_and_whether_the_goal_is_met(run: gpu_check.Run) -> None:
    good = {"setting": "rerotated", "cache": "f16", "placement": "all layers", "model": "llama", "status": "ok"}
    good.update(case(rows(0), rows(0)), standard=1e-6, over_rotated=2e-6, splits=3, plain_splits=1, why=[])
    bad = {"model": "qwen2", "case": "f16; plain", "status": "crashed", "why": ["SIGABRT: an assertion"]}
    measured = {"flash_attn": True, "tokens_per_second": 100.0, "prefill_ratio": None, "kv_bytes": 2**30}
    table = {"length": 16384, "seconds": 9.0, "measurements": [{**measured, "mode": "rerotated-w4096", "ratio": 1.07}]}
    failed = {"length": 4096, "seconds": 1.0, "error": "out of memory"}
    run.record.update(backend="cuda", shape="8b", rows=[good, bad], bench=[table, failed])
    text = gpu_report.render(run.record)
    assert "2 cases of 2 models, 1 failed" in text
    assert "- qwen2, f16; plain: crashed; SIGABRT: an assertion" in text
    assert "| rerotated | 1 | 0 | 0 | 1.0e-06 | 2.0e-06 | 0.0e+00 |" in text and "| 3, 1 |" in text
    assert "| rerotated-w4096 | on | 100.0 | 1.070x |  | 1024 |" in text
    assert "Goal for rerotated-w4096: at most 1.10x; measured 1.070x, met." in text
    assert text.index("out of memory") < text.index("16384 tokens")


def test_measurements_outlive_a_run_of_other_stages_but_not_another_build(
    run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unpack", "build_llama", "build_pypcd", "compare_rows", "measure"):
        monkeypatch.setattr(gpu_check.Run, name, lambda self: None)
    assert run.run() == 0
    run.record["bench"] = [{"key": run.keys()["bench"], "length": 64, "seconds": 0.0, "error": "none"}]
    run.options.stages, run.options.rounds = ("rows",), 9
    assert run.run() == 0 and len(run.record["bench"]) == 1
    run.options.stages = ("bench",)
    assert run.run() == 0 and run.record["bench"] == []
    monkeypatch.setattr(run, "cmake_args", lambda: ["-DGGML_CUDA=ON"])
    run.options.stages = ("llama", "pypcd")
    assert run.run() == 0 and sorted(run.record["stages"]) == ["llama", "pypcd", "unpack"]
