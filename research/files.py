"""The data behind the pictures: CSV for tables, JSON for everything."""

from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pypcd.errors import InputError

__all__ = ["open_folder", "write_csv", "write_json"]


def open_folder(path: pathlib.Path) -> pathlib.Path:
    """A folder, created if it does not exist.

    Raises:
        ValueError: it is a file.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; allowed: a folder, which is created if it does not exist")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_csv(path: pathlib.Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> pathlib.Path:
    """Write a table, with enough digits to read the same float64 again; None becomes an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([repr(float(v)) if isinstance(v, float) else v for v in row] for row in rows)
    return path


def write_json(path: pathlib.Path, record: Mapping[str, Any]) -> pathlib.Path:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
