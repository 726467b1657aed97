"""Files and folders of files that are handed over together."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable

from pypcd.document import Document, read_document
from pypcd.document.formats import ALLOWED
from pypcd.document.parts import bound, most
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
    typed = dict[int, str]()  # of the files that are named themselves
    for one in given:
        if isinstance(one, Document):
            documents.append(one)
        elif not os.path.isdir(folder := os.path.expanduser(one)):
            typed[len(documents)] = str(one)
            documents.append(read_document(one))
        else:
            most()  # raise errors that are no file's
            bound("SECONDS", 60)
            n, root = len(documents), pathlib.Path(folder).resolve()
            last: Exception = InputError(f"{one} has no file that can be read; allowed: folders with {ALLOWED}")
            paths = [root]
            while paths:
                if stopped():
                    raise PCDError(f"{one} was not read to its end, since that was stopped")
                path = paths.pop()
                name = str(path.relative_to(root.parent))
                try:
                    if path.is_dir() and not path.is_symlink():
                        below = [path for path in path.iterdir() if not path.name.startswith(".")]
                        paths += sorted(below, key=lambda path: (path.is_dir(), path.name), reverse=True)
                    elif path.is_file() and path.resolve().is_relative_to(root):
                        documents.append(dataclasses.replace(read_document(path), name=name))
                    else:
                        raise InputError(f"{path} is no file, or a link to one that is elsewhere")
                except (OSError, ValueError, PCDError) as error:
                    left_out.append(name)
                    last = error
            if len(documents) == n:
                raise last
    n_of = collections.Counter({words: documents[i].name for i, words in typed.items()}.values())
    for i, words in typed.items():
        if n_of[documents[i].name] > 1:  # as it was typed, which tells it from the other one
            documents[i] = dataclasses.replace(documents[i], name=words)
    names = ", ".join(left_out[:NAMED]) + (f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else "")
    return documents, f"not read: {names}" if names else ""
