"""What the tests with real clients share: packages that may be missing, a network that ends at this machine, and the oracle
for what a client gets to see, the text of an answer.

Each test asks through one client's package and gives the text to `said`, which follows it with pypcd.Llama under the same
setting. Knows nothing of any one client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import contrasted, native_row, rounding_of
from serving import BASE, PROMPTS, SETTINGS, SMALL, N, in_python, ready

import pypcd
from pypcd.server import Server

# isort: split
import llama_cpp

QUIET = {  # what these packages would otherwise ask the internet for, or send there
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
    "no_proxy": "*",
}


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
def loop() -> Iterator[None]:
    """An event loop of this thread: LiteLLM makes one where there is none, and leaves it open."""
    made = asyncio.new_event_loop()
    asyncio.set_event_loop(made)
    yield
    asyncio.set_event_loop(None)
    made.close()


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """Clients that nobody closed are closed here: collected in a later test, their sockets would warn, and it would fail."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


# -- the oracle -------------------------------------------------------------------------------------------------------


class Grammar:
    """A grammar of llama.cpp's, followed token by token: where an answer stands in it."""

    def __init__(self, llm: pypcd.Llama, text: str) -> None:
        self._n = llm.n_vocab()
        self._sampler = llama_cpp.llama_sampler_init_grammar(llm._model.vocab, text.encode(), b"root")
        assert self._sampler, text

    def masked(self, row: np.ndarray) -> np.ndarray:
        """The row with -inf for each token that may not come now."""
        data = (llama_cpp.llama_token_data * self._n)()
        seen = np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), (self._n, 3))
        np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_int32)), (self._n, 3))[:, 0] = range(self._n)
        seen[:, 1] = row
        array = llama_cpp.llama_token_data_array(data=data, size=self._n, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        assert array.size == self._n
        return seen[:, 1].copy()

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._sampler)


def pieces(llm: pypcd.Llama) -> list[bytes]:
    """What each token adds to a text; special ones add nothing."""
    buffer, found = ctypes.create_string_buffer(256), []
    for token in range(llm.n_vocab()):
        n = llama_cpp.llama_token_to_piece(llm._model.vocab, token, buffer, len(buffer), 0, False)
        found.append(buffer.raw[:n])
    return found


def said(
    llm: pypcd.Llama,
    prompt: str,
    setting: Any,
    text: str,
    *,
    n: int = N,
    ended: bool | None = None,
    bias: dict[int, float] | None = None,
    grammar: str | None = None,
) -> None:
    """The text is pypcd.Llama's greedy answer: each of its tokens is the best one that goes on with the text, and ties with
    the best of all if it is not that one, since sums in another order round in another way.

    Args:
        n: the tokens that it may have; it has them all unless it `ended`.
        ended: whether it came to its end; None: where a client does not say.
        bias: added to the logits of tokens.
        grammar: what the request's answer has to follow.
    """
    llm.pcd = config = in_python(setting)
    known, rest, worst, rules = pieces(llm), text.encode(), 0.0, Grammar(llm, grammar) if grammar else None
    tokens = llm.tokenize(prompt.encode())
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(tokens)
    for n_said in range(n + 1):
        if not rest and (n_said == n or ended is not False and best_of(llm, bias, rules)[0] == llm.token_eos()):
            assert ended in (None, n_said < n), f"{text!r} has {n_said} of {n} tokens, ended: {ended}"
            break
        assert n_said < n, f"{rest!r} is left of {text!r} after {n} tokens"
        best, row = best_of(llm, bias, rules)
        fits = [token for token, piece in enumerate(known) if piece and rest.startswith(piece)]
        token = max(fits, key=lambda token: row[token], default=llm.token_eos())
        token = best if not known[best] and best != llm.token_eos() else token  # it is not seen
        assert np.isfinite(row[token]), f"the grammar does not let {text!r} go on with {rest!r}"
        worst = max(worst, float(row[best] - row[token]))
        if token == llm.token_eos():
            assert ended is not False, f"{text!r} has {n_said} of {n} tokens, ended: {ended}"
            break
        rest = rest[len(known[token]) :]
        llm.eval([token])
        if rules:
            rules.accept(token)
    if rules:
        rules.close()
    if worst > 0:
        limit = contrasted(rounding_of(llm, tokens), config.beta if config else 0.0)
        assert worst < limit, f"{text!r} is {worst} behind the best, not {limit}: {prompt!r} with {setting}"


def best_of(
    llm: pypcd.Llama,
    bias: dict[int, float] | None,
    rules: Grammar | None,
) -> tuple[int, np.ndarray]:
    """The token that comes now, and the row that says so."""
    row = native_row(llm)
    for token, added in (bias or {}).items():
        row[token] += added
    if rules:
        row = rules.masked(row)
    return int(np.argmax(row)), row


Ask = Callable[[str, Any], "tuple[str, bool | None]"]
STRONG = {"beta": 30.0}
JOBS = [(prompt, setting) for prompt in PROMPTS for setting in SETTINGS.values()]


def check_alone_and_at_once(llm: pypcd.Llama, ask: Ask, ask_at_once: Ask | None = None) -> None:
    """Answers to each prompt with each setting, one after the other and 8 at once, are pypcd.Llama's.

    Args:
        ask: takes a prompt and a setting; gives a text of N tokens at most, and whether it ended.
        ask_at_once: the same in another way, by which 8 are asked at once.
    """
    alone = [ask(*job) for job in JOBS]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda job: (ask_at_once or ask)(*job), JOBS))
    for job, answers in zip(JOBS, zip(alone, at_once)):
        for text, ended in dict.fromkeys(answers):  # one, where no rounding decided
            said(llm, *job, text, ended=ended)
    first = [text for text, _ in alone[: len(SETTINGS)]]
    assert first[0] != first[1] and len(set(first)) >= 3, "the settings must differ, or this shows nothing"


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
    return max(token for token, piece in enumerate(pieces(llm)) if piece == b"{")


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
