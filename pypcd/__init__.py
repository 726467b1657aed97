"""Positional Contrastive Decoding for GGUF models.

    llm = pypcd.Llama("model.gguf", pcd=True)
    llm.create_chat_completion(messages)

Import pypcd before llama_cpp: it loads its own build of libllama in place of the stock one.
"""

import pathlib
import sys

from pypcd._config import PCDConfig
from pypcd._errors import LibraryError, ModelError, PCDError, UnsupportedError

try:
    from pypcd import _native  # noqa: F401  before all that imports llama_cpp: it decides which library that loads
except LibraryError as error:
    if pathlib.Path(sys.argv[0]).stem == "pypcd" or getattr(sys, "orig_argv", [])[1:3] == ["-m", "pypcd"]:
        sys.exit(f"pypcd: {error}")  # at the command line a sentence will do
    raise

from pypcd import _log
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
