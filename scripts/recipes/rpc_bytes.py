"""Counts the bytes on the wire between a model and two RPC servers on loopback, per token, for each way to contrast.

    python scripts/recipes/rpc_bytes.py MODEL [--length N] [--n-tokens N] [--no-flash-attn] [--only SETTING] [--evaluation NAME,...] [--names]

The servers, `pypcd rpc-server`, are started here, and a relay before each counts what passes, by ggml's commands: inputs and
results that are set (set), graphs that are sent (graph) or run again (again), what is read back (get). With --names it also
prints which tensors are set and read back, with their bytes per token.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

import pypcd

COMMANDS = {6: "set", 8: "get", 10: "graph", 16: "again"}  # enum rpc_cmd; all others are "other"
NAME_AT, NAME_SIZE = 228, 64  # of the name in an rpc_tensor

SETTINGS = {
    "off": None,
    "shared": "cache=shared",
    "rerotated": "cache=rerotated",
    "separate": "cache=separate",
    "window": "perturbation=none:window=64",
}


class Relay:
    """Listens on loopback for one server, passes everything on and counts it.

    Attributes:
        sent: bytes to the server, by command.
        received: bytes from it.
        names: bytes of the tensors that were set or read back, by name.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.clear()
        threading.Thread(target=self._accept, daemon=True).start()

    def clear(self) -> None:
        self.sent: collections.Counter[str] = collections.Counter()
        self.names: collections.Counter[str] = collections.Counter()
        self.received = 0

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._back, args=(far, near), daemon=True).start()
            threading.Thread(target=self._forth, args=(near, far), daemon=True).start()

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                self.received += len(data)
                near.sendall(data)
            near.shutdown(socket.SHUT_WR)

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        def read(n: int) -> bytes:
            data = near.recv(n, socket.MSG_WAITALL)
            far.sendall(data)
            return data

        with contextlib.suppress(OSError, struct.error):
            while True:
                command, size = struct.unpack("<BQ", read(9))
                what = COMMANDS.get(command, "other")
                self.sent[what] += 9 + size
                first = read(min(size, 512)) if size else b""
                if what in ("set", "get"):
                    name = first[NAME_AT : NAME_AT + NAME_SIZE].split(b"\0")[0].decode()
                    self.names[f"{what} {name}"] += size if what == "set" else struct.unpack("<Q", first[-8:])[0]
                left = size - len(first)
                while left:
                    left -= len(read(min(left, 1 << 16)))
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)


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


def measure(llm: pypcd.Llama, relays: list[Relay], text: list[int], step: Callable[[], None], n: int) -> list[str]:
    """The cells of a row: KB per token of the prompt and of a step, sent and received, and what was sent in a step."""
    llm.reset()
    for relay in relays:
        relay.clear()
    llm.eval(text)
    llm.pcd_logits() if llm.pcd else llm.logits_to_logprobs(llm._scores[-1:, :1])
    prompt = sum(sum(relay.sent.values()) + relay.received for relay in relays) / len(text)
    for _ in range(3):  # after that graphs are kept
        step()
    for relay in relays:
        relay.clear()
    for _ in range(n):
        step()
    sent = sum((relay.sent for relay in relays), collections.Counter())
    received = sum(relay.received for relay in relays)
    kb = [
        prompt,
        sum(sent.values()) / n,
        received / n,
        *(sent[what] / n for what in ("set", "graph", "again", "get", "other")),
    ]
    return [f"{value / 1000:,.1f}" for value in kb]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--no-flash-attn", action="store_true")
    parser.add_argument("--only", help="one setting", choices=SETTINGS)
    parser.add_argument("--evaluation", default="fused,alternate", help="auto too (default %(default)s)")
    parser.add_argument("--names", action="store_true", help="which tensors are set and read back in a step")
    for name, default in (("--length", 1024), ("--n-tokens", 16), ("--threads", 1)):
        parser.add_argument(name, type=int, default=default, help="default %(default)s")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    print(
        "| setting | evaluation | prompt, KB a token | step, KB sent | received | of it sent: set | graph | again | get | other |\n"
        "| --- | --- |" + " ---: |" * 8
    )
    with servers(2) as relays:
        for setting, pcd in SETTINGS.items() if args.only is None else [(args.only, SETTINGS[args.only])]:
            for evaluation in args.evaluation.split(",") if pcd else ("",):
                llm = pypcd.Llama(
                    args.model,
                    pcd=f"{pcd}:evaluation={evaluation}" if pcd else False,
                    n_ctx=args.length + 256,
                    n_threads=args.threads,
                    flash_attn=not args.no_flash_attn,
                    rpc_servers=[relay.address for relay in relays],
                )
                text = random.integers(3, llm.n_vocab(), args.length).tolist()
                row = measure(llm, relays, text, lambda: llm.eval([text[0]]), args.n_tokens)  # noqa: B023  used at once
                print(f"| `{setting}` | {evaluation} | {' | '.join(row)} |", flush=True)
                if args.names:
                    names = sum((relay.names for relay in relays), collections.Counter())
                    told = ", ".join(f"{name} {size / args.n_tokens:,.0f}" for name, size in names.most_common(24))
                    print(f"    {told}")
                llm.close()


if __name__ == "__main__":
    main()
