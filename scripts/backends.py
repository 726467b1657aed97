"""llama-cpp-python built with another backend of ggml: what has to be installed for that, how it is built, where it is kept.

    python3 scripts/backends.py vulkan      # Debian's packages that are missing for it; nothing if all are there

Only the standard library is used. Knows nothing of pypcd, and not how a build is run, which install.py does.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from machine import cuda_options, find_nvcc

__all__ = ["BACKENDS", "Backend", "build_environment", "kept_wheels", "missing_packages"]

SYSTEM = Path("/usr")
CPUINFO = Path("/proc/cpuinfo")


class Backend(NamedTuple):
    """A backend that llama-cpp-python is not built with by default.

    Attributes:
        flags: CMake's, for llama-cpp-python; rows need no pictures, so libmtmd is left out.
        minutes: of one core, as measured on a 2.1 GHz Xeon.
        needs: Debian's packages, and how it is found out whether what they hold is there.
    """

    flags: str
    minutes: float
    needs: dict[str, Callable[[], bool]]


def _header(name: str) -> Path | None:
    sdk = os.environ.get("VULKAN_SDK")
    given = [f"{sdk}/include" if sdk else "", *os.environ.get("CPATH", "").split(os.pathsep)]
    folders = [*(Path(folder) for folder in given if folder), SYSTEM / "include", SYSTEM / "local" / "include"]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _has_driver() -> bool:
    """A Vulkan driver, of whatever device: the loader's own lists."""
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    folders = [SYSTEM / "share", SYSTEM / "local" / "share", SYSTEM.parent / "etc", Path.home() / ".local" / "share"]
    return bool(named) or any(any((folder / "vulkan" / "icd.d").glob("*.json")) for folder in folders)


BACKENDS: dict[str, Backend] = {
    "vulkan": Backend(
        flags="-DGGML_VULKAN=ON -DLLAVA_BUILD=OFF",
        minutes=14.0,
        needs={
            "libvulkan-dev": lambda: _header("vulkan/vulkan.hpp") is not None,
            "glslc": lambda: shutil.which("glslc") is not None,
            "spirv-headers": lambda: _header("spirv/unified1/spirv.hpp") is not None,
            "mesa-vulkan-drivers": _has_driver,
        },
    ),
    "cuda": Backend(
        flags="-DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DLLAVA_BUILD=OFF",
        minutes=90.0,  # for one architecture; the only number here that is an estimate
        needs={"nvidia-cuda-toolkit": lambda: find_nvcc() is not None},
    ),
}


def missing_packages(name: str) -> list[str]:
    """Debian's packages that have to be installed before the backend is built and used."""
    return [package for package, is_there in BACKENDS[name].needs.items() if not is_there()]


def build_environment(name: str | None, root: Path) -> dict[str, str]:
    """What the build of llama-cpp-python sees in its environment, beside the rest; name: None is the CPU alone."""
    given = os.environ.get("CMAKE_ARGS", "")
    flags = [BACKENDS[name].flags if name else "", *(cuda_options(find_nvcc()) if name == "cuda" else []), given]
    env = {"CMAKE_ARGS": " ".join(filter(None, flags))}
    nvcc = find_nvcc()
    if name == "cuda" and nvcc and not (nvcc.resolve().parent.parent / "lib64").exists():  # in pip's packages it is lib
        folders = [str(nvcc.resolve().parent.parent / "lib"), os.environ.get("LIBRARY_PATH", "")]
        env["LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    header = _header("vulkan/vulkan_core.h")
    if name == "vulkan" and header and "VK_EXT_layer_settings" not in header.read_text(encoding="utf-8"):
        folders = [str(root / "cmake" / "vulkan"), os.environ.get("CPATH", "")]
        env["CPATH"] = os.pathsep.join(filter(None, folders))
    return env


def kept_wheels(name: str | None, version: str, root: Path) -> Path:
    """The folder of the user's cache for the wheel of this version as it would be built now; it may not exist."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pypcd" / "backends"
    names = ("CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CFLAGS", "CXXFLAGS")
    parts = [build_environment(name, root)["CMAKE_ARGS"], platform.machine(), _cpu_flags()]
    parts += [*(os.environ.get(name, "") for name in names), _compiler("CC", "cc"), _compiler("CXX", "c++")]
    parts += [(root / "cmake" / file).read_text(encoding="utf-8") for file in ("llama-cpp-python.cmake", "amx.cmake")]
    return base / f"{name or 'cpu'}-{version}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _compiler(variable: str, default: str) -> str:
    """The first line that the compiler says of itself; empty where there is none."""
    command: Sequence[str] = [*shlex.split(os.environ.get(variable, default)), "--version"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0]


def _cpu_flags() -> str:
    """ggml is compiled for the CPU that it is built on."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


if __name__ == "__main__":
    print(*missing_packages(sys.argv[1]))
