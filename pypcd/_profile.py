"""A PCD setting in a file, with the evidence it was chosen by."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

__all__ = ["is_profile", "other_model", "read_profile", "write_profile"]

_VERSION = 1


def is_profile(name: str) -> bool:
    """Whether a setting's name is that of a profile's file."""
    return name.endswith(".json")


def read_profile(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The fields of PCDConfig that a profile sets; None where it says that PCD is best left off.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no profile.
    """
    return _read(path)["pcd"]


def other_model(path: str | os.PathLike[str], model_path: str) -> str | None:
    """What is to be said where a profile was chosen with a file of another size than this model's; else None.

    Raises:
        FileNotFoundError, ValueError: as read_profile().
    """
    evidence = _read(path).get("evidence", {})
    theirs, ours = evidence.get("model_bytes"), os.path.getsize(model_path)
    if theirs in (None, ours):
        return None
    return (
        f"{path} was chosen with another model ({evidence.get('model')}, {theirs} bytes; this one has {ours}) and says "
        "nothing of this one; `pypcd tune` does"
    )


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = pathlib.Path(path).expanduser()
    if not file.exists():
        raise FileNotFoundError(f"there is no profile {file}; `pypcd tune` writes one")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("pypcd_profile") != _VERSION or "pcd" not in record:
        raise ValueError(f"{file} is no profile written by pypcd tune")
    if record["pcd"] is not None and not isinstance(record["pcd"], dict):
        raise ValueError(f"{file} is damaged: its pcd is neither null nor a mapping")
    if not isinstance(record.get("evidence", {}), dict):
        raise ValueError(f"{file} is damaged: its evidence is no mapping")
    return record


def write_profile(path: str | os.PathLike[str], pcd: Mapping[str, Any] | None, evidence: Mapping[str, Any]) -> None:
    record = {"pypcd_profile": _VERSION, "pcd": pcd, "evidence": evidence}
    pathlib.Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
