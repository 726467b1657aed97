"""Positional Contrastive Decoding for GGUF models.

    llm = pypcd.Llama("model.gguf", pcd=True)  # the preset "unsure"
    llm.create_chat_completion(messages)

A llama_cpp that is imported afterwards has pypcd's own build of libllama in place of the stock one, so pypcd has to come first.
The names below are imported when they are first used, so `import pypcd` itself takes almost no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pypcd.integrations import finder

if TYPE_CHECKING:
    from pypcd.engine import PCDAnswer, PCDLogits, PCDStats
    from pypcd.errors import LibraryError, ModelError, PCDError, RPCError, UnsupportedError
    from pypcd.integrations.install import install, uninstall
    from pypcd.llama import Llama
    from pypcd.llama.sampler import pcd_sampler
    from pypcd.settings.config import PCDConfig, PCDFields, PCDSetting
else:  # unseen by type checkers, to which any name would be one of pypcd's

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            moved = f"; it is now pypcd.{_MOVED[name]}" if name in _MOVED else ""
            raise AttributeError(f"module 'pypcd' has no attribute {name!r}{moved}")
        value = getattr(importlib.import_module(f"pypcd.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


__version__ = "0.1.0"

__all__ = [
    "LibraryError",
    "Llama",
    "ModelError",
    "PCDAnswer",
    "PCDConfig",
    "PCDError",
    "PCDFields",
    "PCDLogits",
    "PCDSetting",
    "PCDStats",
    "RPCError",
    "UnsupportedError",
    "install",
    "pcd_sampler",
    "uninstall",
]

_HOME_OF = {
    "LibraryError": "errors",
    "Llama": "llama",
    "ModelError": "errors",
    "PCDConfig": "settings.config",
    "PCDError": "errors",
    "PCDFields": "settings.config",
    "PCDLogits": "engine",
    "PCDSetting": "settings.config",
    "PCDAnswer": "engine",
    "PCDStats": "engine",
    "RPCError": "errors",
    "UnsupportedError": "errors",
    "install": "integrations.install",
    "pcd_sampler": "llama.sampler",
    "uninstall": "integrations.install",
}

# names of former releases
_MOVED = {
    "analysis": "explain; the rest is in research/ of a clone",
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
    "strength": "settings.formula.strength",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


finder.install()
