"""docs/recipes.md's recipe for llm, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
from typing import Any

from recipe import ADDRESS, ON, Folder, check_greedy, folder, needs, recipe, server, with_setting

import pypcd
from pypcd.server import Server

needs("llm_gguf", "llm")


def own(folder: Folder, setting: Any) -> str:
    """pypcd.Llama's answer, asked as the plugin asks."""
    path, messages = folder.path / "model.gguf", [{"role": "user", "content": folder.question}]
    with contextlib.closing(pypcd.Llama(path, pcd=setting, n_ctx=0, chat_format="chatml-function-calling")) as llm:
        parts = [part["choices"][0]["delta"] for part in llm.create_chat_completion(messages=messages, stream=True)]
    return "".join(part.get("content") or "" for part in parts)


def ran(folder: Folder, text: str, **environment: str) -> str:
    done = folder.command(["sh", "-e", "-c", text], LLM_USER_PATH=str(folder.path / "llm"), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_the_environment_gives_the_plugin_pcd(folder: Folder) -> None:
    """It samples at a temperature of 0.2, always with the same seed, and has its own form of a prompt."""
    answers = [ran(folder, with_setting(recipe("llm", "sh"), setting)) for setting in (False, ON)]
    assert answers == [own(folder, False), own(folder, ON)] and answers[0] != answers[1]


def test_with_the_server_the_answer_is_llamas(folder: Folder, server: Server) -> None:
    (folder.path / "llm").mkdir()
    file = folder.path / "llm" / "extra-openai-models.yaml"

    def ask(setting: object) -> str:
        file.write_text(with_setting(recipe("llm", "yaml"), setting).replace(ADDRESS, server.url), encoding="utf-8")
        return ran(folder, 'llm -m mine -o temperature 0 "$(cat question.txt)"', OPENAI_API_KEY="none")

    check_greedy(folder, ask)


def test_without_a_stream_the_plugin_stops_in_a_debugger(folder: Folder) -> None:
    text = recipe("llm", "sh").replace("llm -m", "llm --no-stream -m")
    done = folder.command(["sh", "-c", text], LLM_USER_PATH=str(folder.path / "llm"))
    assert "breakpoint()" in done.stdout + done.stderr or "Pdb" in done.stdout + done.stderr
