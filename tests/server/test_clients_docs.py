"""The programs in docs/serve.md and the line that `pypcd serve` prints, run as they stand; curl as a client."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import (
    check_alone_and_at_once,
    collected,
    llm,
    loop,
    offline,
    package,
    said,
    server,
)
from serving import N
from test_cli_serve import greeting, serving

import pypcd
from pypcd.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
if not PAGE.exists():
    pytest.skip("the page lies in a checkout only", allow_module_level=True)
SECTION = PAGE.read_text(encoding="utf-8").partition("\n## From Python and other programs\n")[2].partition("\n## ")[0]
PROGRAMS = {
    re.search(r"(?m)^(?:from|import) (\w+)", text)[1]: text
    for text in re.findall(r"(?ms)^```python\n(.*?)^```", SECTION)
}
(LINE,) = re.findall(r"(?ms)^```sh\n(.*?)^```", SECTION)
QUESTION = "What is the capital of France?"
OURS = "http://127.0.0.1:8080"

needs_curl = pytest.mark.skipif(
    not shutil.which("curl"), reason="there is no curl; where it is installed these tests run"
)


def setting_of(text: str) -> Any:
    """The setting that a program asks for, in its body or its model's name."""
    given = re.search(r'"pcd": (\{.*?\}|"\w+")', text)
    return json.loads(given[1]) if given else re.search(r"demo:pcd-(\w+)", text)[1]


def shell(line: str) -> Any:
    """What a line of a shell prints, which is JSON."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_is_a_program_for_each_client() -> None:
    assert set(PROGRAMS) == {"openai", "anthropic", "langchain_openai"}
    assert len({str(setting_of(text)) for text in [*PROGRAMS.values(), LINE]}) >= 4


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # a program that ends need not close its client
def test_a_program_prints_the_answer_of_llama_with_its_setting(
    server: Server,
    llm: pypcd.Llama,
    name: str,
) -> None:
    package(name)
    text = PROGRAMS[name].replace(OURS, server.url)
    assert text != PROGRAMS[name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, f"docs/serve.md, {name}", "exec"), {})  # noqa: S102  it is ours
    said(llm, QUESTION, setting_of(text), out.getvalue()[:-1], n=32)


@needs_curl
def test_the_line_of_the_page_gives_the_answer_of_llama(server: Server, llm: pypcd.Llama) -> None:
    assert OURS in LINE
    (choice,) = shell(LINE.replace(OURS, server.url))["choices"]
    ended = choice["finish_reason"] == "stop"
    said(llm, QUESTION, setting_of(LINE), choice["message"]["content"], n=32, ended=ended)


@needs_curl
@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("setting", [None, "gentle"])
def test_the_line_that_serve_prints_works(key: str | None, setting: str | None) -> None:
    with serving("demo", *(["--pcd", setting] if setting else []), *(["--api-key", key] if key else [])) as process:
        line = greeting(process)["try"]
        if key:
            assert "Authorization: Bearer KEY" in line
            assert shell(line)["error"]["code"] == 401
        answer = shell(line.replace("KEY", key or ""))
    assert answer["choices"][0]["message"]["content"]
    counts = [answer["timings"].get(f"pcd_{name}", 0) for name in ("twins", "skipped")]
    assert sum(counts) == (answer["usage"]["completion_tokens"] if setting else 0)


@needs_curl
def test_answers_to_curl_are_those_of_llama_alone_and_8_at_once(
    server: Server,
    llm: pypcd.Llama,
) -> None:
    def ask(prompt: str, setting: Any) -> tuple[str, bool]:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": N, "temperature": 0, "pcd": setting}
        command = ["curl", "-s", f"{server.url}/v1/chat/completions", "-d", json.dumps(body)]
        (choice,) = json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)["choices"]
        return choice["message"]["content"], choice["finish_reason"] == "stop"

    check_alone_and_at_once(llm, ask)


@needs_curl
def test_curl_streams_and_sees_a_400(server: Server, llm: pypcd.Llama) -> None:
    body = {"prompt": QUESTION, "max_tokens": N, "temperature": 0, "pcd": "cautious", "stream": True}
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-d", json.dumps(body)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said(llm, QUESTION, "cautious", "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]))
    refused = subprocess.run(
        ["curl", "-s", "-w", "%{http_code}", f"{server.url}/v1/completions", "-d", json.dumps({**body, "pcd": "x"})],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert refused.endswith("400") and "Field 'pcd': it is" in refused
