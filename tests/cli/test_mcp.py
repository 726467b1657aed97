"""pypcd mcp: asked by the package's own client, through pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from conftest import Tiny
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from runs import python_path
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd.cli import main

TEXT = "\n\n".join(f"The toll of gate {n} is {n * n} crowns." for n in range(12))
ENV = python_path(PYPCD_CACHE_GIB="0")


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> str:
    return str(tiny(seed=3, chat_template=CHAT_TEMPLATE, n_ctx_train=16384, n_layer=2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents; and beside the folder one that may not be read, to which a link in it leads."""
    made = tmp_path / "documents"
    (made / "sub").mkdir(parents=True)
    (made / "toll.txt").write_text(TEXT)
    (made / "sub" / "other.txt").write_text("Nothing.\n\nNothing more.")
    (made / "empty.txt").write_text("")
    (made / "endless.txt").write_text("\n\n".join(f"Gate {n} stands open." for n in range(400)))
    (tmp_path / "secret.txt").write_text("Secret.")
    (made / "link.txt").symlink_to(tmp_path / "secret.txt")
    (made / "out").symlink_to(tmp_path)
    (made / "again.txt").symlink_to("toll.txt")
    os.mkfifo(made / "pipe")
    return made


def command(model: str, *folders: Path) -> list[str]:
    return ["-m", "pypcd", "mcp", model, *map(str, folders), "--n-ctx", "16384", "--threads", "1"]


def talk(model: str, folders: list[Path], say: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Start the command and speak with it."""

    async def run() -> None:
        server = StdioServerParameters(command=sys.executable, args=command(model, *folders), env=ENV)
        with anyio.fail_after(300):
            async with stdio_client(server) as streams, ClientSession(*streams) as session:
                await session.initialize()
                await say(session)

    anyio.run(run)


async def asked(session: ClientSession, *documents: str, question: str = "What is the toll of gate 7?") -> Any:
    return await session.call_tool("ask", {"question": question, "documents": list(documents)})


def test_it_answers_as_python_does_with_places(model: str, folder: Path, tmp_path: Path) -> None:
    llm = pypcd.Llama(model, n_ctx=16384, n_threads=1, n_threads_batch=1)
    wanted = llm.ask(folder / "toll.txt", "What is the toll of gate 7?", cache=False)

    async def say(session: ClientSession) -> None:
        (tool,) = (await session.list_tools()).tools
        assert tool.name == "ask" and str(folder) in (tool.description or "")
        assert tool.input_schema["required"] == ["question"]

        for name in ("toll.txt", "again.txt", "sub/../toll.txt", str(folder / "toll.txt")):
            found = await asked(session, name)
            assert not found.is_error
            (passage, *_) = [one for one in found.structured_content["passages"] if "gate 7" in one["text"]]
            assert found.structured_content["answer"] == wanted.text and passage["place"] == "line 15"
            assert (passage["document"], passage["text"]) == ("toll.txt", "The toll of gate 7 is 49 crowns.")
            (content,) = found.content
            assert wanted.text.strip() in content.text and f"toll.txt, line 15:\n{passage['text']}" in content.text
        both = await asked(session, "toll.txt", "sub/other.txt")
        assert not both.is_error and "gate 7" in both.content[0].text
        given = {"question": "What is the toll of gate 7?", "read": 160}
        folders = (await session.call_tool("ask", given)).structured_content
        assert folders["read"].endswith("of 5 documents") and "gate 7" in str(folders["passages"])
        assert "not read: documents/empty.txt, documents/link.txt, documents/pipe" in folders["note"]
        assert "Secret" not in str(folders)

    talk(model, [tmp_path / "documents" / "sub", folder], say)


def test_errors_are_pypcds_sentences(model: str, folder: Path, tmp_path: Path) -> None:
    outside = ["../secret.txt", str(tmp_path / "secret.txt"), "link.txt", "out/secret.txt", "/etc/passwd", "../nothing"]

    async def say(session: ClientSession) -> None:
        for name in outside:
            found = await asked(session, name)
            assert found.is_error and found.content[0].text == (
                f"{name!r} is outside of the folders that may be read; allowed: files below {folder}"
            )
        for name in ("nothing.txt", "pipe", "a\0b", "x" * 5000, "~/x"):
            found = await asked(session, name)
            assert found.is_error and found.content[0].text.endswith(f"allowed: files below {folder}")
        found = await asked(session, "empty.txt")
        assert found.is_error and found.content[0].text.startswith("empty.txt has no text")
        found = await asked(session, "toll.txt", question=" ")
        assert found.is_error and found.content[0].text == "the question is empty"
        assert not (await asked(session, "toll.txt")).is_error, "and goes on"

    talk(model, [folder], say)


def test_questions_come_one_after_the_other_and_a_cancelled_one_ends(model: str, folder: Path) -> None:
    async def say(session: ClientSession) -> None:
        answers = []

        async def one(name: str) -> None:
            answers.append((name, (await asked(session, name)).structured_content["answer"]))

        alone = (await asked(session, "toll.txt")).structured_content["answer"]
        async with anyio.create_task_group() as group:
            for name in ("toll.txt", "sub/other.txt", "again.txt"):
                group.start_soon(one, name)
        assert dict(answers)["toll.txt"] == dict(answers)["again.txt"] == alone
        reports = []

        async def report(n: float, total: float | None, text: str | None) -> None:
            reports.append((n, total, text))
            scope.cancel()

        with anyio.CancelScope() as scope:
            await session.call_tool("ask", {"question": "?", "documents": ["endless.txt"]}, progress_callback=report)
        (n, total, text), *_ = reports
        assert 0 < n < total / 2 and text == "reading"
        await one("toll.txt")
        assert answers[-1][1] == alone

    talk(model, [folder], say)


def sent(process: subprocess.Popen[str], method: str, **params: Any) -> dict[str, Any]:
    """What comes first when a request was sent."""
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": method, "method": method, "params": params}) + "\n")
    process.stdin.flush()
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("how", ["closed", signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_and_stdout_has_the_protocol_alone(
    how: Any, busy: bool, model: str, folder: Path, tmp_path: Path
) -> None:
    pipe, client = subprocess.PIPE, {"name": "test", "version": "1"}
    words = [sys.executable, *command(model, folder)]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENV) as process:
        assert process.stdin and process.stdout and process.stderr
        said = sent(process, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        assert said["result"]["serverInfo"]["name"] == "pypcd"
        if busy:
            asked = {"question": "?", "documents": ["endless.txt"]}
            said = sent(process, "tools/call", name="ask", arguments=asked, _meta={"progressToken": 7})
            assert said["method"] == "notifications/progress"
        if how == "closed":
            process.stdin.close()
        else:
            process.send_signal(how)
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
        for said in map(json.loads, process.stdout):
            assert said["jsonrpc"] == "2.0" and "result" not in said
            assert "params" not in said or said["params"]["progress"] < said["params"]["total"] / 2
        assert process.stderr.read() == ""


def test_without_the_package_it_is_a_sentence(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp", model, str(folder)]) == 1
    assert "pip install 'llama-pcd[mcp]'" in capsys.readouterr().err
