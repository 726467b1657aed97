"""llama_cpp.server, the server written in Python, refuses "pcd" in a request while pypcd.install() is in force.

It has one setting, install()'s, for all requests, and would pass over the field without a word. Imported by finder only, since it
needs what llama_cpp.server needs. (`pypcd serve` is another server, llama.cpp's own: server.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import HTTPException  # type: ignore[import-not-found,unused-ignore]
from pydantic import create_model, model_validator  # type: ignore[import-not-found,unused-ignore]

__all__ = ["adapt"]


def adapt(execute: Callable[[], None]) -> None:
    """Execute llama_cpp.server.app, which takes the types of its requests from another module when it is imported."""
    from llama_cpp.server import types

    before = {name: getattr(types, name) for name in ("CreateCompletionRequest", "CreateChatCompletionRequest")}
    try:
        for name, base in before.items():
            check: dict[str, Any] = {"refuse": model_validator(mode="before")(_refuse)}
            setattr(types, name, create_model(name, __base__=base, __module__=base.__module__, __validators__=check))
        execute()
    finally:
        for name, base in before.items():
            setattr(types, name, base)


def _refuse(request: Any) -> Any:
    if isinstance(request, dict) and "pcd" in request:
        raise HTTPException(
            400,
            'this server takes no "pcd" in a request; start it with a setting for all of them, such as PYPCD=unsure, or use pypcd serve',
        )
    return request
