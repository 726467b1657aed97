"""What the machine has: GPUs, CUDA's compiler and libraries, the CPU. Asked with the standard library alone."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def output_of(*command: str) -> str:
    """What a command prints; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def find_nvcc() -> Path | None:
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True), Path("/opt/cuda")]
    homes += [home for path in sys.path if path for home in Path(path, "nvidia").glob("*")]
    on_path = shutil.which("nvcc")
    found = [Path(on_path)] if on_path else [home / "bin/nvcc" for home in homes if (home / "bin/nvcc").is_file()]
    return found[0] if found else None


def cuda_library_folders(nvcc: Path | None) -> list[str]:
    """Where CUDA's run time and the driver's library may lie: llama-cpp-python's libraries look in their own folder."""
    home = nvcc.resolve().parent.parent if nvcc else Path("/usr/local/cuda")
    folders = [home / name for name in ("lib64", "targets/x86_64-linux/lib", "lib")]  # never the toolkit's stubs
    folders += [Path("/usr/local/nvidia/lib64"), Path("/usr/local/nvidia/lib")]
    folders += [folder for path in sys.path if path for folder in Path(path, "nvidia").glob("*/lib")]
    names = ("libcudart.so*", "libcublas.so*", "libcuda.so*")
    return [str(folder) for folder in folders if any(any(folder.glob(name)) for name in names)]


def ask_gpus(fields: str) -> list[str]:
    """A line for each GPU that nvidia-smi knows of."""
    return output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines()


def cuda_options(nvcc: Path | None) -> list[str]:
    """CMake's, for ggml. The architecture is this GPU's, 90-real for 9.0; where nvidia-smi is silent, "native"."""
    found = sorted({line.replace(".", "") for line in ask_gpus("compute_cap") if re.match(r"\d+\.\d$", line)})
    kinds = ";".join(f"{number}-real" for number in found) or "native"
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={kinds}"]
    if not found:  # nor then a driver to link with: a library that does not ask for it loads here too
        options.append("-DGGML_CUDA_NO_VMM=ON")
    return options + ([f"-DCMAKE_CUDA_COMPILER={nvcc}", *_versioned_libraries(nvcc)] if nvcc else [])


def _versioned_libraries(nvcc: Path) -> list[str]:
    """Pip's packages hold libcudart.so.13 and no libcudart.so, which is what CMake looks for."""
    folders = [nvcc.resolve().parent.parent / name for name in ("lib64", "targets/x86_64-linux/lib", "lib")]
    options = []
    variables = {
        "CUDART": "cudart",
        "cudart_LIBRARY": "cudart",
        "cublas_LIBRARY": "cublas",
        "cublasLt_LIBRARY": "cublasLt",
    }
    for variable, name in variables.items():
        if not any((folder / f"lib{name}.so").exists() for folder in folders):
            found = [path for folder in folders for path in sorted(folder.glob(f"lib{name}.so.*"))]
            options += [f"-DCUDA_{variable}={path}" for path in found[:1]]
    return options


def describe_machine(nvcc: Path | None) -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    release = re.search(r"release (\S+),", output_of(str(nvcc), "--version")) if nvcc else None
    return {
        "gpus": ask_gpus("name,driver_version,memory.total"),
        "nvcc": release.group(1) if release else None,
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "compiler": (output_of(os.environ.get("CXX", "c++"), "--version").splitlines() or ["no compiler"])[0],
    }
