"""Clients of `pypcd serve`: what each asks, streams, calls and refuses is what the server does for a plain request; docs/serve.md's programs.

What the server does is held to pypcd.Llama in test_serve.py, so that here its own answer to the same prompt and setting is the oracle.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import LOOK_UP, check_call, package
from serving import PROMPTS, N, ask, complete, greeting, ready, serving

from pypcd.server import Server

pytest_plugins = ["serving", "clients"]  # fixtures
pytestmark = pytest.mark.usefixtures("offline", "collected")

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


# -- what each does ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[OpenAI, Responses, Anthropic])
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
        ({"beta": -1}, "demo", "Field 'pcd': beta is -1; allowed: from 0 to 1000"),
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


@pytest.mark.parametrize("kind", [OpenAI, Responses, Anthropic])
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
    told = complete(server, PROMPTS[0], pcd="cautious", n_probs=3)["completion_probabilities"]
    wanted = [entry["pcd"] for entry in told]
    asked = {"logprobs": True, "top_logprobs": 3}
    answer = OpenAI(server).create(PROMPTS[0], "cautious", **asked)
    assert [entry.pcd for entry in answer.choices[0].logprobs.content] == wanted
    parts = [chunk.choices[0].logprobs for chunk in OpenAI(server).create(PROMPTS[0], "cautious", **asked, stream=True)]
    assert [entry.pcd for part in parts if part for entry in part.content] == wanted


def test_a_structured_answer_has_its_schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": LOOK_UP["parameters"]}}
    for setting in (False, STRONG):
        text, _ = OpenAI(server).ask(PROMPTS[0], setting, response_format=form, max_tokens=200)
        check_call("look_up", json.loads(text))


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
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_clients_own_parts_are_files(server: Server, kind: Any) -> None:
    """The same answer as to a message with the file's text, and the passages that a plain request is told."""
    talk: Any = [{"role": "user", "content": WAYS[kind]}]
    given = {"messages": talk} if kind in (OpenAI, Anthropic) else {}
    text, ended = kind(server).ask("" if given else talk, False, **given)
    body = {"messages": [{"role": "user", "content": [FILE, QUESTION]}], "max_tokens": N}
    found = ask(server, "/v1/chat/completions", body)[1]["timings"]["passages"]
    assert found
    passages = "\n\n".join(one["text"] for one in found)
    prompt = f"{NOTES}\n\nFrom the text above:\n\n{passages}\n\n{QUESTION['text']}"
    wanted = complete(server, prompt, pcd=False)
    assert (text, ended) == (wanted["content"], wanted["stop_type"] == "eos")


# -- the programs in docs/serve.md and the line that `pypcd serve` prints, run as they stand ------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
SECTION, DOCUMENTS = (
    PAGE.read_text(encoding="utf-8").partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    for head in ("From Python and other programs", "Documents")
)
PROGRAMS = {
    re.search(r"(?m)^(?:from|import) (\w+)", text)[1]: text
    for text in re.findall(r"(?ms)^```python\n(.*?)^```", SECTION)
}
CAPITAL = "What is the capital of France?"
OURS = "http://127.0.0.1:8080"

needs_curl = pytest.mark.skipif(
    not shutil.which("curl"), reason="there is no curl; where it is installed these tests run"
)


def setting_of(text: str) -> Any:
    """The setting that a program asks for, in its body or its model's name."""
    given = re.search(r'"pcd": (\{.*?\}|"[^"]+")', text)
    return json.loads(given[1]) if given else re.search(r"model:pcd-(\w+)", text)[1]


def printed(text: str, server: Server, name: str) -> str:
    """What a program of the page prints, with our server's address."""
    assert OURS in text
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text.replace(OURS, server.url), name, "exec"), {})  # noqa: S102  it is ours
    return out.getvalue()


def shell(line: str) -> Any:
    """What a line of a shell prints, which is JSON."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # a program that ends need not close its client
def test_a_program_prints_the_answer_with_its_setting(server: Server, name: str) -> None:
    package(name)
    wanted = complete(server, CAPITAL, pcd=setting_of(PROGRAMS[name]), n_predict=32)["content"]
    assert printed(PROGRAMS[name], server, f"docs/serve.md, {name}") == wanted + "\n"


def test_the_program_with_a_document_prints_answer_and_passages(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("openai")
    (text,) = re.findall(r"(?ms)^```python\n(.*?)^```", DOCUMENTS)
    report = "The bridge was opened in 1931.\n\nSigned by Ruth Amsel.\n\nThe river is wide."
    (tmp_path / "report.txt").write_text(report, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    said = printed(text, server, "docs/serve.md, Documents")
    body = {"messages": [{"role": "user", "content": "Who signed it?"}], "documents": [{"name": "a", "text": report}]}
    status, answer = ask(server, "/v1/chat/completions", body)
    assert status == 200
    wanted = [answer["choices"][0]["message"]["content"], "report.txt line 3 Signed by Ruth Amsel."]
    assert said == "\n".join(wanted) + "\n"


@needs_curl
@pytest.mark.parametrize(("key", "setting"), [(None, None), ("secret", "unsure")])
def test_the_line_that_serve_prints_works(key: str | None, setting: str | None) -> None:
    with serving("demo", *(["--pcd", setting] if setting else []), *(["--api-key", key] if key else [])) as process:
        line = greeting(process)["try"]
        if key:
            assert "Authorization: Bearer KEY" in line
            assert shell(line)["error"]["code"] == 401
        answer = shell(line.replace("KEY", key or ""))
    assert answer["choices"][0]["message"]["content"].strip() == "8044-44b2", (
        "the first of its values, with PCD of its own"
    )
    counts = [answer["timings"][f"pcd_{name}"] for name in ("twins", "skipped")]
    assert sum(counts) == answer["usage"]["completion_tokens"]
