"""The user's folders for what programs keep, by the system's convention; and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import stat
import sys
from typing import Any

from pypcd.errors import InputError

__all__ = ["cache", "json_text", "parsed", "state", "write"]


def cache() -> pathlib.Path:
    """Of what can be made again."""
    return _folder("XDG_CACHE_HOME", "Library/Caches" if sys.platform == "darwin" else ".cache")


def state() -> pathlib.Path:
    """Of what is kept from one start to the next."""
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


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, or leave the former one as it was: what fails, fails beside it. A link stays, and its file is written.

    Args:
        content: text is written in UTF-8.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        UnicodeEncodeError: UTF-8 does not have the text.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = pathlib.Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a terminal or a pipe has no former content
        target.write_bytes(data)
        return
    beside = target.with_name(f".{target.name[:100]}-{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def json_text(record: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8. Names of files and texts of a PDF may have halves of a surrogate pair, which are escaped."""
    return json.dumps(record, ensure_ascii=False, indent=indent).encode("utf-8", "backslashreplace")


def parsed(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is none, or nested more deeply than Python follows.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError("its brackets are nested more deeply than can be read; allowed: some hundred levels") from None
