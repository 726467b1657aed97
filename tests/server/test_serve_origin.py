"""Who may ask a server without an API key: programs, this machine's pages, and nobody's page that is open in a browser here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from serving import ask, at, ready

from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server

BODY = {"prompt": "a", "n_predict": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with ready(parallel=1) as running:
        yield running


def refused(answer: tuple[int, Any], *words: str) -> None:
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
        refused(ask(server, path, **sent), *words)
    refused(ask(server, "/completion", BODY, **sent), *words)
    plain = {"Content-Type": "text/plain", **sent}  # which a browser sends without asking first
    refused(ask(server, "/completion", json.dumps(BODY).encode(), **plain), *words)


@pytest.mark.parametrize("headers", ANSWERED, ids=lambda headers: " ".join(headers.values()))
def test_this_machines_and_the_servers_own_pages_are_answered(server: Server, headers: dict[str, str]) -> None:
    assert ask(server, "/v1/models", **filled(server, headers))[0] == 200
    assert ask(server, "/completion", BODY, **filled(server, headers))[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/v1/models", 200), ("/nothing", 404), ("/props", 403)])
def test_answers_stand_in_no_other_page_and_are_what_they_say(server: Server, path: str, status: int) -> None:
    asked = Request(server.url + path, headers={"Host": "evil.example"} if status == 403 else {})
    try:
        answer = urlopen(asked)
    except HTTPError as error:
        answer = error
    with answer:
        assert answer.status == status
        assert answer.headers.get_all("Content-Security-Policy") == ["frame-ancestors 'none'"]
        assert answer.headers.get_all("X-Content-Type-Options") == ["nosniff"]


def test_a_link_of_another_site_is_followed(server: Server) -> None:
    assert ask(server, "/", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200


@pytest.mark.parametrize("names", ["a", "ab"])
def test_origins_that_were_given_open_a_server_of_one_model_and_of_several(names: str, tmp_path: Path) -> None:
    """A router passes Host and Origin on, and the process of the model looks at them too."""
    models = [str(shutil.copy(DEMO_MODEL, tmp_path / f"{name}.gguf")) for name in names]
    site, body = "https://chat.example", {**BODY, "model": names[-1]}
    with ready("--cors-origins", f"{site}, http://other.example:81", model=models, parallel=1) as server:
        other, own = {"Origin": "http://other.example:81"}, {"Host": "chat.example"}
        for headers in ({}, {"Origin": site}, other, own, {"Origin": site, **own}):
            assert ask(server, "/completion", body, **headers)[0] == 200
        refused(ask(server, "/completion", body, Host="evil.example"), "Host is", "evil.example")
        for origin in ("http://evil.example", "http://other.example"):
            refused(ask(server, "/completion", body, Origin=origin), "Origin is", origin)
        assert len(server._parts) == len(names)
        for part in filter(None, server._parts):  # the processes behind a router, which a page may look for too
            process = at(f"http://127.0.0.1:{part.strip('[] ')}")
            refused(ask(process, "/completion", body, Host="evil.example"), "Host is")
