"""docs/recipes.md's recipes, against the real packages: the answers are pypcd.Llama's, and what the page says of a package is so.

A package that is not installed is skipped; `scripts/test --consumers NAME` installs it.
"""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from recipe import ADDRESS, ON, VALUE, Folder, N, check_greedy, folder, needs, recipe, server, with_setting

import pypcd
from pypcd.server import Server

MODULES = {  # what has to be there for a recipe; the last three ask a server
    "guidance": "guidance",
    "outlines": "outlines",
    "lm-format-enforcer": "lmformatenforcer",
    "LangChain": "langchain_community",
    "LlamaIndex": "llama_index.llms.llama_cpp",
    "Haystack": "haystack_integrations.components.generators.llama_cpp",
    "txtai": "txtai",
    "smolagents": "smolagents",
    "LiteLLM": "litellm",
    "DSPy": "dspy",
}


def consumer(name: str) -> str:
    """A recipe's name in noxfile.py."""
    return "llama-index" if name == "LlamaIndex" else name.lower()


@pytest.mark.parametrize("name", MODULES)
def test_a_recipes_answer_is_llamas(folder: Folder, name: str, request: pytest.FixtureRequest) -> None:
    needs(MODULES[name], consumer(name))
    text = recipe(name)
    if ADDRESS in text:
        text = text.replace(ADDRESS, request.getfixturevalue("server").url)
    check_greedy(folder, lambda setting: folder.run(with_setting(text, setting)))


# -- packages that constrain answers ----------------------------------------------------------------------------------


VALUE_OF = {
    "type": "object",
    "properties": {"value": {"type": "string", "pattern": f"^{VALUE}$"}},
    "required": ["value"],
}


def called(folder: Folder, setting: Any) -> str:
    """pypcd.Llama's own call of instructor's tool."""
    tool = {"type": "function", "function": {"name": "Answer", "parameters": VALUE_OF}}
    choice = {"type": "function", "function": {"name": "Answer"}}
    messages = [{"role": "user", "content": folder.question}]
    asked = {"tools": [tool], "tool_choice": choice, "max_tokens": 64, "temperature": 0, "pcd": setting}
    with contextlib.closing(pypcd.Llama(folder.path / "model.gguf")) as llm:
        answer = llm.create_chat_completion(messages, **asked)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])["value"]


def test_instructors_answer_is_llamas_and_a_setting_of_the_model_alone_leaves_it_plain(folder: Folder) -> None:
    needs("instructor", "instructor")
    plain, contrasted = (folder.run(with_setting(recipe("instructor"), setting)) for setting in (False, ON))
    assert (plain, contrasted) == (called(folder, False), called(folder, ON))
    assert plain != contrasted
    text = with_setting(recipe("instructor"), ON).replace(f", pcd={ON!r}", "")
    said = folder.run(text.replace('"model.gguf"', f'"model.gguf", pcd={ON!r}'))
    assert said.splitlines()[-1] == plain and "PCD is off" not in said, "the warning is on stderr"


# -- llm --------------------------------------------------------------------------------------------------------------


def ran(folder: Folder, text: str, **environment: str) -> str:
    done = folder.command(["sh", "-e", "-c", text], LLM_USER_PATH=str(folder.path / "llm"), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def plugins(folder: Folder, setting: Any) -> str:
    """pypcd.Llama's answer, asked as llm's plugin asks: at a temperature, with its own form of a prompt."""
    path, messages = folder.path / "model.gguf", [{"role": "user", "content": folder.question}]
    with contextlib.closing(pypcd.Llama(path, pcd=setting, n_ctx=0, chat_format="chatml-function-calling")) as llm:
        parts = [part["choices"][0]["delta"] for part in llm.create_chat_completion(messages=messages, stream=True)]
    return "".join(part.get("content") or "" for part in parts)


def test_the_environment_gives_llms_plugin_pcd(folder: Folder) -> None:
    needs("llm_gguf", "llm")
    answers = [ran(folder, with_setting(recipe("llm", "sh"), setting)) for setting in (False, ON)]
    assert answers == [plugins(folder, False), plugins(folder, ON)] and answers[0] != answers[1]


def test_llm_with_the_server_has_llamas_answer(folder: Folder, server: Server) -> None:
    needs("llm_gguf", "llm")
    (folder.path / "llm").mkdir()
    file = folder.path / "llm" / "extra-openai-models.yaml"

    def ask(setting: object) -> str:
        file.write_text(with_setting(recipe("llm", "yaml"), setting).replace(ADDRESS, server.url), encoding="utf-8")
        return ran(folder, 'llm -m mine -o temperature 0 "$(cat question.txt)"', OPENAI_API_KEY="none")

    check_greedy(folder, ask)
