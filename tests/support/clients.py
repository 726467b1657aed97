"""What the tests with real clients share: packages that may be missing, a network that ends at this machine, and a server whose
template knows tools. Knows nothing of any one client.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import BASE, SMALL, ready

import pypcd
from pypcd import engine
from pypcd.server import Server

QUIET = {"DO_NOT_TRACK": "1", "NO_PROXY": "*", "no_proxy": "*"}


# -- packages and the network -----------------------------------------------------------------------------------------


def package(name: str) -> Any:
    """An imported package; where it is missing, the module that asks is skipped."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(
            f"{name} is not installed; `scripts/install test clients`, or pip install '.[test,clients]', brings what these "
            "tests need",
            allow_module_level=True,
        )
    with staying_here(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the modules that it imports
        return importlib.import_module(name)


@contextlib.contextmanager
def staying_here() -> Iterator[None]:
    """A block in which a connection to another machine, or the look-up of its name, fails, and fails the block too."""
    tried: list[str] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded(of: socket.socket, address: Any) -> None:
        if of.family != getattr(socket, "AF_UNIX", None) and address[0] not in ("127.0.0.1", "::1"):
            tried.append(str(address))
            raise OSError(f"{address} is another machine")
        connect(of, address)

    def looking_up(host: Any, *args: Any, **more: Any) -> Any:
        if host not in ("127.0.0.1", "::1", "localhost", None):
            tried.append(str(host))
            raise socket.gaierror(f"{host} is another machine")
        return look_up(host, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setattr(socket.socket, "connect", guarded)
        patch.setattr(socket, "getaddrinfo", looking_up)
        yield
    assert not tried, f"a request would have left this machine: {tried}"


@pytest.fixture
def offline() -> Iterator[None]:
    """A test that stays on this machine."""
    with staying_here():
        yield


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """Clients that nobody closed are closed here: collected in a later test, their sockets would warn, and it would fail."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


# -- tools ------------------------------------------------------------------------------------------------------------

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
OPENS = 100.0  # added to "{": this model does not know that a call begins so, and may write any text before it


def brace(llm: pypcd.Llama) -> int:
    """The token that a call begins with."""
    return max(token for token in range(llm.n_vocab()) if engine.token_bytes(llm, token) == b"{")


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory, llm: pypcd.Llama) -> Iterator[Server]:
    """A server whose template knows tools, and where an answer that is a call begins with it."""
    template: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = [*SMALL, "--chat-template-file", str(template), "--logit-bias", f"{brace(llm)}+{OPENS:.0f}"]
    with ready(pcd=BASE, parallel=8, options=options) as made:
        yield made


def check_call(name: str, arguments: Any) -> None:
    """A call is one of look_up with what its schema wants."""
    assert name == "look_up" and set(arguments) == {"key", "n"}
    assert arguments["key"] in LOOK_UP["parameters"]["properties"]["key"]["enum"]
    assert type(arguments["n"]) is int
