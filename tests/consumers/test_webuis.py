"""docs/recipes.md's recipes for text-generation-webui and Open WebUI: the requests that they send, without the programs.

They are written down from text-generation-webui's modules/llama_cpp_server.py and Open WebUI's routers/openai.py.
"""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipe import ON, Folder, N, check_greedy, folder, needs, recipe, server, with_setting
from serving import ask, within

from pypcd.llama import machine
from pypcd.server import Server


@pytest.fixture(autouse=True)
def asked_for() -> None:
    needs("pypcd", "webuis")


def events(text: str) -> list[Any]:
    """The JSON objects of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- text-generation-webui --------------------------------------------------------------------------------------------

# of what it sends with each prompt, that which is not as every client's
SAMPLING = {
    "temperature": 0,
    "top_k": 0,
    "min_p": 0.05,
    "n_predict": N,
    "stream": True,
    "dry_sequence_breakers": ["\n"],
}
SAMPLING["samplers"] = ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "top_p", "typ_p", "min_p", "xtc"]


@contextlib.contextmanager
def started(folder: Folder, setting: Any) -> Iterator[Any]:
    """The recipe's file as text-generation-webui starts its server; what has the port that it chose."""
    file = folder.path / "llama_cpp_binaries.py"
    file.write_text(recipe("text-generation-webui").replace('"unsure"', repr(setting or "off")), encoding="utf-8")
    file.chmod(0o755)
    found = folder.run("import llama_cpp_binaries\n\nprint(llama_cpp_binaries.get_binary_path())\n")
    assert found == str(file)
    server = SimpleNamespace(port=machine.free_port("127.0.0.1", 0))

    def is_healthy() -> bool:
        assert process.poll() is None, b"".join(said).decode()
        with contextlib.suppress(OSError):  # nobody listens yet
            return ask(server, "/health")[0] == 200
        return False

    command = [found, "--model", str(folder.path / "model.gguf"), "--batch-size", "1024", "--ubatch-size", "1024"]
    command += ["--port", str(server.port), "--no-webui", "--flash-attn", "on", "--fit", "on", "--fit-ctx", "8192"]
    command += ["--threads", "1", "--parallel", "1"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stderr
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
        reader.start()
        try:
            assert within(is_healthy), b"".join(said).decode()
            yield server
        finally:
            process.terminate()
            process.wait(60)
            reader.join(60)


def test_text_generation_webui_gets_the_answers_of_llama(folder: Folder) -> None:
    def answer(setting: Any) -> str:
        with started(folder, setting) as server:
            tokens = ask(server, "/tokenize", {"content": folder.question, "add_special": True})[1]["tokens"]
            status, text = ask(server, "/completion", {**SAMPLING, "prompt": tokens})
            assert status == 200, text
        *parts, last = events(text)
        assert last["stop"] and last["tokens_predicted"] >= 1
        return "".join(part["content"] for part in [*parts, last])

    check_greedy(folder, answer)


# -- Open WebUI -------------------------------------------------------------------------------------------------------

HEADERS = {"Authorization": "Bearer none", "HTTP-Referer": "https://openwebui.com/", "X-Title": "Open WebUI"}


def chat(server: Server, folder: Folder, **more: Any) -> str:
    body = {"stream": True, "model": "model", "messages": [{"role": "user", "content": folder.question}]}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": N, **more}
    status, text = ask(server, "/v1/chat/completions", body, **HEADERS)
    assert status == 200, text
    found = events(text)
    assert found[-1]["usage"]["completion_tokens"] > 1
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in found if part["choices"])


def test_open_webui_lists_a_model_for_each_setting_and_each_answers_as_llama(folder: Folder, server: Server) -> None:
    assert recipe("Open WebUI", "sh").splitlines()[0] == "pypcd serve model.gguf &"
    status, models = ask(server, "/v1/models", **HEADERS)
    names = [model["id"] for model in models["data"]]
    assert status == 200 and {"model", "model:pcd-unsure", f"model:pcd-{ON}"} <= set(names)
    check_greedy(folder, lambda setting: chat(server, folder, model=f"model:pcd-{setting}" if setting else "model"))
