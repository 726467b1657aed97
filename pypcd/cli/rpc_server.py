"""pypcd rpc-server: the other end of --rpc, on a machine that computes a part of a model.

ggml's own server runs in a thread, which nothing but the end of the process stops. Exit status: 0 after Ctrl-C or SIGTERM,
1 if it ends by itself, 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import os
import signal
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
    try:
        port = _port(args.host, args.port)
        address = f"{args.host}:{port}"
        serve = engine.rpc_server(address, args.threads or machine.default_threads(), _options.names(args.device))
    except (*MENDABLE, OSError) as error:  # each of them is a mistake in what was typed
        raise InputError(sentence(error)) from error
    _terminal.note(
        "ggml's RPC has no authentication and no encryption: use it on loopback or through a tunnel (ssh -L) only"
    )
    if not remote.is_loopback(args.host):
        _terminal.note(f"whoever reaches {args.host} can read and write this process: is that network yours alone?")
    sys.stdout = open(os.dup(1), "w", encoding="utf-8", errors="replace")  # noqa: SIM115  for as long as the program runs
    os.dup2(2, 1)  # ggml's log, which it writes to the C library's stdout
    with _terminal.interruptible(signal.SIGTERM) as stopped:
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        if _is_ready(address, server, stopped):
            _terminal.write(_greeting(args.host, port))
        while server.is_alive() and not stopped():
            time.sleep(0.1)
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


def _is_ready(address: str, server: threading.Thread, stopped: Callable[[], bool]) -> bool:
    """Whether it listens now; False: it ended, or `stopped` returned True first."""
    while server.is_alive() and not stopped():
        try:
            remote.handshake(address)
            return True
        except RPCError:
            time.sleep(0.05)
    return False


def _greeting(host: str, port: int) -> str:
    """Where it is, and the lines to use on the other machine."""
    text = f"listening on {host}:{port} | Ctrl-C to end\n"
    if host == "0.0.0.0":
        host = socket.gethostname()
    if remote.is_loopback(host):
        there = f"{os.environ.get('USER') or 'user'}@{socket.gethostname()}"
        text += f"  tunnel   ssh -N -L {port}:{host}:{port} {there}    # on the other machine, and then there:\n"
    return text + f"  use      pypcd chat MODEL --rpc {host}:{port}\n"
