"""scripts/install.py, with a fake pip in .venv: what it builds when, what it says, what is left of a build that is stopped, and the
cure where llama-cpp-python crashes with a CPU's AMX."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_pip import AGAIN, BUILD, FIRST, PACKAGE, REQUIRED, ROOT, TOOLS, Project
from processes import lives, within

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


pytest_plugins = ["fake_pip"]  # fixtures
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")

Said = pytest.CaptureFixture[str]


def test_the_pin_and_the_extras_are_pyprojects(program: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)
    wanted = [*project["build-system"]["requires"], *project["tool"]["pypcd"]["native-requires"]]
    assert program.build_requirements(text) == wanted
    assert program.known_extras(text) == list(project["project"]["optional-dependencies"])
    for broken in ("", 'requires = ["pip"]\n'):
        with pytest.raises(program.Failed, match=r"pyproject\.toml"):
            program.build_requirements(broken)


# -- what is built when ----------------------------------------------------------------------------------------------


def test_there_are_three_steps_and_a_second_run_has_none(project: Project, capsys: Said) -> None:
    project.install("test")
    assert [line[:4] for line in capsys.readouterr().err.splitlines()] == ["1/3 ", "2/3 ", "3/3 "]
    assert project.lines() == [FIRST, BUILD, PACKAGE, f"{REQUIRED}[test]"]
    assert project.lines("probes") == [], "this CPU has no AMX"
    for extras in (["test"], []):
        project.install(*extras)
        assert capsys.readouterr().err == "Nothing to install: .venv is up to date\n"
        assert project.lines() == []
    project.install("hub", "plot")  # another extra builds nothing, and those before stay
    assert project.lines() == [PACKAGE, f"{REQUIRED}[hub,plot,test]"]


SITE = ".venv/lib/python3.11/site-packages"
BUILDS: dict[str, list[str]] = {  # what a change of a file makes pip do
    "cpp/a.cpp": [BUILD, PACKAGE, REQUIRED],
    "cpp/patches/new.patch": [BUILD, PACKAGE, REQUIRED],
    "cmake/pin.py": [BUILD, PACKAGE, REQUIRED],
    "pypcd/__init__.py": [BUILD, PACKAGE, REQUIRED],
    "CMakeLists.txt": [BUILD, PACKAGE, REQUIRED],
    "pypcd/__pycache__/a.pyc": [],  # it is not in the wheel, nor are these
    "pypcd/lib/libllama.so": [],
    "tests/test_a.py": [],
    "README.md": [],
    # the package was replaced, perhaps by one of the same version: a llama-cpp-python for a GPU, say
    f"{SITE}/llama_cpp_python-0.3.36.dist-info/RECORD": [FIRST, BUILD, PACKAGE, REQUIRED],
    f"{SITE}/llama_pcd-0.1.0.dist-info/RECORD": [FIRST, BUILD, PACKAGE, REQUIRED],
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_change_builds_what_depends_on_it(name: str, installed: Project) -> None:
    installed.change(name, "other")
    installed.install()
    assert installed.lines() == BUILDS[name]


def test_in_place_a_change_of_python_alone_builds_nothing(project: Project) -> None:
    """The sources run where they are, beside the compiled part of the installation, which is built when its own sources change."""
    environment = project.program.Environment(project.root)
    environment.in_place([])
    assert project.lines() == [FIRST, BUILD, PACKAGE, REQUIRED]
    library = project.change(f"{SITE}/pypcd/lib/libllama.so", "compiled")
    project.change("pypcd/__init__.py", "another")
    environment.in_place([])
    assert project.lines() == [] and (project.root / "pypcd/lib/libllama.so").read_text() == "compiled"
    library.write_text("compiled again")
    project.change("cpp/a.cpp", "another")
    environment.in_place([])
    assert project.lines() == [BUILD, PACKAGE, REQUIRED]
    assert (project.root / "pypcd/lib/libllama.so").read_text() == "compiled again"
    environment.in_place(["test"])
    assert len(project.lines()) == 2, "an extra that was not installed"


def test_a_source_of_ones_own_is_always_built(installed: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPCD_LLAMA_CPP_SOURCE", "/some/llama.cpp")
    installed.install()
    assert installed.lines() == [BUILD, PACKAGE, REQUIRED]


def test_after_a_failure_everything_is_tried_again(project: Project, capsys: Said) -> None:
    fail = project.change("fail")
    with pytest.raises(project.program.Failed) as failed:
        project.install()
    text = str(failed.value)
    assert "x.cpp:3: error: it does not compile\n" in text and "line 99" in text and "line 84" not in text
    assert text.endswith(f"ended with exit code 1; the whole log is {project.root / '.cache/install.log'}")
    assert capsys.readouterr().err.endswith("… FAILED\n")
    assert project.lines() == [FIRST]
    fail.unlink()
    project.install()
    assert project.lines() == [FIRST, BUILD, PACKAGE, REQUIRED]
    project.change("cpp/a.cpp", "y")
    fail.touch()
    for _ in range(2):
        with pytest.raises(project.program.Failed):
            project.install()
        assert project.lines() == [BUILD]


def test_a_folder_that_was_moved_has_a_new_environment(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    """Its console scripts name the old path."""
    project.install("test")
    old = project.root
    project.root = old.rename(old.with_name("elsewhere"))
    project.lines()
    monkeypatch.setattr(project.program.Environment, "make_venv", lambda _: project.make_venv())
    project.install()
    assert f".venv was made for {old}" in capsys.readouterr().err
    assert project.lines() == [FIRST, BUILD, PACKAGE, REQUIRED]


def test_what_was_stopped_half_way_is_done_again(installed: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed.root / ".venv/pypcd-installed.json").write_text('{"folder": ')
    installed.install()
    assert BUILD in installed.lines()
    shutil.rmtree(installed.root / ".venv")

    def cut_off(*_: Any) -> None:
        installed.make_venv()
        raise KeyboardInterrupt

    monkeypatch.setattr(installed.program.Environment, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        installed.install()
    assert not (installed.root / ".venv").exists()


# -- what is missing or wrong ----------------------------------------------------------------------------------------


def test_wrong_words_are_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(project.program.Failed, match="the extra is 'tests'; allowed: hub, .*test"):
        project.install("hub", "tests")
    project.change(".venv/pyvenv.cfg", "version = 3.2.1\n")
    monkeypatch.setenv("PYTHON", "python3")
    with pytest.raises(project.program.Failed, match=r"PYTHON is python3, .* \.venv was made with 3\.2; remove \.venv"):
        project.install()


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (None, r"there is no C\+\+ compiler \(c\+\+\); .*apt-get install build-essential"),
        ("vulkan", "there is no glslc; the vulkan backend needs Debian's packages libvulkan-dev glslc"),
        ("cuda", "there is no nvcc; the cuda backend needs Debian's packages nvidia-cuda-toolkit"),
    ],
)
def test_a_missing_compiler_is_named_before_anything_is_built(
    backend: str | None, said: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(project.program.shutil, "which", lambda name, path=None: name == "c++" and backend)
    with pytest.raises(project.program.Failed, match=said):
        project.install(backend=backend)
    assert project.lines() == []


def test_without_cmake_pip_brings_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project.program.shutil, "which", lambda name, path=None: name == "c++")
    project.install()
    assert project.lines()[0] == f"{TOOLS} cmake ninja llama-cpp-python==0.3.36"


# -- AMX -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("found", "backend", "told", "is_built_again"),
    [
        (["right"], "cpu", "", False),
        (["wrong: by 1", "right"], "cpu", "It computes wrongly with this CPU's AMX, so it is built again\n", True),
        (["crash"], "cpu", "It still crashes with AMX; models will not use it\n", True),
        # built again without its options, it would have no GPU
        (["crash"], "cuda", "It crashes with this CPU's AMX; left as it is, since it has libggml-cuda\n", False),
    ],
)
def test_a_llama_cpp_python_is_probed_and_built_again_once_if_it_fails(
    found: list[str], backend: str, told: str, is_built_again: bool, project: Project, capsys: Said
) -> None:
    project.cpu("amx_tile amx_int8")
    project.amx(*found)
    project.change(f"{SITE}/llama_cpp/lib/libggml-{backend}.so")
    project.install()
    said = capsys.readouterr().err
    assert told in said and ("AMX" in said) == bool(told)
    assert project.lines() == [FIRST, *(AGAIN if is_built_again else []), BUILD, PACKAGE, REQUIRED]
    probe = "-I ROOT/pypcd/_amx_probe.py ROOT/pypcd/models/demo.gguf"
    assert project.lines("probes") == [probe] * (1 + is_built_again)
    project.change("cpp/a.cpp", "y")
    project.install()
    assert project.lines("probes") == [] and project.lines() == [BUILD, PACKAGE, REQUIRED]


# -- a build that is stopped -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_and_what_it_started(number: signal.Signals, project: Project) -> None:
    """The real program, in a folder of its own."""
    for name in ("install", "install.py"):
        shutil.copy(ROOT / "scripts" / name, project.root / "scripts" / name)
    project.change("hang")
    process = subprocess.Popen(
        [project.root / "scripts/install", "test"],
        env={**os.environ, "PYTHON": sys.executable},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  in the background Ctrl-C is ignored
    )
    pids = project.root / "hanging"
    try:
        while not pids.exists() or not pids.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert told.endswith("Stopped; the same command goes on from here\n") and "Traceback" not in told
    assert within(lambda: not any(lives(int(pid)) for pid in pids.read_text().split()))
    assert not (project.root / ".venv/pypcd-installed.json").exists()


# -- other backends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vulkan", "cuda"])
def test_a_backend_is_built_into_an_environment_of_its_own_and_kept(
    backend: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = project.change(f"bin/{project.program.BACKENDS[backend].program}", "#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("CMAKE_ARGS", "-DX=1")
    project.make_venv(f".venv-{backend}")
    project.install(backend=backend)
    kept = f"ROOT/.cache/llama-cpp-python/0.3.36-{backend}-KEY"
    built = "wheel --no-deps --no-build-isolation"
    wheel = f"ROOT/.cache/wheel-{backend}/llama_pcd-0.1.0-py3-none-any.whl"
    calls = [
        TOOLS,
        f"{built} -C build-dir=ROOT/build/llama-cpp-python-{backend}-KEY --wheel-dir {kept} ROOT/build/llama_cpp_python-0.3.36",
        f"install {kept}/llama_cpp_python-0.3.36-py3-none-any.whl",
        f"{built} -Cbuild-dir=build/{backend} -Ccmake.define.PYPCD_SERVER=OFF --wheel-dir ROOT/.cache/wheel-{backend} ROOT",
        f"install --force-reinstall --no-deps {wheel}",
        f"install --no-build-isolation {wheel}",
    ]
    assert project.lines() == calls
    (made,) = (project.root / ".cache/llama-cpp-python").glob("*/*.whl")
    assert (
        made.read_text()
        == f"-DGGML_{backend.upper()}=ON" + " -DGGML_CUDA_NCCL=OFF" * (backend == "cuda") + " -DLLAVA_BUILD=OFF -DX=1"
    )
    project.install(backend=backend)
    assert project.lines() == []
    project.change("cpp/a.cpp", "y")
    shutil.rmtree(project.root / f".venv-{backend}/lib")
    project.install(backend=backend)
    assert project.lines() == [calls[0], *calls[2:]]
    monkeypatch.setenv("CMAKE_ARGS", "-DX=2")
    shutil.rmtree(project.root / f".venv-{backend}/lib")
    project.install(backend=backend)
    assert project.lines() == calls


def test_a_wrong_backend_is_named() -> None:
    done = subprocess.run([ROOT / "scripts/test", "--backend", "metal"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "the backend is 'metal'; allowed: vulkan, cuda, rpc, cpu" in done.stderr
