"""Which libllama this process runs: loads pypcd's in place of the stock one, and checks what was loaded.

Where pypcd's is not installed, or does not fit what is, the stock one stays, and the engine is "stock" (pypcd/engine/_stock.py); the
environment variable PYPCD_ENGINE asks for one of the two.

The engine imports llama_cpp, so this has to happen before. Whether the installed llama-cpp-python and its ggml are those
that pypcd's libllama was built for is checked before it is loaded: with others it might load, and compute nonsense. Where
llama_cpp was imported first, its functions are pointed at pypcd's library. Of these, knows only those for the version and
the log.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any, Callable

from pypcd import ggml
from pypcd.errors import InputError, LibraryError

__all__ = ["API_VERSION", "NOT_INSTALLED", "check", "load", "pinned_version", "prepare_mtmd", "why_stock"]

API_VERSION = 13  # LLAMA_PCD_VERSION of cpp/llama-pcd.h

NOT_INSTALLED = (
    "llama-cpp-python is not installed; pypcd is built on it: pip install llama-cpp-python, which takes a C++ compiler and CMake, or a "
    "wheel that its authors offer (https://github.com/abetlen/llama-cpp-python#installation)"
)

_VARIABLE = "LLAMA_CPP_LIB_PATH"  # where llama_cpp looks for libllama; read once, when it is imported
_ENGINE = "PYPCD_ENGINE"

_logger = logging.getLogger("pypcd")
_why_stock = ""


def why_stock() -> str:
    """Why the engine is "stock", in a sentence; empty if it is "native"."""
    return _why_stock


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


def _take_stock(why: str) -> None:
    global _why_stock
    _why_stock = why


def _fits(llama_cpp: pathlib.Path, version: str | None) -> bool:
    """Whether pypcd's library is installed, for the llama-cpp-python of this folder and version; if not, the stock one stays.

    Raises:
        LibraryError: it does not, and the environment asks for the native engine.
    """
    wanted = _wanted()
    _take_stock("")  # an import that failed may be tried again
    if wanted == "stock":
        _take_stock(f"{_ENGINE} is stock; unset it")
        return False
    if wanted != "native" and _installed() is None:
        _take_stock("pypcd is installed without its native part; docs/install.md says how to get it")
        return False
    try:
        folder = _library_dir()
        if version is not None:
            _check_version(version)
        _check_ggml(llama_cpp / "lib", folder)
    except LibraryError as error:
        if wanted == "native":
            raise
        _take_stock(str(error))
        _logger.warning("pypcd's own libllama is not used, so only settings with a window alone can run: %s", error)
        return False
    return True


def library_dirs() -> list[pathlib.Path]:
    """Where pypcd's library may be: beside this file, or in site-packages for an editable install."""
    here = pathlib.Path(__file__).parent / "lib"
    sites = [sysconfig.get_path("platlib"), site.getusersitepackages()]
    return [here, *(pathlib.Path(path) / "pypcd" / "lib" for path in sites)]


def _installed() -> pathlib.Path | None:
    return next((path for path in library_dirs() if any(path.glob("*llama.*"))), None)


def _library_dir() -> pathlib.Path:
    found = _installed()
    if found is not None:
        return found
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
    if not before and not _fits(package.parent, found and found[1]):
        try:
            execute()
        except (OSError, RuntimeError) as error:
            raise LibraryError(f"libllama cannot be loaded: {error}; reinstall llama-cpp-python") from error
        return
    path = before or str(_library_dir())
    if before and (pathlib.Path(path) / "ggml.json").exists():
        if found:
            _check_version(found[1])
        _check_ggml(package.parent / "lib", pathlib.Path(path))
    try:
        _preload_ggml(package.parent / "lib")
    except OSError as error:
        raise LibraryError(
            f"a backend of the installed llama-cpp-python cannot be loaded: {error}; install what it names (a GPU's driver, most often), "
            "or llama-cpp-python for another device"
        ) from error
    try:
        os.environ[_VARIABLE] = path
        execute()
    except (OSError, RuntimeError) as error:
        hint = f"{_VARIABLE} is set to {before}: unset it" if before else "reinstall pypcd and llama-cpp-python"
        raise LibraryError(f"libllama cannot be loaded: {error}; {hint}") from error
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    _check(module, f"unset {_VARIABLE}, which names another library" if before else "reinstall pypcd")


def check() -> None:
    """Import llama_cpp, and see to it that it has pypcd's library, if that is installed and fits.

    Raises:
        LibraryError: it is not installed, or too old; or it has another library, and pypcd's is to take its place but cannot.
    """
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        raise LibraryError(NOT_INSTALLED) from None
    if not _why_stock:
        _look(llama_cpp)
    if _why_stock:
        _check_calls(llama_cpp)


def _look(llama_cpp: Any) -> None:
    """Which library llama_cpp has, or gets."""
    module = llama_cpp.llama_cpp
    if not _has_hooks(module._lib) and getattr(module, "_override_base_path", None) is None:
        if not _fits(pathlib.Path(llama_cpp.__file__).parent, llama_cpp.__version__):
            return
        _replace(llama_cpp)
    _check(llama_cpp, f"unset {_VARIABLE}, which named another library when llama_cpp was imported")


# what engine/_stock.py is made of
_CALLS = (
    "llama_batch_free", "llama_batch_init", "llama_decode", "llama_get_logits_ith", "llama_get_memory", "llama_max_parallel_sequences",
    "llama_memory_seq_cp", "llama_memory_seq_pos_max", "llama_memory_seq_rm", "llama_model_get_vocab", "llama_n_batch",
    "llama_n_seq_max", "llama_vocab_n_tokens",
)  # fmt: skip


def _check_calls(llama_cpp: Any) -> None:
    missing = [name for name in _CALLS if not hasattr(llama_cpp, name)]
    if "kv_unified" not in dict(llama_cpp.llama_context_params._fields_):
        missing.append("kv_unified")
    if missing:
        raise LibraryError(
            f"llama-cpp-python {llama_cpp.__version__} has no {missing[0]}, which pypcd needs; pypcd is tested with 0.3.16 and newer: "
            "pip install --upgrade llama-cpp-python"
        )


def _has_hooks(lib: ctypes.CDLL) -> bool:
    return hasattr(lib, "llama_pcd_version")


def _check(llama_cpp: Any, remedy: str) -> None:
    lib = llama_cpp.llama_cpp._lib
    wanted = _wanted()
    if wanted == "stock":
        _take_stock(f"{_ENGINE} is stock; unset it")
        return
    try:
        version = lib.llama_pcd_version
    except AttributeError:
        why = f"the loaded {pathlib.Path(lib._name).name} has no PCD hooks ({lib._name}); {remedy}"
        if wanted == "native":
            raise LibraryError(why) from None
        _take_stock(why)
        return
    version.restype = ctypes.c_int32
    if version() != API_VERSION:
        raise LibraryError(
            f"{lib._name} has version {version()} of the PCD interface, this package needs version {API_VERSION}; "
            "reinstall pypcd"
        )
    _check_version(llama_cpp.__version__)


# -- after llama_cpp was imported ------------------------------------------------------------------------------------

_replaced = False  # the stock library was loaded first


def _replace(llama_cpp: Any) -> None:
    """Point the functions of a llama_cpp that was imported before pypcd at pypcd's library, which fits it.

    Each is an object of ctypes that holds an address. Whoever imported one by name has the same object, so the address is
    changed in place. The stock library stays loaded: a sampler that it made calls functions of its own.

    All is checked before anything is changed. What cannot be seen: a model that was opened through the low-level API
    without being mapped (use_mmap=False, or not on Linux), and libraries of others that link to libllama.

    Raises:
        LibraryError: a model is open, or pypcd's library is of another version of pypcd.
    """
    global _replaced
    lib, package, folder = llama_cpp.llama_cpp._lib, pathlib.Path(llama_cpp.__file__).parent, _library_dir()
    if in_use := next(_in_use(), None):
        raise LibraryError(
            f"the loaded {pathlib.Path(lib._name).name} has no PCD hooks ({lib._name}) and cannot be replaced now: {in_use}; "
            f"import pypcd before llama_cpp, or at least before a model is opened, or set {_VARIABLE}={folder}; or {_ENGINE}=stock, "
            "for settings with a window alone"
        )
    try:
        _preload_ggml(package / "lib")
        ours = sys.modules["llama_cpp._ctypes_extensions"].load_shared_library("llama", folder)
    except (OSError, RuntimeError) as error:
        raise LibraryError(f"libllama cannot be loaded: {error}; reinstall pypcd and llama-cpp-python") from error
    functions = {name: value for name, value in vars(lib).items() if isinstance(value, lib._FuncPtr)}
    missing = [name for name in functions if not hasattr(ours, name)]
    if missing or not _has_hooks(ours) or ours.llama_pcd_version() != API_VERSION:
        raise LibraryError(f"{ours._name} is not of this version of pypcd; reinstall pypcd")

    log, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    lib.llama_log_get(ctypes.byref(log), ctypes.byref(data))
    for name, function in functions.items():
        address = ctypes.cast(getattr(ours, name), ctypes.c_void_p)
        ctypes.c_void_p.from_address(ctypes.addressof(function)).value = address.value
    lib._handle, lib._name = ours._handle, ours._name
    ours.llama_log_set(log, data)
    llama_cpp.Llama._Llama__backend_initialized = False  # this library's is not
    _replaced = True


def _in_use() -> Iterator[str]:
    """What uses the stock library, in a few words each."""
    for name in ("mtmd_cpp", "llava_cpp"):
        if f"llama_cpp.{name}" in sys.modules:
            yield f"llama_cpp.{name}, which uses it too, has been imported"
    internals = sys.modules["llama_cpp._internals"]
    gc.collect()  # what nobody can use any more is no reason
    for thing in gc.get_objects():
        if issubclass(type(thing), internals.LlamaModel) and thing.__dict__.get("model") is not None:
            yield f"{thing.path_model} is open"
    maps = pathlib.Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if maps.exists() else []
    for path in sorted({fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}):
        if path.startswith("/") and _is_gguf(path):
            yield f"{path} is open"


def _is_gguf(path: str) -> bool:
    if not os.path.isfile(path):  # a device, or a file that has been deleted
        return path.endswith(".gguf (deleted)")
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return path.endswith(".gguf")


def prepare_mtmd() -> None:
    """Before llama_cpp's mtmd_cpp, for pictures, is imported: see to it that libmtmd uses pypcd's library.

    Raises:
        LibraryError: it would use the stock library, which was loaded before ours.
    """
    if not _replaced:
        return
    if sys.platform != "linux":
        raise LibraryError(
            "pictures need libmtmd, which would use the stock libllama here, since llama_cpp was imported before pypcd; "
            "import pypcd first"
        )
    # libmtmd names libllama by its soname, which the stock library has too; but what is global comes before that
    ctypes.CDLL(sys.modules["llama_cpp.llama_cpp"]._lib._name, mode=ctypes.RTLD_GLOBAL)


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
