"""From what a user calls a model to a checked file path. Knows nothing of the library."""

from __future__ import annotations

import os
import pathlib

from pypcd._errors import ModelError

__all__ = ["DEMO_MODEL", "resolve_model"]

DEMO_MODEL = pathlib.Path(__file__).parent / "models" / "demo.gguf"


def resolve_model(model: str | os.PathLike[str]) -> str:
    """The path of a GGUF file; `demo` names the model that ships with pypcd (unless a file is called so).

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: it is a folder, or not a GGUF file.
    """
    if not str(model):
        raise ModelError("the model's name is empty; give the path of a .gguf file, or 'demo'")
    path = pathlib.Path(model).expanduser()
    if str(model) == "demo" and not path.exists():
        path = DEMO_MODEL
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(found[:3])}" if found else ""
        raise ModelError(f"{path} is a folder, not a GGUF file{hint}")
    if not path.exists():
        raise FileNotFoundError(
            f"there is no model file {path}; give the path of a .gguf file, or 'demo' for the model that comes with pypcd"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is no GGUF file: it starts with {magic!r}, not b'GGUF'; convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    return str(path)
