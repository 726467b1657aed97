"""scripts/install.py --backend and scripts/backends.py, with a fake pip: what is built when, what is missing, what is kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import backends
import pytest
from fake_pip import ROOT, Project  # it puts scripts/ on the path

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with all that Vulkan needs, and a user's cache of its own."""
    usr = tmp_path / "root" / "usr"
    files = {
        "include/vulkan/vulkan.hpp": "",
        "include/vulkan/vulkan_core.h": "#define VK_EXT_layer_settings 1\n",
        "include/spirv/unified1/spirv.hpp": "",
        "share/vulkan/icd.d/lvp_icd.json": "{}",
        "bin/glslc": "#!/bin/sh\n",
    }
    for name, text in files.items():
        (usr / name).parent.mkdir(parents=True, exist_ok=True)
        (usr / name).write_text(text)
    (usr / "bin/glslc").chmod(0o755)
    monkeypatch.setattr(backends, "SYSTEM", usr)
    monkeypatch.setenv("PATH", str(usr / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("VULKAN_SDK", "CPATH", "CMAKE_ARGS", "CXXFLAGS", "VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    return usr


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("include/vulkan/vulkan.hpp", "libvulkan-dev"),
        ("include/spirv/unified1/spirv.hpp", "spirv-headers"),
        ("share/vulkan/icd.d/lvp_icd.json", "mesa-vulkan-drivers"),
        ("bin/glslc", "glslc"),
    ],
)
def test_a_missing_package_is_named(
    file: str, package: str, system: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backends.missing_packages("vulkan") == []
    (system / file).unlink()
    monkeypatch.setenv("PATH", str(system / "bin"))  # this machine may have a glslc
    assert backends.missing_packages("vulkan") == [package]
    with pytest.raises(
        project.program.Failed, match=f"the vulkan backend needs {package}, which is not .*apt-get install {package}$"
    ):
        project.install(backend="vulkan")
    assert project.calls() == []


def test_a_driver_may_be_named_and_headers_may_be_of_a_kit(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "share/vulkan/icd.d/lvp_icd.json").unlink()
    monkeypatch.setenv("VK_ICD_FILENAMES", "/somewhere/driver.json")
    (system / "include").rename(system.parent / "kit-include")
    monkeypatch.setenv("VULKAN_SDK", str(system.parent / "kit"))
    (system.parent / "kit").mkdir()
    (system.parent / "kit-include").rename(system.parent / "kit" / "include")
    assert backends.missing_packages("vulkan") == []


def test_an_old_header_gets_the_missing_part(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CPATH" not in backends.build_environment("vulkan", ROOT)
    (system / "include/vulkan/vulkan_core.h").write_text("#define VK_HEADER_VERSION 239\n")
    monkeypatch.setenv("CPATH", "/mine")
    monkeypatch.setenv("CMAKE_ARGS", "-DX=1")
    assert backends.build_environment("vulkan", ROOT) == {
        "CMAKE_ARGS": "-DGGML_VULKAN=ON -DLLAVA_BUILD=OFF -DX=1",
        "CPATH": f"{ROOT / 'cmake/vulkan'}{os.pathsep}/mine",
    }
    assert (ROOT / "cmake/vulkan/vulkan/vulkan.hpp").is_file()


def test_it_is_built_into_an_environment_of_its_own_and_kept(system: Path, project: Project) -> None:
    project.make_venv(".venv-vulkan")
    told = project.install("test", backend="vulkan")
    calls = project.calls()
    assert "1/3 llama-cpp-python 0.3.36 with vulkan: compiling" in told or "with vulkan: done in" in told
    assert calls[0].startswith("wheel --no-deps --no-cache-dir --wheel-dir ")
    assert calls[0].endswith("--no-binary llama-cpp-python llama-cpp-python==0.3.36")
    (kept,) = (system.parent.parent / "cache/pypcd/backends").glob("vulkan-0.3.36-*/llama_cpp_python-*.whl")
    assert kept.read_text() == "-DGGML_VULKAN=ON -DLLAVA_BUILD=OFF"
    assert calls[1] == f"install scikit-build-core>=0.11 KEPT/{kept.name} pip setuptools>=70.1"
    built = "wheel --no-deps --no-build-isolation -C build-dir=build/vulkan -C cmake.define.PYPCD_SERVER=OFF"
    assert calls[2] == f"{built} --wheel-dir ROOT/.cache/wheel-vulkan ROOT"
    assert len(calls) == 5
    assert project.install("test", backend="vulkan") == "Nothing to install: .venv-vulkan is up to date\n"
    assert project.calls() == []


def test_another_clone_takes_the_wheel_that_was_kept(
    system: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.make_venv(".venv-vulkan")
    project.install(backend="vulkan")
    project.calls()
    again = Project(project.root.parent / "another", project.program)
    again.make_venv(".venv-vulkan")
    again.install(backend="vulkan")
    assert again.calls()[0].startswith("install scikit-build-core")
    monkeypatch.setenv("CXXFLAGS", "-O1")
    third = Project(project.root.parent / "third", project.program)
    third.make_venv(".venv-vulkan")
    third.install(backend="vulkan")
    assert third.calls()[0].startswith("wheel --no-deps --no-cache-dir")


def test_what_changes_a_build_changes_its_place(system: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = [backends.kept_wheels("vulkan", "0.3.36", ROOT), backends.kept_wheels("vulkan", "0.3.37", ROOT)]
    for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.setenv(name, "-DA=1")
        seen.append(backends.kept_wheels("vulkan", "0.3.36", ROOT))
    monkeypatch.setattr(backends, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu another\n")
    seen.append(backends.kept_wheels("vulkan", "0.3.36", ROOT))
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho another compiler\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{compiler}' -v")
    seen.append(backends.kept_wheels("vulkan", "0.3.36", ROOT))
    assert len(set(seen)) == len(seen) and seen[-1] == backends.kept_wheels("vulkan", "0.3.36", ROOT)


def test_a_failed_build_leaves_nothing_behind(system: Path, project: Project) -> None:
    project.make_venv(".venv-vulkan")
    project.change("fail")
    with pytest.raises(project.program.Failed, match=r"whole log is .*install-vulkan\.log"):
        project.install(backend="vulkan")
    assert list((system.parent.parent / "cache/pypcd/backends").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend"], "the backend is ''; allowed: vulkan, cuda, rpc, cpu"),
        (["--backend", "metal"], "the backend is 'metal'; allowed: vulkan, cuda, rpc, cpu"),
    ],
)
def test_a_wrong_backend_is_named(words: list[str], said: str) -> None:
    done = subprocess.run([ROOT / "scripts/test", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and said in done.stderr


def test_an_environment_of_another_backend_is_another(project: Project) -> None:
    state: Any = project.program.State
    assert [state(project.root, name).venv.name for name in (None, "vulkan")] == [".venv", ".venv-vulkan"]


def test_cuda_is_built_for_the_gpu_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without one so that the library loads without a driver."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    for name in ("nvcc", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    assert backends.missing_packages("cuda") == []
    without = backends.build_environment("cuda", ROOT)["CMAKE_ARGS"]
    assert without.startswith("-DGGML_CUDA=ON ") and f"-DCMAKE_CUDA_COMPILER={tmp_path}/nvcc" in without
    assert "-DCMAKE_CUDA_ARCHITECTURES=native" in without and "-DGGML_CUDA_NO_VMM=ON" in without
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 9.0; echo 8.6; echo 9.0\n")
    found = backends.build_environment("cuda", ROOT)["CMAKE_ARGS"]
    assert "-DCMAKE_CUDA_ARCHITECTURES=86-real;90-real" in found and "NO_VMM" not in found
    assert backends.kept_wheels("cuda", "1", ROOT) != backends.kept_wheels("vulkan", "1", ROOT)


def test_a_machine_without_nvcc_is_told_which_package_has_it(monkeypatch: pytest.MonkeyPatch, project: Project) -> None:
    monkeypatch.setattr(backends, "find_nvcc", lambda: None)
    with pytest.raises(
        project.program.Failed, match=r"the cuda backend needs nvidia-cuda-toolkit, which is not installed"
    ):
        project.install(backend="cuda")
