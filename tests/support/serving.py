"""What the tests of `pypcd serve` share: servers, requests, and the oracle for an answer, pypcd.Llama with the same setting.

Knows nothing of what a single test looks for. Where llama-server was not built, the module that imports this is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from conftest import F32, contrasted, native_row, rounding_of

import pypcd
from pypcd import PCDConfig
from pypcd.server import Server, executable, model_list

try:
    executable()
except pypcd.LibraryError:
    pytest.skip(
        "llama-server was not built (PYPCD_SERVER=OFF); pip install . without that builds it", allow_module_level=True
    )

N = 24
SMALL = ["--ctx-size", "8192", "--threads", "1", "--threads-batch", "1", "--log-verbosity", "1"]
SMALL += ["--cache-type-k", "f32", "--cache-type-v", "f32"]  # a cache that rounds nothing
BASE = "paper:evaluation=fused"  # "auto" goes by time
PROMPTS = ["The keys are red, blue and green. The first one is", '{"a": 1, "b": 2}\nWhat is b?', "1 2 3 4 5 6 7"]
SETTINGS: dict[str, Any] = {
    "plain": False,
    "server's": {},
    "recommended": True,
    "preset": "cautious",
    "window": {"perturbation": "none", "window": 4, "n_sink": 0, "beta": 4.0},
    "fields": {"beta": 1.0, "relative_top": 0.05, "gamma": 8},
    "late": {"min_context": 30},
    "unsure": {"min_entropy": 2.0},
    "sure": {"min_entropy": 20.0},  # this and the next leave these prompts' answers alone
    "short": {"min_context": 300},
}
MESSAGES = [{"role": "user", "content": "What is red?"}]
ROUTES: dict[str, dict[str, Any]] = {  # those that answer, and what they need
    "/v1/completions": {"prompt": PROMPTS[0], "max_tokens": N},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": N},
    "/v1/responses": {"input": MESSAGES[0]["content"], "max_output_tokens": N},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": N},
}
MUTE_ROUTES: dict[str, dict[str, Any]] = {  # those that decode nothing
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": MESSAGES},
    "/embedding": {"content": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/documents": {"name": "a", "text": "b"},
    "/props": {},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[pypcd.Llama]:
    given: dict[str, Any] = {"n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "n_gpu_layers": 0, **F32}
    with pypcd.Llama("demo", pcd=BASE, **given) as opened:
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ready(pcd=BASE, parallel=8) as running:
        yield running


def begun(server: Any, path: str, body: Any = None, at: str = "127.0.0.1", **headers: str) -> HTTPConnection:
    """A connection to what has this port, with a request whose answer is not read yet."""
    connection = HTTPConnection(at, server.port, timeout=120)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json", **headers})
    return connection


def ask(server: Any, path: str, body: Any = None, at: str = "127.0.0.1", **headers: str) -> tuple[int, Any]:
    """The status and the answer, read as JSON if it is."""
    connection = begun(server, path, body, at, **headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


def server_of(*options: str, model: Any = "demo", **given: Any) -> Server:
    """A server on a free port, which does not run yet: of a model, or of several words as `pypcd serve` takes them."""
    models = model_list.read(model) if isinstance(model, list) else model
    return Server(models, **{"port": 0, "options": [*SMALL, *options], **given})


@contextlib.contextmanager
def ready(*options: str, **given: Any) -> Iterator[Server]:
    """A block in which server_of() answers requests."""
    with server_of(*options, **given).running() as server:
        assert server.wait_until_ready()
        yield server


OPTIONS = ["--ctx-size", "2048", "--threads", "1", "--threads-batch", "1"]


@contextlib.contextmanager
def serving(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A block in which `pypcd serve` runs."""
    command = [sys.executable, "-m", "pypcd", "serve", *args, "--port", "0", "--", *OPTIONS]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "80"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen(command, env=env, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def greeting(process: subprocess.Popen[str]) -> dict[str, str]:
    """The lines that it prints once it is ready, by their first word."""
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(4)]
    assert all(lines), process.communicate()[1]
    return {"head": lines[0], **{line.split()[0]: line.split(None, 1)[1].strip() for line in lines[1:]}}


def answered(server: Any, path: str, body: Any = None) -> Any:
    """The answer, which has to be one."""
    status, answer = ask(server, path, body)
    assert status == 200, answer
    return answer


def at(url: str) -> Any:
    """What ask() takes for a server of this address."""
    return SimpleNamespace(port=urlsplit(url).port)


@contextlib.contextmanager
def with_workers(code: str, folder: Path, *options: str, **given: Any) -> Iterator[Server]:
    """ready(), with processes that read documents after they have run this code, which stands in a file of the folder."""
    if os.name == "nt":
        pytest.skip("they are started by a shell script")
    program, python = folder / "worker.py", folder / "python"
    program.write_text(f"from pypcd.server import worker\n\n{code}\n\nworker.main()\n", encoding="utf-8")
    command = shlex.join([sys.executable, str(program)])
    python.write_text(f'#!/bin/sh\nexec {command} "$3"\n', encoding="utf-8")
    python.chmod(0o755)
    server = server_of(*options, **{"parallel": 1, **given})
    server.environment["PYPCD_PYTHON"] = str(python)
    with server.running():
        assert server.wait_until_ready()
        yield server


# For with_workers: a function of theirs writes the name of its document into "log", and waits for "go".
HELD = """
import pathlib, time

own, folder = worker.{name}, pathlib.Path(__file__).parent

def held(request, model):
    with open(folder / "log", "a") as file:
        file.write(request.get("document", {{}}).get("filename", "x"))
    while not (folder / "go").exists():
        time.sleep(0.01)
    return own(request, model)

worker.{name} = held
"""


def complete(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": N, "temperature": 0, "return_tokens": True, **fields}
    return answered(server, "/completion", body)


def meant(server: Server, **fields: Any) -> Any:
    """What the server makes of a request's setting."""
    return complete(server, "a", **{"n_predict": 1, **fields})["generation_settings"]["pcd"]


def events(text: str) -> list[Any]:
    """The parts of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def last_timings(text: str) -> dict[str, Any]:
    """Those of the end of a stream."""
    return dict(next(part["timings"] for part in reversed(events(text)) if "timings" in part))


def refused(server: Server, path: str = "/completion", **fields: Any) -> str:
    """The sentence with which a server refuses these fields."""
    status, answer = ask(server, path, {"prompt": "a", "messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    return str(answer["error"]["message"])


def in_python(setting: Any) -> Any:
    """What pypcd.Llama takes for a request's setting."""
    config = PCDConfig.resolve(setting, PCDConfig.resolve(BASE))
    return config and config.repeatable()


def is_greedy(llm: pypcd.Llama, prompt: str, setting: Any, tokens: list[int], *, ends: bool = True) -> None:
    """Each token is pypcd.Llama's best one; or, since sums in another order round in another way, one that ties with it.

    Args:
        ends: whether the answer may end; else the token that would end it is not looked at.
    """
    llm.pcd = config = in_python(setting)
    text = llm.tokenize(prompt.encode())
    llm.reset()
    llm._ctx.kv_cache_clear()
    for part in [text[:-1], text[-1:]] if setting is not False else [text]:  # as generate() and the server do
        llm.eval(part)
    missed = []
    assert tokens
    for i, token in enumerate(tokens):
        row = native_row(llm)
        if not ends:
            row[llm.token_eos()] = -np.inf
        if row.max() > row[token]:
            missed.append((i, float(row.max() - row[token])))
        llm.eval([token])
    for i, by in missed:
        limit = contrasted(rounding_of(llm, text + tokens[:i]), config.beta if config else 0.0)
        assert by < limit, (prompt, setting, tokens, i, by)


def log_softmax(row: Any) -> np.ndarray:
    row = np.asarray(row, np.float64)
    best = row[np.isfinite(row)].max()
    return row - best - np.log(np.exp(row - best).sum())


def counter(server: Server, name: str) -> float:
    """One of the numbers of /metrics."""
    lines = ask(server, "/metrics")[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"llamacpp:{name} "))
