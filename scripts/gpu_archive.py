"""The archive of `scripts/check_gpu pack`: of llama-cpp-python's source what libllama and ggml (CPU and CUDA) are built from,
and wheels."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Of llama-cpp-python's source tree: what building and installing it reads, with LLAVA_BUILD=OFF and no backend but CUDA.
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
    "pip", "scikit-build-core>=0.11", "ninja", "numpy>=1.24", "gguf>=0.10", "tqdm>=4.60", "diskcache>=5.6.1",
    "jinja2>=2.11.3", "typing-extensions>=4.5.0", "pytest>=8", "hypothesis", "pexpect",
]  # fmt: skip
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


def find_source(folder: Path) -> Path:
    """The tree or sdist that PYPCD_LLAMA_CPP_SOURCE names, or the pinned sdist, downloaded to a folder."""
    named = os.environ.get("PYPCD_LLAMA_CPP_SOURCE")
    if named:
        source = Path(named).resolve()
        tree = source.parent.parent if source.is_dir() and not (source / "llama_cpp").is_dir() else source
        if not tree.exists() or (tree.is_dir() and not (tree / "llama_cpp" / "__init__.py").is_file()):
            raise SystemExit(
                f"PYPCD_LLAMA_CPP_SOURCE names {named}: neither an sdist of llama-cpp-python nor its tree, and no "
                "llama.cpp inside one"
            )
        return tree
    print(f"downloading the source of llama-cpp-python {pinned_version()}", flush=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*download, f"llama-cpp-python=={pinned_version()}", "--dest", str(folder)], check=True)
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def source_files(source: Path) -> Iterator[tuple[str, bytes, int]]:
    """Name in the tree, content and mode of every wanted file of a tree or an sdist."""
    if source.is_dir():
        for folder, folders, names in os.walk(source):
            folders[:] = sorted(set(folders) - {".git", "__pycache__"})
            for name in sorted(names):
                path = Path(folder) / name
                if wanted(path.relative_to(source).as_posix()):
                    yield path.relative_to(source).as_posix(), path.read_bytes(), path.stat().st_mode & 0o777
        return
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and wanted(name):
                content = archive.extractfile(member)
                assert content
                yield name, content.read(), member.mode


def pack(file: Path, python_version: str) -> None:
    """Write the archive: llama-cpp-python/, wheels/ and pack.json."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder, tree = Path(temporary), Path(temporary) / "pack" / "llama-cpp-python"
        for name, content, mode in source_files(find_source(folder)):
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
        for tag in ("cp" + python_version.replace(".", ""), "abi3", "none"):
            download += ["--abi", tag]
        for tag in PLATFORMS:
            download += ["--platform", tag + "_x86_64"]
        subprocess.run([*download, *PACKAGES], check=True)

        names = sorted(path.name for path in wheels.iterdir())
        about = {"llama_cpp_python": pinned_version(), "python": python_version, "wheels": names}
        (tree.parent / "pack.json").write_text(json.dumps(about, indent=2) + "\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:xz") as archive:
            archive.add(tree.parent, ".", filter=_anonymous)
        n_files = sum(1 for path in tree.rglob("*") if path.is_file())
    took = time.monotonic() - start
    print(
        f"{file}: {file.stat().st_size / 2**20:.1f} MiB, {n_files} files of source, {len(names)} wheels, {took:.0f} s"
    )


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
