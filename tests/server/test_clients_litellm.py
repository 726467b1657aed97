"""LiteLLM with `pypcd serve`, as a server of OpenAI's kind, against pypcd.Llama with the same setting."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import json
from typing import Any

import pytest
from clients import (
    LOOK_UP,
    SETTINGS,
    check_alone_and_at_once,
    check_call,
    collected,
    llm,
    loop,
    offline,
    package,
    said,
    server,
    tools,
)
from serving import PROMPTS, N, in_python

import pypcd
from pypcd.server import Server

litellm = package("litellm")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class .*ReadOnly:UserWarning"),  # of pydantic
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # its clients are its own
]
litellm.telemetry, litellm.suppress_debug_info = False, True


def ask(server: Server, prompt: str, setting: Any = None, **more: Any) -> Any:
    given = {"model": "openai/demo", "temperature": 0, "max_tokens": N, "api_key": "none", "max_retries": 0, **more}
    body = {} if setting is None else {"extra_body": {"pcd": setting}}
    messages = [{"role": "user", "content": prompt}]
    return litellm.completion(api_base=f"{server.url}/v1", messages=messages, **{**body, **given})


def told(choice: Any) -> tuple[str, bool]:
    """The text of an answer, and whether it ended."""
    return choice.message.content, choice.finish_reason == "stop"


def test_answers_are_those_of_llama_alone_and_8_at_once(
    server: Server,
    llm: pypcd.Llama,
) -> None:
    check_alone_and_at_once(llm, lambda prompt, setting: told(ask(server, prompt, setting).choices[0]))


def test_streams_are_those_of_llama_alone_and_8_at_once(
    server: Server,
    llm: pypcd.Llama,
) -> None:
    def streamed(prompt: str, setting: Any) -> tuple[str, bool]:
        text, reason = "", None
        for chunk in ask(server, prompt, setting, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = reason or chunk.choices[0].finish_reason
        return text, reason == "stop"

    check_alone_and_at_once(llm, streamed)


def test_the_models_name_or_a_field_of_its_own_chooses(
    server: Server,
    llm: pypcd.Llama,
) -> None:
    for more, setting in (
        ({"model": "openai/demo:pcd-cautious"}, "cautious"),
        ({"model": "openai/demo:pcd-cautious", "pcd": {"beta": 30.0}}, in_python("cautious").replace(beta=30.0)),
        ({"pcd": False}, False),
    ):
        text, ended = told(ask(server, PROMPTS[0], **more).choices[0])
        said(llm, PROMPTS[0], setting, text, ended=ended)


def test_several_answers_and_logprobs_with_pcd(server: Server) -> None:
    answer = ask(server, PROMPTS[0], "cautious", n=2, logprobs=True, top_logprobs=2)
    assert told(answer.choices[0]) == told(answer.choices[1])
    assert answer.timings["pcd_twins"] > 0
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries) == choice.message.content
        assert all(entry.pcd["contrasted"] == pytest.approx(entry.logprob, abs=1e-4) for entry in entries)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_forced_call_has_its_schema_also_in_a_stream(tools: Server, name: str) -> None:
    more = {"tools": [{"type": "function", "function": LOOK_UP}], "tool_choice": "required", "max_tokens": 200}
    more["parallel_tool_calls"] = False
    (call,) = ask(tools, PROMPTS[0], SETTINGS[name], **more).choices[0].message.tool_calls
    check_call(call.function.name, json.loads(call.function.arguments))
    chunks = list(ask(tools, PROMPTS[0], SETTINGS[name], **more, stream=True))
    (again,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert again.function.name == call.function.name
    assert json.loads(again.function.arguments) == json.loads(call.function.arguments)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_schema_holds(server: Server, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": LOOK_UP["parameters"]}}
    answer = ask(server, PROMPTS[0], SETTINGS[name], response_format=form, max_tokens=200)
    check_call("look_up", json.loads(answer.choices[0].message.content))


def test_a_wrong_setting_is_a_bad_request_with_the_sentence(server: Server) -> None:
    for more, message in (
        ({"pcd": {"beta": -1}}, "Field 'pcd': beta is -1, allowed: 0 to 1000"),
        ({"model": "openai/demo:pcd-x"}, "Field 'model': it is \"x\"; allowed: "),
    ):
        with pytest.raises(litellm.BadRequestError) as error:
            ask(server, "a", **more)
        assert message in error.value.message
        with pytest.raises(litellm.BadRequestError) as error:
            list(ask(server, "a", **more, stream=True))
        assert message in error.value.message
