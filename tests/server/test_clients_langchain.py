"""LangChain's ChatOpenAI with `pypcd serve`, against pypcd.Llama with the same setting."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import json
from typing import Any

import pytest
from clients import (
    JOBS,
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
from serving import PROMPTS, N, in_python

import pypcd
from pypcd.server import Server

openai, langchain = package("openai"), package("langchain_openai")
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # a model cannot be closed


def model(server: Server, setting: Any = None, **more: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_tokens": N, "api_key": "none", "max_retries": 0, **more}
    body = {} if setting is None else {"extra_body": {"pcd": setting}}
    return langchain.ChatOpenAI(base_url=f"{server.url}/v1", **body, **given)


def told(message: Any) -> tuple[str, bool]:
    """The text of an answer, and whether it ended."""
    return message.content, message.response_metadata["finish_reason"] == "stop"


def test_answers_are_those_of_llama_alone_and_8_at_once(
    server: Server,
    llm: pypcd.Llama,
) -> None:
    check_alone_and_at_once(llm, lambda prompt, setting: told(model(server, setting).invoke(prompt)))


def test_streams_are_those_of_llama_alone_and_8_at_once(
    server: Server,
    llm: pypcd.Llama,
) -> None:
    def ask(prompt: str, setting: Any) -> tuple[str, bool]:
        whole, *parts = model(server, setting).stream(prompt)
        for part in parts:
            whole += part
        return told(whole)

    check_alone_and_at_once(llm, ask)


def test_a_batch_of_8_has_one_setting(server: Server, llm: pypcd.Llama) -> None:
    prompts = [prompt for prompt, _ in JOBS[::3]]
    for prompt, message in zip(prompts, model(server, "cautious").batch(prompts)):
        text, ended = told(message)
        said(llm, prompt, "cautious", text, ended=ended)


def test_the_models_name_or_one_call_chooses(server: Server, llm: pypcd.Llama) -> None:
    by_name = model(server, model="demo:pcd-cautious")
    said(llm, PROMPTS[0], "cautious", by_name.invoke(PROMPTS[0]).content)
    said(llm, PROMPTS[0], False, by_name.bind(extra_body={"pcd": False}).invoke(PROMPTS[0]).content)
    strong = by_name.invoke(PROMPTS[0], extra_body={"pcd": {"beta": 30.0}})
    said(llm, PROMPTS[0], in_python("cautious").replace(beta=30.0), strong.content)


def test_logprobs_carry_pcd(server: Server) -> None:
    message = model(server, "cautious").bind(logprobs=True, top_logprobs=3).invoke(PROMPTS[0])
    entries = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == message.content
    for entry in entries:
        assert entry["pcd"]["standard"] < 0 and len(entry["top_logprobs"]) == 3
        assert entry["pcd"]["contrasted"] == pytest.approx(entry["logprob"], abs=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bound_tool_is_called_also_in_a_stream(tools: Server, name: str) -> None:
    bound = model(tools, SETTINGS[name], max_tokens=200).bind_tools(
        [{"type": "function", "function": LOOK_UP}], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = bound.invoke(PROMPTS[0]).tool_calls
    check_call(call["name"], call["args"])
    whole, *parts = bound.stream(PROMPTS[0])
    for part in parts:
        whole += part
    assert [(again["name"], again["args"]) for again in whole.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_structured_answer_has_its_schema(server: Server, name: str) -> None:
    schema = {"title": "entry", "description": LOOK_UP["description"], **LOOK_UP["parameters"]}
    asked = model(server, SETTINGS[name], max_tokens=200)
    structured = asked.with_structured_output(schema, method="json_schema", include_raw=True)
    answer = structured.invoke(PROMPTS[0])
    assert answer["parsing_error"] is None and answer["parsed"] == json.loads(answer["raw"].content)
    check_call("look_up", answer["parsed"])


def test_a_wrong_setting_is_a_bad_request_with_the_sentence(server: Server) -> None:
    for wrong, message in (
        (model(server, {"beta": -1}), "Field 'pcd': beta is -1, allowed: 0 to 1000"),
        (model(server, model="demo:pcd-x"), "Field 'model': it is \"x\"; allowed: "),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            wrong.invoke("a")
        assert message in error.value.body["message"]
        with pytest.raises(openai.BadRequestError):
            list(wrong.stream("a"))
