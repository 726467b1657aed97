"""llama_cpp.server, the server written in Python, with "pcd" in its requests. A real process of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python
from serving import ask, within

import pypcd
from pypcd.llama import machine

for package in ("fastapi", "starlette_context", "sse_starlette", "uvicorn", "pydantic_settings"):
    pytest.importorskip(package, reason="llama_cpp.server needs it: pip install 'llama-cpp-python[server]'")

Tiny = Callable[..., Path]

START = "import runpy, pypcd; runpy.run_module('llama_cpp.server', run_name='__main__', alter_sys=True)"
DEFAULT = "beta=1.5:gamma=5"
PROMPT = "bada what? The value of the third key is not here, and neither is the second."


class Server:
    """A process of it, of which `ask` needs the port."""

    def __init__(self, log: Path, *models: Path, **environment: str) -> None:
        self.port = machine.free_port("127.0.0.1", 0)
        settings = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "chat_format": "chatml", "verbose": False}
        of_models = [{"model": str(path), "model_alias": path.stem, **settings} for path in models]
        file = log.with_suffix(".json")
        file.write_text(json.dumps({"host": "127.0.0.1", "port": self.port, "models": of_models}), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment}
        command = [sys.executable, "-c", START, "--config_file", file]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        assert within(lambda: self.process.poll() is not None or self.answers()), log.read_text()
        assert self.process.poll() is None, log.read_text()

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return ask(self, "/v1/models")[0] == 200
        return False

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        status, answer = ask(self, path, body)
        if status != 200 or not body.get("stream"):
            return status, answer
        lines = [line.partition(": ")[2] for line in answer.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", answer
        return status, [json.loads(line) for line in lines[:-1]]

    def complete(self, stream: bool = False, **body: Any) -> str:
        return written(self.answered("/v1/completions", prompt=PROMPT, stream=stream, **body))

    def chat(self, stream: bool = False, **body: Any) -> str:
        return written(self.answered("/v1/chat/completions", messages=MESSAGES, stream=stream, **body))

    def answered(self, path: str, **body: Any) -> Any:
        # the server's own default of the penalty differs from the class's
        status, answer = self.post(path, max_tokens=12, temperature=0, repeat_penalty=1.0, **body)
        assert status == 200, answer
        return answer


def written(answer: Any) -> str:
    """The text of a completion or a chat's answer, whole or as a stream."""
    if not isinstance(answer, dict):
        return "".join(map(written, answer))
    choice = answer["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


MESSAGES = [{"role": "user", "content": PROMPT}]
SETTINGS: list[Any] = [None, False, True, "perturbation=none:window=4:n_sink=0", {"beta": 4, "gamma": 3}]


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    started = Server(log, tiny("llama"), tiny("mamba"), PYPCD=DEFAULT)
    yield started
    started.process.terminate()
    started.process.wait(30)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[pypcd.Llama]:
    opened = pypcd.Llama(tiny("llama"), pcd=DEFAULT, n_ctx=256, n_threads=1, n_threads_batch=1, chat_format="chatml")
    yield opened
    opened.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_answers_are_those_of_pypcd_llama(setting: Any, stream: bool, server: Server, llm: pypcd.Llama) -> None:
    # streams are compared with streams: llama_cpp's lose a letter whose bytes are several tokens
    options: Any = {"max_tokens": 12, "temperature": 0, "pcd": setting, "stream": stream}
    assert server.complete(stream, pcd=setting) == written(llm(PROMPT, **options))
    assert server.chat(stream, pcd=setting) == written(llm.create_chat_completion(MESSAGES, **options))


def test_a_stream_that_is_left_leaves_no_setting_behind(server: Server, llm: pypcd.Llama) -> None:
    wanted = llm(PROMPT, max_tokens=12, temperature=0)["choices"][0]["text"]
    body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "stream": True, "pcd": "beta=4:gamma=3"}
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(2):
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
        assert server.complete() == wanted


WRONG = [
    ("unsuer", "'unsure'"),
    ("tuned.json", "a file; allowed in a request: "),
    ({"bta": 1}, "bta"),
    ([1], "pcd=[1]"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("setting", "word"), WRONG)
def test_a_wrong_value_is_a_400_with_the_sentence(setting: Any, word: str, stream: bool, server: Server) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        status, answer = server.post(path, pcd=setting, stream=stream, **body)
        assert status == 400 and word in answer["error"]["message"], answer
        assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["param"] == "pcd"
    assert server.complete(), "it serves on"


def test_a_model_that_cannot_run_it_says_why(server: Server, tiny: Tiny) -> None:
    mamba = tiny("mamba").stem
    status, answer = server.post("/v1/completions", prompt="a", model=mamba, pcd="paper")
    assert status == 400 and "cannot run here" in answer["error"]["message"]
    status, parts = server.post("/v1/completions", prompt="a", model=mamba, pcd="paper", stream=True)
    assert "cannot run here" in parts[0]["error"]["message"] and len(parts) == 1
    assert server.post("/v1/completions", prompt="a", model=mamba, pcd=False)[0] == 200
    assert server.post("/v1/completions", prompt="a", model=mamba)[0] == 200, "as PYPCD says: a warning, and plain"


def test_what_llama_checks_is_the_clients_mistake(server: Server) -> None:
    status, answer = server.post("/v1/completions", prompt="a", grammar="root ::= (")
    assert (
        status == 400 and "the grammar is not valid" in answer["error"]["message"] and answer["error"]["param"] is None
    )
    status, answer = server.post("/v1/completions", prompt="bada " * 600)  # the server's own
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert server.complete(), "it serves on"
    schemas = ask(server, "/openapi.json")[1]["components"]["schemas"]
    for name in ("CreateCompletionRequest", "CreateChatCompletionRequest"):
        assert {"pcd", "max_tokens"} <= schemas[name]["properties"].keys()


# --- where it is not installed ---


def said_by(code: str, *args: Any) -> str:
    done = run_python(code, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_install_it_is_llama_cpps_own_and_too_late_an_install_says_so() -> None:
    code = """if True:
        import warnings, pypcd
        import llama_cpp.server.app as app
        print("pcd" in app.CreateCompletionRequest.model_fields, app.get_event_publisher.__module__)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pypcd.install()
        print(*[w.message for w in seen])"""
    said = said_by(code).splitlines()
    assert said == [
        "False llama_cpp.server.app",
        'llama_cpp.server takes no "pcd": it was imported before pypcd.install()',
    ]


def test_with_it_the_modules_it_is_made_of_are_left_as_they_were() -> None:
    code = """if True:
        import pypcd
        import llama_cpp.server.types as types, llama_cpp.server.errors as errors
        before = dict(vars(types)), dict(vars(errors))
        pypcd.install()
        import llama_cpp.server.app as app
        print("pcd" in app.CreateCompletionRequest.model_fields, before == (vars(types), vars(errors)))"""
    assert said_by(code) == "True True\n"
