"""The programs in docs/serve.md and the line that `pypcd serve` prints, run as they stand."""

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
from clients import package
from serving import ask, complete
from test_cli_serve import greeting, serving

from pypcd.server import Server

pytest_plugins = ["serving", "clients"]  # fixtures
pytestmark = pytest.mark.usefixtures("offline", "collected")

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
if not PAGE.exists():
    pytest.skip("the page lies in a checkout only", allow_module_level=True)
SECTION, DOCUMENTS = (
    PAGE.read_text(encoding="utf-8").partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    for head in ("From Python and other programs", "Documents")
)
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
    wanted = complete(server, QUESTION, pcd=setting_of(PROGRAMS[name]), n_predict=32)["content"]
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
    status, answer = ask(server, "/v1/chat/completions", body)
    assert status == 200 and answer["timings"]["passages"]
    wanted = [answer["choices"][0]["message"]["content"], str(answer["timings"]["passages"])]
    assert said == "\n".join(wanted) + "\n"


@needs_curl
def test_the_line_of_the_page_gives_the_answer_with_its_setting(server: Server) -> None:
    assert OURS in LINE
    (choice,) = shell(LINE.replace(OURS, server.url))["choices"]
    assert choice["message"]["content"] == complete(server, QUESTION, pcd=setting_of(LINE), n_predict=32)["content"]


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
