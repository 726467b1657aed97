"""docs/recipes.md's recipe for instructor, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import json
from typing import Any

from recipe import ON, VALUE, Folder, folder, needs, recipe, with_setting

import pypcd

needs("instructor", "instructor")

VALUE_OF = {
    "type": "object",
    "properties": {"value": {"type": "string", "pattern": f"^{VALUE}$"}},
    "required": ["value"],
}


def own(folder: Folder, setting: Any) -> str:
    """pypcd.Llama's own call of the same tool."""
    tool = {"type": "function", "function": {"name": "Answer", "parameters": VALUE_OF}}
    choice = {"type": "function", "function": {"name": "Answer"}}
    messages = [{"role": "user", "content": folder.question}]
    asked = {"tools": [tool], "tool_choice": choice, "max_tokens": 64, "temperature": 0, "pcd": setting}
    with contextlib.closing(pypcd.Llama(folder.path / "model.gguf")) as llm:
        answer = llm.create_chat_completion(messages, **asked)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])["value"]


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    plain, contrasted = (folder.run(with_setting(recipe("instructor"), setting)) for setting in (False, ON))
    assert (plain, contrasted) == (own(folder, False), own(folder, ON))
    assert plain != contrasted


def test_a_setting_of_the_model_alone_leaves_it_plain(folder: Folder) -> None:
    text = (
        with_setting(recipe("instructor"), ON)
        .replace(f", pcd={ON!r}", "")
        .replace('"model.gguf"', f'"model.gguf", pcd={ON!r}')
    )
    said = folder.run(text)
    assert said.splitlines()[-1] == own(folder, False) and "PCD is off" not in said, "the warning is on stderr"


def test_the_mode_json_schema(folder: Folder) -> None:
    """OpenAI's form of a schema, which stock llama_cpp passes over."""
    text = recipe("instructor").replace("Mode.TOOLS", "Mode.JSON_SCHEMA")
    plain, contrasted = (folder.run(with_setting(text, setting)).strip() for setting in (False, ON))
    form = {"type": "json_object", "schema": VALUE_OF}
    messages = [{"role": "user", "content": folder.question}]
    with contextlib.closing(pypcd.Llama(folder.path / "model.gguf")) as llm:
        for said, setting in ((plain, False), (contrasted, ON)):
            asked = {"response_format": form, "max_tokens": 64, "temperature": 0, "pcd": setting}
            answer = llm.create_chat_completion(messages, **asked)["choices"][0]["message"]["content"]
            assert said == json.loads(answer)["value"]
    assert plain != contrasted
