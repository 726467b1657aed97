"""Times requests to llama-server, with PCD, without, and to stock llama-server.

    python -m research.time_server MODEL [--pcd window] [--requests 4] [--length 256] [--n-tokens 32] [--starts 1] [--rounds 3]
    python -m research.time_server MODEL --stock "$(scripts/recipes/stock_server)"

n requests at once with PCD are timed beside n plain ones and beside 2n, which have as many rows; or, with --stock, beside n to
stock llama-server. Each line has a server of its own, which gets no other requests; they take turns, in another order each round,
in --starts sets of processes: where one got its memory may make it a few per cent faster.
Prints medians of the rounds, and in brackets the median and the quartiles of the quotient with the first line in the same round:
above 1 is more. `first token` is the median of the n requests; `tokens per second` are those of all answers, from each one's first
token on; `all` is the time until the last answer is complete. Prompts are words at random, the same for all lines of a round;
nothing is taken from a prompt cache. With --cpu-time seconds are those of the server's process alone: on one thread, what it would take
if nothing else ran on that core, which a shared machine shows more exactly than the clock (Linux).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pypcd import engine
from pypcd.cli import _options
from pypcd.server import Server

WORDS = "the a of and in to water house red green old new time day made found when there first last open light"


Clock = Callable[[], float]


class Times(NamedTuple):
    first: float  # seconds, the median
    per_second: float
    all: float


def post(server: Server, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "Connection": "close"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read().decode()}")
    return response


def cpu_clock(server: Server) -> Clock:
    """The CPU time of all its threads."""
    assert server._process is not None
    clock = (~server._process.pid << 3) | 2  # clock_getcpuclockid() in C, which Python has for threads alone
    return lambda: time.clock_gettime(clock)


def answer(
    server: Server, prompt: list[int], n_tokens: int, fields: dict[str, Any], clock: Clock
) -> tuple[float, float]:
    """Asks once, streaming; the seconds to the first token and to the last."""
    body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    started, first = clock(), 0.0
    with post(server, "/completion", {**body, **fields, "stream": True}) as response:
        for line in response:
            if not first and line.startswith(b"data: ") and json.loads(line[6:]).get("tokens"):
                first = clock() - started
    return first, clock() - started


def timed(server: Server, prompts: list[list[int]], n_tokens: int, fields: dict[str, Any], clock: Clock) -> Times:
    """All at once."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        ends = list(pool.map(lambda prompt: answer(server, prompt, n_tokens, fields, clock), prompts))
    speed = sum((n_tokens - 1) / (last - first) for first, last in ends)
    return Times(statistics.median(first for first, _ in ends), speed, max(last for _, last in ends))


def stock(server: Server, executable: str) -> Server:
    """The same command for another executable, and no libllama of ours."""
    server.command[0], server.environment = executable, dict(os.environ)
    return server


def cell(numbers: list[float], of: list[float], digits: int) -> str:
    quotients = [a / b for a, b in zip(numbers, of)]
    if len(quotients) > 2:
        low, _, high = statistics.quantiles(quotients, n=4)
    else:  # of two, quartiles would lie outside of them
        low, high = min(quotients), max(quotients)
    return f"{statistics.median(numbers):.{digits}f} ({statistics.median(quotients):.2f}, {low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--pcd", default="window", help="a preset, or any other setting")
    parser.add_argument("--stock", metavar="EXECUTABLE", help="what scripts/recipes/stock_server prints")
    for name, default in (("requests", 4), ("length", 256), ("n-tokens", 32), ("starts", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=_options.at_least(2 if name == "n-tokens" else 1), default=default)
    parser.add_argument("--cpu-time", action="store_true", help="of the server's process, not of the clock")
    parser.add_argument("--threads", type=_options.at_least(1))
    args = parser.parse_args()
    n = args.requests
    n_ctx = 2 * n * (args.length + args.n_tokens + 64)
    options = ["--cache-ram", "0", "--log-verbosity", "1", "--ctx-size", str(2 * n_ctx)]
    options += ["--threads", str(args.threads), "--threads-batch", str(args.threads)] if args.threads else []
    amx = engine.configure_amx()
    options += ["--no-repack"] if amx.exists and not amx.on else []  # stock would use it wherever it was compiled

    def server(pcd: object = False) -> Server:
        return Server(args.model, pcd=pcd, port=0, parallel=2 * n, options=options)

    ways = {f"{n} with --pcd off": (server(), n, {}), f"{n} with PCD": (server(args.pcd), n, {})}
    if args.stock:
        refused = (server(args.pcd), n, {"pcd": False})
        ways = {f"{n} to stock": (stock(server(), args.stock), n, {}), **ways, f'{n} with "pcd": false': refused}
    else:
        ways = {f"{2 * n} with --pcd off": (server(), 2 * n, {}), **ways}
    found: dict[str, list[Times]] = {way: [] for way in ways}
    for start in range(args.starts):
        with contextlib.ExitStack() as stack:
            rng = random.Random(start)
            for one, _, _ in rng.sample(list(ways.values()), len(ways)):
                stack.enter_context(one.running()).wait_until_ready()
            for turn in range(args.rounds + 1):  # the first one warms up
                texts = [" ".join(rng.choices(WORDS.split(), k=args.length)) for _ in range(2 * n)]
                prompts = [
                    json.loads(post(one, "/tokenize", {"content": text}).read())["tokens"][: args.length]
                    for text in texts
                ]
                for way in rng.sample(list(ways), len(ways)):
                    one, count, fields = ways[way]
                    clock = cpu_clock(one) if args.cpu_time else time.perf_counter
                    times = timed(one, prompts[:count], args.n_tokens, fields, clock)
                    if turn:
                        found[way].append(times)
    print(f"prompts of {args.length} tokens, answers of {args.n_tokens}; medians of {args.starts * args.rounds} rounds")
    print("| requests at once | first token, s | tokens per second | all, s |\n| --- | ---: | ---: | ---: |")
    base = found[next(iter(ways))]
    for way, times in found.items():
        cells = (
            cell([getattr(one, name) for one in times], [getattr(one, name) for one in base], digits)
            for name, digits in (("first", 3), ("per_second", 1), ("all", 2))
        )
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
