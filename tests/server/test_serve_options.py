"""llama-server's own options in `pypcd serve`: what PCD does beside them, and that what a user gives wins; settings as text; who may
ask."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving
from processes import SECONDS
from serving import BASE, MESSAGES, MUTE_ROUTES, PROMPTS, ask, at, begun, complete, is_greedy, meant, ready, refused

import pypcd
from pypcd import PCDConfig, engine
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server, options

HELLO = {"prompt": "a", "n_predict": 1}


@pytest.mark.parametrize("pcd", [BASE, False])
def test_backend_sampling_gives_way_to_requests_with_pcd(pcd: Any, llm: pypcd.Llama) -> None:
    with ready("--backend-sampling", pcd=pcd, parallel=2) as sampling:
        assert sampling.refusals() == {}
        for setting in ("cautious", {"beta": 4.0}):
            answer = complete(sampling, PROMPTS[0], pcd=setting)
            assert answer["timings"]["pcd_twins"] > 0
            is_greedy(llm, PROMPTS[0], setting, answer["tokens"])
        plain = complete(sampling, PROMPTS[0], pcd=False)
        assert plain["generation_settings"]["backend_sampling"] is True
        is_greedy(llm, PROMPTS[0], False, plain["tokens"])


@pytest.mark.parametrize("models", [["demo"], ["demo", "also"]])
def test_requests_that_wait_leave_others_their_answer(models: list[str], tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL, tmp_path / "also.gguf")
    models = [model if model == "demo" else str(tmp_path / f"{model}.gguf") for model in models]
    with ready(model=models, parallel=1) as server, contextlib.ExitStack() as stack:
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"  # and never a body
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(head)
        assert ask(server, "/health")[0] == 200


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_refusal_names_options_and_no_function_of_c() -> None:
    with ready("--no-kv-unified", pcd="cautious", pcd_required=False, parallel=2) as apart:
        for said in (refused(apart, pcd="paper"), *apart.refusals().values()):
            assert "--kv-unified" in said and "llama_" not in said and "kv_unified" not in said
        assert "--kv-unified" in refused(apart, model="demo:pcd")
        assert complete(apart, "a", model="demo:pcd", pcd=False, n_predict=1)["tokens"]  # before the name


@pytest.mark.parametrize("path", MUTE_ROUTES)
def test_a_route_that_decodes_nothing_takes_no_setting(path: str, server: Server) -> None:
    for setting in (True, "nonsense", {"beta": 1}):
        said = refused(server, path, **MUTE_ROUTES[path], pcd=setting)
        assert said.startswith(f"Field 'pcd': it is {json.dumps(setting, separators=(',', ':'))}, ") and path in said
        assert "; allowed: " in said
    without = ask(server, path, MUTE_ROUTES[path])
    for setting in (None, False, "off"):
        assert ask(server, path, {**MUTE_ROUTES[path], "pcd": setting}) == without
    if path == "/tokenize":
        assert without[0] == 200
        assert ask(server, path, {"content": '"pcd"'})[0] == 200, "a text may have the word in it"


def test_a_server_of_embeddings_gives_them_and_refuses_pcd() -> None:
    with ready("--embeddings", "--pooling", "mean", parallel=1) as pooling:
        first = serving.answered(pooling, "/v1/embeddings", {"input": ["red", "blue"]})
        red, blue = (np.array(entry["embedding"]) for entry in first["data"])
        assert np.isclose(np.linalg.norm(red), 1.0, atol=1e-3) and not np.array_equal(red, blue)
        said = refused(pooling, "/v1/chat/completions", pcd=True)
        assert "pools embeddings and computes no logits" in said
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
    given = ["--chat-template-file", str(template), "--logit-bias", f"{brace}+100"]
    with ready(*given, pcd=BASE, parallel=8) as running:
        yield running


CALLED = {"messages": MESSAGES, "tools": [{"type": "function", "function": LOOK_UP}], "temperature": 0}
FORCED = {**CALLED, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}


def matches(arguments: str) -> bool:
    """Whether they have LOOK_UP's schema."""
    given = json.loads(arguments)
    return set(given) == {"key", "n"} and given["key"] in ("red", "blue", "green") and type(given["n"]) is int


OF_ANTHROPIC = {"name": "look_up", "description": "The value of a key", "input_schema": LOOK_UP["parameters"]}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": FORCED,
    "/v1/responses": {
        "input": PROMPTS[0],
        "tools": [{"type": "function", **LOOK_UP}],
        "tool_choice": "required",
        "max_output_tokens": 200,
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "tools": [OF_ANTHROPIC],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 200,
    },
}


def part_of_call(event: dict[str, Any]) -> str:
    """What an event of any route has of a call's arguments."""
    if event.get("type") == "response.function_call_arguments.delta":
        return event["delta"]
    calls = [call for choice in event.get("choices", []) for call in choice["delta"].get("tool_calls", [])]
    of_messages = event["delta"].get("partial_json", "") if event.get("type") == "content_block_delta" else ""
    return "".join(call["function"].get("arguments", "") for call in calls) + of_messages


@pytest.mark.parametrize("route", STREAMS)
def test_a_forced_call_has_its_schema_and_is_plain_unless_its_request_asks(route: str, tools: Server) -> None:
    calls, timings = [], []
    for asked in ({"pcd": False}, {}, {"pcd": {"beta": 30.0}}):
        text = serving.answered(tools, route, {**STREAMS[route], "temperature": 0, "stream": True, **asked})
        parts = [*filter(None, map(part_of_call, serving.events(text)))]
        assert len(parts) > 2
        calls.append("".join(parts))
        timings.append(serving.last_timings(text))
    assert calls[0] == calls[1] != calls[2] and all(map(matches, calls))
    assert timings[1]["pcd_constrained"] == timings[1]["predicted_n"]
    assert timings[1]["pcd_twins"] == 0 < timings[2]["pcd_twins"]


def test_a_call_has_its_name_and_one_that_is_not_forced_is_contrasted_until_it_comes(tools: Server) -> None:
    answer = ask(tools, "/v1/chat/completions", FORCED)[1]
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "look_up" and matches(call["arguments"])
    free = ask(tools, "/v1/chat/completions", {**CALLED, "tool_choice": "auto", "max_tokens": 1})[1]["timings"]
    assert free["pcd_twins"] == 1 and free["pcd_constrained"] == 0, "until the model calls, it writes as it likes"


def test_an_answer_that_does_not_match_its_format_is_a_fault_of_the_server(tools: Server) -> None:
    """Another try may do better, and clients ask again after a 500 alone."""
    body = {**CALLED, "max_tokens": 8}
    status, answer = ask(tools, "/v1/chat/completions", body)  # a call begins, and does not end
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "does not match the expected" in answer["error"]["message"]
    assert refused(tools, "/v1/chat/completions", **body, pcd="nonsense")


# -- what pypcd has to know of: names, variables, addresses -----------------------------------------------------------


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


@pytest.mark.parametrize(("n_models", "prefix"), [(1, "/a.b/c"), (2, "/llm")])
def test_it_serves_under_a_prefix(n_models: int, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ["demo", str(shutil.copy(DEMO_MODEL, tmp_path / "twin.gguf"))][:n_models]
    if n_models == 1:
        monkeypatch.setenv("LLAMA_ARG_API_PREFIX", prefix)
    given = ["--api_prefix", prefix] if n_models > 1 else []
    server = serving.server_of(*given, model=models, parallel=1)
    end = time.monotonic() + SECONDS
    with server.running():
        assert server.wait_until_ready(lambda: time.monotonic() > end), "nobody finds it"
        assert server.url == f"http://127.0.0.1:{server.port}{prefix}" and "demo:pcd" in server.names()
        answer = serving.answered(server, f"{prefix}/completion", {**HELLO, "model": "demo:pcd-cautious"})
        assert answer["timings"]["pcd_setting"].startswith("cautious")
        assert server.has_page() and ask(server, "/health")[0] == 404


@pytest.mark.parametrize("where", ["words", "variable of a file"])
def test_a_key_is_known_wherever_it_stands(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsesame, as it stands\nanother\n", encoding="utf-8")
    if where != "words":
        monkeypatch.setenv("LLAMA_ARG_API_KEY_FILE", str(file))
    words = ["--api-key", "sesame,another"] if where == "words" else []
    with ready(*words, parallel=1) as server:
        assert server.has_key and "demo:pcd" in server.names()
        for path, body in (("/completion", HELLO), ("/documents", {"name": "a", "text": "b"})):
            key = {"Authorization": "Bearer another"}
            for host in ({}, {"Host": "llm.example"}):  # with a key no name of a host matters
                assert ask(server, path, body, **key, **host)[0] == 200 and ask(server, path, body, **host)[0] == 401


def test_where_a_server_runs_is_told_to_pypcd_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are not passed on: they would change what the command line says."""
    before = set(os.environ)
    for name in [*options.ELSEWHERE, "AIP_MODE"]:  # also "model" and "port", which are other programs' own
        monkeypatch.setenv(name, "PREDICTION")  # which on Vertex AI means another port; nonsense to all others
    unread = {name for name in set(os.environ) - before if name.isupper()}
    with ready(parallel=1) as server:
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
        with ready(model=[str(ini)], parallel=2, options=words) as server:
            answers = [ask(server, "/props?model=" + name) for name in "ab"]
            assert tuple(props["default_generation_settings"]["n_ctx"] for _, props in answers) == sizes
    alone = Server("demo", port=0, parallel=2)
    assert (
        "--ctx-size" not in alone.command and alone.command[alone.command.index("--kv-unified-per-slot") + 1] == "512"
    )


def test_where_ggml_gives_up_a_value_may_be_the_reason() -> None:
    server = Server("demo", port=0)
    said = "src/llama-context.cpp:2277: GGML_ASSERT(n_outputs_max <= cparams.n_outputs_max) failed"
    code = f"import os\nprint({said!r}, flush=True)\nprint('detached', flush=True)\nos.abort()"
    server.command = [sys.executable, "-c", code]
    told = r"a value of an option may have caused: src/.*_outputs_max\) failed"
    with server.running(), pytest.raises(pypcd.ModelError, match=told):
        server.wait_until_ready()


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


def test_it_listens_on_several_addresses(both: str) -> None:
    with ready(host=both, parallel=2) as server:
        assert server.url == f"http://127.0.0.1:{server.port}" and len(server.hosts) == 2
        for address in server.hosts:
            own = f"[{address}]" if ":" in address else address
            assert ask(server, "/v1/models", at=address, Host=own)[0] == 200
            assert ask(server, "/v1/models", at=address, Host="evil.example")[0] == 403
            with pytest.raises(OSError, match=rf"port is {server.port}, which {address} cannot listen on"):
                Server("demo", host=address, port=server.port)


# -- a setting means what it means in pypcd.Llama(pcd=...) ------------------------------------------------------------


def test_a_setting_means_what_it_means_in_python(server: Server) -> None:
    """More of them: tests/settings."""
    for given in ("off", " OFF ", "Unsure", "window:relative_top=0.1", "paper:window=off:gamma=7"):
        wanted = PCDConfig.resolve(given)
        got = meant(server, pcd=given)
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
        own = meant(made, pcd={"beta": 1.5})
        assert (own["beta"], own["window"]) == (1.5, None)
        own = meant(made, pcd="paper:perturbation=none:window=8")
        assert (own["beta"], own["window"], own["perturbation"]) == (2.5, 8, "none")


# -- who may ask without a key: programs, this machine's pages, and nobody's page that is open in a browser here ---------


def forbidden(answer: tuple[int, Any], *words: str) -> None:
    status, said = answer
    assert status == 403, said
    assert all(word in said["error"]["message"] for word in (*words, "allowed: ", "--cors-origins")), said


REFUSED = [
    *({"Host": host} for host in ("evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example")),
    *({"Origin": origin} for origin in ("http://evil.example", "null", "http://localhost.evil.example")),
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},  # a picture
]
ANSWERED = [
    *({"Host": host} for host in ("127.0.0.1:{port}", "LOCALHOST", "me.localhost", "[::1]:{port}", "192.168.1.7:8080")),
    *({"Origin": origin} for origin in ("http://localhost:3000", "http://[::1]:1")),
    {"Origin": "http://192.168.1.7:8080", "Host": "192.168.1.7:8080"},
    {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
    {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
]


def filled(server: Server, headers: dict[str, str]) -> dict[str, str]:
    return {name: value.format(port=server.port) for name, value in headers.items()}


@pytest.mark.parametrize("headers", REFUSED, ids=lambda headers: " ".join(headers.values()))
def test_another_sites_page_is_refused(server: Server, headers: dict[str, str]) -> None:
    sent, (name, value) = filled(server, headers), next(iter(headers.items()))
    words = name, value.partition(":{port}")[0]
    for path in ("/props", "/slots", *(("/", "/v1/models") if name == "Host" else ())):
        forbidden(ask(server, path, **sent), *words)
    forbidden(ask(server, "/completion", HELLO, **sent), *words)
    plain = {"Content-Type": "text/plain", **sent}  # which a browser sends without asking first
    forbidden(ask(server, "/completion", json.dumps(HELLO).encode(), **plain), *words)


@pytest.mark.parametrize("headers", ANSWERED, ids=lambda headers: " ".join(headers.values()))
def test_this_machines_and_the_servers_own_pages_are_answered(server: Server, headers: dict[str, str]) -> None:
    assert ask(server, "/v1/models", **filled(server, headers))[0] == 200
    assert ask(server, "/completion", HELLO, **filled(server, headers))[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/v1/models", 200), ("/nothing", 404), ("/props", 403)])
def test_answers_stand_in_no_other_page_and_are_what_they_say(server: Server, path: str, status: int) -> None:
    with contextlib.closing(begun(server, path, **({"Host": "evil.example"} if status == 403 else {}))) as connection:
        answer = connection.getresponse()
    assert answer.status == status
    assert answer.headers.get_all("Content-Security-Policy") == ["frame-ancestors 'none'"]
    assert answer.headers.get_all("X-Content-Type-Options") == ["nosniff"]


def test_a_link_of_another_site_is_followed(server: Server) -> None:
    assert ask(server, "/", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200


@pytest.mark.parametrize("names", ["a", "ab"])
def test_origins_that_were_given_open_a_server_of_one_model_and_of_several(names: str, tmp_path: Path) -> None:
    """A router passes Host and Origin on, and the process of the model looks at them too."""
    models = [str(shutil.copy(DEMO_MODEL, tmp_path / f"{name}.gguf")) for name in names]
    site, body = "https://chat.example", {**HELLO, "model": names[-1]}
    with ready("--cors-origins", f"{site}, http://other.example:81", model=models, parallel=1) as server:
        other, own = {"Origin": "http://other.example:81"}, {"Host": "chat.example"}
        for headers in ({}, {"Origin": site}, other, own, {"Origin": site, **own}):
            assert ask(server, "/completion", body, **headers)[0] == 200
        forbidden(ask(server, "/completion", body, Host="evil.example"), "Host is", "evil.example")
        for origin in ("http://evil.example", "http://other.example"):
            forbidden(ask(server, "/completion", body, Origin=origin), "Origin is", origin)
        assert len(server._parts) == len(names)
        for part in filter(None, server._parts):  # the processes behind a router, which a page may look for too
            process = at(f"http://127.0.0.1:{part.strip('[] ')}")
            forbidden(ask(process, "/completion", body, Host="evil.example"), "Host is")
