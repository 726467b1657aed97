"""The user's folders for what programs keep, by the system's convention. Makes none."""

from __future__ import annotations

import os
import pathlib
import sys

__all__ = ["cache", "state"]


def cache() -> pathlib.Path:
    """Of what can be made again.

    Raises:
        OSError: the user has no home.
    """
    return _folder("XDG_CACHE_HOME", "Library/Caches" if sys.platform == "darwin" else ".cache")


def state() -> pathlib.Path:
    """Of what is kept from one start to the next.

    Raises:
        OSError: the user has no home.
    """
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, usual: str) -> pathlib.Path:
    if sys.platform == "win32":
        variable, usual = "LOCALAPPDATA", "AppData/Local"
    if base := os.environ.get(variable):
        return pathlib.Path(base) / "pypcd"
    try:
        return pathlib.Path.home() / usual / "pypcd"
    except RuntimeError:
        raise FileNotFoundError(f"this user has no home folder; set HOME or {variable}") from None
