"""Each client with `pypcd serve`: what it asks, streams, calls and refuses, against pypcd.Llama with the same setting.

(What the openai package alone shows is in test_clients_openai.py.)
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from clients import JOBS, LOOK_UP, STRONG, check_alone_and_at_once, check_call, package, said
from serving import PROMPTS, N, in_python, ready

import pypcd
from pypcd.server import Server

pytest_plugins = ["serving", "clients"]  # fixtures
pytestmark = [
    pytest.mark.usefixtures("offline", "loop", "collected"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # some clients cannot be closed
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class .*ReadOnly:UserWarning"),  # of pydantic
]

Answer = tuple[str, bool]  # its text, and whether it came to its end
TOOL = {"type": "function", "function": LOOK_UP}
FORM = {"type": "json_schema", "json_schema": {"name": "entry", "schema": LOOK_UP["parameters"]}}


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]  # the demo's template adds nothing


def pcd(setting: Any) -> dict[str, Any]:
    return {} if setting is None else {"pcd": setting}


class OpenAI:
    def __init__(self, server: Server, key: str = "none") -> None:
        made = package("openai")
        self.client = made.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        self.refused, self.locked_out = made.BadRequestError, made.AuthenticationError

    def ask(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Answer:
        given = {"messages": messages(prompt), "max_tokens": N, "temperature": 0, **more}
        choice = self.client.chat.completions.create(model=model, **given, extra_body=pcd(setting)).choices[0]
        return choice.message.content, choice.finish_reason == "stop"

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        given = {"messages": messages(prompt), "max_tokens": N, "temperature": 0, "stream": True}
        text, reason = "", None
        for chunk in self.client.chat.completions.create(model=model, **given, extra_body=pcd(setting)):
            text += chunk.choices[0].delta.content or ""
            reason = reason or chunk.choices[0].finish_reason
        return text, reason == "stop"

    def sentence(self, error: Any) -> str:
        return error.body["message"]


class Completions(OpenAI):
    """The openai package's route for a prompt without a template."""

    def ask(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Answer:
        given = {"prompt": prompt, "max_tokens": N, "temperature": 0, **more}
        choice = self.client.completions.create(model=model, **given, extra_body=pcd(setting)).choices[0]
        return choice.text, choice.finish_reason == "stop"

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        given = {"prompt": prompt, "max_tokens": N, "temperature": 0, "stream": True}
        chunks = [*self.client.completions.create(model=model, **given, extra_body=pcd(setting))]
        return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason == "stop"


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

    def calls(self, prompt: str, setting: Any) -> Iterator[tuple[str, Any]]:
        """A forced call of a tool: its name and arguments in a whole answer, then in a stream."""
        tool = {"name": "look_up", "description": LOOK_UP["description"], "input_schema": LOOK_UP["parameters"]}
        more = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
        message = self.client.messages.create(**self.given(prompt, setting, **more))
        (call,) = message.content
        assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
        yield call.name, call.input
        with self.client.messages.stream(**self.given(prompt, setting, **more)) as stream:
            (call,) = stream.get_final_message().content
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

    def ask(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        return self.told(self.model(setting, model=model).invoke(prompt))

    def whole(self, stream: Any) -> Any:
        first, *parts = stream
        for part in parts:
            first += part
        return first

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        return self.told(self.whole(self.model(setting, model=model).stream(prompt)))

    def calls(self, prompt: str, setting: Any) -> Iterator[tuple[str, Any]]:
        asked = self.model(setting, max_tokens=200)
        bound = asked.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
        for message in (bound.invoke(prompt), self.whole(bound.stream(prompt))):
            (call,) = message.tool_calls
            yield call["name"], call["args"]

    def sentence(self, error: Any) -> str:
        return error.body["message"]


class LiteLLM:
    def __init__(self, server: Server) -> None:
        self.package, self.server = package("litellm"), server
        self.package.telemetry, self.package.suppress_debug_info = False, True
        self.refused = self.package.BadRequestError

    def completion(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Any:
        given = {"temperature": 0, "max_tokens": N, "api_key": "none", "max_retries": 0, **more}
        body = {"extra_body": pcd(setting)} if pcd(setting) else {}
        to = {"model": f"openai/{model}", "api_base": f"{self.server.url}/v1"}
        return self.package.completion(**to, messages=messages(prompt), **body, **given)

    def ask(self, prompt: str, setting: Any = None, model: str = "demo", **more: Any) -> Answer:
        choice = self.completion(prompt, setting, model, **more).choices[0]
        return choice.message.content, choice.finish_reason == "stop"

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        text, reason = "", None
        for chunk in self.completion(prompt, setting, model, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = reason or chunk.choices[0].finish_reason
        return text, reason == "stop"

    def calls(self, prompt: str, setting: Any) -> Iterator[tuple[str, Any]]:
        more = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}
        chunks = list(self.completion(prompt, setting, **more, stream=True))
        for answer in (self.completion(prompt, setting, **more), self.package.stream_chunk_builder(chunks)):
            (call,) = answer.choices[0].message.tool_calls
            yield call.function.name, json.loads(call.function.arguments)

    def sentence(self, error: Any) -> str:
        return error.message


class Refused(Exception):
    """A status that curl was given, other than 200."""


class Curl:
    refused = Refused

    def __init__(self, server: Server) -> None:
        if not shutil.which("curl"):
            pytest.skip("there is no curl; where it is installed these tests run")
        self.server = server

    def post(self, prompt: str, setting: Any, model: str, **more: Any) -> str:
        body = {"messages": messages(prompt), "max_tokens": N, "temperature": 0, "model": model, **pcd(setting), **more}
        command = ["curl", "-sN", "--write-out", "%{stderr}%{http_code}", f"{self.server.url}/v1/chat/completions"]
        command += ["-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        if done.stderr != "200":
            raise Refused(done.stdout)
        return done.stdout

    def ask(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        (choice,) = json.loads(self.post(prompt, setting, model))["choices"]
        return choice["message"]["content"], choice["finish_reason"] == "stop"

    def stream(self, prompt: str, setting: Any = None, model: str = "demo") -> Answer:
        lines = self.post(prompt, setting, model, stream=True).splitlines()
        assert lines[-2] == "data: [DONE]"
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, choices[-1]["finish_reason"] == "stop"

    def sentence(self, error: Any) -> str:
        return json.loads(str(error))["error"]["message"]


@pytest.fixture
def anthropic(server: Server) -> Anthropic:
    return Anthropic(server)


@pytest.fixture
def langchain(server: Server) -> LangChain:
    return LangChain(server)


@pytest.fixture
def litellm(server: Server) -> LiteLLM:
    return LiteLLM(server)


# -- what each does ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[OpenAI, Completions, Anthropic, LangChain, LiteLLM, Curl])
def client(server: Server, request: pytest.FixtureRequest) -> Any:
    return request.param(server)


def test_answers_alone_and_streams_8_at_once_are_those_of_llama(client: Any, llm: pypcd.Llama) -> None:
    check_alone_and_at_once(llm, client.ask, client.stream)


def test_the_models_name_chooses_and_the_body_comes_first(client: Any, llm: pypcd.Llama) -> None:
    for setting, meant in (
        (None, "cautious"),
        ({"beta": 30.0}, in_python("cautious").replace(beta=30.0)),
        (False, False),
    ):
        text, ended = client.ask(PROMPTS[0], setting, model="demo:pcd-cautious")
        said(llm, PROMPTS[0], meant, text, ended=ended)


@pytest.mark.parametrize(
    ("setting", "model", "message"),
    [
        ({"beta": -1}, "demo", "Field 'pcd': beta is -1, allowed: 0 to 1000"),
        ("cautius", "demo", 'Field \'pcd\': it is "cautius" (did you mean "cautious"?); allowed: '),
        (None, "demo:pcd-x", "Field 'model': it is \"demo:pcd-x\"; allowed: "),
    ],
)
def test_a_wrong_setting_is_a_bad_request_with_the_sentence(
    client: Any, setting: Any, model: str, message: str
) -> None:
    for ask in (client.ask, client.stream):
        with pytest.raises(client.refused) as error:
            ask("a", setting, model=model)
        assert message in client.sentence(error.value)


@pytest.mark.parametrize("kind", [Anthropic, LangChain, LiteLLM])
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


# -- what one of them has ---------------------------------------------------------------------------------------------


def test_anthropics_system_message_stop_and_count(anthropic: Anthropic, llm: pypcd.Llama) -> None:
    text, ended = anthropic.ask(PROMPTS[0], "cautious", system="Red is 7.")
    said(llm, f"Red is 7.\n{PROMPTS[0]}", "cautious", text, ended=ended)
    text, _ = anthropic.ask(PROMPTS[0], "cautious")
    given = anthropic.given(PROMPTS[0], "cautious", stop_sequences=[text[3:6]])
    message = anthropic.client.messages.create(**given)
    assert message.content[0].text == text[: text.index(text[3:6])]
    assert message.stop_sequence == text[3:6]  # llama-server gives "end_turn" as the reason
    counted = anthropic.client.messages.count_tokens(model="demo", messages=messages(PROMPTS[0]))
    assert counted.input_tokens == len(llm.tokenize(PROMPTS[0].encode()))
    assert [model.id for model in anthropic.client.models.list()][:2] == ["demo", "demo:pcd"]


def test_langchains_batch_has_one_setting_and_one_call_another(langchain: LangChain, llm: pypcd.Llama) -> None:
    prompts = [prompt for prompt, _ in JOBS[::3]]
    for prompt, message in zip(prompts, langchain.model("cautious").batch(prompts)):
        text, ended = langchain.told(message)
        said(llm, prompt, "cautious", text, ended=ended)
    by_name = langchain.model(model="demo:pcd-cautious")
    said(llm, PROMPTS[0], False, by_name.bind(extra_body={"pcd": False}).invoke(PROMPTS[0]).content)
    strong = by_name.invoke(PROMPTS[0], extra_body={"pcd": STRONG})
    said(llm, PROMPTS[0], in_python("cautious").replace(**STRONG), strong.content)


def test_langchains_structured_answer_has_its_schema(langchain: LangChain) -> None:
    schema = {"title": "entry", "description": LOOK_UP["description"], **LOOK_UP["parameters"]}
    for setting in (False, STRONG):
        asked = langchain.model(setting, max_tokens=200)
        answer = asked.with_structured_output(schema, method="json_schema", include_raw=True).invoke(PROMPTS[0])
        assert answer["parsing_error"] is None and answer["parsed"] == json.loads(answer["raw"].content)
        check_call("look_up", answer["parsed"])


def test_langchains_logprobs_carry_pcd(langchain: LangChain) -> None:
    message = langchain.model("cautious").bind(logprobs=True, top_logprobs=3).invoke(PROMPTS[0])
    entries = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == message.content
    for entry in entries:
        assert entry["pcd"]["standard"] < 0 and len(entry["top_logprobs"]) == 3
        assert entry["pcd"]["contrasted"] == pytest.approx(entry["logprob"], abs=1e-4)


def test_litellm_has_a_field_of_its_own_schemas_and_logprobs(litellm: LiteLLM, llm: pypcd.Llama) -> None:
    text, ended = litellm.ask(PROMPTS[0], pcd=STRONG)
    said(llm, PROMPTS[0], STRONG, text, ended=ended)
    text, _ = litellm.ask(PROMPTS[0], STRONG, response_format=FORM, max_tokens=200)
    check_call("look_up", json.loads(text))
    answer = litellm.completion(PROMPTS[0], "cautious", n=2, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == answer.choices[1].message.content
    assert answer.timings["pcd_twins"] > 0
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries) == choice.message.content
        assert all(entry.pcd["contrasted"] == pytest.approx(entry.logprob, abs=1e-4) for entry in entries)


# -- files ------------------------------------------------------------------------------------------------------------

NOTES = "The key k1 is red.\n\nThe key k2 is blue.\n\nThe lamp k3 is red."
DATA = base64.b64encode(NOTES.encode()).decode()
QUESTION = {"type": "text", "text": "What is blue?"}
FILE = {"type": "file", "file": {"filename": "notes.txt", "file_data": f"data:text/plain;base64,{DATA}"}}


def of_openai(server: Server) -> Answer:
    return OpenAI(server).ask("", False, messages=[{"role": "user", "content": [FILE, QUESTION]}])


def of_openais_responses(server: Server) -> Answer:
    part = {"type": "input_file", **FILE["file"]}
    content = [part, {"type": "input_text", "text": QUESTION["text"]}]
    answer = OpenAI(server).client.responses.create(
        model="demo", input=[{"role": "user", "content": content}], max_output_tokens=N, extra_body=pcd(False)
    )
    return answer.output_text, answer.usage.output_tokens < N


def of_anthropic(server: Server) -> Answer:
    source = {"type": "text", "media_type": "text/plain", "data": NOTES}
    content = [{"type": "document", "source": source, "title": "notes.txt"}, QUESTION]
    return Anthropic(server).ask("", False, messages=[{"role": "user", "content": content}])


def of_langchain(server: Server) -> Answer:
    part = {"type": "file", "base64": DATA, "mime_type": "text/plain", "filename": "notes.txt"}
    chain = LangChain(server)
    return chain.told(chain.model(False).invoke([{"role": "user", "content": [part, QUESTION]}]))


@pytest.mark.parametrize("ask_with_file", [of_openai, of_openais_responses, of_anthropic, of_langchain])
def test_a_clients_own_parts_are_files(server: Server, llm: pypcd.Llama, ask_with_file: Any) -> None:
    """The same answer as to a message with the file's text, and the passages that are told to curl."""
    text, ended = ask_with_file(server)
    told = json.loads(Curl(server).post("", False, "demo", messages=[{"role": "user", "content": [FILE, QUESTION]}]))
    passages = "\n\n".join(told["timings"]["passages"])
    assert passages
    prompt = f"{NOTES}\n\nFrom the text above:\n\n{passages}\n\n{QUESTION['text']}"
    said(llm, prompt, False, text, ended=ended)
