"""What goes wrong with servers on other machines: addresses, servers that are none, `pypcd rpc-server`, one that is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest
from conftest import Tiny
from hypothesis import given
from hypothesis import strategies as st
from rpc_servers import RPCServer, needs_rpc, running

import pypcd
from pypcd import library
from pypcd.cli import main
from pypcd.llama import machine
from pypcd.settings.remote import MAX_SERVERS, PROTOCOL, Device, handshake, is_connected, parse_servers

HELLO = struct.pack("<Q", 28) + bytes([*PROTOCOL, 0, 0]) + bytes(24)  # a server's answer to the first question


# -- addresses -------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.text("az09.-", max_size=20).map("h".__add__), st.integers(1, 65535)),
        min_size=1,
        max_size=16,
        unique=True,
    )
)
def test_addresses_are_taken_as_they_are(pairs: list[tuple[str, int]]) -> None:
    words = [f"{host}:{port}" for host, port in pairs]
    assert parse_servers(words) == parse_servers(" , ".join(words)) == tuple(words)


@pytest.mark.parametrize(
    "given_, said",
    [
        ("", "rpc_servers has ''; allowed: host:port"),
        ([], r"rpc_servers is \[\]; allowed: host:port .*None is for this machine alone"),
        ("there", "rpc_servers has 'there'; allowed: host:port"),
        (":5", "rpc_servers has ':5'"),
        ("a b:5", "rpc_servers has 'a b:5'"),
        ("http://a:5", "rpc_servers has 'http://a:5'"),
        ("[::1]:5", "rpc_servers has .*IPv4"),
        ("a:0", "rpc_servers has 'a:0', whose port is '0'; allowed: 1 to 65535"),
        ("a:65536", "whose port is '65536'"),
        ("a:x", "whose port is 'x'"),
        ("a:1,,b:1", "rpc_servers has ''"),
        ("a:1,b:1, a:01", "rpc_servers has a:1 twice; allowed: each server once; leave one out"),
        ([5], "rpc_servers has 5; allowed"),
        ([f"a:{i}" for i in range(1, 18)], "rpc_servers has 17 servers; allowed: at most 16; leave some out"),
    ],
)
def test_a_wrong_address_is_refused_before_anything_is_opened(given_: object, said: str, tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=said):
        pypcd.Llama(tiny("llama"), rpc_servers=given_)


def test_the_protocol_is_that_of_the_pinned_ggml() -> None:
    header = Path(llama_cpp.__file__).parent.parent / "include" / "ggml-rpc.h"
    text = header.read_text(encoding="utf-8")
    numbers = [int(re.findall(rf"define RPC_PROTO_{part}_VERSION +(\d+)", text)[0]) for part in ("MAJOR", "MINOR")]
    assert tuple(numbers) == PROTOCOL
    assert int(re.findall(r"define GGML_RPC_MAX_SERVERS +(\d+)", text)[0]) == MAX_SERVERS


# -- servers that are none -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with each connection; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def says(*parts: bytes) -> Callable[[socket.socket], None]:
    """Answers each request, which is read first, with the next part."""

    def answer(connection: socket.socket) -> None:
        for part in parts:
            head = connection.recv(9, socket.MSG_WAITALL)
            connection.recv(struct.unpack("<Q", head[1:])[0], socket.MSG_WAITALL)
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    return answer


def version(major: int, minor: int) -> bytes:
    return struct.pack("<Q", 28) + bytes([major, minor, 3, 0]) + bytes(24)


@pytest.mark.parametrize(
    "answer, said",
    [
        (says(version(6, 0)), r"speaks version 6\.0\.3 of ggml's protocol, this pypcd 7\.0; use the same version"),
        (says(version(7, 1)), r"speaks version 7\.1\.3"),
        (says(version(8, 0)), r"speaks version 8\.0\.3"),
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "does not speak ggml's RPC protocol; is `pypcd rpc-server`"),
        (says(struct.pack("<Q", 3) + b"\2\0\0"), "does not speak ggml's RPC protocol"),
        (says(struct.pack("<Q", 28) + bytes(7)), "does not speak ggml's RPC protocol"),
        (lambda connection: None, "closed the connection; is `pypcd rpc-server`"),
        (says(HELLO), "closed the connection"),
        (says(HELLO, struct.pack("<QI", 4, 0)), "has 0 devices; allowed: 1 to 16"),
        (says(HELLO, struct.pack("<QI", 4, 17)), "has 17 devices"),
        (says(HELLO, struct.pack("<QI", 4, 1), struct.pack("<QQ", 8, 1)), "does not speak ggml's RPC protocol"),
    ],
)
@needs_rpc
def test_what_is_no_server_of_this_version_is_an_exception(
    answer: Callable[[socket.socket], None], said: str, tiny: Tiny
) -> None:
    with fake(answer) as address, pytest.raises(pypcd.RPCError, match=f"{address}.*{said}") as raised:
        pypcd.Llama(tiny("llama"), rpc_servers=address)
    assert isinstance(raised.value, (pypcd.PCDError)) and isinstance(raised.value, ConnectionError)


def test_devices_are_told_with_their_memory() -> None:
    devices = [struct.pack("<QQQ", 16, 5 + i, 9 + i) for i in range(2)]
    with fake(says(HELLO, struct.pack("<QI", 4, 2), *devices)) as address:
        assert handshake(address) == [(address, 5, 9), (address, 6, 10)]


def test_a_silent_server_is_not_waited_for() -> None:
    quiet = threading.Event()
    with fake(lambda connection: quiet.wait(20)) as address:
        with pytest.raises(pypcd.RPCError, match="says nothing for 0.2 seconds; it serves one program at a time"):
            handshake(address, 0.2)
        quiet.set()


@needs_rpc
def test_nobody_there(tiny: Tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(pypcd.RPCError, match=f"{address} cannot be reached: .*`pypcd rpc-server`"):
        pypcd.Llama(tiny("llama"), rpc_servers=address)
    with pytest.raises(pypcd.RPCError, match="no-such-host.invalid"):
        pypcd.Llama(tiny("llama"), rpc_servers="no-such-host.invalid:5")


def test_a_pypcd_without_rpc_says_so(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if any((Path(llama_cpp.__file__).parent / "lib").glob("libggml-rpc*")):
        pytest.skip("llama-cpp-python has RPC of its own")
    monkeypatch.setattr(library, "library_dirs", lambda: [tmp_path])
    with pytest.raises(pypcd.LibraryError, match="-DGGML_RPC=ON"):
        pypcd.Llama(tiny("llama"), rpc_servers="127.0.0.1:5")
    assert main(["rpc-server", "--port", "0"]) == 2
    assert "was built with ggml's RPC" in capsys.readouterr().err


def test_memory_of_other_machines_counts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tiny("llama"))
    monkeypatch.setattr(machine, "total_memory", lambda: 2**20)
    far = [Device("10.0.0.2:5", 2**36, 2**36)]
    near = [Device("127.0.0.1:5", 2**36, 2**36)]  # may be the same memory
    alone, loopback, remote = (machine.checked_n_ctx(path, {}, remote=devices) for devices in ([], near, far))
    assert alone == loopback <= remote
    with pytest.raises(ValueError, match="this machine has"):
        machine.checked_n_ctx(path, {"n_ctx": 2**24})
    assert machine.checked_n_ctx(path, {"n_ctx": 2**24}, remote=near) == 2**24
    with pytest.raises(ValueError, match="this machine has"):
        machine.checked_n_ctx(path, {"n_ctx": 2**24, "n_gpu_layers": 0}, remote=near)


def test_looking_for_a_connection_leaves_no_file_open_and_nothing_else_changed() -> None:
    """Whether a descriptor is blocking belongs to all who share it: ggml's own connection, which waits for answers, too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        address, before = f"127.0.0.1:{here[1]}", len(os.listdir("/dev/fd"))
        assert not is_connected(address)
        with socket.create_connection(here) as ours:
            theirs, shared = listener.accept()[0], os.dup(ours.fileno())  # as a library's
            socket.setdefaulttimeout(5)
            try:
                assert is_connected(address)
            finally:
                socket.setdefaulttimeout(None)
            assert os.get_blocking(ours.fileno()) and os.get_blocking(theirs.fileno()) and os.get_blocking(shared)
            theirs.sendall(b"x")
            assert is_connected(address)
            assert os.read(shared, 9) == b"x", "looking took what the server sent"
            os.close(shared)
            theirs.close()
            assert not is_connected(address)
        assert len(os.listdir("/dev/fd")) == before


# -- pypcd rpc-server ------------------------------------------------------------------------------------------------


@needs_rpc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_rpc_server_tells_what_it_is_and_ends_in_order(how: signal.Signals) -> None:
    server = RPCServer()
    try:
        assert "no authentication and no encryption" in server.log()
        assert "can read and write" not in server.log()  # it listens on loopback
        assert server.process.stdout is not None
        port = server.address.partition(":")[2]
        told = [server.process.stdout.readline() for _ in range(3)]
        assert "GiB free" in told[0]
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in told[1]
        assert f"--rpc {server.address}" in told[2]
        server.process.send_signal(how)
        assert server.process.wait(20) == 0
        assert server.process.stdout.read() == ""
        assert len(server.log().splitlines()) == 1
    finally:
        server.end()


@needs_rpc
def test_rpc_server_on_a_network_warns() -> None:
    server = RPCServer("--host=0.0.0.0")
    try:
        assert "whoever reaches 0.0.0.0 can read and write this process" in server.log()
    finally:
        server.end()


@needs_rpc
@pytest.mark.parametrize(
    "args, said",
    [
        (["--host=::1"], "host is '::1'; allowed: an IPv4 address"),
        (["--host=192.0.2.1"], "host is '192.0.2.1', which is no address of this machine"),
        (["--port=70000"], "port is 70000; allowed: an integer from 0 to 65535"),
        (["--device=GPU7"], "there is no device 'GPU7'.*; allowed: .*CPU"),
    ],
)
def test_rpc_server_refuses(args: list[str], said: str, capsys) -> None:
    assert main(["rpc-server", "--port", "0", *args]) == 2
    assert re.search(said, capsys.readouterr().err)


@needs_rpc
def test_rpc_server_on_a_port_that_is_taken(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["rpc-server", f"--port={port}"]) == 2
    assert f"port is {port}, which 127.0.0.1 cannot listen on" in capsys.readouterr().err


# -- a server that is busy, or lost ----------------------------------------------------------------------------------

LOST = "pypcd: the connection to the RPC server {} was lost, so ggml ends this process; docs/rpc.md says how to stay safe\n"
CHILD = """
import sys, pypcd
path, servers = sys.argv[1:]
llm = pypcd.Llama(path, pcd="paper", n_ctx=512, n_threads=1, rpc_servers=servers)
llm.eval([1, 5, 6])
print("ready", flush=True)
sys.stdin.readline()
print("something that was not flushed")
try:
    pypcd.Llama(path, n_ctx=512, rpc_servers=servers)
    print("opened again")
except pypcd.RPCError as error:
    print(error)
try:
    next(iter(llm.generate([1, 5, 6, 7], temp=0)))
    print("one token")
except Exception as error:
    print("an exception:", error)
"""


@contextlib.contextmanager
def child(path: Path, servers: list[RPCServer]) -> Iterator[subprocess.Popen[str]]:
    """A process with a model on these servers, which goes on when it reads a line."""
    addresses = ",".join(server.address for server in servers)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), addresses],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_rpc
def test_a_server_serves_one_process_at_a_time(tiny: Tiny) -> None:
    path = tiny("llama")
    with running(1) as servers, child(path, servers) as process:
        with pytest.raises(pypcd.RPCError, match="it serves one program at a time: end the one that uses it"):
            handshake(servers[0].address, 0.5)
        out, err = process.communicate("\n", timeout=60)
        assert process.returncode == 0 and "opened again\none token" in out, err
        pypcd.Llama(path, n_ctx=512, rpc_servers=servers[0].address).close()  # it is free again


@needs_rpc
def test_a_server_that_is_lost_ends_the_process_with_a_sentence(tiny: Tiny) -> None:
    with running() as servers, child(tiny("llama"), servers) as process:
        servers[1].kill()
        out, err = process.communicate("\n", timeout=60)
        lost = f"the connection to the RPC server {servers[1].address} was lost"
        assert process.returncode == -signal.SIGABRT
        assert f"{lost}, and with it the models that are open there" in out  # an exception, where nothing was sent yet
        assert "something that was not flushed" in out
        assert "one token" not in out and "an exception" not in out
        assert err == LOST.format(servers[1].address)
