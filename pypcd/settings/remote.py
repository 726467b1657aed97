"""Servers on other machines (ggml's RPC): their addresses, and a handshake with each before ggml gets the address.

ggml ends the process where a server cannot be reached, answers nonsense or has another version. So it is asked first, in
the protocol of ggml-rpc.cpp: a command is one byte, the size of its request in 8 and the request; an answer is its size
and itself. Knows nothing of libllama.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable

from pypcd.errors import InputError, RPCError
from pypcd.settings.ranges import Integer, literal

__all__ = [
    "PROTOCOL",
    "Servers",
    "handshake",
    "is_loopback",
    "parse_servers",
]

Servers = str | Iterable[str] | None  # as a caller writes them

PROTOCOL = (7, 0)  # RPC_PROTO_{MAJOR,MINOR}_VERSION of the pinned ggml; a test compares them with its header
_SECONDS = 5.0  # that a server gets to answer
_HELLO = struct.pack("<BQ24x", 14, 24)  # the command, and which transports there are: none but TCP
_ANSWER = struct.Struct("<BBB25x")  # the version

_EXAMPLE = "host:port such as 127.0.0.1:50052, several with commas between them"


def parse_servers(servers: Servers) -> tuple[str, ...]:
    """The addresses, each once and as host:port."""
    if servers is None:
        return ()
    words = servers.split(",") if isinstance(servers, str) else list(servers)
    found: list[str] = []
    for word in words:
        address = _address(word)
        if address in found:
            raise InputError(f"rpc_servers has {address} twice; allowed: each server once; leave one out")
        found.append(address)
    if not found:
        raise InputError(f"rpc_servers is {servers!r}; allowed: {_EXAMPLE}; None is for this machine alone")
    return tuple(found)


def _address(word: object) -> str:
    text = word.strip() if isinstance(word, str) else ""
    host, colon, port = text.rpartition(":")
    if ":" in host:
        raise InputError(
            f"rpc_servers has {text!r}; allowed: {_EXAMPLE}; ggml's RPC takes IPv4 addresses and names, so give one of those"
        )
    if not colon or not host or any(c.isspace() or c in "/@[]" for c in host):
        raise InputError(f"rpc_servers has {word!r}; allowed: {_EXAMPLE}")
    try:
        number = Integer(1, 65535)("the port", literal(port))
    except ValueError:
        raise InputError(f"rpc_servers has {text!r}, whose port is {port!r}; allowed: 1 to 65535") from None
    return f"{host}:{number}"


def is_loopback(address: str) -> bool:
    """Whether an address, with a port or without, is this machine's own, which the end of a tunnel is too."""
    host = address.partition(":")[0]
    return host == "localhost" or host.startswith("127.")


def handshake(address: str, seconds: float = _SECONDS) -> None:
    """Ask a server for its version.

    Raises:
        RPCError: it cannot be reached, is silent, is no such server, or has another version.
    """
    host, _, port = address.partition(":")
    try:
        where = socket.gethostbyname(host), int(port)  # as ggml finds it: IPv4 alone
        with socket.create_connection(where, seconds) as connection:
            told, answer = _hello(connection)
    except (socket.gaierror, UnicodeError):
        raise RPCError(f"the RPC server {address} is not known: {host!r} has no IPv4 address; check the name") from None
    except TimeoutError:
        raise RPCError(
            f"the RPC server {address} says nothing for {seconds:g} seconds; it serves one program at a time: end the one "
            "that uses it, or start another `pypcd rpc-server`"
        ) from None
    except OSError as error:
        raise RPCError(
            f"the RPC server {address} cannot be reached: {error.strerror or error}; start `pypcd rpc-server` there, or check "
            "address and tunnel"
        ) from None
    if len(answer) != _ANSWER.size:
        what = "does not speak ggml's RPC protocol" if told else "closed the connection"
        raise RPCError(
            f"{address} {what}; is `pypcd rpc-server`, of the same version as this pypcd, what listens there?"
        )
    major, minor, patch = _ANSWER.unpack(answer)
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise RPCError(
            f"the RPC server {address} speaks version {major}.{minor}.{patch} of ggml's protocol, this pypcd "
            f"{'.'.join(map(str, PROTOCOL))}; use the same version of pypcd or of llama.cpp on both machines"
        )


def _hello(connection: socket.socket) -> tuple[bytes, bytes]:
    """The size that is told, and the answer if that is its size; as much of both as came before the end."""
    told = answer = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError), connection.makefile("rb") as stream:
        connection.sendall(_HELLO)
        told = stream.read(8)
        if told == struct.pack("<Q", _ANSWER.size):
            answer = stream.read(_ANSWER.size)
    return told, answer
