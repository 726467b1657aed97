"""Spellings that no longer exist: their errors name the new ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pypcd._errors import InputError

__all__ = ["add_mode", "checked_methods"]

# the words of --mode -> those of --method
_MODES = {
    "plain": "greedy",
    "two-rows": "two-rows",
    "stock": "stock",
    "rerotated": "pcd",
    "shared": "pcd:cache=shared",
    "separate": "pcd:cache=separate",
    "window": "pcd:window",
    "noise": "pcd:blog",
}
_ENDINGS = {
    "alternate": "evaluation=alternate",
    "cautious": "evaluation=alternate:relative_top=0.1",
    "w4096": "window=4096",
    "q8_0": "type_k_over=q8_0",
    "q4_0": "type_k_over=q4_0",
}


def add_mode(parser: argparse.ArgumentParser) -> None:
    """--mode of bench and nocache: an error that names the --method which means the same."""
    parser.add_argument("--mode", action=_Mode, help=argparse.SUPPRESS)


def checked_methods(names: Sequence[str]) -> Sequence[str]:
    """The words of --method, none of them a word of --mode.

    Raises:
        ValueError: one is; the message names the method which means the same.
    """
    for name in names:
        new = _method(name)
        if new not in (None, name):
            raise InputError(f"method is {name!r}, a mode of earlier versions; write {new}")
    return names


class _Mode(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        methods = [_method(name.strip()) for name in values.split(",") if name.strip()]
        if methods and all(methods):
            parser.error(f"--mode is now --method; write --method {','.join(filter(None, methods))}")
        parser.error("--mode is now --method; allowed: names such as greedy,pcd,pcd:cache=shared")


def _method(mode: str) -> str | None:
    name, dash, ending = mode.rpartition("-")
    if mode in _MODES or not dash:
        return _MODES.get(mode)
    known = name in _MODES and _MODES[name].startswith("pcd") and ending in _ENDINGS
    return f"{_MODES[name]}:{_ENDINGS[ending]}" if known else None
