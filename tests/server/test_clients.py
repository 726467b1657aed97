"""Clients of `pypcd serve`: OpenAI's and Anthropic's packages, and docs/serve.md's programs.

What the server does is held to pypcd.Llama in test_serve.py, so that here its own answer to the same prompt and setting is the oracle.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import PROMPTS, N, answered, complete, greeting, serving

from pypcd.server import Server


def package(name: str) -> Any:
    return pytest.importorskip(
        name, reason="`scripts/install test clients`, or pip install '.[test,clients]', brings it"
    )


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Clients that nobody closed are closed here: collected in a later test, their sockets would warn, and it would fail."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


# -- what the packages read, and what they raise ----------------------------------------------------------------------

Stream = Callable[[Server, str, Any], Iterator[str]]


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]  # the demo's template adds nothing


def openai(server: Server) -> Any:
    return package("openai").OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(server: Server, prompt: str, pcd: Any) -> Iterator[str]:
    asked = {"model": "demo", "messages": messages(prompt), "max_tokens": N, "temperature": 0, "stream": True}
    for chunk in openai(server).chat.completions.create(**asked, extra_body={"pcd": pcd}):
        yield chunk.choices[0].delta.content or ""


def responses(server: Server, prompt: str, pcd: Any) -> Iterator[str]:
    asked = {"model": "demo", "input": prompt, "max_output_tokens": N, "temperature": 0, "stream": True}
    for event in openai(server).responses.create(**asked, extra_body={"pcd": pcd}):
        if event.type == "response.output_text.delta":
            yield event.delta


def anthropic(server: Server, prompt: str, pcd: Any) -> Iterator[str]:
    client = package("anthropic").Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": "demo", "messages": messages(prompt), "max_tokens": N}
    with client.messages.stream(**asked, extra_body={"temperature": 0, "pcd": pcd}) as stream:
        yield from stream.text_stream


@pytest.mark.parametrize("stream", [chat, responses, anthropic])
def test_a_stream_is_the_servers_answer_and_a_wrong_setting_a_bad_request(server: Server, stream: Stream) -> None:
    plain, contrasted = (complete(server, PROMPTS[0], pcd=pcd)["content"] for pcd in (False, {"beta": 30.0}))
    assert plain != contrasted, "or this shows nothing"
    assert "".join(stream(server, PROMPTS[0], False)) == plain
    assert "".join(stream(server, PROMPTS[0], {"beta": 30.0})) == contrasted
    refused = package("anthropic" if stream is anthropic else "openai").BadRequestError
    with pytest.raises(refused, match="Field 'pcd': beta is -1; allowed: from 0 to 1000"):
        list(stream(server, "a", {"beta": -1}))


# -- the programs in docs/serve.md and the line that `pypcd serve` prints, run as they stand ------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
SECTION, DOCUMENTS = (
    PAGE.read_text(encoding="utf-8").partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    for head in ("From Python and other programs", "Documents")
)
PROGRAMS = {
    re.search(r"(?m)^(?:from|import) (\w+)", text)[1]: text
    for text in re.findall(r"(?ms)^```python\n(.*?)^```", SECTION)
}
CAPITAL = "What is the capital of France?"
OURS = "http://127.0.0.1:8080"

needs_curl = pytest.mark.skipif(
    not shutil.which("curl"), reason="there is no curl; where it is installed these tests run"
)


def setting_of(text: str) -> Any:
    """The setting that a program asks for, in its body or its model's name."""
    given = re.search(r'"pcd": (\{.*?\}|"[^"]+")', text)
    return json.loads(given[1]) if given else re.search(r"model:pcd-(\w+)", text)[1]


def printed(text: str, server: Server, name: str) -> str:
    """What a program of the page prints, with our server's address."""
    assert OURS in text
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text.replace(OURS, server.url), name, "exec"), {})  # noqa: S102  it is ours
    return out.getvalue()


def shell(line: str) -> Any:
    """What a line of a shell prints, which is JSON."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # a program that ends need not close its client
def test_a_program_prints_the_answer_with_its_setting(server: Server, name: str) -> None:
    package(name)
    wanted = complete(server, CAPITAL, pcd=setting_of(PROGRAMS[name]), n_predict=32)["content"]
    assert printed(PROGRAMS[name], server, f"docs/serve.md, {name}") == wanted + "\n"


def test_the_program_with_a_document_prints_answer_and_passages(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("openai")
    (text,) = re.findall(r"(?ms)^```python\n(.*?)^```", DOCUMENTS)
    report = "The bridge was opened in 1931.\n\nSigned by Ruth Amsel.\n\nThe river is wide."
    (tmp_path / "report.txt").write_text(report, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    said = printed(text, server, "docs/serve.md, Documents")
    body = {"messages": [{"role": "user", "content": "Who signed it?"}], "documents": [{"name": "a", "text": report}]}
    answer = answered(server, "/v1/chat/completions", body)
    wanted = [answer["choices"][0]["message"]["content"], "report.txt line 3 Signed by Ruth Amsel."]
    assert said == "\n".join(wanted) + "\n"


@needs_curl
@pytest.mark.parametrize(("key", "setting"), [(None, None), ("secret", "unsure")])
def test_the_line_that_serve_prints_works(key: str | None, setting: str | None) -> None:
    with serving("demo", *(["--pcd", setting] if setting else []), *(["--api-key", key] if key else [])) as process:
        line = greeting(process)["try"]
        if key:
            assert "Authorization: Bearer KEY" in line
            assert shell(line)["error"]["code"] == 401
        answer = shell(line.replace("KEY", key or ""))
    assert answer["choices"][0]["message"]["content"].strip() == "8044-44b2", (
        "the first of its values, with PCD of its own"
    )
    counts = [answer["timings"][f"pcd_{name}"] for name in ("twins", "skipped")]
    assert sum(counts) == answer["usage"]["completion_tokens"]
