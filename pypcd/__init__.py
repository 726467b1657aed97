"""Positional Contrastive Decoding for GGUF models.

    llm = pypcd.Llama("model.gguf", pcd=True)
    llm.create_chat_completion(messages)

Import pypcd before llama_cpp: llama_cpp then loads pypcd's own build of libllama instead of the stock one. The names
below are imported when they are first used, so `import pypcd` itself takes almost no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pypcd import _finder, _lm_eval

if TYPE_CHECKING:
    from pypcd._config import PCDConfig
    from pypcd._engine import PCDLogits, PCDStats
    from pypcd._errors import LibraryError, ModelError, PCDError, RPCError, UnsupportedError
    from pypcd._llama import Llama
    from pypcd._method import contrast, frequencies, rho, strength
    from pypcd._sampler import pcd_sampler

__version__ = "0.1.0"

__all__ = [
    "LibraryError",
    "Llama",
    "ModelError",
    "PCDConfig",
    "PCDError",
    "PCDLogits",
    "PCDStats",
    "RPCError",
    "UnsupportedError",
    "contrast",
    "frequencies",
    "pcd_sampler",
    "rho",
    "strength",
]

_HOME_OF = {
    "LibraryError": "_errors",
    "Llama": "_llama",
    "ModelError": "_errors",
    "PCDConfig": "_config",
    "PCDError": "_errors",
    "PCDLogits": "_engine",
    "PCDStats": "_engine",
    "RPCError": "_errors",
    "UnsupportedError": "_errors",
    "contrast": "_method",
    "frequencies": "_method",
    "pcd_sampler": "_sampler",
    "rho": "_method",
    "strength": "_method",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pypcd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pypcd.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_finder.install()
_lm_eval.install()
