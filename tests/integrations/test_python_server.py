"""llama_cpp.server, the server written in Python, under PYPCD. A real process of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ask, within

import pypcd
from pypcd.llama import machine

for package in ("fastapi", "starlette_context", "sse_starlette", "uvicorn", "pydantic_settings"):
    pytest.importorskip(package, reason="llama_cpp.server needs it: pip install 'llama-cpp-python[server]'")

Tiny = Callable[..., Path]

START = "import runpy, pypcd; runpy.run_module('llama_cpp.server', run_name='__main__', alter_sys=True)"
DEFAULT = "paper:beta=1.5:gamma=5"
PROMPT = "bada what? The value of the third key is not here, and neither is the second."
MESSAGES = [{"role": "user", "content": PROMPT}]
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "chat_format": "chatml"}


@pytest.fixture
def port(tiny: Tiny, tmp_path: Path) -> Iterator[int]:
    number, log = machine.free_port("127.0.0.1", 0), tmp_path / "log"
    words = [f"--{name}={value}" for name, value in {"model": tiny("llama"), "port": number, **SMALL}.items()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYPCD": DEFAULT}
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", START, *words], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        assert within(lambda: process.poll() is not None or answers(number)) and process.poll() is None, log.read_text()
        yield number
    finally:
        process.terminate()
        process.wait(30)


def asked(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    return ask(types.SimpleNamespace(port=port), path, body)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return asked(port, "/v1/models")[0] == 200
    return False


def written(answer: Any) -> str:
    """The text of a completion or a chat's answer, whole or as a stream."""
    if isinstance(answer, str):
        lines = [line.partition(": ")[2] for line in answer.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", answer
        answer = map(json.loads, lines[:-1])
    if not isinstance(answer, dict):
        return "".join(map(written, answer))
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", ""))


def test_answers_are_those_of_pypcd_llama(port: int, tiny: Tiny) -> None:
    llm = pypcd.Llama(tiny("llama"), pcd=DEFAULT, **SMALL)
    # streams are compared with streams: llama_cpp's lose a letter whose bytes are several tokens
    for stream in (False, True):
        options: Any = {"max_tokens": 12, "temperature": 0, "stream": stream}
        body = {**options, "repeat_penalty": 1.0}  # the server's own default differs from the class's
        status, answer = asked(port, "/v1/completions", {"prompt": PROMPT, **body})
        assert status == 200, answer
        assert written(answer) == written(llm(PROMPT, **options)) != written(llm(PROMPT, **options, pcd=False))
        status, answer = asked(port, "/v1/chat/completions", {"messages": MESSAGES, **body})
        assert status == 200 and written(answer) == written(llm.create_chat_completion(MESSAGES, **options)), answer
