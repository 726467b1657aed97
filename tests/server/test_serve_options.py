"""llama-server's own options in `pypcd serve`: what PCD does beside them, and that what a user gives wins; settings as text."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import SECONDS
from serving import BASE, MESSAGES, MUTE_ROUTES, PROMPTS, SMALL, ask, complete, is_greedy, ready, refused

import pypcd
from pypcd import PCDConfig, engine
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server, model_list, options

pytest_plugins = ["serving"]  # fixtures

HELLO = {"prompt": "a", "n_predict": 1}
C_NAMES = ("llama_", "kv_unified")


def running(*options: str, **given: Any) -> contextlib.AbstractContextManager[Server]:
    return ready(**{"parallel": 2, **given, "options": [*SMALL, *options]})


# -- backend sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pcd", [BASE, False])
def test_backend_sampling_gives_way_to_requests_with_pcd(pcd: Any, llm: pypcd.Llama) -> None:
    with running("--backend-sampling", pcd=pcd) as sampling:
        assert sampling.refusals() == {}
        for setting in ("cautious", {"beta": 4.0}):
            answer = complete(sampling, PROMPTS[0], pcd=setting)
            assert answer["timings"]["pcd_twins"] > 0
            is_greedy(llm, PROMPTS[0], setting, answer["tokens"])
        plain = complete(sampling, PROMPTS[0], pcd=False)
        assert plain["generation_settings"]["backend_sampling"] is True
        is_greedy(llm, PROMPTS[0], False, plain["tokens"])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_refusal_names_options_and_no_function_of_c() -> None:
    with running("--no-kv-unified", pcd="cautious", pcd_required=False) as apart:
        for said in (refused(apart, pcd="paper"), *apart.refusals().values()):
            assert "--kv-unified" in said and not any(name in said for name in C_NAMES)
        assert "--kv-unified" in refused(apart, model="demo:pcd")
        assert complete(apart, "a", model="demo:pcd", pcd=False, n_predict=1)["tokens"]  # before the name


@pytest.mark.parametrize("path", MUTE_ROUTES)
def test_a_route_that_decodes_nothing_takes_no_setting(path: str, server: Server) -> None:
    for setting in (True, "nonsense", {"beta": 1}):
        status, answer = ask(server, path, {**MUTE_ROUTES[path], "pcd": setting})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        said = answer["error"]["message"]
        assert said.startswith(f"Field 'pcd': it is {json.dumps(setting, separators=(',', ':'))}, ") and path in said
        assert "; allowed: " in said
    without = ask(server, path, MUTE_ROUTES[path])
    for setting in (None, False, "off"):
        assert ask(server, path, {**MUTE_ROUTES[path], "pcd": setting}) == without
    if path == "/tokenize":
        assert without[0] == 200
        assert ask(server, path, {"content": '"pcd"'})[0] == 200, "a text may have the word in it"


def test_a_server_of_embeddings_gives_them_and_refuses_pcd() -> None:
    with running("--embeddings", "--pooling", "mean", parallel=1) as pooling:
        status, first = ask(pooling, "/v1/embeddings", {"input": ["red", "blue"]})
        red, blue = (np.array(entry["embedding"]) for entry in first["data"])
        assert status == 200 and np.isclose(np.linalg.norm(red), 1.0, atol=1e-3) and not np.array_equal(red, blue)
        status, answer = ask(pooling, "/v1/chat/completions", {"messages": MESSAGES, "pcd": True})
        assert status == 400 and "pools embeddings and computes no logits" in answer["error"]["message"]
        assert ask(pooling, "/v1/embeddings", {"input": ["red", "blue"]})[1]["data"] == first["data"]


# -- calls of tools ----------------------------------------------------------------------------------------------------

LOOK_UP: dict[str, Any] = {
    "name": "look_up",
    "description": "The value of a key",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "enum": ["red", "blue", "green"]}, "n": {"type": "integer"}},
        "required": ["key", "n"],
    },
}

# The demo model's own template has no place for tools. In this one a call is JSON as Llama 3 writes it.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory, llm: pypcd.Llama) -> Iterator[Server]:
    """A server whose template knows tools; its answers begin with the token that a call begins with, which this model does not know."""
    template: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    brace = max(token for token in range(llm.n_vocab()) if engine.token_bytes(llm, token) == b"{")
    options = [*SMALL, "--chat-template-file", str(template), "--logit-bias", f"{brace}+100"]
    with ready(pcd=BASE, parallel=8, options=options) as made:
        yield made


CALLED = {"messages": MESSAGES, "tools": [{"type": "function", "function": LOOK_UP}], "temperature": 0}


def test_a_forced_call_is_plain_unless_its_request_asks(tools: Server) -> None:
    body = {**CALLED, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    plain, default, on = (
        ask(tools, "/v1/chat/completions", {**body, **asked})[1]
        for asked in ({"pcd": False}, {}, {"pcd": {"beta": 30.0}})
    )
    calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in (plain, default, on)]
    assert calls[0] == calls[1] != calls[2]
    for call in calls:
        given = json.loads(call["arguments"])
        assert call["name"] == "look_up" and given["key"] in ("red", "blue", "green") and type(given["n"]) is int
    assert default["timings"]["pcd_constrained"] == default["timings"]["predicted_n"]
    assert default["timings"]["pcd_twins"] == 0 < on["timings"]["pcd_twins"]
    free = ask(tools, "/v1/chat/completions", {**CALLED, "tool_choice": "auto", "max_tokens": 1})[1]["timings"]
    assert free["pcd_twins"] == 1 and free["pcd_constrained"] == 0, "until the model calls, it writes as it likes"


STREAMS: dict[
    str, tuple[dict[str, Any], Callable[[dict[str, Any]], str | None]]
] = {  # what is asked, and the part of a call in an event
    "/v1/chat/completions": (
        {**CALLED, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200},
        lambda event: "".join(
            call["function"].get("arguments", "")
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", [])
        ),
    ),
    "/v1/responses": (
        {
            "input": PROMPTS[0],
            "tools": [{"type": "function", **LOOK_UP}],
            "tool_choice": "required",
            "max_output_tokens": 200,
        },
        lambda event: event["delta"] if event["type"] == "response.function_call_arguments.delta" else "",
    ),
    "/v1/messages": (
        {
            "messages": MESSAGES,
            "tools": [{"name": "look_up", "description": "The value of a key", "input_schema": LOOK_UP["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 200,
        },
        lambda event: event.get("delta", {}).get("partial_json", ""),
    ),
}


@pytest.mark.parametrize("setting", [False, {"beta": 30.0}])
@pytest.mark.parametrize("route", STREAMS)
def test_a_forced_call_has_its_schema_also_in_a_stream(route: str, setting: Any, tools: Server) -> None:
    body, part_of = STREAMS[route]
    request = urllib.request.Request(
        tools.url + route,
        json.dumps({**body, "temperature": 0, "stream": True, "pcd": setting}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        lines = [line[len(b"data: ") :] for line in answer if line.startswith(b"data: ")]
    parts = [part for line in lines if line.strip() != b"[DONE]" and (part := part_of(json.loads(line)))]
    given = json.loads("".join(parts))
    assert set(given) == {"key", "n"} and given["key"] in ("red", "blue", "green") and type(given["n"]) is int
    assert len(parts) > 2


def test_an_answer_that_does_not_match_its_format_is_a_fault_of_the_server(tools: Server) -> None:
    """Another try may do better, and clients ask again after a 500 alone."""
    body = {**CALLED, "max_tokens": 8}
    status, answer = ask(tools, "/v1/chat/completions", body)  # a call begins, and does not end
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "does not match the expected" in answer["error"]["message"]
    status, answer = ask(tools, "/v1/chat/completions", {**body, "pcd": "nonsense"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


# -- what pypcd has to know of ----------------------------------------------------------------------------------------


def test_the_names_of_options_are_those_of_llama_servers_help() -> None:
    server = Server("demo", port=0)
    command = [server.command[0], "--help"]
    helped = subprocess.run(command, env=server.environment, capture_output=True, text=True, check=True)
    of_name: dict[str, set[str]] = {}
    for text in (text.split("\n\n")[0] for text in re.split(r"\n(?=-)", helped.stdout)):
        names = re.findall(r"[a-z][\w-]*", re.match(r"(--?[a-z][\w-]*(, +)?)*", text)[0].replace(" -", " "))
        variables = re.findall(r"\(env:\s+(\w+)\)", text)
        told = {*names, *variables, *(variable.replace("_ARG_", "_ARG_NO_") for variable in variables)}
        of_name |= dict.fromkeys(names, told)
    for name, ours in options._NAMES.items():
        assert name in of_name[ours], (name, ours)


@pytest.mark.parametrize(
    ("models", "given", "environment"),
    [
        (["demo"], [], {"LLAMA_ARG_API_PREFIX": "/a.b/c"}),
        (["demo", "twin.gguf"], ["--api_prefix", "/llm"], {}),
    ],
)
def test_it_serves_under_a_prefix(
    models: list[str], given: list[str], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DEMO_MODEL, "twin.gguf")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server = Server(model_list.read(models), port=0, parallel=1, options=[*SMALL, *given])
    end = time.monotonic() + SECONDS
    with server.running():
        assert server.wait_until_ready(lambda: time.monotonic() > end), "nobody finds it"
        prefix = [*given, *environment.values()][-1]
        assert server.url == f"http://127.0.0.1:{server.port}{prefix}" and "demo:pcd" in server.names()
        status, answer = ask(server, f"{prefix}/completion", {**HELLO, "model": "demo:pcd-cautious"})
        assert status == 200 and answer["timings"]["pcd_setting"].startswith("cautious"), answer
        assert server.has_page() and ask(server, "/health")[0] == 404


@pytest.mark.parametrize("where", ["words", "variable of a file"])
def test_a_key_is_known_wherever_it_stands(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsesame, as it stands\nanother\n", encoding="utf-8")
    if where != "words":
        monkeypatch.setenv("LLAMA_ARG_API_KEY_FILE", str(file))
    words = ["--api-key", "sesame,another"] if where == "words" else []
    with ready(parallel=1, options=[*SMALL, *words]) as server:
        assert server.has_key and "demo:pcd" in server.names()
        assert ask(server, "/v1/models", Authorization="Bearer another")[0] == 200
        assert ask(server, "/completion", HELLO)[0] == 401


def test_where_a_server_runs_is_told_to_pypcd_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are not passed on: they would change what the command line says."""
    before = set(os.environ)
    for name in [*options.ELSEWHERE, "AIP_MODE"]:  # also "model" and "port", which are other programs' own
        monkeypatch.setenv(name, "PREDICTION")  # which on Vertex AI means another port; nonsense to all others
    unread = {name for name in set(os.environ) - before if name.isupper()}
    with ready(parallel=1, options=SMALL) as server:
        (remark,) = server.remarks
        assert len(unread) > 9 and set(remark.partition(" in the environment")[0].split(", ")) == unread
        assert not unread & server.environment.keys()
        assert ask(server, "/completion", HELLO)[1]["model"] == "demo"


def test_a_word_comes_before_the_file_of_models_and_that_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini = tmp_path / "models.ini"
    ini.write_text(
        "[a]\nmodel = demo\nctx-size = 2048\nload-on-startup = on\n[b]\nmodel = demo\nload-on-startup = on\n"
    )
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1024")
    for words, sizes in (([], (1024, 512)), (["-c", "768"], (384, 384))):
        with ready(model_list.read([str(ini)]), parallel=2, options=words) as server:
            answers = [ask(server, "/props?model=" + name) for name in "ab"]
            assert tuple(props["default_generation_settings"]["n_ctx"] for _, props in answers) == sizes
    alone = Server("demo", port=0, parallel=2)
    assert (
        "--ctx-size" not in alone.command and alone.command[alone.command.index("--kv-unified-per-slot") + 1] == "512"
    )


def test_where_ggml_gives_up_a_value_may_be_the_reason() -> None:
    server = Server("demo", port=0)
    said = "src/llama-context.cpp:2277: GGML_ASSERT(n_outputs_max <= cparams.n_outputs_max) failed"
    server.command = [
        sys.executable,
        "-c",
        f"import os\nprint({said!r}, flush=True)\nprint('detached', flush=True)\nos.abort()",
    ]
    with (
        server.running(),
        pytest.raises(pypcd.ModelError, match=r"a value of an option may have caused: src/.*_outputs_max\) failed"),
    ):
        server.wait_until_ready()


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def both() -> str:
    """Two addresses of this machine."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            if not sys.platform.startswith("linux"):
                pytest.skip("there is no second address that is this machine's for sure")
            return "127.0.0.1,127.0.0.2"
    return "127.0.0.1, [::1]"


def status_at(address: str, port: int, host: str) -> int:
    connection = http.client.HTTPConnection(address, port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Host": host})
    status = connection.getresponse().status
    connection.close()
    return status


def test_it_listens_on_several_addresses(both: str) -> None:
    with running(host=both) as server:
        assert server.url == f"http://127.0.0.1:{server.port}" and len(server.hosts) == 2
        for address in server.hosts:
            assert status_at(address, server.port, f"[{address}]" if ":" in address else address) == 200
            assert status_at(address, server.port, "evil.example") == 403
        for address in server.hosts:
            with pytest.raises(OSError, match=rf"port is {server.port}, which {address} cannot listen on"):
                Server("demo", host=address, port=server.port)


# -- a setting means what it means in pypcd.Llama(pcd=...) ------------------------------------------------------------


def test_a_setting_means_what_it_means_in_python(server: Server) -> None:
    """More of them: tests/settings."""
    for given in ("off", " OFF ", "Unsure", "window:relative_top=0.1", "paper:window=off:adaptive=jsd"):
        wanted = PCDConfig.resolve(given)
        got = complete(server, "a", n_predict=1, pcd=given)["generation_settings"]["pcd"]
        assert got == (wanted is not None and {name: getattr(wanted, name) for name in got}), given
    wrong: list[Any] = ["cautius", "", "beta=1.5", "beta=1e400", "beta=1:" * 5000, 3, []]
    for given in [*wrong, {"beta": "x"}, {"beta": None}, {"gamma": 2**40}, {"perturbation": "none"}, {"self": 1}]:
        with pytest.raises((ValueError, TypeError)) as error:
            PCDConfig.resolve(given)
        assert refused(server, pcd=given) == f"Field 'pcd': {error.value}"


def test_a_text_that_means_another_rotation_is_refused_and_an_object_is_not() -> None:
    with ready(pcd="paper:alpha=0.3:cache=shared:evaluation=alternate", parallel=1) as made:
        for given in ("paper:beta=1.5", "paper"):
            said = refused(made, pcd=given)
            assert said.startswith("Field 'pcd': ") and ("only" in said or "alpha" in said), said
        own = complete(made, "a", n_predict=1, pcd={"beta": 1.5})["generation_settings"]["pcd"]
        assert (own["beta"], own["window"]) == (1.5, None)
        own = complete(made, "a", n_predict=1, pcd="paper:perturbation=none:window=8")["generation_settings"]["pcd"]
        assert (own["beta"], own["window"], own["perturbation"]) == (2.5, 8, "none")
