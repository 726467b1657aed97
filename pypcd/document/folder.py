"""Files and folders of files that are handed over together."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator

from pypcd.document import Document, read_document
from pypcd.document.formats import ALLOWED
from pypcd.errors import InputError, PCDError

__all__ = ["read_files"]

NAMED = 3  # of the files that are left out


def read_files(given: Iterable[str | os.PathLike[str] | Document]) -> tuple[list[Document], str]:
    """Documents of files, and of all files below folders but hidden ones; and a sentence on those in folders that are not read, since they
    cannot be, or a link leads to them from elsewhere. Their names begin with the folder's.

    Raises:
        OSError, ValueError, PCDError: as read_document(), for a file that is named itself.
        ValueError: there is no document in a folder.
    """
    documents, left_out = list[Document](), list[str]()
    for one in given:
        if isinstance(one, Document):
            documents.append(one)
        elif not os.path.isdir(folder := os.path.expanduser(one)):
            documents.append(read_document(one))
        else:
            n, root = len(documents), pathlib.Path(folder).resolve()
            for path in _below(root):
                name = str(path.relative_to(root.parent))
                try:
                    if not (path.is_file() and path.resolve().is_relative_to(root)):
                        raise InputError("it is elsewhere, or no file")
                    documents.append(dataclasses.replace(read_document(path), name=name))
                except (OSError, ValueError, PCDError):
                    left_out.append(name)
            if len(documents) == n:
                raise InputError(f"{one} has no file that can be read; allowed: folders with {ALLOWED}")
    names = ", ".join(left_out[:NAMED]) + (f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else "")
    return documents, f"not read: {names}" if names else ""


def _below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (pathlib.Path(place, name) for name in sorted(names) if not name.startswith("."))
