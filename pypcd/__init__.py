"""Positional Contrastive Decoding for GGUF models.

    llm = pypcd.Llama("model.gguf", pcd=True)
    llm.create_chat_completion(messages)

Import pypcd before llama_cpp: it loads its own build of libllama in place of the stock one.
"""

from pypcd import _native  # noqa: F401  first: it decides which library llama_cpp loads
from pypcd import _log
from pypcd._config import PCDConfig
from pypcd._errors import LibraryError, ModelError, PCDError, UnsupportedError
from pypcd._llama import Llama, PCDLogits, PCDStats
from pypcd._method import contrast, frequencies, rho
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
    "UnsupportedError",
    "contrast",
    "frequencies",
    "pcd_sampler",
    "rho",
]

_log.install()
