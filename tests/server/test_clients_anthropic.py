"""The anthropic package with `pypcd serve`: /v1/messages, against pypcd.Llama with the same setting.

The temperature is sent in `extra_body`, since newer versions of the package have no parameter for it.
"""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from clients import (
    LOOK_UP,
    SETTINGS,
    check_alone_and_at_once,
    check_call,
    collected,
    llm,
    offline,
    package,
    said,
    server,
    tools,
)
from serving import PROMPTS, N, in_python, ready

import pypcd
from pypcd.server import Server

anthropic = package("anthropic")


def connected(server: Server, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with connected(server) as made:
        yield made


@pytest.fixture(scope="module")
def caller(tools: Server) -> Iterator[Any]:
    with connected(tools) as made:
        yield made


def given(prompt: str, setting: Any = None, **more: Any) -> dict[str, Any]:
    body = {"temperature": 0, **({} if setting is None else {"pcd": setting})}
    asked = {"model": "demo", "max_tokens": N, "messages": [{"role": "user", "content": prompt}]}
    return {**asked, "extra_body": body, **more}


def told(message: Any) -> tuple[str, bool]:
    """The text of an answer, and whether it ended."""
    return "".join(block.text for block in message.content), message.stop_reason == "end_turn"


def test_messages_are_those_of_llama_alone_and_8_at_once(client: Any, llm: pypcd.Llama) -> None:
    check_alone_and_at_once(llm, lambda prompt, setting: told(client.messages.create(**given(prompt, setting))))


def test_streams_are_those_of_llama_alone_and_8_at_once(client: Any, llm: pypcd.Llama) -> None:
    def ask(prompt: str, setting: Any) -> tuple[str, bool]:
        with client.messages.stream(**given(prompt, setting)) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert told(message)[0] == text and message.usage.output_tokens > 0
        return told(message)

    check_alone_and_at_once(llm, ask)


def test_the_models_name_chooses_and_the_body_comes_first(client: Any, llm: pypcd.Llama) -> None:
    more = {"model": "demo:pcd-cautious", "system": "Red is 7."}
    text, ended = told(client.messages.create(**given(PROMPTS[0], **more)))
    said(llm, f"Red is 7.\n{PROMPTS[0]}", "cautious", text, ended=ended)
    text, ended = told(client.messages.create(**given(PROMPTS[0], {"beta": 30.0}, **more)))
    said(llm, f"Red is 7.\n{PROMPTS[0]}", in_python("cautious").replace(beta=30.0), text, ended=ended)
    assert [model.id for model in client.models.list()][:2] == ["demo", "demo:pcd"]


def test_a_stop_ends_an_answer_and_tokens_are_counted(client: Any, llm: pypcd.Llama) -> None:
    text, _ = told(client.messages.create(**given(PROMPTS[0], "cautious")))
    message = client.messages.create(**given(PROMPTS[0], "cautious", stop_sequences=[text[3:6]]))
    assert message.content[0].text == text[: text.index(text[3:6])]
    assert message.stop_sequence == text[3:6]  # llama-server gives "end_turn" as the reason
    counted = client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": PROMPTS[0]}])
    assert counted.input_tokens == len(llm.tokenize(PROMPTS[0].encode()))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_forced_call_has_its_schema_also_in_a_stream(caller: Any, name: str) -> None:
    tool = {"name": "look_up", "description": LOOK_UP["description"], "input_schema": LOOK_UP["parameters"]}
    more = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
    message = caller.messages.create(**given(PROMPTS[0], SETTINGS[name], **more))
    (call,) = message.content
    assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
    check_call(call.name, call.input)
    with caller.messages.stream(**given(PROMPTS[0], SETTINGS[name], **more)) as stream:
        (again,) = stream.get_final_message().content
    assert (again.name, again.input) == (call.name, call.input)


@pytest.mark.parametrize(
    ("setting", "more", "message"),
    [
        ({"beta": -1}, {}, "Field 'pcd': beta is -1, allowed: 0 to 1000"),
        ("cautius", {}, "Field 'pcd': it is \"cautius\"; allowed: true, false"),
        (None, {"model": "demo:pcd-x"}, "Field 'model': it is \"x\"; allowed: "),
    ],
)
def test_a_wrong_setting_is_a_bad_request_with_the_sentence(client: Any, setting: Any, more: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**given("a", setting, **more))
    assert message in error.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError) as error, client.messages.stream(**given("a", setting, **more)):
        pass
    assert message in error.value.body["error"]["message"]


def test_a_wrong_key_is_an_authentication_error() -> None:
    with ready(parallel=1, api_key="k") as locked, connected(locked, "k") as right, connected(locked, "x") as wrong:
        assert told(right.messages.create(**given("a", "cautious")))[0]
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**given("a"))
