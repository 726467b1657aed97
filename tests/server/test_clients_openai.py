"""What the openai package has beside test_clients.py: asyncio, the Responses API, logprobs, tools and schemas, against pypcd.Llama
with the same setting; and that the oracle of these tests sees another answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clients import (
    JOBS,
    LOOK_UP,
    OPENS,
    SETTINGS,
    STRONG,
    brace,
    check_alone_and_at_once,
    check_call,
    package,
    said,
)
from conftest import contrasted, rounding_of
from serving import PROMPTS, SMALL, N, in_python, log_softmax, ready

import pypcd
from pypcd.server import Server

pytest_plugins = ["serving", "clients"]  # fixtures
pytestmark = pytest.mark.usefixtures("offline", "collected")
openai = package("openai")


def connected(server: Server, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with connected(server) as made:
        yield made


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]  # the demo's template adds nothing


def chat(client: Any, prompt: str, setting: Any = None, **more: Any) -> Any:
    given = {"model": "demo", "messages": messages(prompt), "max_tokens": N, "temperature": 0, **more}
    body = {} if setting is None else {"pcd": setting}
    return client.chat.completions.create(**{**given, "extra_body": {**body, **more.get("extra_body", {})}})


def told(choice: Any) -> tuple[str, bool]:
    """The text of an answer, and whether it ended."""
    return choice.message.content, choice.finish_reason == "stop"


# -- answers ----------------------------------------------------------------------------------------------------------


def test_another_setting_or_another_end_is_seen(client: Any, llm: pypcd.Llama) -> None:
    text, ended = told(chat(client, PROMPTS[0], STRONG).choices[0])
    said(llm, PROMPTS[0], STRONG, text, ended=ended)
    wrong = [  # a text may be cut into other tokens, of which too many are needed
        (False, text, {"ended": ended}, "behind the best|is left of"),
        ({"beta": 4.0}, text, {"ended": ended}, "behind the best|is left of"),
        (STRONG, text, {"ended": not ended}, f"ended: {not ended}"),
        (STRONG, text[:-1], {"ended": ended}, "behind the best|ended: False"),
        (STRONG, text + "0", {"ended": ended}, "behind the best|is left of"),
        (STRONG, text, {"grammar": "root ::= [^0-9a-f]+"}, "the grammar does not let"),
    ]
    for setting, said_instead, more, why in wrong:
        with pytest.raises(AssertionError, match=why):
            said(llm, PROMPTS[0], setting, said_instead, **more)


def test_an_asyncio_client_streams_8_at_once(server: Server, llm: pypcd.Llama) -> None:
    async def one(client: Any, prompt: str, setting: Any) -> tuple[str, bool]:
        given = {"model": "demo", "messages": messages(prompt), "max_tokens": N, "temperature": 0, "stream": True}
        text, reason = "", None
        async for chunk in await client.chat.completions.create(**given, extra_body={"pcd": setting}):
            text += chunk.choices[0].delta.content or ""
            reason = reason or chunk.choices[0].finish_reason
        return text, reason == "stop"

    async def together() -> list[tuple[str, bool]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, *job) for job in JOBS[:8]))

    for job, (text, ended) in zip(JOBS, asyncio.run(together())):
        said(llm, *job, text, ended=ended)


def test_a_conversation_has_its_setting(client: Any, llm: pypcd.Llama) -> None:
    turns = [
        {"role": "system", "content": "Red is 7."},
        {"role": "user", "content": "Blue?"},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "Red?"},
    ]
    text, ended = told(chat(client, "", STRONG, messages=turns).choices[0])
    said(llm, "\n".join(turn["content"] for turn in turns), STRONG, text, ended=ended)


@pytest.mark.parametrize("name", ["plain", "preset", "unsure"])
def test_a_stream_says_the_same_and_what_pcd_did(client: Any, name: str) -> None:
    whole = chat(client, PROMPTS[0], SETTINGS[name])
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chat(client, PROMPTS[0], SETTINGS[name], **more))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    n = chunks[-1].usage.completion_tokens
    assert n == whole.usage.completion_tokens > 3 and len(chunks) > n
    counts = [
        [answer.model_extra["timings"][f"pcd_{kind}"] for kind in ("twins", "skipped", "contrasted")]
        for answer in (whole, chunks[-1])
    ]
    assert counts[0] == counts[1]
    assert sum(counts[0][:2]) == (0 if name == "plain" else n)


def test_several_answers_a_seed_and_a_stop(client: Any, llm: pypcd.Llama) -> None:
    several = chat(client, PROMPTS[0], "cautious", n=3).choices
    assert len({told(choice) for choice in several}) == 1 and [choice.index for choice in several] == [0, 1, 2]
    text, ended = told(several[0])
    said(llm, PROMPTS[0], "cautious", text, ended=ended)

    streamed = {0: "", 1: ""}
    for chunk in chat(client, PROMPTS[0], "cautious", n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(streamed.values()) == {text}

    stopped = chat(client, PROMPTS[0], "cautious", stop=[text[3:6]]).choices[0]
    assert told(stopped) == (text[: text.index(text[3:6])], True)

    drawn = {"temperature": 1.5, "extra_body": {"cache_prompt": False, "id_slot": 0}}
    first, *again = (told(chat(client, PROMPTS[1], {"gamma": 500}, seed=s, **drawn).choices[0]) for s in (5, 5, 6, 7))
    assert again[0] == first and set(again) != {first}


def test_a_logit_bias_lifts_what_was_taken_out_and_bans(client: Any, llm: pypcd.Llama) -> None:
    setting = {"gamma": 2, "beta": 4.0}
    first = (
        chat(client, PROMPTS[0], setting, logprobs=True, top_logprobs=5, max_tokens=1).choices[0].logprobs.content[0]
    )
    out = first.model_extra["pcd"]["pushed_out"][0]["id"] if first.model_extra["pcd"]["pushed_out"] else None
    out = out or next(entry.model_extra["id"] for entry in first.top_logprobs if entry.pcd["contrasted"] is None)
    lifted = chat(client, PROMPTS[0], setting, logit_bias={str(out): 100}).choices[0]
    said(llm, PROMPTS[0], setting, lifted.message.content, bias={out: 100.0}, ended=lifted.finish_reason == "stop")
    assert lifted.message.content.startswith(llm.detokenize([out]).decode())
    best = first.model_extra["id"]
    banned = chat(client, PROMPTS[0], setting, logit_bias={str(best): -100}).choices[0]
    said(llm, PROMPTS[0], setting, banned.message.content, bias={best: -100.0}, ended=banned.finish_reason == "stop")
    assert not banned.message.content.startswith(first.token)


def test_logprobs_carry_both_rows(client: Any, llm: pypcd.Llama) -> None:
    answer = chat(client, PROMPTS[0], "cautious", logprobs=True, top_logprobs=4)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    text = llm.tokenize(PROMPTS[0].encode())
    limit = contrasted(rounding_of(llm, text), 1.5)
    llm.pcd = in_python("cautious")
    llm._ctx.kv_cache_clear()
    llm.eval(text)
    for entry in entries[:4]:
        rows = llm.pcd_logits()
        for candidate in [entry, *entry.top_logprobs]:
            pcd, token = candidate.model_extra["pcd"], candidate.model_extra["id"]
            for kind in ("standard", "local", "contrasted"):
                wanted = float(log_softmax(getattr(rows, kind))[token])
                assert (pcd[kind] is None) == (not np.isfinite(wanted))
                assert pcd[kind] is None or abs(pcd[kind] - wanted) < limit
        assert entry.model_extra["pcd"]["strength"] == pytest.approx(1.5)
        llm.eval([entry.model_extra["id"]])
    chunks = list(chat(client, PROMPTS[0], "cautious", logprobs=True, top_logprobs=4, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert {"strength", "pushed_out", "contrasted"} <= set(streamed[0].model_extra["pcd"])


# -- the Responses API ------------------------------------------------------------------------------------------------


def respond(client: Any, prompt: str, setting: Any = None, **more: Any) -> Any:
    given = {"model": "demo", "input": prompt, "max_output_tokens": N, "temperature": 0, **more}
    return client.responses.create(**given, extra_body={} if setting is None else {"pcd": setting})


def test_responses_are_those_of_llama_alone_and_8_at_once(client: Any, llm: pypcd.Llama) -> None:
    check_alone_and_at_once(llm, lambda prompt, setting: (respond(client, prompt, setting).output_text, None))


def test_a_response_streams_and_its_model_chooses(client: Any, llm: pypcd.Llama) -> None:
    whole = respond(client, PROMPTS[0], model="demo:pcd-cautious", instructions="Red is 7.")
    said(llm, f"Red is 7.\n{PROMPTS[0]}", "cautious", whole.output_text)
    events = list(respond(client, PROMPTS[0], "cautious", instructions="Red is 7.", stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 3
    assert events[-1].type == "response.completed" and events[-1].response.output_text == whole.output_text
    assert events[-1].model_extra["timings"]["pcd_twins"] == whole.usage.output_tokens


# -- tools and schemas ------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": LOOK_UP}
CALLED = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}


@pytest.fixture(scope="module")
def caller(tools: Server) -> Iterator[Any]:
    with connected(tools) as made:
        yield made


def forced(caller: Any, setting: Any) -> Any:
    return chat(caller, PROMPTS[0], setting, **CALLED, extra_body={"verbose": True})


def check_forced(llm: pypcd.Llama, setting: Any, answer: Any) -> dict[str, Any]:
    """The one call of an answer has what its schema wants, and its text is greedy under its grammar; its arguments."""
    (call,), inside = answer.choices[0].message.tool_calls, answer.model_extra["__verbose"]
    arguments = json.loads(call.function.arguments)
    check_call(call.function.name, arguments)
    assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
    assert json.loads(inside["content"]) == {"name": "look_up", "parameters": arguments}
    prompt = inside["prompt"].removeprefix("<s>")
    assert LOOK_UP["description"] in prompt and PROMPTS[0] in prompt
    assert len(llm.tokenize(prompt.encode())) == answer.usage.prompt_tokens
    rules = {"bias": {brace(llm): OPENS}, "grammar": inside["generation_settings"]["grammar"]}
    said(llm, prompt, setting, inside["content"], n=200, ended=True, **rules)
    return arguments


def test_forced_calls_8_at_once_are_greedy_under_their_grammar(caller: Any, llm: pypcd.Llama) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda setting: forced(caller, setting), SETTINGS.values()))
    made = [check_forced(llm, setting, answer) for setting, answer in zip(SETTINGS.values(), answers)]
    assert len({str(arguments) for arguments in made}) >= 2, "the settings must differ, or this shows nothing"
    for setting, arguments in zip(SETTINGS.values(), made):
        chunks = chat(caller, PROMPTS[0], setting, **CALLED, stream=True)
        calls = [chunk.choices[0].delta.tool_calls[0] for chunk in chunks if chunk.choices[0].delta.tool_calls]
        assert [call.function.name for call in calls if call.function.name] == ["look_up"] and len(calls) > 2
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == arguments


def test_a_forced_call_is_plain_unless_its_request_asks(caller: Any) -> None:
    plain, by_default, on = (forced(caller, setting) for setting in (False, None, "cautious"))
    (call,), (same,) = (answer.choices[0].message.tool_calls for answer in (plain, by_default))
    assert same.function == call.function
    counts = by_default.model_extra["timings"]
    assert counts["pcd_constrained"] == counts["predicted_n"] and counts["pcd_twins"] == 0
    assert on.model_extra["timings"]["pcd_twins"] > 0 and on.model_extra["timings"]["pcd_constrained"] == 0


def test_a_call_that_the_model_may_make_has_the_servers_setting(caller: Any) -> None:
    answer = chat(caller, PROMPTS[0], tools=[TOOL], tool_choice="auto", max_tokens=1, extra_body={"verbose": True})
    rules = answer.model_extra["__verbose"]["generation_settings"]
    assert rules["grammar"] == "" or rules["grammar_lazy"]
    counts = answer.model_extra["timings"]
    assert counts["pcd_twins"] == 1 and counts["pcd_constrained"] == 0


def test_a_result_of_a_tool_is_read(caller: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "red", "n": 1}'}}
    turns = [
        *messages("Red?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "It is 77."},
    ]
    more = {"messages": turns, "tools": [TOOL], "tool_choice": "none", "extra_body": {"verbose": True}}
    answer = chat(caller, "", "cautious", **more)
    assert '"parameters": {"key": "red", "n": 1}}\nIt is 77.' in answer.model_extra["__verbose"]["prompt"]
    assert answer.choices[0].message.tool_calls is None


def test_responses_call_tools(caller: Any) -> None:
    more = {"tools": [{"type": "function", **LOOK_UP}], "tool_choice": "required", "max_output_tokens": 200}
    for setting in (False, "cautious", STRONG):
        (call,) = respond(caller, PROMPTS[0], setting, **more).output
        assert call.type == "function_call"
        check_call(call.name, json.loads(call.arguments))
        events = list(respond(caller, PROMPTS[0], setting, **more, stream=True))
        parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert "".join(parts) == call.arguments == done[0].arguments and len(parts) > 2


@pytest.mark.parametrize("name", ["plain", "server's", "window", "adaptive"])
def test_a_schema_holds_and_is_greedy_under_its_grammar(client: Any, llm: pypcd.Llama, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": LOOK_UP["parameters"]}}
    more = {"response_format": form, "max_tokens": 200, "extra_body": {"verbose": True}}
    answer = chat(client, PROMPTS[0], SETTINGS[name], **more)
    text, ended = told(answer.choices[0])
    check_call("look_up", json.loads(text))
    inside = answer.model_extra["__verbose"]
    grammar = inside["generation_settings"]["grammar"]
    said(llm, PROMPTS[0], SETTINGS[name], inside["content"], n=200, ended=ended, grammar=grammar)
    chunks = chat(client, PROMPTS[0], SETTINGS[name], response_format=form, max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_server_of_embeddings_gives_them_and_refuses_pcd() -> None:
    def embedded(client: Any) -> list[list[float]]:
        return [entry.embedding for entry in client.embeddings.create(model="demo", input=["red", "blue"]).data]

    options = [*SMALL, "--embeddings", "--pooling", "mean"]
    with ready(parallel=1, options=options) as pooling, connected(pooling) as client:
        vectors = embedded(client)
        assert len(vectors) == 2 and vectors[0] != vectors[1]
        assert np.isclose(np.linalg.norm(vectors[0]), 1.0, atol=1e-3)
        with pytest.raises(openai.BadRequestError, match="this context pools embeddings and computes no logits"):
            chat(client, "a", True)
        assert embedded(client) == vectors
