"""Optional packages, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from pypcd.errors import PCDError

__all__ = ["require"]


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
