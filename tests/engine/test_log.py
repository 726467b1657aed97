"""llama.cpp's log: what a thread's calls failed over is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import llama_cpp

from pypcd import engine

# -- errors ----------------------------------------------------------------------------------------------------------


def fail(name: str) -> None:
    """llama.cpp itself logs why."""
    assert not llama_cpp.llama_model_load_from_file(name.encode(), llama_cpp.llama_model_default_params())


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


def test_errors_are_those_of_the_threads_own_calls() -> None:
    def beside() -> str:
        before = engine.last_errors()
        fail("/theirs.gguf")
        return before + "|" + engine.last_errors()

    engine.clear_errors()
    fail("/ours.gguf")
    before, _, theirs = in_a_thread(beside).partition("|")
    assert before == "" and "/theirs.gguf" in theirs and "/ours.gguf" not in theirs
    in_a_thread(engine.clear_errors)
    assert "/ours.gguf" in engine.last_errors() and "/theirs.gguf" not in engine.last_errors()
