"""Which libllama this process runs: loads pypcd's in place of the stock one, and checks what was loaded.

The engine imports llama_cpp, so this has to happen before. Knows only one function of the library: the one that returns
its version.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
import site
import sys
import sysconfig
from typing import Any, Callable

from pypcd._errors import LibraryError

__all__ = ["API_VERSION", "check", "load", "pinned_version"]

API_VERSION = 9  # LLAMA_PCD_VERSION of cpp/llama-pcd.h

_VARIABLE = "LLAMA_CPP_LIB_PATH"  # where llama_cpp looks for libllama; read once, when it is imported


def library_dirs() -> list[pathlib.Path]:
    """Where pypcd's library may be: beside this file, or in site-packages for an editable install."""
    here = pathlib.Path(__file__).parent / "lib"
    sites = [sysconfig.get_path("platlib"), site.getusersitepackages()]
    return [here, *(pathlib.Path(path) / "pypcd" / "lib" for path in sites)]


def _library_dir() -> pathlib.Path:
    for path in library_dirs():
        if any(path.glob("*llama.*")):
            return path
    raise LibraryError(
        f"pypcd's libllama was not found; looked in {', '.join(map(str, library_dirs()))}; "
        "install the package with 'pip install .' (a source checkout alone has no library)"
    )


def _preload_ggml(lib: pathlib.Path) -> None:
    """Load llama-cpp-python's ggml. Our library links to it by name, and the two packages may be installed apart."""
    if sys.platform == "win32":
        os.add_dll_directory(str(lib))
        return
    # base first, then the backends, then the registry that links to them all
    names = sorted(
        lib.glob("libggml*.dylib" if sys.platform == "darwin" else "libggml*.so"),
        key=lambda p: (p.stem != "libggml-base", p.stem == "libggml", p.stem),
    )
    for name in names:
        ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)


def load(module: Any, execute: Callable[[], None]) -> None:
    """Execute llama_cpp so that it loads pypcd's library.

    Args:
        module: llama_cpp, about to be executed.
        execute: executes it.

    Raises:
        LibraryError: pypcd's library is missing or does not load, or LLAMA_CPP_LIB_PATH names another one.
    """
    before = os.environ.get(_VARIABLE)
    path = before or str(_library_dir())
    try:
        os.environ[_VARIABLE] = path
        _preload_ggml(pathlib.Path(module.__file__).parent / "lib")
        execute()
    except (OSError, RuntimeError) as error:
        hint = f"{_VARIABLE} is set to {before}: unset it" if before else "reinstall pypcd"
        raise LibraryError(f"libllama cannot be loaded: {error}; {hint}") from error
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    _check(module, f"unset {_VARIABLE}, which names another library" if before else "reinstall pypcd")


def check() -> None:
    """Import llama_cpp, and check that it has pypcd's library.

    Raises:
        LibraryError: it is not installed, or has another library.
    """
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        raise LibraryError(
            "llama-cpp-python is not installed; pypcd is built on it: pip install llama-cpp-python"
        ) from None
    _check(llama_cpp, "import pypcd before llama_cpp (or before the package that imports it)")


def _check(llama_cpp: Any, remedy: str) -> None:
    lib = llama_cpp.llama_cpp._lib
    try:
        version = lib.llama_pcd_version
    except AttributeError:
        raise LibraryError(
            f"the loaded {pathlib.Path(lib._name).name} has no PCD hooks ({lib._name}); {remedy}"
        ) from None
    version.restype = ctypes.c_int32
    if version() != API_VERSION:
        raise LibraryError(
            f"{lib._name} has version {version()} of the PCD interface, this package needs version {API_VERSION}; "
            "reinstall pypcd"
        )
    pin = pinned_version()
    if pin is not None and llama_cpp.__version__ != pin:
        raise LibraryError(
            f"pypcd was built for llama-cpp-python {pin}, but {llama_cpp.__version__} is installed; "
            f"run: pip install llama-cpp-python=={pin}"
        )


@functools.cache
def pinned_version() -> str | None:
    """The llama-cpp-python version this package was built for; None where pypcd is not installed as a package."""
    try:
        requires = importlib.metadata.requires("pypcd") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in requires:
        match = re.match(r"llama[-_]cpp[-_]python\s*==\s*([^\s;]+)", line)
        if match:
            return match.group(1)
    return None
