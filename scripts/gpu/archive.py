"""The archive of `scripts/check_gpu pack`: the part of llama-cpp-python's source that ggml (CPU and CUDA) and libllama
are built from, and wheels of all that is installed."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "cmake"))

from pin import dynamic_metadata

# What building and installing llama-cpp-python reads, with LLAVA_BUILD=OFF and no backend but CUDA.
LLAMA = "vendor/llama.cpp/"
KEPT = [
    "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE.md", "llama_cpp/*",
    *(LLAMA + name for name in ("CMakeLists.txt", "LICENSE", "licenses/*", "cmake/*", "common/*", "include/*", "src/*")),
    *(LLAMA + name for name in ("vendor/*", "ggml/CMakeLists.txt", "ggml/cmake/*", "ggml/include/*")),
    *(LLAMA + name for name in ("ggml/src/ggml-cpu/*", "ggml/src/ggml-cuda/*")),
]  # fmt: skip
LEFT_OUT = [
    *("llama_cpp/lib/*", "*.pyc", "*.so", "*.gguf"),
    *(LLAMA + name for name in ("vendor/miniaudio/*.h", "vendor/stb/*.h")),  # for pictures and sound only
]
PACKAGES = [
    *("pip", "setuptools>=70.1", "scikit-build-core>=0.11", "ninja"),  # scripts/install asks for them too
    *(name for name in dynamic_metadata("dependencies") if not name.startswith("llama-cpp-python")),  # built there
    "diskcache>=5.6.1",  # what that one requires beside
    *("pytest>=8.2", "hypothesis", "gguf>=0.10"),
]
PLATFORMS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux1"]


def wanted(path: str) -> bool:
    """Whether a file of llama-cpp-python's tree goes into the archive."""
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in LEFT_OUT):
        return False
    if re.fullmatch(re.escape(LLAMA) + r"ggml/src/[^/]+", path):  # the files, not the backends' folders
        return True
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in KEPT)


def pinned_version() -> str:
    found = re.search(r'"llama-cpp-python==([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found
    return found.group(1)


def find_sdist(folder: Path) -> Path:
    """The sdist that PYPCD_LLAMA_CPP_SOURCE names, or the pinned one, downloaded to a folder."""
    named = os.environ.get("PYPCD_LLAMA_CPP_SOURCE")
    if named:
        if not (Path(named).is_file() and tarfile.is_tarfile(named)):
            raise SystemExit(f"PYPCD_LLAMA_CPP_SOURCE is {named}; needed here: an sdist of llama-cpp-python (.tar.gz)")
        return Path(named)
    print(f"downloading the source of llama-cpp-python {pinned_version()}", flush=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*download, f"llama-cpp-python=={pinned_version()}", "--dest", str(folder)], check=True)
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def source_files(sdist: Path) -> Iterator[tuple[str, bytes, int]]:
    """Name in the tree, content and mode of every wanted file of an sdist."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and wanted(name):
                content = archive.extractfile(member)
                assert content
                yield name, content.read(), member.mode


def pack(file: Path, python_version: str) -> None:
    """Write the archive: llama-cpp-python/, wheels/ and pack.json."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, tree = Path(temporary), Path(temporary) / "pack" / "llama-cpp-python"
        for name, content, mode in source_files(find_sdist(folder)):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(content)
            (tree / name).chmod(mode)
        found = re.search(r'__version__ = "([^"]+)"', (tree / "llama_cpp" / "__init__.py").read_text())
        if found is None or found.group(1) != pinned_version():
            raise SystemExit(f"the source is llama-cpp-python {found and found.group(1)}, not {pinned_version()}")

        wheels = tree.parent / "wheels"
        print(f"downloading wheels for Python {python_version}", flush=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels)]
        download += ["--python-version", python_version, "--implementation", "cp"]
        download += [f"--abi={tag}" for tag in ("cp" + python_version.replace(".", ""), "abi3", "none")]
        download += [f"--platform={tag}_x86_64" for tag in PLATFORMS]
        subprocess.run([*download, *PACKAGES], check=True)

        about = {"llama_cpp_python": pinned_version(), "python": python_version}
        (tree.parent / "pack.json").write_text(json.dumps(about, indent=2) + "\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:xz") as archive:
            archive.add(tree.parent, ".", filter=_anonymous)
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
