"""pypcd rpc-server: the other end of --rpc, on a machine that computes a part of a model.

ggml's own server runs in a thread, which nothing but the end of the process stops. Exit status: 0 after Ctrl-C or SIGTERM,
1 if it ends by itself, 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from pypcd import engine
from pypcd.cli import _options, _terminal
from pypcd.cli._text import sentence
from pypcd.errors import MENDABLE, InputError, RPCError
from pypcd.llama import machine
from pypcd.settings import remote
from pypcd.settings.ranges import Integer

_LINES = {
    "Accepted client connection": True,
    "Client connection closed": False,
}  # of ggml: whether somebody is connected
_SECONDS = 10.0  # that it gets to listen
_LASTS = 0.5  # seconds: shorter connections are questions before a model is loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd rpc-server [options]"
    parser.epilog = (
        "ggml's RPC has no authentication and no encryption: whoever reaches the port reads and writes this process. "
        "Listen on loopback, and let other machines in through a tunnel (ssh -L). See docs/rpc.md."
    )
    add = parser.add_argument
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="IPv4 address to listen on (default: 127.0.0.1)")
    add("--port", metavar="N", type=_options.at_least(0), default=50052, help="0: any free one (default: 50052)")
    add("--threads", metavar="N", type=_options.at_least(1), help="CPU threads (default: as for a model)")
    add("--device", metavar="NAME,...", help="what computes (default: all GPUs, else the CPU); pypcd info lists them")


def run(args: argparse.Namespace) -> int:
    threads = args.threads or machine.default_threads()
    devices = _options.names(args.device)
    try:
        port = _port(args.host, args.port)
        address = f"{args.host}:{port}"
        engine.check_rpc_server(devices)
    except (*MENDABLE, OSError) as error:
        print(f"pypcd: {sentence(error)}", file=sys.stderr)
        return 2
    _terminal.note(
        "ggml's RPC has no authentication and no encryption: use it on loopback or through a tunnel (ssh -L) only"
    )
    if not remote.is_loopback(args.host):
        _terminal.note(f"whoever reaches {args.host} can read and write this process: is that network yours alone?")
    with _terminal.ending() as stopped:
        server = _Server(address, threads, devices)
        ready = server.wait_until_ready(stopped)
        if ready:
            _terminal.write(_greeting(args.host, port, ready))
            server.wait(stopped)
        if not stopped():
            _terminal.note(f"the server on {address} ended by itself")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if stopped() else 1)  # its thread is in ggml, and would use what an orderly end takes away


def _port(host: str, port: int) -> int:
    """A port that can be listened on.

    Raises:
        ValueError: the host is no IPv4 address, or the port no port.
        OSError: it is taken, or this machine does not have the address.
    """
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        raise InputError(f"host is {host!r}; allowed: an IPv4 address of this machine, such as 127.0.0.1") from None
    return machine.free_port(host, Integer(0, 65535)("port", port))


class _Server:
    """ggml's server in a thread; of what it prints only that somebody is connected is used."""

    def __init__(self, address: str, n_threads: int, devices: tuple[str, ...]) -> None:
        self._address = address
        self._is_used = False
        # ggml prints to the C library's stdout, where nobody should see it among results
        ours, (reader, writer) = os.dup(1), os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        sys.stdout = open(ours, "w", encoding="utf-8", errors="replace")  # noqa: SIM115  for as long as the program runs
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()
        self._thread = threading.Thread(target=engine.run_rpc_server, args=(address, n_threads, devices), daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        with open(reader, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._is_used = _LINES.get(line.strip(), self._is_used)

    def wait_until_ready(self, stopped: Callable[[], bool]) -> list[remote.Device]:
        """Its devices, as other machines see them; empty if it ended, or `stopped` returned True."""
        until = time.monotonic() + _SECONDS
        while self._thread.is_alive() and not stopped() and time.monotonic() < until:
            try:
                return remote.handshake(self._address)
            except RPCError:  # it does not listen yet
                time.sleep(0.05)
        return []

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Returns when `stopped` does so with True, or it has ended by itself."""
        told, same_since = False, time.monotonic()
        while self._thread.is_alive() and not stopped():
            now = time.monotonic()
            if self._is_used == told:
                same_since = now
            elif now - same_since > _LASTS:
                told = not told
                _terminal.say("a program has connected" if told else "it has left")
            time.sleep(0.1)


def _greeting(host: str, port: int, devices: list[remote.Device]) -> str:
    """What it offers, and the line to use on the other machine."""
    text = f"listening on {host}:{port} | Ctrl-C to end\n"
    for device in devices:
        text += f"  device   {device.free / 2**30:.1f} of {device.memory / 2**30:.1f} GiB free\n"
    if host == "0.0.0.0":
        host = socket.gethostname()
    if remote.is_loopback(host):
        there = f"{os.environ.get('USER') or 'user'}@{socket.gethostname()}"
        text += f"  tunnel   ssh -N -L {port}:{host}:{port} {there}    # on the other machine, and then there:\n"
    return text + f"  use      pypcd chat MODEL --rpc {host}:{port}\n"
