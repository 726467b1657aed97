"""Servers on other machines (ggml's RPC): their addresses, and a handshake with each before ggml gets the address.

ggml ends the process where a server cannot be reached, answers nonsense or has another version. So it is asked first, in
the protocol of ggml-rpc.cpp: a command is one byte, the size of its request in 8 and the request; an answer is its size
and itself. Knows nothing of libllama.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

from pypcd.errors import InputError, RPCError
from pypcd.settings.ranges import Integer, literal

__all__ = [
    "MAX_SERVERS",
    "PROTOCOL",
    "SECONDS",
    "Device",
    "Servers",
    "handshake",
    "is_connected",
    "is_loopback",
    "lost_text",
    "parse_servers",
]

Servers = str | Iterable[str] | None  # as a caller writes them

MAX_SERVERS = 16  # GGML_RPC_MAX_SERVERS, and as many devices a model can have
PROTOCOL = (7, 0)  # RPC_PROTO_{MAJOR,MINOR}_VERSION of the pinned ggml; a test compares them with its header
SECONDS = 5.0  # that a server gets to answer
_HELLO, _DEVICE_COUNT, _DEVICE_MEMORY = 14, 15, 11  # enum rpc_cmd
_CAPABILITIES = 24  # bytes that say which transports there are; none but TCP

_EXAMPLE = "host:port such as 127.0.0.1:50052, several with commas between them"


class Device(NamedTuple):
    """A device of a server: what it computes on, and the bytes that has."""

    address: str
    free: int
    memory: int


def parse_servers(servers: Servers) -> tuple[str, ...]:
    """The addresses, each once and as host:port.

    Raises:
        ValueError: one is no address, or there twice, or there are too many.
    """
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
    if len(found) > MAX_SERVERS:
        raise InputError(f"rpc_servers has {len(found)} servers; allowed: at most {MAX_SERVERS}; leave some out")
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


def handshake(address: str, seconds: float = SECONDS) -> list[Device]:
    """One server's devices.

    Raises:
        RPCError: it cannot be reached, is silent, is no such server, or has another version.
    """
    with contextlib.closing(_connect(address, seconds)) as connection:
        stream = _Stream(connection, address, seconds)
        answer = stream.ask(_HELLO, bytes(_CAPABILITIES), 4 + _CAPABILITIES)
        version = tuple(answer[:3])
        if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
            raise RPCError(
                f"the RPC server {address} speaks version {'.'.join(map(str, version))} of ggml's protocol, this pypcd "
                f"{'.'.join(map(str, PROTOCOL))}; use the same version of pypcd or of llama.cpp on both machines"
            )
        (count,) = struct.unpack("<I", stream.ask(_DEVICE_COUNT, b"", 4))
        if not 0 < count <= MAX_SERVERS:
            raise RPCError(
                f"the RPC server {address} has {count} devices; allowed: 1 to {MAX_SERVERS}; see its --device"
            )
        memory = (struct.unpack("<QQ", stream.ask(_DEVICE_MEMORY, struct.pack("<I", i), 16)) for i in range(count))
        return [Device(address, free, total) for free, total in memory]


def is_connected(address: str) -> bool:
    """Whether this process has a connection to a server that stands.

    A server takes a second connection only when the first has ended, so it cannot be asked.
    """
    host, _, port = address.partition(":")
    try:
        there = {entry[4] for entry in socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)}
    except (socket.gaierror, UnicodeError):
        return False
    names = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ()
    return any(_peer(int(name)) in there and _stands(int(name)) for name in names)


# Python's own socket objects may make what they are made of non-blocking, for all who share it: so the C library is asked.


def _peer(fd: int) -> tuple[str, int] | None:
    """Whom a file descriptor is connected to; None if it is no IPv4 connection, or closed by now."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if ctypes.CDLL(None).getpeername(fd, name, ctypes.byref(size)) != 0:
        return None
    family = struct.unpack("=BB" if sys.platform == "darwin" else "=H", name.raw[:2])[-1]
    if family != socket.AF_INET:
        return None
    return socket.inet_ntoa(name.raw[4:8]), int.from_bytes(name.raw[2:4], "big")


def _stands(fd: int) -> bool:
    """Whether a connection is open: there is something to read, or nothing yet. Nothing is taken from it."""
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
    n = ctypes.CDLL(None, use_errno=True).recv(fd, ctypes.create_string_buffer(1), ctypes.c_size_t(1), flags)
    return n > 0 or (n < 0 and ctypes.get_errno() in (errno.EAGAIN, errno.EWOULDBLOCK))


def lost_text(addresses: Iterable[str], gone: Iterable[str], end: str) -> str:
    """A sentence about a connection that was lost.

    Args:
        addresses: all servers that were used.
        gone: those that seem to be it.
        end: what follows, such as "ggml ends this process".
    """
    known, missing = sorted(addresses), sorted(gone)
    if not missing or len(missing) == len(known) > 1:  # while a model is loaded connections are short
        who = f"one of the RPC servers {', '.join(known)}"
    else:
        who = f"the RPC server {' and '.join(missing)}"
    return f"the connection to {who} was lost, so {end}; docs/rpc.md says how to stay safe"


def _connect(address: str, seconds: float) -> socket.socket:
    host, _, port = address.partition(":")
    try:
        where = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except (socket.gaierror, UnicodeError):
        raise RPCError(f"the RPC server {address} is not known: {host!r} has no IPv4 address; check the name") from None
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    try:
        connection.connect(where)
    except OSError as error:
        connection.close()
        if isinstance(error, (socket.timeout, TimeoutError)):
            raise RPCError(_silent(address, seconds)) from None
        raise RPCError(
            f"the RPC server {address} cannot be reached: {error.strerror or error}; start `pypcd rpc-server` there, or check "
            "address and tunnel"
        ) from None
    return connection


def _silent(address: str, seconds: float) -> str:
    return (
        f"the RPC server {address} says nothing for {seconds:g} seconds; it serves one program at a time: end the one that uses "
        "it, or start another `pypcd rpc-server`"
    )


class _Stream:
    """Requests and answers on a connection, all of them within some seconds."""

    def __init__(self, connection: socket.socket, address: str, seconds: float) -> None:
        self._connection, self._address = connection, address
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def ask(self, command: int, request: bytes, size: int) -> bytes:
        try:
            self._connection.sendall(struct.pack("<BQ", command, len(request)) + request)
            told = self._read(8)
            if len(told) == 8 and struct.unpack("<Q", told)[0] == size:
                answer = self._read(size)
                if len(answer) == size:
                    return answer
        except TimeoutError:
            raise RPCError(_silent(self._address, self._seconds)) from None
        except OSError:
            told = b""
        what = "closed the connection" if not told else "does not speak ggml's RPC protocol"
        raise RPCError(
            f"{self._address} {what}; is `pypcd rpc-server`, of the same version as this pypcd, what listens there?"
        )

    def _read(self, n: int) -> bytes:
        """n bytes, or those that came before the end."""
        data = b""
        while len(data) < n:
            self._connection.settimeout(max(self._until - time.monotonic(), 1e-3))
            part = self._connection.recv(n - len(data))
            if not part:
                break
            data += part
        return data
