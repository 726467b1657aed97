"""scripts/install.py where the CPU has AMX: llama-cpp-python that crashes with it is built anew."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fake_pip import AGAIN, BUILD, FIRST, PACKAGE, REQUIRED, ROOT, Project

Said = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")


def test_builds_of_llama_cpp_python_are_told_of_the_cure(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable that scikit-build-core splits at semicolons: a path may have spaces."""
    project.install()
    cure = "CMAKE_PROJECT_llama_cpp_INCLUDE=ROOT/cmake/llama-cpp-python.cmake"
    assert set(project.lines("defines")) == {cure}
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", "GGML_CUDA=ON;A=b c")
    project.change("cpp/a.cpp", "y")
    project.install()
    assert set(project.lines("defines")) == {f"GGML_CUDA=ON;A=b c;{cure}"}


def test_what_nobody_uses_is_left_out_and_the_cure_is_in(tmp_path: Path) -> None:
    """In projects of the names and with the commands of llama-cpp-python, llama.cpp and ggml."""
    lines = {
        "": 'project(llama_cpp CXX)\nset(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)\nadd_subdirectory(vendor)',
        "vendor": 'project("llama.cpp" CXX)\noption(LLAMA_BUILD_COMMON "" ON)\nadd_subdirectory(ggml)\n'
        'message("common is ${LLAMA_BUILD_COMMON}")',
        "vendor/ggml": 'project("ggml" CXX)\nadd_subdirectory(src)\nmessage("the cure is ${PYPCD_AMX_CURE}")',
        "vendor/ggml/src": 'file(WRITE "${CMAKE_CURRENT_SOURCE_DIR}/ggml-cpu/amx/mmq.cpp" "")',
    }
    for folder, text in lines.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.21)\n{text}\n")
    include = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={ROOT / 'cmake/llama-cpp-python.cmake'}"
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", include]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"common is OFF", "the cure is -fno-tree-dse;-fno-dse"} <= set(done.stderr.splitlines())


def test_without_amx_in_the_cpu_nothing_is_probed(project: Project, tmp_path: Path) -> None:
    project.amx("crash")
    project.install()
    project.program.CPUINFO = tmp_path / "no such file"
    project.change(".venv/pypcd-installed.json", "")
    project.install()
    assert project.lines("probes") == []


@pytest.mark.parametrize("found", ["right", "none"])
def test_a_llama_cpp_python_that_works_is_probed_once(found: str, project: Project) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx(found)
    project.install()
    assert project.lines() == [FIRST, BUILD, PACKAGE, REQUIRED]
    site = "ROOT/.venv/lib/python3.11/site-packages"
    assert project.lines("probes") == [f"-I -S ROOT/pypcd/_amx_probe.py {site}/llama_cpp/lib"]
    project.change("cpp/a.cpp", found)
    project.install()
    assert project.lines("probes") == [] and project.lines() == [BUILD, PACKAGE, REQUIRED]


@pytest.mark.parametrize(("found", "told"), [("crash", "crashes"), ("wrong: Q4_0, 1 tokens", "computes wrongly")])
def test_one_that_crashes_is_built_again_once_and_pips_cache_is_left_alone(
    found: str, told: str, project: Project, capsys: Said
) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx(found, "right")
    project.install()
    said = capsys.readouterr().err
    assert f"It {told} with this CPU's AMX, so it is built again\n" in said and "still" not in said
    assert project.lines() == [FIRST, *AGAIN, BUILD, PACKAGE, REQUIRED] and len(project.lines("probes")) == 2
    project.install()
    assert capsys.readouterr().err == "Nothing to install: .venv is up to date\n" and project.lines("probes") == []


def test_the_wheel_that_was_built_again_is_kept(project: Project) -> None:
    """For a .venv that is made again with what pip's cache has."""
    project.cpu("amx_int8")
    project.amx("crash", "right", "crash", "right")
    project.install()
    project.lines()
    project.change(".venv/pypcd-installed.json", "")
    project.install()
    assert project.lines() == [FIRST, AGAIN[1], BUILD, PACKAGE, REQUIRED]


def test_where_the_cure_does_not_help_it_is_said(project: Project, capsys: Said) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx("crash")
    project.install()
    assert "It still crashes with AMX; models will not use it\n" in capsys.readouterr().err
    project.lines()
    project.change("cpp/a.cpp", "y")
    project.install()
    assert project.lines() == [BUILD, PACKAGE, REQUIRED]


def test_one_with_other_backends_is_left_alone(project: Project, capsys: Said) -> None:
    """Built again without its options, it would have no GPU."""
    project.cpu("amx_tile amx_int8")
    project.amx("crash")
    project.change(".venv/lib/python3.11/site-packages/llama_cpp/lib/libggml-cuda.so")
    project.install()
    assert "It crashes with this CPU's AMX; left as it is, since it has libggml-cuda\n" in capsys.readouterr().err
    assert project.lines() == [FIRST, BUILD, PACKAGE, REQUIRED]
