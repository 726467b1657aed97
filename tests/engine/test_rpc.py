"""A model whose layers, caches and second keys lie on two servers on loopback: its rows and texts, and `--rpc`; and what goes
wrong: addresses, servers that are none, `pypcd rpc-server`, one that is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest
from conftest import TOKENS, Load, Tiny
from rpc_servers import needs_rpc, running
from test_backend import SHAPE

import pypcd
from pypcd import engine, library
from pypcd.cli import main
from pypcd.llama import machine
from pypcd.settings.remote import PROTOCOL, handshake, parse_servers

pytestmark = needs_rpc


def command(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pypcd", *args], input=stdin, check=False, capture_output=True, text=True, timeout=300
    )


# -- rows: those of more settings are compared with the reference by `scripts/test --backend rpc` ---------------------


@pytest.mark.parametrize(
    "name, pcd",
    [("native", "paper"), ("stock", "window"), ("stock", "paper"), ("stock", {"cache": "separate"})],
)
def test_the_servers_compute_and_no_other_model_does_so_there(
    name: str, pcd: Any, tiny: Tiny, load: Load, rpc_servers: str
) -> None:
    path = tiny("llama", **SHAPE)
    addresses = rpc_servers.split(",")
    before = machine.has_gpu(), [one["name"] for one in machine.devices()]
    options: dict[str, Any] = {"pcd": pcd, "engine": name, "f16": True, "flash_attn": True}
    there = load(path, rpc_servers=rpc_servers, n_gpu_layers=-1, **options)
    also_there = load(path, rpc_servers=addresses, n_gpu_layers=-1, **options)
    here = load(path, **options)
    rows, devices = [], []
    for llm in (there, also_there, here):
        with engine.watch_graphs(llm) as graphs:
            llm.eval(TOKENS)
        devices.append({name for graph in graphs for name in graph.devices})
        rows.append(llm.pcd_logits(-1))
    for other in rows[1:]:  # the same kernels, in the same order
        assert (other.standard == rows[0].standard).all() and (other.local == rows[0].local).all()
    assert (rows[0].standard != rows[0].local).any()
    assert devices[0] == devices[1] > devices[2] and len(devices[0] - devices[2]) == 2, devices
    there.close()
    also_there.close()
    for address in addresses:
        handshake(address)  # it is free again, though `here` is open
    assert (machine.has_gpu(), [one["name"] for one in machine.devices()]) == before
    assert machine.has_gpu({"rpc_servers": rpc_servers})


# -- the options -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def question() -> str:
    return command("demo", "215").stdout


def test_generate_writes_the_same_text(question: str) -> None:
    with running() as servers:
        rpc = "--rpc=" + ",".join(server.address for server in servers)
        args = ["generate", "demo", "--pcd=on", "--max-tokens=12", "--threads=1"]
        here, there = command(*args, stdin=question), command(*args, rpc, stdin=question)
        assert there.returncode == 0, there.stderr
        assert there.stdout == here.stdout != ""
        said = json.loads(command("info", "demo", "--json", rpc).stdout)
        assert all(check["passed"] for check in said["self_test"]["checks"])
        assert "Traceback" not in "".join(server.log() for server in servers)


def test_serve_answers_as_a_model_here_does_and_tells_of_a_server_that_is_lost(question: str) -> None:
    llm = pypcd.Llama("demo", pcd="paper", n_ctx=2048, n_threads=1)
    text = llm(question, max_tokens=12, temperature=0)["choices"][0]["text"]
    llm.close()
    from serving import ask, greeting, serving  # where there is no llama-server this test is skipped

    with (
        running() as servers,
        serving("demo", "--parallel", "1", "--rpc", ",".join(one.address for one in servers)) as process,
    ):
        port = SimpleNamespace(port=int(greeting(process)["page"].strip("/").rpartition(":")[2]))
        body = {"prompt": question, "max_tokens": 12, "temperature": 0}
        plain, with_pcd = (ask(port, "/v1/completions", {**body, "pcd": pcd})[1]["choices"] for pcd in (False, "paper"))
        assert with_pcd[0]["text"] == text and plain[0]["text"]
        servers[1].kill()
        with pytest.raises((OSError, http.client.HTTPException)):  # no answer that looks like a whole one
            ask(port, "/v1/completions", {**body, "pcd": "paper"})
        assert process.wait(30) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        both = ", ".join(server.address for server in servers)
        assert f"the connection to an RPC server ({both}) was lost, so ggml ended llama-server; docs/rpc.md" in said
        assert len(said.splitlines()) < 5, said


# -- addresses -------------------------------------------------------------------------------------------------------


def test_addresses_are_taken_as_they_are() -> None:
    words = ["127.0.0.1:50052", "localhost:1", "gpu-1.example.org:65535"]
    assert parse_servers(words) == parse_servers(" , ".join(words)) == tuple(words)


@pytest.mark.parametrize(
    "given, said",
    [
        ("", "rpc_servers has ''; allowed: host:port"),
        ([], r"rpc_servers is \[\]; allowed: host:port .*None is for this machine alone"),
        ("there", "rpc_servers has 'there'; allowed: host:port"),
        ("http://a:5", "rpc_servers has 'http://a:5'"),
        ("[::1]:5", "rpc_servers has .*IPv4"),
        ("a:0", "rpc_servers has 'a:0', whose port is '0'; allowed: 1 to 65535"),
        ("a:65536", "whose port is '65536'"),
        ("a:1,b:1, a:01", "rpc_servers has a:1 twice; allowed: each server once; leave one out"),
        ([5], "rpc_servers has 5; allowed"),
    ],
)
def test_a_wrong_address_is_refused_before_anything_is_opened(given: object, said: str, tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=said):
        pypcd.Llama(tiny("llama"), rpc_servers=given)


# -- servers that are none -------------------------------------------------------------------------------------------

HELLO, COUNT, MEMORY = 14, 15, 11  # enum rpc_cmd


def answer(form: str, *values: int) -> bytes:
    return struct.pack("<Q", struct.calcsize("<" + form)) + struct.pack("<" + form, *values)


def version(major: int, minor: int) -> bytes:
    return answer("BBB25x", major, minor, 3)


GOOD = {HELLO: version(*PROTOCOL), COUNT: answer("I", 1), MEMORY: answer("QQ", 5, 9)}


@contextlib.contextmanager
def fake(answers: dict[int, bytes]) -> Iterator[str]:
    """A server that has these answers to commands, and closes the connection at any other; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as requests:
                    while head := requests.read(9):
                        command, size = struct.unpack("<BQ", head)
                        requests.read(size)
                        if command not in answers:
                            break
                        connection.sendall(answers[command])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_the_protocol_is_that_of_the_pinned_ggml() -> None:
    header = Path(llama_cpp.__file__).parent.parent / "include" / "ggml-rpc.h"
    text = header.read_text(encoding="utf-8")
    numbers = [int(re.findall(rf"define RPC_PROTO_{part}_VERSION +(\d+)", text)[0]) for part in ("MAJOR", "MINOR")]
    assert tuple(numbers) == PROTOCOL


@pytest.mark.parametrize(
    "answers, said",
    [
        ({HELLO: version(6, 0)}, r"speaks version 6\.0\.3 of ggml's protocol, this pypcd 7\.0; use the same version"),
        ({HELLO: b"SSH-2.0-OpenSSH_9.6\r\n"}, "does not speak ggml's RPC protocol; is `pypcd rpc-server`"),
        ({}, "closed the connection; is `pypcd rpc-server`"),
        ({HELLO: GOOD[HELLO], COUNT: answer("I", 0)}, "have 0 devices together; allowed: 1 to 16; see their --device"),
        ({HELLO: GOOD[HELLO], COUNT: answer("I", 17)}, "have 17 devices together"),
    ],
)
def test_what_is_no_server_of_this_version_is_an_exception(answers: dict[int, bytes], said: str, tiny: Tiny) -> None:
    with fake(answers) as address, pytest.raises(pypcd.RPCError, match=f"{address}.*{said}") as raised:
        pypcd.Llama(tiny("llama"), rpc_servers=address)
    assert isinstance(raised.value, pypcd.PCDError) and isinstance(raised.value, ConnectionError)


def test_a_silent_server_is_not_waited_for() -> None:
    said = "says nothing for 0.2 seconds; it serves one program at a time: end the one that uses it"
    with fake({HELLO: b""}) as address, pytest.raises(pypcd.RPCError, match=said):
        handshake(address, 0.2)


def test_nobody_there(tiny: Tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(pypcd.RPCError, match=f"{address} cannot be reached: .*`pypcd rpc-server`"):
        pypcd.Llama(tiny("llama"), rpc_servers=address)
    with pytest.raises(pypcd.RPCError, match="no-such-host.invalid:5 is not known"):
        pypcd.Llama(tiny("llama"), rpc_servers="no-such-host.invalid:5")


def test_devices_are_told_with_their_memory() -> None:
    with fake({**GOOD, COUNT: answer("I", 2)}) as address:
        devices = engine.RemoteDevices([address]).devices
    assert [(one["description"], one["free"], one["memory"]) for one in devices] == [(address, 5, 9)] * 2


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
    far = [{"description": "10.0.0.2:5", "free": 2**36, "memory": 2**36}]
    near = [{**far[0], "description": "127.0.0.1:5"}]  # may be the same memory
    alone, loopback, beyond = (machine.checked_n_ctx(path, {}, remote=devices) for devices in ([], near, far))
    assert alone == loopback <= beyond
    with pytest.raises(ValueError, match="this machine has"):
        machine.checked_n_ctx(path, {"n_ctx": 2**24})
    assert machine.checked_n_ctx(path, {"n_ctx": 2**24}, remote=near) == 2**24
    with pytest.raises(ValueError, match="this machine has"):
        machine.checked_n_ctx(path, {"n_ctx": 2**24, "n_gpu_layers": 0}, remote=near)


# -- pypcd rpc-server ------------------------------------------------------------------------------------------------


def test_rpc_server_tells_how_to_reach_it_and_ends_in_order() -> None:
    with running(1) as (server,):
        assert "no authentication and no encryption" in server.log()
        assert "can read and write" not in server.log()  # it listens on loopback
        port = server.address.partition(":")[2]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert server.process.stdout is not None
        tunnel, use = server.process.stdout.read().splitlines()  # and nothing of ggml's
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel and f"--rpc {server.address}" in use
        assert "ended by itself" not in server.log()


def test_rpc_server_on_a_network_warns() -> None:
    with running(1, "--host=0.0.0.0") as (server,):
        assert "whoever reaches 0.0.0.0 can read and write this process" in server.log()


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


# -- a server that is busy, or lost ----------------------------------------------------------------------------------

LOST = "pypcd: the connection to an RPC server was lost, so ggml ends this process; docs/rpc.md says how to stay safe\n"
CHILD = """
import sys, pypcd
path, servers = sys.argv[1:]
llm = pypcd.Llama(path, pcd="paper", n_ctx=512, n_threads=1, rpc_servers=servers)
llm.eval([1, 5, 6])
print("ready", flush=True)
if sys.stdin.readline() == "go on\\n":
    pypcd.Llama(path, n_ctx=512, rpc_servers=servers)
    next(iter(llm.generate([1, 5, 6, 7], temp=0)))
    print("one token")
"""


@contextlib.contextmanager
def child(path: Path, addresses: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a model on these servers, which uses them when it reads "go on", and then ends."""
    command = [sys.executable, "-c", CHILD, str(path), addresses]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_server_serves_one_process_at_a_time(tiny: Tiny) -> None:
    path = tiny("llama")
    with running(1) as (server,), child(path, server.address) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with pytest.raises(pypcd.RPCError, match="it serves one program at a time: end the one that uses it"):
            handshake(server.address, 0.5)
        assert process.communicate("go on\n", timeout=60) == ("one token\n", "")
        pypcd.Llama(path, n_ctx=512, rpc_servers=server.address).close()  # it is free again


@pytest.mark.parametrize("next_line", ["go on", "end"])
def test_a_server_that_is_lost_ends_the_process_with_a_sentence(next_line: str, tiny: Tiny) -> None:
    """When it is used next, at the latest when the model is freed."""
    with running() as servers, child(tiny("llama"), ",".join(server.address for server in servers)) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        servers[1].kill()
        out, err = process.communicate(f"{next_line}\n", timeout=60)
        assert (out, err, process.returncode) == ("", LOST, -signal.SIGABRT)
