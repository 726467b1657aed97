"""Positional Contrastive Decoding for GGUF models.

    llm = pypcd.Llama("model.gguf")
    llm.ask("report.txt", "Who signed it?").text  # with replay: the passages in question stand once more before it
    llm.pcd = True  # the preset "unsure"
    llm.create_chat_completion(messages)

A llama_cpp that is imported afterwards has pypcd's own build of libllama in place of the stock one, if pypcd was installed with its native
part, so pypcd has to come first. The names below are imported when they are first used, so `import pypcd` itself takes almost no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pypcd.integrations import finder

if TYPE_CHECKING:
    from pypcd import ask as ask
    from pypcd import bench as bench
    from pypcd import decode as decode
    from pypcd import evaluation as evaluation
    from pypcd.engine import PCDAnswer as PCDAnswer
    from pypcd.engine import PCDLogits as PCDLogits
    from pypcd.engine import PCDStats as PCDStats
    from pypcd.errors import LibraryError as LibraryError
    from pypcd.errors import ModelError as ModelError
    from pypcd.errors import PCDError as PCDError
    from pypcd.errors import RPCError as RPCError
    from pypcd.errors import UnsupportedError as UnsupportedError
    from pypcd.integrations.install import install as install
    from pypcd.integrations.install import uninstall as uninstall
    from pypcd.llama import Llama as Llama
    from pypcd.llama.sampler import pcd_sampler as pcd_sampler
    from pypcd.settings.config import PCDConfig as PCDConfig
    from pypcd.settings.config import PCDSetting as PCDSetting
else:  # unseen by type checkers, to which any name would be one of pypcd's
    _HOME_OF = {
        **dict.fromkeys(("LibraryError", "ModelError", "PCDError", "RPCError", "UnsupportedError"), "errors"),
        **dict.fromkeys(("PCDAnswer", "PCDLogits", "PCDStats"), "engine"),
        **dict.fromkeys(("PCDConfig", "PCDSetting"), "settings.config"),
        **dict.fromkeys(("install", "uninstall"), "integrations.install"),
        "Llama": "llama",
        "pcd_sampler": "llama.sampler",
    }
    __all__ = list(_HOME_OF)
    _PACKAGES = ("ask", "bench", "decode", "evaluation")  # which have the rest of what is public
    # names of former releases
    _MOVED = {
        "PCDFields": "PCDSetting: a mapping of fields is one",
        "analysis": "bench, and research/ of a clone",
        "config": "settings.config",
        "contrast": "settings.formula.contrast",
        "fields": "settings.fields",
        "frequencies": "settings.formula.frequencies",
        "machine": "llama.machine",
        "measure": "bench",
        "method": "settings.formula",
        "methods": "decode",
        "prompt_cache": "decode.prompt_cache",
        "rho": "settings.formula.rho",
        "sampler": "llama.sampler",
    }

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"pypcd.{name}")
        if name not in _HOME_OF:
            moved = f"; it is now pypcd.{_MOVED[name]}" if name in _MOVED else ""
            raise AttributeError(f"module 'pypcd' has no attribute {name!r}{moved}")
        value = getattr(importlib.import_module(f"pypcd.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted([*__all__, "__version__"])


__version__ = "0.1.0"

finder.install()
