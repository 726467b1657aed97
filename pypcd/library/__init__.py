"""Which libllama this process runs: loads pypcd's in place of the stock one, and checks what was loaded.

Where pypcd's is not installed, or does not fit what is, the stock one stays, and the engine is "stock" (pypcd/engine/_stock.py); the
environment variable PYPCD_ENGINE asks for one of the two.

The engine imports llama_cpp, so this has to happen before. Whether the installed llama-cpp-python and its ggml are those
that pypcd's libllama was built for is checked before it is loaded: with others it might load, and compute nonsense.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import site
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from pypcd.errors import InputError, LibraryError
from pypcd.library import ggml

__all__ = ["API_VERSION", "NOT_INSTALLED", "check", "load", "pinned_version", "why_stock"]

API_VERSION = 21  # LLAMA_PCD_VERSION of cpp/llama-pcd.h

NOT_INSTALLED = (
    "llama-cpp-python is not installed; pypcd is built on it: pip install llama-cpp-python, which takes a C++ compiler and CMake, or a "
    "wheel that its authors offer (https://github.com/abetlen/llama-cpp-python#installation)"
)

_VARIABLE = "LLAMA_CPP_LIB_PATH"  # where llama_cpp looks for libllama; read once, when it is imported
_ENGINE = "PYPCD_ENGINE"
_ASKED_FOR = f"{_ENGINE} is stock; unset it"

_logger = logging.getLogger("pypcd")
_why_stock = ""


def why_stock() -> str:
    """Why the engine is "stock", in a sentence; empty if it is "native"."""
    return _why_stock


def _take_stock(why: str) -> None:
    global _why_stock
    _why_stock = why


def _wanted() -> str:
    """The engine that the environment asks for; empty if it does not.

    Raises:
        ValueError: there is no such engine.
    """
    text = os.environ.get(_ENGINE, "").strip().lower()
    if text not in ("", "native", "stock"):
        raise InputError(
            f"the environment variable {_ENGINE} is {text!r}; allowed: native, stock; unset, what is installed decides"
        )
    return text


def _fits(llama_cpp: pathlib.Path, version: str | None) -> bool:
    """Whether pypcd's library is installed, for the llama-cpp-python of this folder and version; if not, the stock one stays.

    Raises:
        LibraryError: it does not, and the environment asks for the native engine.
    """
    wanted, folder, why = _wanted(), _library_dir(), ""
    _take_stock("")  # an import that failed may be tried again
    if wanted == "stock":
        why = _ASKED_FOR
    elif folder is None and not wanted:
        why = "pypcd is installed without its native part; docs/install.md says how to get it"
    else:
        try:
            if folder is None:
                raise LibraryError(
                    f"pypcd's libllama was not found; looked in {', '.join(map(str, library_dirs()))}; "
                    "install the package with 'pip install .' (a source checkout alone has no library)"
                )
            if version is not None:
                _check_version(version)
            _check_ggml(llama_cpp / "lib", folder)
        except LibraryError as error:
            if wanted == "native":
                raise
            why = str(error)
            _logger.warning("pypcd's own libllama is not used, so not all settings can run: %s", why)
    _take_stock(why)
    return not why


def library_dirs() -> list[pathlib.Path]:
    """Where pypcd's library may be: beside this file, or in site-packages for an editable install."""
    here = pathlib.Path(__file__).parents[1] / "lib"
    sites = [sysconfig.get_path("platlib"), site.getusersitepackages()]
    return [here, *(pathlib.Path(path) / "pypcd" / "lib" for path in sites)]


def _library_dir() -> pathlib.Path | None:
    """Where it is; None if it is not installed."""
    return next((path for path in library_dirs() if any(path.glob("*llama.*"))), None)


def _preload_ggml(lib: pathlib.Path) -> None:
    """Load llama-cpp-python's ggml. Our library links to it by name, and the two packages may be installed apart.

    Raises:
        LibraryError: one of its backends does not load.
    """
    if sys.platform == "win32":
        os.add_dll_directory(str(lib))
        return
    # base first, then the backends, then the registry that links to them all
    names = sorted(
        lib.glob("libggml*.dylib" if sys.platform == "darwin" else "libggml*.so"),
        key=lambda p: (p.stem != "libggml-base", p.stem == "libggml", p.stem),
    )
    for name in names:
        try:
            ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise LibraryError(
                f"a backend of the installed llama-cpp-python cannot be loaded: {error}; install what it names (a GPU's driver, most "
                "often), or llama-cpp-python for another device"
            ) from error


def load(module: Any, execute: Callable[[], None]) -> None:
    """Execute llama_cpp so that it loads pypcd's library, or the stock one.

    Args:
        module: llama_cpp, about to be executed.
        execute: executes it.

    Raises:
        LibraryError: the library does not load; or PYPCD_ENGINE is native, and pypcd's library is missing, LLAMA_CPP_LIB_PATH names another
            one, or the installed llama-cpp-python is not the one that it was built for.
    """
    before = os.environ.get(_VARIABLE)
    package = pathlib.Path(module.__file__)
    found = re.search(r"^__version__ = \"(.*)\"$", package.read_text(encoding="utf-8"), re.MULTILINE)
    path, hint = before, "reinstall llama-cpp-python"
    if before:
        hint = f"{_VARIABLE} is set to {before}: unset it"
        if (pathlib.Path(before) / "ggml.json").exists():
            if found:
                _check_version(found[1])
            _check_ggml(package.parent / "lib", pathlib.Path(before))
    elif _fits(package.parent, found and found[1]):
        path, hint = str(_library_dir()), "reinstall pypcd and llama-cpp-python"
    if path:
        _preload_ggml(package.parent / "lib")
        os.environ[_VARIABLE] = path
    try:
        execute()
    except (OSError, RuntimeError) as error:
        raise LibraryError(f"libllama cannot be loaded: {error}; {hint}") from error
    finally:
        if not before:
            os.environ.pop(_VARIABLE, None)
    if path:
        _check(module, f"unset {_VARIABLE}, which names another library" if before else "reinstall pypcd")


def check() -> None:
    """Import llama_cpp, and see to it that it has pypcd's library, if that is installed and fits.

    Raises:
        LibraryError: it is not installed, or was imported before pypcd, and has another library.
    """
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        raise LibraryError(NOT_INSTALLED) from None
    if _why_stock:
        return
    module = llama_cpp.llama_cpp
    if hasattr(module._lib, "llama_pcd_version") or getattr(module, "_override_base_path", None) is not None:
        _check(llama_cpp, f"unset {_VARIABLE}, which named another library when llama_cpp was imported")
    elif _fits(pathlib.Path(llama_cpp.__file__).parent, llama_cpp.__version__):
        raise LibraryError(
            f"llama_cpp was imported before pypcd, so it has a libllama without PCD hooks ({module._lib._name}), which cannot be replaced "
            f"now; import pypcd before llama_cpp, or set {_VARIABLE}={_library_dir()}; or {_ENGINE}=stock, which runs fewer settings"
        )


def _check(llama_cpp: Any, remedy: str) -> None:
    lib = llama_cpp.llama_cpp._lib
    wanted = _wanted()
    if wanted == "stock":
        _take_stock(_ASKED_FOR)
        return
    if not hasattr(lib, "llama_pcd_version"):
        why = f"the loaded {pathlib.Path(lib._name).name} has no PCD hooks ({lib._name}); {remedy}"
        if wanted == "native":
            raise LibraryError(why)
        _take_stock(why)
        return
    version = lib.llama_pcd_version()  # an int, as ctypes takes it
    if version != API_VERSION:
        raise LibraryError(
            f"{lib._name} has version {version} of the PCD interface, this package needs version {API_VERSION}; "
            "reinstall pypcd"
        )
    _check_version(llama_cpp.__version__)


# -- what it was built for -------------------------------------------------------------------------------------------


def _check_version(version: str) -> None:
    pin = pinned_version()
    if pin is not None and version != pin:
        raise LibraryError(
            f"pypcd was built for llama-cpp-python {pin}, but {version} is installed; "
            f"run: pip install llama-cpp-python=={pin}"
        )


def _check_ggml(lib: pathlib.Path, ours: pathlib.Path) -> None:
    """Whether llama-cpp-python's ggml is of the source that pypcd's libllama was built for; its backends are its own affair.

    Args:
        lib: llama_cpp/lib.
        ours: where pypcd's libllama is.
    """
    record = ours / "ggml.json"
    pin = pinned_version()
    again = f"run: pip install --force-reinstall --no-deps llama-cpp-python{'' if pin is None else f'=={pin}'}"
    try:
        wanted = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LibraryError(
            f"{record}, which says what ggml libllama was built for, is missing; reinstall pypcd"
        ) from None
    try:
        other = ggml.difference(ggml.identity(lib), wanted)
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the ggml of the installed llama-cpp-python cannot be used: {error}; {again}") from error
    if other:
        raise LibraryError(
            f"the ggml of the installed llama-cpp-python ({lib}) is not the one that pypcd's libllama was built for: "
            f"{other}; {again} (or build pypcd for it: docs/troubleshooting.md)"
        )


@functools.cache
def pinned_version() -> str | None:
    """The llama-cpp-python version this package was built for; None where pypcd is not installed as a package."""
    try:
        requires = importlib.metadata.requires("llama-pcd") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in requires:
        match = re.match(r"llama[-_]cpp[-_]python\s*==\s*([^\s;]+)", line)
        if match:
            return match.group(1)
    return None
