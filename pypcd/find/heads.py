"""The heads that retrieve, of each model: a list that ships with pypcd, and what `pypcd probe` has found on this machine."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pypcd import engine, files
from pypcd.errors import InputError

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Heads", "heads_of", "keep_heads"]


Heads = Mapping[int, Sequence[int]]  # by layer, both counted from 0 as engine.attention() does


def heads_of(llm: Llama) -> Heads | None:
    """What is known of a model; what was found here comes before what ships. A file that cannot be read is a warning."""
    try:
        path = _path(llm)
        return _heads(files.parsed(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        engine.logger.warning("%s is left out, since it cannot be read; pypcd probe makes it anew: %r", path, error)
    shipped = _shipped().get(model_id(llm))
    return _heads(shipped) if shipped else None


def keep_heads(llm: Llama, heads: Heads) -> pathlib.Path:
    """Keep what a probe has found in the user's folder for caches; returns the file.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(llm)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write(path, files.json_text(heads) + b"\n")
    return path


def model_id(llm: Llama) -> str:
    """What tells a model from others in the list that ships, whatever its weights are stored in."""
    keys = ("general.architecture", "general.name", "general.size_label")
    return " ".join(llm.metadata.get(key, "").casefold() for key in keys).strip()


def _heads(record: Any) -> Heads:
    heads = {int(il): [int(head) for head in some] for il, some in record.items()}
    if not heads:
        raise InputError("it names no heads")
    return heads


@functools.cache
def _shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pathlib.Path(__file__).parent / "heads.json").read_text(encoding="utf-8"))
    return found


def _path(llm: Llama) -> pathlib.Path:
    return files.cache() / "heads" / f"{llm.weights_id}.json"
