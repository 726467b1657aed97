"""Positional Contrastive Decoding for GGUF models.

    llm = pypcd.Llama("model.gguf", pcd=True)  # the recommended setting
    llm.create_chat_completion(messages)

llama_cpp then has pypcd's own build of libllama in place of the stock one, also if it was imported before; but pypcd has to
come before a model is opened. The names below are imported when they are first used, so `import pypcd` itself takes almost no
time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pypcd import _finder

if TYPE_CHECKING:
    from pypcd._config import PCDConfig, PCDFields, PCDSetting
    from pypcd._engine import PCDLogits, PCDStats
    from pypcd._errors import LibraryError, ModelError, PCDError, RPCError, UnsupportedError
    from pypcd._install import install, uninstall
    from pypcd._llama import Llama
    from pypcd._method import contrast, frequencies, rho, strength
    from pypcd._sampler import pcd_sampler
else:  # unseen by type checkers, to which any name would be one of pypcd's

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'pypcd' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"pypcd.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


__version__ = "0.1.0"

__all__ = [
    "LibraryError",
    "Llama",
    "ModelError",
    "PCDConfig",
    "PCDError",
    "PCDFields",
    "PCDLogits",
    "PCDSetting",
    "PCDStats",
    "RPCError",
    "UnsupportedError",
    "contrast",
    "frequencies",
    "install",
    "pcd_sampler",
    "rho",
    "strength",
    "uninstall",
]

_HOME_OF = {
    "LibraryError": "_errors",
    "Llama": "_llama",
    "ModelError": "_errors",
    "PCDConfig": "_config",
    "PCDError": "_errors",
    "PCDFields": "_config",
    "PCDLogits": "_engine",
    "PCDSetting": "_config",
    "PCDStats": "_engine",
    "RPCError": "_errors",
    "UnsupportedError": "_errors",
    "contrast": "_method",
    "frequencies": "_method",
    "install": "_install",
    "pcd_sampler": "_sampler",
    "rho": "_method",
    "strength": "_method",
    "uninstall": "_install",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_finder.install()
