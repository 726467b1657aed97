"""Which ggml lies in a folder: its version, and the commit that it was built from.

CMake runs this file when libllama is built, and installs what it prints beside the library; pypcd.library compares that with
the ggml it finds before it loads libllama. Only libggml-base is loaded, which needs no device and no driver. What it has
in common with every other build of the same source is told, and nothing of its backends. Knows nothing of pypcd.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import sys

__all__ = ["base_of", "difference", "identity"]


def identity(folder: pathlib.Path) -> dict[str, str]:
    """What all builds of one ggml have in common, whatever compiler, backends and CPU they are for.

    Args:
        folder: llama_cpp/lib.

    Raises:
        OSError: there is no libggml-base, or it does not load.
        AttributeError: it has no such functions.
    """
    base = ctypes.CDLL(str(base_of(folder)))
    base.ggml_version.restype = base.ggml_commit.restype = ctypes.c_char_p
    return {
        "version": base.ggml_version().decode(),
        "commit": base.ggml_commit().decode(),  # "unknown" where it was built without git
    }


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Where a folder's libggml-base is."""
    return folder / {"win32": "ggml-base.dll", "darwin": "libggml-base.dylib"}.get(sys.platform, "libggml-base.so")


def difference(found: dict[str, str], wanted: dict[str, str]) -> str:
    """What tells that they are of different sources, as "its version is ...; allowed: ..."; empty if nothing does.

    Commits count where both are known: the sources that pip builds from know theirs only where git is installed.
    """
    for key, a in found.items():
        b = wanted.get(key, "unknown")
        if key == "commit":
            short = sorted((a.partition("-")[0], b.partition("-")[0]), key=len)
            if "unknown" in short or short[1].startswith(short[0]):  # git shortens it to as few digits as suffice
                continue
        if a != b:
            return f"its {key} is {a}; allowed: {b}"
    return ""


if __name__ == "__main__":
    print(json.dumps(identity(pathlib.Path(sys.argv[1])), indent=1))
