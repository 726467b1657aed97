"""pypcd's own exceptions.

    PCDError(RuntimeError)
     ├── LibraryError(PCDError, ImportError)   the patched libllama is missing, stock, or of another version
     ├── ModelError(PCDError, ValueError)      the model file cannot be loaded
     ├── RPCError(PCDError, ConnectionError)   a server on another machine cannot be used
     └── UnsupportedError(PCDError)            this model or context cannot run the requested PCD setting
    InputError(ValueError)                     a value that the caller gave is not allowed
     └── ArgumentError(InputError, TypeError)  there is no such argument, or it is of another type

A missing file raises FileNotFoundError. All else is a fault of pypcd's own, or of what it calls.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

__all__ = [
    "MENDABLE",
    "ArgumentError",
    "InputError",
    "LibraryError",
    "ModelError",
    "PCDError",
    "RPCError",
    "UnsupportedError",
    "did_you_mean",
    "rename",
    "require",
]


class PCDError(RuntimeError):
    """Base of pypcd's own errors."""


class LibraryError(PCDError, ImportError):
    """The libllama in this process is not pypcd's."""


class ModelError(PCDError, ValueError):
    """The model file cannot be loaded."""


class RPCError(PCDError, ConnectionError):
    """A server on another machine cannot be used."""


class UnsupportedError(PCDError):
    """This model or context cannot run the requested PCD setting."""


class InputError(ValueError):
    """A value that the caller gave is not allowed; the message has the value, what is allowed and the remedy."""


class ArgumentError(InputError, TypeError):
    """There is no such argument, or it is of another type."""


MENDABLE = (PCDError, InputError)  # what pypcd raises itself; with OSError, all that one sentence says enough of


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The hint " (did you mean 'x'?)" with the name nearest to a misspelt one; empty if none is near."""
    close = difflib.get_close_matches(str(name), list(names), n=3, cutoff=0.5)
    close.sort(key=lambda near: sorted(near) != sorted(str(name)))  # the same letters in another order go first
    return f" (did you mean {close[0]!r}?)" if close else ""


class _Former:
    def __init__(self, text: str) -> None:
        self.text = text

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self.text)


def rename(of: type, names: Mapping[str, str]) -> None:
    """Make the former names of a class's attributes say the present ones, in an AttributeError."""
    for old, new in names.items():
        setattr(of, old, _Former(f"{of.__name__}.{old} is now {of.__name__}.{new}"))


def require(module: str, purpose: str, package: str = "") -> Any:
    """A module of an optional package.

    Raises:
        PCDError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.replace("_", "-")
        raise PCDError(
            f"{purpose} needs the package {package}, which is not installed: pip install {package}"
        ) from error
