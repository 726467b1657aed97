"""llama-server's own options in `pypcd serve`: what PCD does beside them, and that what a user gives wins; settings as text."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
from typing import Any

import numpy as np
import pytest
from clients import LOOK_UP, check_call
from serving import BASE, MESSAGES, MUTE_ROUTES, PROMPTS, SMALL, ask, complete, is_greedy, ready, refused

import pypcd
from pypcd import PCDConfig
from pypcd.server import Server
from pypcd.settings.config import PRESETS

pytest_plugins = ["serving", "clients"]  # fixtures

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
        check_call(call["name"], json.loads(call["arguments"]))
    assert default["timings"]["pcd_constrained"] == default["timings"]["predicted_n"]
    assert default["timings"]["pcd_twins"] == 0 < on["timings"]["pcd_twins"]
    free = ask(tools, "/v1/chat/completions", {**CALLED, "tool_choice": "auto", "max_tokens": 1})[1]["timings"]
    assert free["pcd_twins"] == 1 and free["pcd_constrained"] == 0, "until the model calls, it writes as it likes"


def test_an_answer_that_does_not_match_its_format_is_a_fault_of_the_server(tools: Server) -> None:
    """Another try may do better, and clients ask again after a 500 alone."""
    body = {**CALLED, "max_tokens": 8}
    status, answer = ask(tools, "/v1/chat/completions", body)  # a call begins, and does not end
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "does not match the expected" in answer["error"]["message"]
    status, answer = ask(tools, "/v1/chat/completions", {**body, "pcd": "nonsense"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


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

TEXTS = [
    "off",
    " OFF ",
    "Unsure",
    "window:relative_top=0.1",
    "paper:beta=1.5:window=64",
    "paper:window=off:adaptive=jsd",
]
TEXTS += ["paper:beta=.5:gamma=007", *(name for name in PRESETS if name != "blog")]  # noise is the whole server's
WRONG: list[Any] = [
    "cautius",
    "gentle:beta=1",
    "pcd:window",
    "true",
    "",
    "beta=1.5",
    "beta=1:beta=2",
    "beta=1,gamma=3",
    "beta=1:",
]
WRONG += ["beta=", "bta=1", "Beta=1", "beta=x", "beta=1e400", "beta=nan", "gamma=1.0", "gamma=99999999999"]
WRONG += ["adaptive=JSD", "n_sink=none", "perturbation=none", "beta=1:" * 5000, 3, []]
WRONG += [{"beta": "x"}, {"beta": 1e300}, {"beta": None}, {"gamma": 1.5}, {"gamma": 2**40}, {"window": "all"}]
WRONG += [{"adaptive": "kl"}, {"perturbation": "none"}, {"perturbation": "noise"}, {"bta": 1}, {"self": 1}]


def test_a_setting_means_what_it_means_in_python(server: Server) -> None:
    for given in TEXTS:
        wanted = PCDConfig.resolve(given)
        got = complete(server, "a", n_predict=1, pcd=given)["generation_settings"]["pcd"]
        assert got == (wanted is not None and {name: getattr(wanted, name) for name in got}), given
    for given in WRONG:
        with pytest.raises((ValueError, TypeError)) as error:
            PCDConfig.resolve(given)
        assert refused(server, pcd=given) == f"Field 'pcd': {error.value}"
    assert complete(server, "a", n_predict=1)["tokens"]


def test_a_text_is_a_whole_setting_and_an_object_a_change() -> None:
    with ready(pcd="window:beta=0.5", parallel=1) as made:

        def beta_and_window(**fields: Any) -> tuple[float, Any]:
            got = complete(made, "a", n_predict=1, **fields)["generation_settings"]["pcd"]
            return got["beta"], got["window"]

        assert beta_and_window() == beta_and_window(pcd={}) == (0.5, 64)
        assert beta_and_window(pcd={"beta": 2}) == (2, 64)
        assert beta_and_window(pcd="paper:beta=2") == (2, None)
        assert beta_and_window(pcd="on:beta=3") == (3, 64)
        assert beta_and_window(pcd="paper:gamma=3", model="demo:pcd-cautious") == (2.5, None)
        assert beta_and_window(pcd={"gamma": 3}, model="demo:pcd-cautious") == (1.5, None)


def test_a_text_that_means_another_rotation_is_refused_and_an_object_is_not() -> None:
    with ready(pcd="paper:alpha=0.3:cache=shared:evaluation=alternate", parallel=1) as made:
        for given in ("paper:beta=1.5", "paper"):
            said = refused(made, pcd=given)
            assert said.startswith("Field 'pcd': ") and ("only" in said or "alpha" in said), said
        own = complete(made, "a", n_predict=1, pcd={"beta": 1.5})["generation_settings"]["pcd"]
        assert (own["beta"], own["window"]) == (1.5, None)
        own = complete(made, "a", n_predict=1, pcd="paper:perturbation=none:window=8")["generation_settings"]["pcd"]
        assert (own["beta"], own["window"], own["perturbation"]) == (2.5, 8, "none")
