"""llama_cpp.server, the server written in Python, under PYPCD. A real process of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny, run_python
from processes import within
from runs import python_path
from serving import ask

import pypcd
from pypcd.llama import machine

for package in ("fastapi", "starlette_context", "sse_starlette", "uvicorn", "pydantic_settings"):
    pytest.importorskip(package, reason="llama_cpp.server needs it: pip install 'llama-cpp-python[server]'")

START = "import runpy, pypcd; runpy.run_module('llama_cpp.server', run_name='__main__', alter_sys=True)"
DEFAULT = "paper:beta=1.5:gamma=5"
PROMPT = "bada what? The value of the third key is not here, and neither is the second."


class Server:
    """A process of it, of which `ask` needs the port."""

    def __init__(self, log: Path, *models: Path, **environment: str) -> None:
        self.port = machine.free_port("127.0.0.1", 0)
        settings = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "chat_format": "chatml", "verbose": False}
        of_models = [{"model": str(path), "model_alias": path.stem, **settings} for path in models]
        file = log.with_suffix(".json")
        file.write_text(json.dumps({"host": "127.0.0.1", "port": self.port, "models": of_models}), encoding="utf-8")
        command = [sys.executable, "-c", START, "--config_file", file]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=python_path(**environment), stdout=out, stderr=subprocess.STDOUT
            )
        assert within(lambda: self.process.poll() is not None or self.answers()), log.read_text()
        assert self.process.poll() is None, log.read_text()

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return ask(self, "/v1/models")[0] == 200
        return False


def written(answer: Any) -> str:
    """The text of a completion or a chat's answer, whole, as a stream, or as the server sends that."""
    if isinstance(answer, str):
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
        assert lines.pop() == "[DONE]", answer
        answer = map(json.loads, lines)
    if not isinstance(answer, dict):
        return "".join(map(written, answer))
    choice = answer["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


MESSAGES = [{"role": "user", "content": PROMPT}]


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


def test_answers_are_those_of_pypcd_llama(server: Server, llm: pypcd.Llama) -> None:
    # streams are compared with streams: llama_cpp's lose a letter whose bytes are several tokens
    for stream in (False, True):
        options: Any = {"max_tokens": 12, "temperature": 0, "stream": stream}
        plain, wanted = (written(llm(PROMPT, **options, pcd=pcd)) for pcd in (False, None))
        chat = written(llm.create_chat_completion(MESSAGES, **options))
        options["repeat_penalty"] = 1.0  # the server's own default differs from the class's
        status, answer = ask(server, "/v1/completions", {"prompt": PROMPT, **options})
        assert status == 200 and written(answer) == wanted != plain
        status, answer = ask(server, "/v1/chat/completions", {"messages": MESSAGES, **options})
        assert status == 200 and written(answer) == chat


def test_a_model_that_cannot_run_it_decodes_plainly(server: Server, tiny: Tiny) -> None:
    assert ask(server, "/v1/completions", {"prompt": "a", "model": tiny("mamba").stem})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_setting_in_a_request_is_a_400_with_the_remedy(stream: bool, server: Server) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        status, answer = ask(server, path, {"pcd": "unsure", "stream": stream, **body})
        assert status == 400 and "PYPCD=unsure, or use pypcd serve" in answer["detail"]
    assert ask(server, "/v1/completions", {"prompt": "a"})[0] == 200, "it serves on"


def test_its_requests_have_our_types_only_once_it_is_installed() -> None:
    code = """if True:
        import sys, pypcd
        sys.argv[1] == "installed" and pypcd.install()
        import llama_cpp.server.app as app
        print("refuse" in vars(app.CreateCompletionRequest))"""
    for installed, said in (("no", "False\n"), ("installed", "True\n")):
        done = run_python(code, installed)
        assert done.stdout == said, done.stderr
