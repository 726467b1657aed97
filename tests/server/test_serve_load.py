"""Many clients of one llama-server: mixed settings, a third of them leaving in the middle; bodies that are wrong in all ways.

scripts/soak runs it for minutes."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from processes import within
from serving import BASE, ask, begun, complete, events, is_greedy, ready

import pypcd
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server

SECONDS = float(os.environ.get("PYPCD_LOAD_SECONDS", "4"))
N_CLIENTS = int(os.environ.get("PYPCD_LOAD_CLIENTS", "16"))
N_LEAST = 6  # requests of each client, however slow the machine is
SETTINGS: list[Any] = [False, True, "cautious", {"beta": 8.0}, {"window": 16}, {"relative_top": 0.1, "beta": 20.0}]
PROMPTS = [" ".join(f"{key * 37 % 101}: {key * 53 % 97}," for key in range(i, i + 4 + i % 3)) for i in range(8)]
WRONG: list[Any] = [{"beta": -1}, {"perturbation": "none"}, "no", 3]


class Client:
    """Asks, one request after the other: reads to the end, leaves in the middle, or asks for what is refused."""

    def __init__(self, server: Server, end: float, seed: int) -> None:
        self.server, self.end, self.rng = server, end, random.Random(seed)
        self.answers: list[tuple[str, int, list[int]]] = []
        self.n_left = self.n_refused = 0

    def run(self) -> None:
        for n in itertools.count():
            if n >= N_LEAST and time.monotonic() >= self.end:
                return
            self.ask()

    def ask(self) -> None:
        prompt, which, dice = self.rng.choice(PROMPTS), self.rng.randrange(len(SETTINGS)), self.rng.random()
        body = {"prompt": prompt, "n_predict": self.rng.choice([4, 24, 48]), "temperature": 0, "stream": True}
        body["ignore_eos"] = True
        body["pcd"] = self.rng.choice(WRONG) if dice < 0.1 else SETTINGS[which]
        connection = begun(self.server, "/completion", body)
        response = connection.getresponse()
        assert response.status == (400 if dice < 0.1 else 200), response.read()
        if dice < 0.1:
            self.n_refused += 1
        elif dice < 0.4:
            response.read(self.rng.randrange(1, 600))
            self.n_left += 1
        else:
            *parts, last = events(response.read().decode())
            tokens = [token for part in [*parts, last] for token in part["tokens"]]
            assert last["stop"] and last["tokens_predicted"] == body["n_predict"] == len(tokens)
            self.answers.append((prompt, which, tokens))
        connection.close()


def resident_bytes(server: Server) -> int:
    assert server._process is not None
    pages = Path(f"/proc/{server._process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_every_answer_is_its_own_memory_is_flat_and_no_slot_stays_busy(llm: pypcd.Llama) -> None:
    with ready("--cache-ram", "0", pcd=BASE, parallel=8) as server:
        for setting in SETTINGS:
            complete(server, PROMPTS[0], pcd=setting)
        start = time.monotonic()
        clients = [Client(server, start + SECONDS, seed) for seed in range(N_CLIENTS)]
        with concurrent.futures.ThreadPoolExecutor(N_CLIENTS) as pool:
            done = [pool.submit(client.run) for client in clients]
            time.sleep(SECONDS / 2)  # until then buffers find their size
            half = resident_bytes(server)
            for one in done:
                one.result(SECONDS + 120)
        grown = resident_bytes(server) - half
        answers = [answer for client in clients for answer in client.answers]
        assert len(answers) > N_CLIENTS
        assert within(lambda: not any(slot["is_processing"] for slot in ask(server, "/slots")[1])), "a slot stays busy"
        status, metrics = ask(server, "/metrics")
        assert status == 200 and "llamacpp:requests_deferred 0\n" in metrics
    n_left, n_refused = (sum(getattr(client, name) for client in clients) for name in ("n_left", "n_refused"))
    print(f"{len(answers)} answers, {n_left} left, {n_refused} refused, {grown} bytes grown")
    assert min(n_left, n_refused) > 0
    assert grown < 16 * 2**20, f"{grown / 2**20:.0f} MiB more than at half time"
    for prompt, which in sorted({answer[:2] for answer in answers}):
        same = {tuple(tokens) for p, w, tokens in answers if (p, w) == (prompt, which)}
        for tokens in same:  # each that is no beginning of another: one, where no rounding decided
            if not any(other[: len(tokens)] == tokens and other != tokens for other in same):
                is_greedy(llm, prompt, SETTINGS[which], list(tokens), ends=False)


@pytest.mark.parametrize("n_models", [1, 2])
def test_a_request_ends_with_its_client_though_others_are_answered(n_models: int, tmp_path: Path) -> None:
    """Alone it always did: its thread looked for its client where nothing had come for a second, to anybody."""
    models = ["demo", str(shutil.copy(DEMO_MODEL, tmp_path / "twin.gguf"))][:n_models]
    endless = {"model": "demo", "prompt": "a", "n_predict": -1, "ignore_eos": True, "temperature": 0}
    with ready("--context-shift", model=models, parallel=2) as server:

        def n_busy() -> int:
            complete(server, "a", n_predict=1, model="demo")  # another's answer, all the time
            return sum(slot["is_processing"] for slot in ask(server, "/slots?model=demo")[1])

        for stream in (True, False):
            connection = begun(server, "/completion", {**endless, "stream": stream})
            assert within(lambda: n_busy() == 1)
            connection.close()
            assert within(lambda: n_busy() == 0, 15)


# -- mutated bodies ---------------------------------------------------------------------------------------------------

N_BODIES = int(os.environ.get("PYPCD_LOAD_BODIES", "150"))
HI = [{"role": "user", "content": "hi"}]
COMPLETION = {"prompt": "a b", "n_predict": 2, "temperature": 0, "n_probs": 2, "stop": ["x"], "pcd": "cautious"}
FORM = {"type": "json_object"}
RIGHT: dict[str, dict[str, Any]] = {
    "/completion": {**COMPLETION, "logit_bias": [[5, 1.0]], "stream": False, "samplers": ["top_k"], "id_slot": -1},
    "/v1/completions": {"prompt": "a b", "n": 1, "logprobs": 2, "model": "demo:pcd", "pcd": {"beta": 1.5}},
    "/v1/chat/completions": {"messages": HI, "pcd": True, "tools": [], "logprobs": True, "response_format": FORM},
    "/v1/responses": {
        "input": "hi",
        "max_output_tokens": 2,
        "pcd": {"window": None, "min_entropy": 1},
        "instructions": "x",
    },
    "/v1/messages": {"messages": HI, "max_tokens": 2, "pcd": False, "system": "x"},
}
FILE = {"filename": "a.txt", "file_data": "YS4KCmIu"}
TEXTS = [{"name": "a", "text": "a.\n\nb."}]
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a.\n\nb."}, "title": "x"}


def with_file(file: dict[str, Any], kind: str = "text") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [file, {"type": kind, "text": "hi"}]}]


WITH_DOCUMENTS: dict[str, dict[str, Any]] = {  # which stock llama-server has not
    "/chat/completions": {"messages": with_file({"type": "file", "file": FILE}), "documents": TEXTS, "replay": True},
    "/responses": {"input": with_file({"type": "input_file", **FILE}, "input_text"), "max_output_tokens": 2},
    "/v1/messages": {"messages": with_file(DOCUMENT), "max_tokens": 2, "documents": TEXTS},
    "/documents": FILE,
}
# what it tells as a fault of its own; test_serve_stock.py
LLAMA_CPPS = r"json\.exception|^Failed to parse |' is required$"
DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 3, 1e308, -1e308, 2**63, 2**70, 0.5),
    *("", "x", "NaN", "off", "pcd", "x" * 20000, "\U0001f600", "\u00e4\u0000b"),
    *([], [1, [2, [3]]], {}, {"a": {"b": [1]}}, [None], ["a"], {"beta": [1]}, {"": 1}, DEEP),
]


def mutated(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """The value with something in it of another type, missing, or too much."""
    if rng.random() < 0.3 or depth > 3 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(ODD)
    if isinstance(value, list):
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng, depth + 1), *value[i + 1 :]]
    key, dice = rng.choice(list(value)), rng.random()
    if dice < 0.1:
        return {name: kept for name, kept in value.items() if name != key}
    if dice < 0.2:
        return {**value, rng.choice(["pcd", "model", "n", "stream", "grammar", "json_schema"]): rng.choice(ODD)}
    return {**value, key: mutated(value[key], rng, depth + 1)}


def body(rng: random.Random, right: dict[str, dict[str, Any]] = RIGHT) -> tuple[str, bytes]:
    path = rng.choice(list(right))
    made: Any = right[path]
    for _ in range(rng.randrange(1, 4)):
        made = mutated(made, rng)
        if not isinstance(made, dict):
            break
        made = {  # no test should wait for a thousand tokens, or for -1, which is as many as there is room for
            name: max(0, min(value, 4))
            if name.startswith(("n_predict", "max_")) and isinstance(value, (int, float))
            else value
            for name, value in {"n_predict": 2, "max_tokens": 2, **made}.items()
        }
    text = json.dumps(made)
    if rng.random() < 0.05:
        text = text.replace("2", "NaN", 1)
    return path, (text[: rng.randrange(len(text) + 1)] if rng.random() < 0.03 else text).encode()


def test_a_mutated_body_is_refused_or_answered_and_harms_nobody(llm: pypcd.Llama) -> None:
    rng, prompt = random.Random(3), PROMPTS[0]
    with ready(pcd=BASE, parallel=4) as server:
        done = False

        def others() -> list[list[int]]:
            said = []
            while not done:
                said.append(complete(server, prompt, pcd="cautious", n_predict=60, ignore_eos=True)["tokens"])
            return said

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            kept = pool.submit(others)
            sent = [body(rng, right) for right in (RIGHT, WITH_DOCUMENTS) for _ in range(N_BODIES)]
            try:
                for one, (status, answer) in zip(sent, pool.map(lambda one: ask(server, *one), sent)):
                    own = status == 500 and re.search(LLAMA_CPPS, answer["error"]["message"])
                    assert own or status in (200, 400, 401, 404, 413, 501), (one, answer)
            finally:
                done = True  # whatever fails, else it is asked without an end
            for tokens in {tuple(tokens) for tokens in kept.result()}:
                is_greedy(llm, prompt, "cautious", list(tokens), ends=False)
