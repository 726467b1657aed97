"""Times requests to llama-server: n at once plainly, n with PCD, and 2n plainly.

    python scripts/recipes/time_server.py MODEL [--pcd window] [--requests 4] [--length 256] [--n-tokens 32] [--rounds 3]

Prints tokens per second of all answers together, the seconds to a first token, and in brackets the time of the n with PCD as a
multiple of the 2n plain ones', which have as many rows. Two servers take turns, one of which never gets a request with PCD. The
prompts are tokens at random that differ from the first one on, so that nothing of them is cached.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import statistics
import time

from pypcd import _server
from pypcd._cli import _options


def answer(server: _server.Server, prompt: list[int], n_tokens: int, pcd: object) -> float:
    """Asks once, streaming; the seconds to the first token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)
    body = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "pcd": pcd, "stream": True}
    started, first = time.perf_counter(), 0.0
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read().decode()}")
    for line in response:
        if not first and line.startswith(b"data: ") and json.loads(line[6:]).get("tokens"):
            first = time.perf_counter() - started
    connection.close()
    return first


def timed(server: _server.Server, prompts: list[list[int]], n_tokens: int, pcd: object) -> tuple[float, float]:
    """All at once: seconds in all, and the median to a first token."""
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        firsts = list(pool.map(lambda prompt: answer(server, prompt, n_tokens, pcd), prompts))
    return time.perf_counter() - started, statistics.median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--pcd", default="window", help="a preset")
    for name, default in (("requests", 4), ("length", 256), ("n-tokens", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=_options.at_least(1), default=default)
    parser.add_argument("--threads", type=_options.at_least(1))
    args = parser.parse_args()
    n = args.requests
    n_ctx = 2 * n * 2 * (args.length + args.n_tokens + 64)
    options = ["--cache-ram", "0", "--log-verbosity", "1", "--ctx-size", str(n_ctx)]
    options += ["--threads", str(args.threads), "--threads-batch", str(args.threads)] if args.threads else []

    number = 0

    def prompts(count: int) -> list[list[int]]:
        nonlocal number
        number += count
        return [[100 + (i * 7919 + j * 31) % 97 for j in range(args.length)] for i in range(number - count, number)]

    ways = {f"{n} plain": (0, n, False), f"{n} with PCD": (1, n, args.pcd), f"{2 * n} plain": (0, 2 * n, False)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    firsts: dict[str, list[float]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        made = [_server.Server(args.model, port=0, parallel=2 * n, options=options) for _ in range(2)]
        servers = [stack.enter_context(server.running()) for server in made]
        for server in servers:
            server.wait_until_ready()
        for turn in range(args.rounds + 1):  # the first one warms up
            for way, (which, count, pcd) in ways.items():
                all_of_them, first = timed(servers[which], prompts(count), args.n_tokens, pcd)
                if turn:
                    seconds[way].append(all_of_them)
                    firsts[way].append(first)
    print(f"prompts of {args.length} tokens, answers of {args.n_tokens}; medians of {args.rounds} rounds")
    print("| requests at once | tokens per second | first token after (s) |\n| --- | ---: | ---: |")
    middle = {way: statistics.median(times) for way, times in seconds.items()}
    for way, (_, count, pcd) in ways.items():
        ratio = f" ({middle[way] / middle[f'{2 * n} plain']:.2f}x)" if pcd else ""
        speed = count * args.n_tokens / middle[way]
        print(f"| {way} | {speed:.1f}{ratio} | {statistics.median(firsts[way]):.2f} |")


if __name__ == "__main__":
    main()
