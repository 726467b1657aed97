"""Questions that are in a file: rows, which are JSON objects, one a line or together in one list."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pypcd.errors import InputError

__all__ = ["FromFile", "Row", "check_length", "drawn", "found_in", "read_rows"]

T = TypeVar("T")

Row = tuple[int, dict[str, Any]]
"""The number of a row, from 1, and the row itself."""

TO_JSONL = "import pandas; pandas.read_parquet({!r}).to_json({!r}, orient='records', lines=True)"


class FromFile:
    """A task whose rows are in a file. The file is read once while it stays as it is: a run makes its tasks several times.

    A subclass is a frozen dataclass. It says which file has the rows, and makes them from the file's content.
    """

    def _find(self) -> pathlib.Path:
        raise NotImplementedError

    def _parsed(self, content: bytes, path: pathlib.Path) -> list[Row]:
        raise NotImplementedError

    def _content(self) -> bytes:
        return self._path.read_bytes()

    @property
    def n_questions(self) -> int | None:
        return len(self._rows)

    def data_sha256(self) -> str:
        """The SHA-256 of the rows' content.

        Raises:
            PCDError, ValueError, FileNotFoundError: there is none; the message says what to give.
        """
        return hashlib.sha256(self._content()).hexdigest()

    @functools.cached_property
    def _path(self) -> pathlib.Path:
        return self._find()

    @functools.cached_property
    def _rows(self) -> list[Row]:
        stat = self._path.stat()
        return _read(self, self._path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _read(task: FromFile, path: pathlib.Path, n_bytes: int, changed: int) -> list[Row]:
    return task._parsed(task._content(), path)


def found_in(data: str | pathlib.Path | None, names: Sequence[str], name: str, give: str) -> pathlib.Path:
    """The file that data names, or the first of these names that is in the folder data.

    Args:
        name: the task's.
        give: what data may be, for errors.

    Raises:
        ValueError: data is None: nothing can be downloaded.
        FileNotFoundError: there is no such file or folder, or the folder has no such file.
    """
    if data is None:
        raise InputError(f"{name} has no data; give {give}")
    path = pathlib.Path(data).expanduser()
    if path.is_file():
        return path
    found = [path / one for one in names if (path / one).is_file()]
    if not found:
        what = "there is no" if not path.exists() else f"{' or '.join(names)} is missing in"
        raise FileNotFoundError(f"{what} {path}; give {give}")
    return found[0]


def read_rows(content: bytes, path: pathlib.Path, is_row: Callable[[Any], bool], right: str, give: str) -> list[Row]:
    """The rows of a file's content; empty lines are skipped.

    Args:
        path: the file, for errors.
        is_row: whether an object has the right fields; it may raise errors of Python's own if not.
        right: what a row must be, for errors.
        give: what to give in place of a file that is empty, for errors.

    Raises:
        ValueError: there is no row, or one is not right; the message says which.
    """
    if content[:4] == b"PAR1":
        line = TO_JSONL.format(str(path), str(path.with_suffix(".jsonl")))
        raise InputError(f'{path} is a Parquet file; allowed: JSON or JSONL. Convert it: python -c "{line}"')
    if content.lstrip()[:1] == b"[":
        listed = _object(content)
        if listed is None:
            raise InputError(f"{path} is no complete JSON list; give {give}")
        unit, found = "row", list(enumerate(listed, 1))
    else:
        unit, found = "line", [(k, _object(line)) for k, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    for k, row in found:
        try:
            ok = is_row(row)
        except (ValueError, LookupError, TypeError, AttributeError):
            ok = False
        if not ok:
            raise InputError(f"{unit} {k} of {path} is not {right}")
    if not found:
        raise InputError(f"{path} is empty; give {give}")
    return found


def _object(text: bytes) -> Any:
    """A JSON text's value; None, which is no row, if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def check_length(n_tokens: int, needed: int, name: str, path: pathlib.Path, best: str) -> None:
    """Questions of a fixed length make a cell of any length that is not far from their own.

    Args:
        needed: the tokens of the longest question and its answer.
        best: the length to choose, for errors.

    Raises:
        ValueError: the longest question takes more than twice n_tokens, or less than half.
    """
    if not needed <= 2 * n_tokens <= 4 * needed:
        raise InputError(
            f"n_tokens is {n_tokens}, but the longest question of {name} takes {needed} in {path}; allowed: "
            f"{-(-needed // 2)} to {2 * needed}, best {best}"
        )


def drawn(rows: Sequence[T], n: int, name: str, seed: int) -> list[T]:
    """All rows of a task, in their order, or n of them, drawn with the seed.

    Raises:
        ValueError: there are fewer than n.
    """
    if n > len(rows):
        raise InputError(f"n is {n}; allowed: 1 to {len(rows)}, the questions of {name}")
    return [rows[at] for at in sorted(random.Random(f"{name} {seed}").sample(range(len(rows)), n))]
