"""Loads pypcd's libllama in place of the stock one and binds what cpp/llama-pcd.h adds to it.

Importing this module imports llama_cpp. It knows nothing of llama_cpp.Llama.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import site
import sys
import sysconfig
from typing import Any

from pypcd._errors import LibraryError

API_VERSION = 4  # LLAMA_PCD_VERSION of cpp/llama-pcd.h

OK, INVALID, UNSUPPORTED, NO_MEMORY, DISABLED = 0, -1, -2, -3, -4
ROW_STANDARD, ROW_OVER_ROTATED, ROW_CONTRASTED = 0, 1, 2

CACHE = {"rerotated": 0, "shared": 1, "separate": 2}
EVALUATION = {"fused": 0, "alternate": 1}
PERTURBATION = {"over-rotation": 0, "none": 1, "noise": 2}
TRANSITION = {"exponential": 0, "none": 1}
BAND = {"low": 0, "high": 1, "all": 2}
HEAD_ORDER = {"static": 0, "outlier": 1}
TYPE_K_OVER = {  # enum ggml_type
    None: -1,
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "bf16": 30,
}


class Params(ctypes.Structure):
    """struct llama_pcd_params"""

    _fields_ = [
        ("cache", ctypes.c_int32),
        ("evaluation", ctypes.c_int32),
        ("perturbation", ctypes.c_int32),
        ("transition", ctypes.c_int32),
        ("band", ctypes.c_int32),
        ("type_k_over", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("base_ratio", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("gamma", ctypes.c_int32),
        ("relative_top", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("n_sink", ctypes.c_int32),
        ("noise", ctypes.c_float),
        ("offset_min", ctypes.c_int32),
        ("offset_max", ctypes.c_int32),
        ("seed", ctypes.c_int32),
        ("combine", ctypes.c_bool),
    ]


class HeadRatios(ctypes.Structure):
    """struct llama_pcd_head_ratios"""

    _fields_ = [
        ("min_ratio", ctypes.c_float),
        ("max_ratio", ctypes.c_float),
        ("first_layer", ctypes.c_int32),
        ("order", ctypes.c_int32),
    ]


class Stats(ctypes.Structure):
    """struct llama_pcd_stats"""

    _fields_ = [
        ("n_tokens", ctypes.c_int64),
        ("n_twins", ctypes.c_int64),
        ("n_skipped", ctypes.c_int64),
        ("n_derived", ctypes.c_int64),
        ("n_caught_up", ctypes.c_int64),
        ("second_bytes", ctypes.c_int64),
        ("kv_bytes", ctypes.c_int64),
    ]


def library_dirs() -> list[pathlib.Path]:
    """Where pypcd's library may lie: beside this file, or in site-packages for an editable install."""
    here = pathlib.Path(__file__).parent / "lib"
    sites = [sysconfig.get_path("platlib"), site.getusersitepackages()]
    return [here, *(pathlib.Path(path) / "pypcd" / "lib" for path in sites)]


def _library_dir() -> pathlib.Path:
    for path in library_dirs():
        if any(path.glob("*llama.*")):
            return path
    raise LibraryError(
        f"pypcd's libllama is in none of {', '.join(map(str, library_dirs()))}; "
        "install the package with 'pip install .' (a source checkout alone has no library)"
    )


def _preload_ggml() -> None:
    """The library links to ggml by name; load the one llama-cpp-python brought, wherever the two packages lie."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise LibraryError("llama-cpp-python is not installed; pypcd is built on it: pip install llama-cpp-python")
    lib = pathlib.Path(spec.origin).parent / "lib"
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


def _load() -> Any:
    """llama_cpp's handle of the library, checked to be ours."""
    remedy = "import pypcd before llama_cpp (or before the package that imports it)"

    if "llama_cpp" not in sys.modules:
        before = os.environ.pop("LLAMA_CPP_LIB_PATH", None)
        os.environ["LLAMA_CPP_LIB_PATH"] = before or str(_library_dir())
        try:
            _preload_ggml()
            import llama_cpp
        except (OSError, RuntimeError) as error:
            hint = f"; LLAMA_CPP_LIB_PATH is set to {before}: unset it" if before else "; reinstall pypcd"
            raise LibraryError(f"libllama cannot be loaded: {error}{hint}") from error
        finally:
            del os.environ["LLAMA_CPP_LIB_PATH"]
            if before is not None:
                os.environ["LLAMA_CPP_LIB_PATH"] = before
        remedy = "unset LLAMA_CPP_LIB_PATH, which names another library" if before else "reinstall pypcd"
    else:
        import llama_cpp

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
            f"{lib._name} speaks version {version()} of the PCD interface, this package version {API_VERSION}; reinstall pypcd"
        )

    pin = pinned_version()
    if pin is not None and llama_cpp.__version__ != pin:
        raise LibraryError(
            f"pypcd was built for llama-cpp-python {pin}, but {llama_cpp.__version__} is installed; run: pip install llama-cpp-python=={pin}"
        )

    return lib


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


lib = _load()

import llama_cpp  # not before _load(), which decides what it loads

_ctx_p = ctypes.c_void_p
_float_p = ctypes.POINTER(ctypes.c_float)


def _bind(name: str, restype: Any, *argtypes: Any) -> Any:
    function = getattr(lib, name)
    function.restype = restype
    function.argtypes = list(argtypes)
    return function


pcd_default_params = _bind("llama_pcd_default_params", Params)
pcd_set = _bind("llama_pcd_set", ctypes.c_int32, _ctx_p, ctypes.POINTER(Params), ctypes.c_char_p, ctypes.c_size_t)
pcd_check = _bind("llama_pcd_check", ctypes.c_int32, _ctx_p, ctypes.POINTER(Params), ctypes.c_char_p, ctypes.c_size_t)
pcd_set_seq = _bind(
    "llama_pcd_set_seq",
    ctypes.c_int32,
    _ctx_p,
    ctypes.c_int32,
    ctypes.POINTER(Params),
    ctypes.c_char_p,
    ctypes.c_size_t,
)
pcd_unset_seq = _bind("llama_pcd_unset_seq", None, _ctx_p, ctypes.c_int32)
pcd_set_tokens = _bind(
    "llama_pcd_set_tokens", ctypes.c_int32, _ctx_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32
)
pcd_suspend = _bind("llama_pcd_suspend", None, _ctx_p, ctypes.c_bool)
pcd_get_logits_ith = _bind("llama_pcd_get_logits_ith", _float_p, _ctx_p, ctypes.c_int32, ctypes.c_int32)
pcd_get_stats = _bind("llama_pcd_get_stats", Stats, _ctx_p)
pcd_set_exits = _bind(
    "llama_pcd_set_exits",
    ctypes.c_int32,
    _ctx_p,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.c_int32,
    ctypes.c_char_p,
    ctypes.c_size_t,
)
pcd_get_exit_logits = _bind("llama_pcd_get_exit_logits", _float_p, _ctx_p, ctypes.c_int32, ctypes.c_int32)
pcd_has_tied_head = _bind("llama_pcd_has_tied_head", ctypes.c_bool, _ctx_p)
tap_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), _float_p, ctypes.c_void_p)
pcd_set_tap = _bind(
    "llama_pcd_set_tap",
    ctypes.c_int32,
    _ctx_p,
    ctypes.POINTER(ctypes.c_char_p),
    ctypes.c_size_t,
    tap_callback,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)
pcd_set_head_ratios = _bind(
    "llama_pcd_set_head_ratios",
    ctypes.c_int32,
    _ctx_p,
    ctypes.POINTER(HeadRatios),
    ctypes.c_char_p,
    ctypes.c_size_t,
)
pcd_find_head_order = _bind("llama_pcd_find_head_order", ctypes.c_int32, _ctx_p, ctypes.c_char_p, ctypes.c_size_t)
pcd_get_head_ratios = _bind(
    "llama_pcd_get_head_ratios", ctypes.c_int32, _ctx_p, ctypes.c_int32, _float_p, ctypes.c_int32
)
pcd_rho = _bind(
    "llama_pcd_rho",
    None,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_float,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_double),
)
pcd_noise = _bind(
    "llama_pcd_noise",
    None,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_int32,
    _float_p,
    _float_p,
)
pcd_offset = _bind("llama_pcd_offset", ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
pcd_contrast = _bind(
    "llama_pcd_contrast",
    ctypes.c_int32,
    _float_p,
    _float_p,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_float,
    _float_p,
)
sampler_init_pcd = _bind("llama_sampler_init_pcd", llama_cpp.llama_sampler_p_ctypes, _ctx_p)
sampler_pcd_set_row = _bind("llama_sampler_pcd_set_row", None, llama_cpp.llama_sampler_p_ctypes, ctypes.c_int32)
