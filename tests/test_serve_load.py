"""Many clients of one llama-server, mixed settings, a third of them leaving in the middle. scripts/soak runs it for minutes."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from test_serve import BASE, SMALL, ask, complete, is_greedy, llm  # noqa: F401  llm is a fixture

import pypcd
from pypcd import _server

SECONDS = float(os.environ.get("PYPCD_LOAD_SECONDS", "6"))
N_CLIENTS = int(os.environ.get("PYPCD_LOAD_CLIENTS", "16"))
SETTINGS: list[Any] = [False, True, "cautious", {"beta": 8.0}, {"window": 16}, {"adaptive": "jsd", "beta": 20.0}]
PROMPTS = [" ".join(f"{key * 37 % 101}: {key * 53 % 97}," for key in range(i, i + 4 + i % 3)) for i in range(8)]
WRONG: list[Any] = [{"beta": -1}, {"perturbation": "none"}, "no", 3]


class Client:
    """Asks, one request after the other: reads to the end, leaves in the middle, or asks for what is refused."""

    def __init__(self, server: _server.Server, end: float, seed: int) -> None:
        self.server, self.end, self.rng = server, end, random.Random(seed)
        self.answers: list[tuple[str, int, list[int]]] = []
        self.n_left = self.n_refused = 0

    def run(self) -> None:
        while time.monotonic() < self.end:
            self.ask()

    def ask(self) -> None:
        prompt, which, dice = self.rng.choice(PROMPTS), self.rng.randrange(len(SETTINGS)), self.rng.random()
        body = {"prompt": prompt, "n_predict": self.rng.choice([4, 24, 48]), "temperature": 0, "stream": True}
        body["ignore_eos"] = True
        body["pcd"] = self.rng.choice(WRONG) if dice < 0.1 else SETTINGS[which]
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == (400 if dice < 0.1 else 200), response.read()
        if dice < 0.1:
            self.n_refused += 1
        elif dice < 0.4:
            response.read(self.rng.randrange(1, 600))
            self.n_left += 1
        else:
            events = [json.loads(line[6:]) for line in response.read().splitlines() if line.startswith(b"data: ")]
            tokens = [token for event in events for token in event["tokens"]]
            assert events[-1]["stop"] and events[-1]["tokens_predicted"] == body["n_predict"] == len(tokens)
            self.answers.append((prompt, which, tokens))
        connection.close()


def resident_bytes(server: _server.Server) -> int:
    assert server._process is not None
    pages = Path(f"/proc/{server._process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_every_answer_is_its_own_memory_is_flat_and_no_slot_stays_busy(llm: pypcd.Llama) -> None:  # noqa: F811
    options = [*SMALL, "--cache-ram", "0"]
    with _server.Server("demo", pcd=BASE, port=0, parallel=8, options=options).running() as server:
        assert server.wait_until_ready()
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
        assert min(sum(client.n_left for client in clients), sum(client.n_refused for client in clients)) > 0
        for _ in range(100):
            if not any(slot["is_processing"] for slot in ask(server, "/slots")[1]):
                break
            time.sleep(0.1)
        else:
            pytest.fail("a slot stays busy")
        status, metrics = ask(server, "/metrics")
        assert status == 200 and "llamacpp:requests_deferred 0\n" in metrics
    print(
        f"{len(answers)} answers, {sum(c.n_left for c in clients)} left, {sum(c.n_refused for c in clients)} refused, {grown} bytes grown"
    )
    assert grown < 16 * 2**20, f"{grown / 2**20:.0f} MiB more than at half time"
    for prompt, which in sorted({answer[:2] for answer in answers}):
        same = {tuple(tokens) for p, w, tokens in answers if (p, w) == (prompt, which)}
        whole = [
            list(tokens)
            for tokens in same
            if not any(other[: len(tokens)] == tokens and other != tokens for other in same)
        ]
        for tokens in whole:  # one, where no rounding decided
            is_greedy(llm, prompt, SETTINGS[which], tokens, ends=False)
