"""Counts the bytes on the wire between a model and two RPC servers on loopback, per token, for each way to contrast.

    python scripts/recipes/rpc_bytes.py MODEL [--length N] [--n-tokens N] [--no-flash-attn]

The servers, `pypcd rpc-server`, are started here, and a relay before each counts what passes.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np

import pypcd

SETTINGS = {
    "off": "off",
    "shared": "paper:cache=shared",
    "rerotated": "paper:cache=rerotated",
    "separate": "paper:cache=separate",
    "window": "window",
}


class Relay:
    """Listens on loopback for one server, passes everything on and counts the bytes.

    Attributes:
        passed: how many, to the server and back.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = [0, 0]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, far = self._listener.accept()[0], socket.create_connection(self._target)
            for which, ends in enumerate([(near, far), (far, near)]):
                ends[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(which, *ends), daemon=True).start()

    def _pass_on(self, which: int, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passed[which] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def servers(n: int) -> Iterator[list[Relay]]:
    """A block with n servers, each behind a relay."""
    processes, relays = [], []
    try:
        for _ in range(n):
            command = [sys.executable, "-m", "pypcd", "rpc-server", "--port=0", "--threads=1"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            processes.append(process)
            assert process.stdout is not None
            found = re.match(r"listening on (\S+)", process.stdout.readline())
            if not found:
                raise SystemExit("pypcd rpc-server did not start; run it by itself to see why")
            relays.append(Relay(found[1]))
        yield relays
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(llm: pypcd.Llama, relays: list[Relay], text: list[int], n: int) -> list[str]:
    """KB per token of the prompt, and of a step, sent and received."""

    def passed() -> list[int]:
        return [sum(relay.passed[i] for relay in relays) for i in (0, 1)]

    before = passed()
    llm.eval(text)
    prompt = (sum(passed()) - sum(before)) / len(text)
    for _ in range(3):  # after that graphs are kept
        llm.eval([text[0]])
    before = passed()
    for _ in range(n):
        llm.eval([text[0]])
    return [f"{kb / 1000:,.1f}" for kb in (prompt, *((b - a) / n for a, b in zip(before, passed())))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--no-flash-attn", action="store_true")
    for name, default in (("--length", 1024), ("--n-tokens", 16), ("--threads", 1)):
        parser.add_argument(name, type=int, default=default, help="default %(default)s")
    args = parser.parse_args()
    print(
        "| setting | evaluation | prompt, KB a token | step, KB sent | received |\n| --- | --- | ---: | ---: | ---: |"
    )
    with servers(2) as relays:
        for setting, pcd in SETTINGS.items():
            for evaluation in ("fused", "alternate") if pcd != "off" else ("",):
                llm = pypcd.Llama(
                    args.model,
                    pcd=f"{pcd}:evaluation={evaluation}" if evaluation else False,
                    n_ctx=args.length + 256,
                    n_threads=args.threads,
                    flash_attn=not args.no_flash_attn,
                    rpc_servers=[relay.address for relay in relays],
                )
                text = np.random.default_rng(0).integers(3, llm.n_vocab(), args.length).tolist()
                row = measure(llm, relays, text, args.n_tokens)
                print(f"| `{setting}` | {evaluation} | {' | '.join(row)} |", flush=True)
                llm.close()


if __name__ == "__main__":
    main()
