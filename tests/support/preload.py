"""A process in which allocations fail, or graphs are others: preload.cpp, put before ggml by LD_PRELOAD."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pypcd  # noqa: F401  it chooses the library that llama_cpp loads, so it comes first

# isort: split
import llama_cpp
import pytest

SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # scripts/sanitize: it keeps freed memory, to catch its use

needs_preload = pytest.mark.skipif(
    SANITIZED or sys.platform != "linux", reason="the sanitizer has to be loaded first; LD_PRELOAD is Linux's"
)


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler, "the library was compiled, so there is a compiler"
    path, source = tmp_path_factory.mktemp("preload") / "preload.so", Path(__file__).with_name("preload.cpp")
    include = Path(llama_cpp.__file__).parent.parent / "include"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-O1", f"-I{include}", source, "-o", path, "-ldl"]
    subprocess.run(command, check=True)
    return path
