"""Files and folders of files that are handed over together."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator

from pypcd.document import Document, read_document
from pypcd.document.apart import seconds
from pypcd.document.formats import ALLOWED
from pypcd.document.parts import most
from pypcd.errors import InputError, PCDError

__all__ = ["read_files"]

NAMED = 3  # of the files that are left out


def read_files(
    given: Iterable[str | os.PathLike[str] | Document], stopped: Callable[[], bool] = lambda: False
) -> tuple[list[Document], str]:
    """Documents of files, and of all files below folders but hidden ones; and a sentence on what in folders is not read, since it
    cannot be, or a link leads to it from elsewhere. Their names begin with the folder's.

    Args:
        stopped: whether it is to end, which is asked before each file of a folder.

    Raises:
        PCDError: it was.
        OSError, ValueError, PCDError: as read_document(), for a file that is named itself, or the last one of a folder without documents.
        ValueError: there is no file in a folder.
    """
    documents, left_out = list[Document](), list[str]()
    for one in given:
        if isinstance(one, Document):
            documents.append(one)
        elif not os.path.isdir(folder := os.path.expanduser(one)):
            documents.append(read_document(one))
        else:
            most()  # raise errors that are no file's
            seconds()
            n, root = len(documents), pathlib.Path(folder).resolve()
            last: Exception | None = None
            for path in _below(root):
                if stopped():
                    raise PCDError(f"{one} was not read to its end, since that was stopped")
                name = str(path.relative_to(root.parent))
                try:
                    if path.is_dir() and not path.is_symlink():
                        os.scandir(path).close()  # raises why it cannot be read
                    if not (path.is_file() and path.resolve().is_relative_to(root)):
                        raise InputError(f"{path} is no file, or a link to one that is elsewhere")
                    documents.append(dataclasses.replace(read_document(path), name=name))
                except (OSError, ValueError, PCDError) as error:
                    left_out.append(name)
                    last = error
            if len(documents) == n:
                raise last or InputError(f"{one} has no file that can be read; allowed: folders with {ALLOWED}")
    names = ", ".join(left_out[:NAMED]) + (f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else "")
    return documents, f"not read: {names}" if names else ""


def _below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The files, and the folders into which it does not go: links, and those that cannot be read."""
    shut = list[OSError]()
    for place, folders, names in os.walk(folder, onerror=shut.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (pathlib.Path(place, name) for name in [*sorted(names), *links] if not name.startswith("."))
    yield from (pathlib.Path(error.filename) for error in shut)
