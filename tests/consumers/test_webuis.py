"""docs/recipes.md's recipes for text-generation-webui and Open WebUI: the requests that they send, without the programs.

They are written down from text-generation-webui's modules/llama_cpp_server.py and Open WebUI's routers/openai.py.
"""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recipe import ON, Folder, N, check_greedy, folder, recipe, server, with_setting

from pypcd import machine
from pypcd.server import Server

SECONDS = 60


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        data = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", path, data, {"Content-Type": "application/json", **headers}
        )
        response = connection.getresponse()
        return response.status, response.read().decode()


def events(text: str) -> list[Any]:
    """The JSON objects of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- text-generation-webui --------------------------------------------------------------------------------------------

# what it sends with each prompt, as its defaults are but for the temperature
SAMPLING: dict[str, Any] = {
    "temperature": 0,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.05,
    "top_n_sigma": -1,
    "adaptive_target": -1,
    "adaptive_decay": 0.9,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 1024,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 1024,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "grammar": "",
    "seed": -1,
    "ignore_eos": False,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "samplers": ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "top_p", "typ_p", "min_p", "xtc"],
    "n_predict": N,
    "stream": True,
    "cache_prompt": True,
}


@contextlib.contextmanager
def started(folder: Folder, setting: Any) -> Iterator[int]:
    """The recipe's file as text-generation-webui starts its server; the port that it chose."""
    file = folder.path / "llama_cpp_binaries.py"
    file.write_text(recipe("text-generation-webui").replace('"gentle"', repr(setting or "off")), encoding="utf-8")
    file.chmod(0o755)
    found = folder.run("import llama_cpp_binaries\n\nprint(llama_cpp_binaries.get_binary_path())\n")
    assert found == str(file)
    port = machine.free_port("127.0.0.1", 0)
    command = [found, "--model", str(folder.path / "model.gguf"), "--batch-size", "1024", "--ubatch-size", "1024"]
    command += ["--port", str(port), "--no-webui", "--flash-attn", "on", "--fit", "on", "--fit-ctx", "8192"]
    command += ["--threads", "1", "--parallel", "1"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stderr
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
        reader.start()
        try:
            end = time.monotonic() + SECONDS
            while not is_healthy(port):
                assert process.poll() is None and time.monotonic() < end, b"".join(said).decode()
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(SECONDS)
            reader.join(SECONDS)


def is_healthy(port: int) -> bool:
    try:
        return ask(port, "/health")[0] == 200
    except OSError:  # nobody listens yet
        return False


def test_text_generation_webui_gets_the_answers_of_llama(folder: Folder) -> None:
    def answer(setting: Any) -> str:
        with started(folder, setting) as port:
            status, models = ask(port, "/v1/models")
            assert status == 200 and json.loads(models)["data"][0]["meta"]["n_vocab"] == 1152
            props = json.loads(ask(port, "/props")[1])
            assert props["bos_token"] and props["default_generation_settings"]["n_ctx"] > 0
            tokens = json.loads(ask(port, "/tokenize", {"content": folder.question, "add_special": True})[1])["tokens"]
            assert folder.question in json.loads(ask(port, "/detokenize", {"tokens": tokens})[1])["content"]
            status, text = ask(port, "/completion", {**SAMPLING, "prompt": tokens})
            assert status == 200, text
            probabilities = {
                **SAMPLING,
                "prompt": tokens,
                "n_predict": 0,
                "logprobs": True,
                "n_probs": 5,
                "stream": False,
            }
            status, shown = ask(port, "/completion", {**probabilities, "post_sampling_probs": False})
            assert status == 200 and len(json.loads(shown)["completion_probabilities"][0]["top_logprobs"]) == 5
        *parts, last = events(text)
        assert last["stop"] and last["tokens_predicted"] >= 1
        return "".join(part["content"] for part in [*parts, last])

    check_greedy(folder, answer)


# -- Open WebUI -------------------------------------------------------------------------------------------------------

HEADERS = {"Authorization": "Bearer none", "HTTP-Referer": "https://openwebui.com/", "X-Title": "Open WebUI"}


def chat(server: Server, folder: Folder, **more: Any) -> str:
    body = {"stream": True, "model": "model", "messages": [{"role": "user", "content": folder.question}]}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": N, **more}
    status, text = ask(server.port, "/v1/chat/completions", body, **HEADERS)
    assert status == 200, text
    found = events(text)
    assert found[-1]["usage"]["completion_tokens"] > 1
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in found if part["choices"])


def test_open_webui_lists_a_model_for_each_setting_and_each_answers_as_llama(folder: Folder, server: Server) -> None:
    assert recipe("Open WebUI", "sh").splitlines()[0] == "pypcd serve model.gguf &"
    status, text = ask(server.port, "/v1/models", **HEADERS)
    names = [model["id"] for model in json.loads(text)["data"]]
    assert status == 200 and {"model", "model:pcd-gentle", f"model:pcd-{ON}"} <= set(names)
    check_greedy(folder, lambda setting: chat(server, folder, model=f"model:pcd-{setting}" if setting else "model"))


@pytest.mark.parametrize("pcd", [ON, {"beta": 2.5, "relative_top": 0.1}])
def test_open_webuis_parameter_reaches_the_server(folder: Folder, server: Server, pcd: Any) -> None:
    check_greedy(folder, lambda setting: chat(server, folder, pcd=pcd if setting else False))


def test_what_it_asks_for_a_title_is_answered(folder: Folder, server: Server) -> None:
    body = {"model": "model:pcd-gentle", "messages": [{"role": "user", "content": folder.question}], "stream": False}
    status, text = ask(server.port, "/v1/chat/completions", {**body, "max_tokens": 8}, **HEADERS)
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"]
