"""Which ggml lies in a folder: its version, and how it lays out a tensor in memory.

CMake runs this file when libllama is built, and installs what it prints beside the library; _library compares that with
the ggml it finds before it loads libllama. Only libggml-base is loaded, which needs no device and no driver. What it has
in common with every other build of the same source is told, and nothing of its backends. Knows nothing of pypcd.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import sys
import zlib

__all__ = ["base_of", "difference", "identity"]

_F16 = 1


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


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
        "tensor layout": _tensor_layout(base),
    }


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Where a folder's libggml-base is."""
    return folder / {"win32": "ggml-base.dll", "darwin": "libggml-base.dylib"}.get(sys.platform, "libggml-base.so")


def _tensor_layout(base: ctypes.CDLL) -> str:
    """A checksum of one tensor with known values: where its members are, and the number of its operation.

    GLU is the last operation of ggml's list, so its number tells how many there are. ggml is not asked for their names:
    beyond the end of a shorter list it reads what is not there.
    """
    base.ggml_tensor_overhead.restype = ctypes.c_size_t
    base.ggml_init.argtypes = [_InitParams]
    base.ggml_free.argtypes = [ctypes.c_void_p]
    base.ggml_new_tensor_4d.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 4]
    base.ggml_swiglu_split.argtypes = base.ggml_set_name.argtypes = [ctypes.c_void_p] * 3
    base.ggml_set_name.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    for function in (base.ggml_init, base.ggml_new_tensor_4d, base.ggml_swiglu_split):
        function.restype = ctypes.c_void_p

    size = base.ggml_tensor_overhead()  # of a tensor and what stands before it
    memory = ctypes.create_string_buffer(8 * size)
    start = ctypes.addressof(memory)
    context = base.ggml_init(_InitParams(len(memory), start, True))
    gate, up = (base.ggml_new_tensor_4d(context, _F16, 2, 3, 5, 7) for _ in range(2))
    made = base.ggml_swiglu_split(context, gate, up)
    base.ggml_set_name(made, b"pypcd")
    words = (ctypes.c_size_t * (size // ctypes.sizeof(ctypes.c_size_t))).from_address(made)
    seen = [word - start if start <= word < start + len(memory) else word for word in words]  # pointers as distances
    base.ggml_free(context)
    return f"{size}-{zlib.crc32(json.dumps(seen).encode()):08x}"


def difference(found: dict[str, str], wanted: dict[str, str]) -> str:
    """What tells that they are of different sources, as "its version is ...; allowed: ..."; empty if nothing does.

    Commits count where both are known: the sources that pip builds from know theirs only where git is installed.
    """
    for key, b in wanted.items():
        a = found.get(key, "unknown")
        if key == "commit":
            short = sorted((a.partition("-")[0], b.partition("-")[0]), key=len)
            if "unknown" in short or short[1].startswith(short[0]):  # git shortens it to as few digits as suffice
                continue
        if a != b:
            return f"its {key} is {a}; allowed: {b}"
    return ""


if __name__ == "__main__":
    print(json.dumps(identity(pathlib.Path(sys.argv[1])), indent=1))
