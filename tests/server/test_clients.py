"""Each client with `pypcd serve`: what it asks, streams, calls and refuses is what the server does for a plain request.

What the server does is held to pypcd.Llama in test_serve.py, so that here its own answer to the same prompt and setting is the oracle.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from clients import LOOK_UP, check_call, package
from serving import PROMPTS, N, ask, complete, ready

from pypcd.server import Server

pytest_plugins = ["serving", "clients"]  # fixtures
pytestmark = [
    pytest.mark.usefixtures("offline", "loop", "collected"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # some clients cannot be closed
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class .*ReadOnly:UserWarning"),  # of pydantic
]

Answer = tuple[str, bool]  # its text, and whether it came to its end
Call = tuple[str, Any]  # a tool's name, and the arguments
STRONG = {"beta": 30.0}
TOOL = {"type": "function", "function": LOOK_UP}


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]  # the demo's template adds nothing


def pcd(setting: Any) -> dict[str, Any]:
    return {} if setting is None else {"pcd": setting}


class OpenAI:
    def __init__(self, server: Server, key: str = "none") -> None:
        made = package("openai")
        self.client = made.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        self.refused, self.locked_out = made.BadRequestError, made.AuthenticationError

    def create(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Any:
        given = {"messages": messages(prompt), "max_tokens": N, "temperature": 0, **more}
        return self.client.chat.completions.create(model=model, **given, extra_body=pcd(setting))

    def ask(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Answer:
        choice = self.create(prompt, setting, model, **more).choices[0]
        return choice.message.content, choice.finish_reason == "stop"

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        text, reason = "", None
        for chunk in self.create(prompt, setting, model, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = reason or chunk.choices[0].finish_reason
        return text, reason == "stop"

    def calls(self, prompt: str, setting: Any) -> Iterator[Call]:
        """A forced call of a tool: in a whole answer, then in a stream."""
        more = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}
        (call,) = self.create(prompt, setting, **more).choices[0].message.tool_calls
        yield call.function.name, json.loads(call.function.arguments)
        deltas = [chunk.choices[0].delta for chunk in self.create(prompt, setting, **more, stream=True)]
        parts = [call.function for delta in deltas for call in delta.tool_calls or []]
        assert len(parts) > 2
        (name,) = (part.name for part in parts if part.name)
        yield name, json.loads("".join(part.arguments or "" for part in parts))

    def sentence(self, error: Any) -> str:
        return error.body["message"]


class Responses(OpenAI):
    """The openai package's Responses API, which does not say whether a short answer came to its end: its tokens do."""

    def create(self, prompt: Any, setting: Any = None, model: str = "demo", **more: Any) -> Any:
        given = {"input": prompt, "max_output_tokens": N, "temperature": 0, **more}
        return self.client.responses.create(model=model, **given, extra_body=pcd(setting))

    def ask(self, prompt: Any, setting: Any = None, model: str = "demo", **more: Any) -> Answer:
        answer = self.create(prompt, setting, model, **more)
        return answer.output_text, answer.usage.output_tokens < N

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        events = list(self.create(prompt, setting, model, stream=True))
        whole = events[-1].response
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events[-1].type == "response.completed" and whole.output_text == text
        return text, whole.usage.output_tokens < N

    def calls(self, prompt: str, setting: Any) -> Iterator[Call]:
        tool = {"type": "function", **LOOK_UP}
        more = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
        (call,) = self.create(prompt, setting, **more).output
        yield call.name, json.loads(call.arguments)
        events = list(self.create(prompt, setting, **more, stream=True))
        parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (done,) = (event.item for event in events if event.type == "response.output_item.done")
        assert "".join(parts) == done.arguments and len(parts) > 2
        yield done.name, json.loads(done.arguments)


class LiteLLM(OpenAI):
    def __init__(self, server: Server) -> None:
        self.package, self.server = package("litellm"), server
        self.package.telemetry, self.package.suppress_debug_info = False, True
        self.refused = self.package.BadRequestError

    def create(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Any:
        given = {"temperature": 0, "max_tokens": N, "api_key": "none", "max_retries": 0, **more}
        body = {"extra_body": pcd(setting)} if pcd(setting) else {}
        to = {"model": f"openai/{model}", "api_base": f"{self.server.url}/v1"}
        return self.package.completion(**to, messages=messages(prompt), **body, **given)

    def sentence(self, error: Any) -> str:
        return error.message


class Anthropic:
    """/v1/messages. The temperature is sent in `extra_body`, since newer versions of the package have no parameter for it."""

    def __init__(self, server: Server, key: str = "none") -> None:
        made = package("anthropic")
        self.client = made.Anthropic(base_url=server.url, api_key=key, max_retries=0)
        self.refused, self.locked_out = made.BadRequestError, made.AuthenticationError

    def given(self, prompt: str, setting: Any, model: str = "demo", **more: Any) -> dict[str, Any]:
        body = {"temperature": 0, **pcd(setting)}
        return {"model": model, "max_tokens": N, "messages": messages(prompt), "extra_body": body, **more}

    def told(self, message: Any) -> Answer:
        return "".join(block.text for block in message.content), message.stop_reason == "end_turn"

    def ask(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Answer:
        return self.told(self.client.messages.create(**self.given(prompt, setting, model, **more)))

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        with self.client.messages.stream(**self.given(prompt, setting, model)) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert self.told(message)[0] == text and message.usage.output_tokens > 0
        return self.told(message)

    def calls(self, prompt: str, setting: Any) -> Iterator[Call]:
        tool = {"name": "look_up", "description": LOOK_UP["description"], "input_schema": LOOK_UP["parameters"]}
        more = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
        given = self.given(prompt, setting, **more)
        with self.client.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
        for message in (self.client.messages.create(**given), streamed):
            (call,) = message.content
            assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
            yield call.name, call.input

    def sentence(self, error: Any) -> str:
        return error.body["error"]["message"]


class LangChain:
    def __init__(self, server: Server) -> None:
        self.package, self.server = package("langchain_openai"), server
        self.refused = package("openai").BadRequestError

    def model(self, setting: Any = None, **more: Any) -> Any:
        given = {"model": "demo", "temperature": 0, "max_tokens": N, "api_key": "none", "max_retries": 0, **more}
        body = {"extra_body": pcd(setting)} if pcd(setting) else {}
        return self.package.ChatOpenAI(base_url=f"{self.server.url}/v1", **body, **given)

    def told(self, message: Any) -> Answer:
        return message.content, message.response_metadata["finish_reason"] == "stop"

    def ask(self, prompt: Any, setting: Any = None, model: str = "demo") -> Answer:
        return self.told(self.model(setting, model=model).invoke(prompt))

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        return self.told(whole(self.model(setting, model=model).stream(prompt)))

    def calls(self, prompt: str, setting: Any) -> Iterator[Call]:
        asked = self.model(setting, max_tokens=200)
        bound = asked.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
        for message in (bound.invoke(prompt), whole(bound.stream(prompt))):
            (call,) = message.tool_calls
            yield call["name"], call["args"]

    def sentence(self, error: Any) -> str:
        return error.body["message"]


def whole(stream: Iterable[Any]) -> Any:
    """The message that LangChain's parts of one add up to."""
    first, *parts = stream
    for part in parts:
        first += part
    return first


# -- what each does ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[OpenAI, Responses, Anthropic, LangChain, LiteLLM])
def client(server: Server, request: pytest.FixtureRequest) -> Any:
    return request.param(server)


def test_answers_and_streams_have_the_setting_of_the_body_or_the_name(client: Any, server: Server) -> None:
    seen = set()
    for model, setting in (
        *(("demo", setting) for setting in (None, False, "cautious", STRONG)),
        *(("demo:pcd-cautious", setting) for setting in (None, False, STRONG)),
    ):
        wanted = complete(server, PROMPTS[0], model=model, **pcd(setting))
        for ask_it in (client.ask, client.stream):
            assert ask_it(PROMPTS[0], setting, model) == (wanted["content"], wanted["stop_type"] == "eos")
        seen.add(wanted["content"])
    assert len(seen) >= 3, "the settings must differ, or this shows nothing"


@pytest.mark.parametrize(
    ("setting", "model", "message"),
    [
        ({"beta": -1}, "demo", "Field 'pcd': beta is -1, allowed: 0 to 1000"),
        (None, "demo:pcd-x", "Field 'model': it is \"demo:pcd-x\"; allowed: "),
    ],
)
def test_a_wrong_setting_is_a_bad_request_with_the_sentence(
    client: Any, setting: Any, model: str, message: str
) -> None:
    for ask_it in (client.ask, client.stream):
        with pytest.raises(client.refused) as error:
            ask_it("a", setting, model=model)
        assert message in client.sentence(error.value)


@pytest.mark.parametrize("kind", [OpenAI, Responses, Anthropic, LangChain, LiteLLM])
def test_a_forced_call_has_its_schema_also_in_a_stream(kind: Any, tools: Server) -> None:
    for setting in (False, "cautious", STRONG):
        call, again = kind(tools).calls(PROMPTS[0], setting)
        check_call(*call)
        assert again == call


@pytest.mark.parametrize("kind", [OpenAI, Anthropic])
def test_a_wrong_key_is_an_authentication_error(kind: Any) -> None:
    with ready(parallel=1, api_key="k") as locked:
        assert kind(locked, "k").ask("a", "cautious")[0]
        wrong = kind(locked, "x")
        with pytest.raises(wrong.locked_out):
            wrong.ask("a")


# -- what some of them have -------------------------------------------------------------------------------------------


def test_logprobs_carry_both_rows(server: Server) -> None:
    """The numbers are those of /completion, which test_serve.py holds to pypcd.Llama's rows."""
    wanted = complete(server, PROMPTS[0], pcd="cautious", n_probs=3)["completion_probabilities"]
    openai, litellm = (
        kind(server).create(PROMPTS[0], "cautious", logprobs=True, top_logprobs=3).choices[0].logprobs.content
        for kind in (OpenAI, LiteLLM)
    )
    chain = LangChain(server).model("cautious").bind(logprobs=True, top_logprobs=3).invoke(PROMPTS[0])
    langchain = [entry["pcd"] for entry in chain.response_metadata["logprobs"]["content"]]
    assert [entry.pcd for entry in openai] == [entry.pcd for entry in litellm] == langchain
    assert [entry["pcd"] for entry in wanted] == langchain
    stream = OpenAI(server).create(PROMPTS[0], "cautious", logprobs=True, top_logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry.pcd for part in parts if part for entry in part.content] == langchain


def test_anthropics_system_message_stop_and_count(server: Server) -> None:
    anthropic = Anthropic(server)
    text, _ = anthropic.ask(PROMPTS[0], "cautious", system="Red is 7.")
    assert text == complete(server, f"Red is 7.\n{PROMPTS[0]}", pcd="cautious")["content"]
    wanted = complete(server, PROMPTS[0], pcd="cautious")
    stop = wanted["content"][3:6]
    message = anthropic.client.messages.create(**anthropic.given(PROMPTS[0], "cautious", stop_sequences=[stop]))
    assert message.content[0].text == wanted["content"].partition(stop)[0]
    assert message.stop_sequence == stop  # llama-server gives "end_turn" as the reason
    counted = anthropic.client.messages.count_tokens(model="demo", messages=messages(PROMPTS[0]))
    assert counted.input_tokens == wanted["tokens_evaluated"]
    assert [model.id for model in anthropic.client.models.list()][:2] == ["demo", "demo:pcd"]


def test_langchains_call_has_another_setting_than_its_model(server: Server) -> None:
    by_name = LangChain(server).model(model="demo:pcd-cautious")
    plain = by_name.bind(extra_body={"pcd": False}).invoke(PROMPTS[0])
    strong = by_name.invoke(PROMPTS[0], extra_body={"pcd": STRONG})
    assert plain.content == complete(server, PROMPTS[0], pcd=False)["content"]
    assert strong.content == complete(server, PROMPTS[0], pcd=STRONG, model="demo:pcd-cautious")["content"]
    litellm = LiteLLM(server)  # which takes it as a field of its own too
    assert litellm.ask(PROMPTS[0], pcd=STRONG) == litellm.ask(PROMPTS[0], STRONG)


def test_a_structured_answer_has_its_schema(server: Server) -> None:
    schema = {"title": "entry", "description": LOOK_UP["description"], **LOOK_UP["parameters"]}
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": LOOK_UP["parameters"]}}
    for setting in (False, STRONG):
        asked = LangChain(server).model(setting, max_tokens=200)
        answer = asked.with_structured_output(schema, method="json_schema", include_raw=True).invoke(PROMPTS[0])
        check_call("look_up", answer["parsed"])
        for kind in (OpenAI, LiteLLM):
            text, _ = kind(server).ask(PROMPTS[0], setting, response_format=form, max_tokens=200)
            assert json.loads(text) == answer["parsed"]


# -- files ------------------------------------------------------------------------------------------------------------

NOTES = "The key k1 is red.\n\nThe key k2 is blue.\n\nThe lamp k3 is red."
DATA = base64.b64encode(NOTES.encode()).decode()
QUESTION = {"type": "text", "text": "What is blue?"}
FILE = {"type": "file", "file": {"filename": "notes.txt", "file_data": f"data:text/plain;base64,{DATA}"}}
WAYS: dict[Any, list[dict[str, Any]]] = {  # each client's own parts of a message
    OpenAI: [FILE, QUESTION],
    Responses: [{"type": "input_file", **FILE["file"]}, {"type": "input_text", "text": QUESTION["text"]}],
    Anthropic: [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": NOTES},
            "title": "notes.txt",
        },
        QUESTION,
    ],
    LangChain: [{"type": "file", "base64": DATA, "mime_type": "text/plain", "filename": "notes.txt"}, QUESTION],
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_clients_own_parts_are_files(server: Server, kind: Any) -> None:
    """The same answer as to a message with the file's text, and the passages that a plain request is told."""
    talk: Any = [{"role": "user", "content": WAYS[kind]}]
    given = {"messages": talk} if kind in (OpenAI, Anthropic) else {}
    text, ended = kind(server).ask("" if given else talk, False, **given)
    body = {"messages": [{"role": "user", "content": [FILE, QUESTION]}], "max_tokens": N}
    passages = "\n\n".join(ask(server, "/v1/chat/completions", body)[1]["timings"]["passages"])
    assert passages
    prompt = f"{NOTES}\n\nFrom the text above:\n\n{passages}\n\n{QUESTION['text']}"
    wanted = complete(server, prompt, pcd=False)
    assert (text, ended) == (wanted["content"], wanted["stop_type"] == "eos")
