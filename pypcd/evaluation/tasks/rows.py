"""Questions that are in a file: a JSON object in each line."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pypcd.errors import InputError

__all__ = ["drawn", "read_rows"]

T = TypeVar("T")


def read_rows(
    content: bytes, path: pathlib.Path, is_row: Callable[[Any], bool], right: str
) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a file's content, each with the number of its line, from 1; empty lines are skipped.

    Args:
        path: the file, for errors.
        is_row: whether an object has the right fields; it may raise KeyError, TypeError and ValueError if not.
        right: what a line must be, for errors.

    Raises:
        ValueError: a line is not a row; the message says which.
    """
    rows = []
    for k, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ok = is_row(row)
        except (ValueError, KeyError, TypeError):
            ok = False
        if not ok:
            raise InputError(f"line {k} of {path} is not {right}")
        rows.append((k, row))
    return rows


def drawn(rows: Sequence[T], n: int, name: str, seed: int) -> list[T]:
    """All rows of a task, in their order, or n of them, drawn with the seed.

    Raises:
        ValueError: there are fewer than n.
    """
    if n > len(rows):
        raise InputError(f"n is {n}; allowed: 1 to {len(rows)}, the questions of {name}")
    return [rows[at] for at in sorted(random.Random(f"{name} {seed}").sample(range(len(rows)), n))]
