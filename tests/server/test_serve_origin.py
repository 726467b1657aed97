"""Who may ask a server without an API key: programs, this machine's pages, and nobody's page that is open in a browser here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import SMALL, ask, ready

from pypcd.gguf import resolve_model
from pypcd.served import Served
from pypcd.server import Server

BODY = {"prompt": "a", "n_predict": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ready(parallel=1) as made:
        yield made


def refused(answer: tuple[int, Any], *words: str) -> None:
    status, said = answer
    assert status == 403, said
    assert all(word in said["error"]["message"] for word in (*words, "allowed: ", "--cors-origins")), said


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "1e.2e"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(server: Server, host: str) -> None:
    named = host.format(port=server.port)
    for path, body in (("/v1/models", None), ("/slots", None), ("/", None), ("/completion", BODY)):
        refused(ask(server, path, body, Host=named), "Host is", named.split(":")[0])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:{port}",
        "127.0.0.1",
        "localhost:{port}",
        "LOCALHOST",
        "[::1]:{port}",
        "192.168.1.7:8080",
        "me.localhost",
    ],
)
def test_addresses_and_localhost_are_answered(server: Server, host: str) -> None:
    assert ask(server, "/v1/models", Host=host.format(port=server.port))[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://evil.example:8080", "null", "file://", "http://localhost.evil.example"]
)
def test_a_page_of_another_site_is_refused(server: Server, origin: str) -> None:
    refused(ask(server, "/completion", BODY, Origin=origin), "Origin is", origin)
    plain = {"Content-Type": "text/plain", "Origin": origin}  # which a browser sends without asking first
    refused(ask(server, "/completion", json.dumps(BODY).encode(), **plain), "Origin is", origin)


def test_a_picture_of_another_site_is_refused_and_a_link_is_followed(server: Server) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    for path in ("/props", "/slots"):
        refused(ask(server, path, **foreign, **{"Sec-Fetch-Mode": "no-cors"}), "Sec-Fetch-Site")
    assert ask(server, "/", **foreign, **{"Sec-Fetch-Mode": "navigate"})[0] == 200
    assert ask(server, "/props", **{"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"})[0] == 200
    headers = {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}
    assert ask(server, "/props", **headers)[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:{port}", "http://[::1]:1", "http://192.168.1.7:8080"]
)
def test_pages_of_this_machine_and_of_the_server_are_answered(server: Server, origin: str) -> None:
    headers = {"Origin": origin.format(port=server.port)}
    if "192" in origin:
        headers["Host"] = "192.168.1.7:8080"
    assert ask(server, "/completion", BODY, **headers)[0] == 200


def test_origins_that_were_given_and_a_key_open_it() -> None:
    site = "https://chat.example"
    given = ["--cors-origins", f"{site}, http://other.example:81"]
    with ready(parallel=1, options=[*SMALL, *given]) as server:
        for origin in (site, "http://other.example:81"):
            assert ask(server, "/completion", BODY, Origin=origin)[0] == 200
        assert ask(server, "/completion", BODY, Host="chat.example")[0] == 200
        refused(ask(server, "/completion", BODY, Origin="http://other.example"), "other.example")
        refused(ask(server, "/completion", BODY, Host="evil.example"), "evil.example")
    with ready(parallel=1, api_key="k") as server:
        assert ask(server, "/completion", BODY, Host="llm.example", Authorization="Bearer k")[0] == 200
        assert ask(server, "/completion", BODY, Host="llm.example")[0] == 401


def test_several_models_are_as_open_as_one(tmp_path: Path) -> None:
    """A router passes Host and Origin on, and the process of the model looks at them too."""
    paths = [tmp_path / f"{name}.gguf" for name in "ab"]
    for path in paths:
        shutil.copy(resolve_model("demo"), path)
    given = [*SMALL, "--cors-origins", "https://chat.example"]
    models = [Served(path.stem, str(path)) for path in paths]
    with ready(models, parallel=1, options=given) as server:
        body = {**BODY, "model": "b"}
        assert ask(server, "/completion", body)[0] == 200
        assert ask(server, "/completion", body, Origin="https://chat.example", Host="chat.example")[0] == 200
        refused(ask(server, "/completion", body, Host="evil.example"), "Host is", "evil.example")
        refused(ask(server, "/completion", body, Origin="http://evil.example"), "Origin is", "evil.example")
        ports = [int(part.strip("[] ")) for part in server._parts]
        assert ports
        for port in ports:  # of the models' processes, which a page may look for too
            refused(ask(SimpleNamespace(port=port), "/completion", body, Host="evil.example"), "Host is")  # type: ignore[arg-type]
