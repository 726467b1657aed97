"""Without PCD our llama-server answers as stock llama-server does: the same bytes, but for times and what PCD adds.

Stock is the same source without our patches, on the libllama that llama-cpp-python installed (scripts/recipes/stock_server).
Both compute with the same ggml, so nothing is rounded differently and nothing is allowed to differ.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import MESSAGES, PROMPTS, answered, ask, events
from test_serve_load import body

from pypcd import engine
from pypcd.server import Server

STOCK = os.environ.get("PYPCD_STOCK_SERVER", "")
if not STOCK:
    pytest.skip(
        "PYPCD_STOCK_SERVER does not name the executable that scripts/recipes/stock_server makes",
        allow_module_level=True,
    )

AMX = engine.configure_amx()
OPTIONS = ["--ctx-size", "4096", "--threads", "1", "--threads-batch", "1", "--log-verbosity", "1", "--cache-ram", "0"]
OPTIONS += ["--no-repack"] if AMX.exists and not AMX.on else []  # stock uses AMX wherever it was compiled for it


class Stock(Server):
    def __init__(self, model: str, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.command[0], self.environment = STOCK, dict(os.environ)


def started(kind: type[Server], pcd: Any = False) -> Any:
    return kind("demo", pcd=pcd, port=0, parallel=2, options=OPTIONS).running()


Servers = tuple[Server, Server]


@pytest.fixture(scope="module", params=["off", "off, used", "unsure", "paper"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Stock, and ours: started with --pcd off, the same after a request with PCD, started with PCD for those that do not say.

    Both get the same requests, so that their caches are filled alike: sums go over cells in the order in which they lie.
    """
    with started(Stock) as stock, started(Server, request.param.split(",")[0]) as ours:
        assert stock.wait_until_ready() and ours.wait_until_ready()
        if "used" in request.param:
            body = {"prompt": PROMPTS[1], "n_predict": 8, "ignore_eos": True, "pcd": "paper"}
            assert ask(stock, "/completion", body)[0] == 200
            assert ask(ours, "/completion", body)[1]["timings"]["pcd_twins"] > 0
        yield stock, ours


OURS = {"pcd"}  # what only our server says
# and names made at random
TIMES = {"timings", "created", "created_at", "completed_at", "id", "id_slot", "media_marker"}


def bare(value: Any) -> Any:
    """An answer without what may differ."""
    if isinstance(value, list):
        return [bare(one) for one in value]
    if isinstance(value, dict):
        # ids of tokens stay: they are numbers
        drop = {key for key in value if key in OURS | TIMES and not (key == "id" and isinstance(value[key], int))}
        return {key: bare(one) for key, one in value.items() if key not in drop}
    return value


def both(servers: Servers, path: str, body: Any) -> Any:
    """The answer that both give."""
    stock, ours = servers
    status, answer = ask(ours, path, None if body is None else {**body, "pcd": False})
    expected = ask(stock, path, body)
    assert (status, bare(answer)) == (expected[0], bare(expected[1]))
    return answer


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the libraries of a process are read from /proc")
def test_stock_runs_on_the_libllama_of_llama_cpp_python(servers: Servers) -> None:
    def loaded(server: Server) -> set[Path]:
        assert server._process is not None
        maps = Path(f"/proc/{server._process.pid}/maps").read_text(encoding="utf-8")
        return {Path(name) for name in re.findall(r"(?m)^(?:\S+ +){5}(/.*/lib(?:llama|ggml|mtmd)[^/\n]*)$", maps)}

    stock, ours = map(loaded, servers)
    own = {path.resolve() for path in (Path(llama_cpp.__file__).parent / "lib").glob("lib*")}
    assert {path.name.split(".")[0] for path in stock} >= {"libllama", "libggml-base", "libggml-cpu", "libmtmd"}
    assert stock <= own and {path.name for path in ours - own} == {"libllama.so"}


def test_greedy_answers_are_the_same_tokens(servers: Servers) -> None:
    for prompt in [*PROMPTS, " ".join(PROMPTS) * 12]:
        body = {"prompt": prompt, "n_predict": 64, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        assert len(both(servers, "/completion", body)["tokens"]) == 64


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            st.text("ab c{}\"':1é\n", min_size=1, max_size=60), st.lists(st.integers(3, 383), min_size=1, max_size=300)
        ),
        "n_predict": st.integers(0, 12),
    },
    optional={
        "temperature": st.floats(0, 3),
        "seed": st.integers(0, 2**31),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.05, 1),
        "min_p": st.floats(0, 0.5),
        "repeat_penalty": st.floats(0.8, 2),
        "n_probs": st.integers(0, 8),
        "post_sampling_probs": st.booleans(),
        "return_tokens": st.booleans(),
        "logit_bias": st.lists(st.tuples(st.integers(3, 383), st.floats(-5, 5)), max_size=3),
        "stop": st.lists(st.text("ab 1", min_size=1, max_size=2), max_size=2),
        "grammar": st.just('root ::= "x" [0-9 ]+'),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=60)
@given(body=REQUESTS)
def test_answers_and_probabilities_are_the_same_numbers(servers: Servers, body: dict[str, Any]) -> None:
    both(servers, "/completion", {"seed": 1, "cache_prompt": False, "id_slot": 0, **body})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 12, "logprobs": 3}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "logprobs": True, "top_logprobs": 4}),
        ("/v1/responses", {"input": "What is red?", "max_output_tokens": 12}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 12}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"content": PROMPTS[1]}),
        ("/apply-template", {"messages": MESSAGES}),
        ("/completion", {"prompt": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_route_says_the_same(servers: Servers, path: str, body: dict[str, Any]) -> None:
    both(servers, path, {"temperature": 0, **body})


def test_streams_are_the_same_parts(servers: Servers) -> None:
    body = {"prompt": PROMPTS[0], "n_predict": 24, "temperature": 0, "stream": True, "n_probs": 3}

    def parts(server: Server, **fields: Any) -> list[Any]:
        return [bare(part) for part in events(answered(server, "/completion", {**body, **fields}))]

    stock, ours = servers
    assert parts(ours, pcd=False) == parts(stock)


def test_it_says_of_itself_what_stock_says(servers: Servers) -> None:
    for path in ("/props", "/health"):
        both(servers, path, None)
    stock, ours = servers
    named = [entry["id"] for entry in ask(stock, "/v1/models")[1]["data"]]
    assert [entry["id"] for entry in ask(ours, "/v1/models")[1]["data"]][: len(named)] == named


def test_a_wrong_body_gets_the_same_status(servers: Servers) -> None:
    """The last test here: what a request leaves in the caches may differ behind it, since its answer is not looked at."""
    rng, seen = random.Random(5), set()
    stock, ours = servers
    for _ in range(200):
        path, sent = body(rng)
        sent = sent.replace(b"demo:pcd", b"x:pcx").replace(b"pcd", b"pcx")  # else it is ours to refuse
        (status, answer), (wanted, _) = ask(ours, path, sent), ask(stock, path, sent)
        assert status == wanted, (path, sent, answer)
        seen.add(status)
    assert seen >= {200, 400, 500}
