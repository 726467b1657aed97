"""The keyword arguments that type checkers know are those that llama_cpp.Llama has at run time."""

from __future__ import annotations

import inspect
from typing import Any

import llama_cpp
import pytest

import pypcd
from pypcd.llama import options

NAMED = set(inspect.signature(pypcd.Llama.__init__).parameters) - {"self", "kwargs"}
WRITTEN: dict[str, tuple[Any, set[str]]] = {  # the method of llama_cpp.Llama, and what pypcd's names itself
    "Opening": (llama_cpp.Llama.__init__, NAMED),
    "Completion": (llama_cpp.Llama.create_completion, {"prompt", "stream"}),
    "Chat": (llama_cpp.Llama.create_chat_completion, {"messages", "stream"}),
    "Generation": (llama_cpp.Llama.generate, {"tokens"}),
    "Sample": (llama_cpp.Llama.sample, set()),
}


def typed(name: str) -> dict[str, Any]:
    return {
        key: hint
        for base in reversed(getattr(options, name).__mro__)
        for key, hint in vars(base).get("__annotations__", {}).items()
    }


@pytest.mark.parametrize("name", WRITTEN)
def test_the_names_are_those_of_llama_cpp(name: str) -> None:
    method, named = WRITTEN[name]
    theirs = set(inspect.signature(method).parameters) - {"self", "kwargs"} - named
    assert set(typed(name)) == theirs
