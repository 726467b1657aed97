"""pypcd.install(): from then on llama_cpp.Llama makes a pypcd.Llama, for frameworks that make the model themselves.

Llama.__init__ is what is replaced, and nothing else: so whoever imported the class, and whenever, gets the same, and all of
it is undone by putting that one function back. (Python cannot undo a replaced __new__: the class then takes no arguments.)
`finder` calls apply() when llama_cpp is imported later. Knows nothing of the frameworks.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from pypcd.errors import InputError, UnsupportedError
from pypcd.settings.config import PCDConfig, PCDSetting, load

__all__ = ["VARIABLE", "apply", "install", "is_installed", "read_environment", "uninstall"]

VARIABLE = "PYPCD"
_OFF = ("", "0", "off", "no", "false")
_ON = ("1", "yes", "true")

_UNREAD = object()
# what objects get that are made without `pcd`; None: not installed; _UNREAD: the environment decides
_setting: Any = _UNREAD


def install(pcd: PCDSetting = "unsure") -> None:
    """From now on `llama_cpp.Llama(…)` makes a pypcd.Llama, also where a framework has imported the class already.

        import pypcd
        pypcd.install("unsure")
        from langchain_community.llms import LlamaCpp

        llm = LlamaCpp(model_path="model.gguf")

    Models that are open stay as they are. `pcd=` still decides where a framework passes it on. An unknown keyword of a
    framework is a UserWarning (pypcd.Llama itself raises TypeError). A model that cannot run the setting, or is opened for
    embeddings, decodes plainly, and a UserWarning says why. Classes that others have derived from llama_cpp.Llama decode
    plainly too; derive them from pypcd.Llama.

    The environment variable PYPCD does the same for programs that cannot be edited: `PYPCD=unsure python -m llama_cpp.server`.

    Args:
        pcd: anything that the `pcd` argument of pypcd.Llama takes; False for models whose PCD is off until a call turns it
            on. Calling install() again changes it.

    Raises:
        ValueError, TypeError, FileNotFoundError: it is not a setting.
    """
    _choose(pcd)
    if sys.modules.get("llama_cpp") is not None:
        apply()


def _choose(pcd: PCDSetting) -> None:
    global _setting
    setting = load(pcd)  # a profile is read once
    PCDConfig.resolve(setting)
    _setting = False if setting is None else setting


def uninstall() -> None:
    """Undo install(): `llama_cpp.Llama(…)` makes a stock object again. Models that are open stay as they are."""
    global _setting
    _setting = None
    stock: Any = getattr(sys.modules.get("llama_cpp"), "Llama", None)
    if _is_ours(stock):  # else there is nothing to undo; or somebody has wrapped ours, which does nothing now
        stock.__init__ = stock.__init__.__wrapped__


def is_installed() -> bool:
    return _setting is not None and _setting is not _UNREAD


def read_environment() -> None:
    """Do what install() does before llama_cpp is imported with what the environment variable PYPCD says, if neither install()
    nor uninstall() was called.

    Raises:
        ValueError: it is not a setting. Not an ImportError: those around an import of llama_cpp are taken for a missing one.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if _setting is not _UNREAD or text.lower() in _OFF:
        return
    try:
        _choose("on" if text.lower() in _ON else text)
    except (InputError, OSError) as error:
        raise InputError(f"the environment variable {VARIABLE} cannot be used: {error}; or unset it") from None


def apply() -> None:
    """Put our __init__ in the place of llama_cpp.Llama's, if install() was called. llama_cpp has pypcd's library."""
    if not is_installed():
        return
    stock: Any = sys.modules["llama_cpp"].Llama
    if not _is_ours(stock):
        stock.__init__ = _ours(stock, stock.__init__)


def _is_ours(stock: Any) -> bool:
    init = getattr(stock, "__init__", None)
    return init is not None and getattr(init, "_pypcds", None) is init  # functools.wraps copies attributes


def _ours(stock: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_installed():
            original(self, *args, **kwargs)
            return
        from pypcd import llama

        if type(self) is stock:
            self.__class__ = llama.Llama
            _open(self, *args, **kwargs)
            return
        if not isinstance(self, llama.Llama):
            warnings.warn(
                f"{type(self).__module__}.{type(self).__qualname__} is derived from llama_cpp.Llama and decodes plainly; derive it from "
                "pypcd.Llama for PCD",
                stacklevel=2,
            )
        original(self, *args, **kwargs)

    __init__._pypcds = __init__  # type: ignore[attr-defined]
    return __init__


def _open(llm: Any, *args: Any, **kwargs: Any) -> None:
    """pypcd.Llama.__init__, for a caller who does not know of it."""
    from pypcd import llama
    from pypcd.llama import arguments

    unknown = arguments.unknown_keywords(kwargs)
    for name in unknown:
        del kwargs[name]
    if unknown:
        names = ", ".join(f"{name!r}" for name in unknown)
        warnings.warn(f"Llama has no argument {names}; ignored, as llama_cpp ignores it", stacklevel=3)
    if kwargs.get("pcd") is not None:
        llama.Llama.__init__(llm, *args, **kwargs)
        return
    setting = _setting
    llama.Llama.__init__(llm, *args, **{**kwargs, "pcd": False})
    try:
        if PCDConfig.resolve(setting) is None or kwargs.get("vocab_only"):  # a tokenizer decodes nothing
            return
        if kwargs.get("embedding"):
            raise UnsupportedError("it is opened for embeddings, which have nothing to contrast")
        llm.pcd = setting
    except UnsupportedError as error:
        warnings.warn(f"{llm.model_path} decodes plainly: {error}", stacklevel=3)
    except BaseException:
        llm.close()  # a traceback may keep this object alive for long
        raise
