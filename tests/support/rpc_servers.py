"""Servers of `pypcd rpc-server` on loopback, each a process of its own, for tests that spread a model over them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from pypcd import LibraryError, engine


def can_run() -> bool:
    """Whether this pypcd, or its llama-cpp-python, has ggml's RPC."""
    try:
        engine.rpc_library()
    except LibraryError:
        return False
    return True


needs_rpc = pytest.mark.skipif(not can_run(), reason="pypcd was built without RPC")


class RPCServer:
    """One server.

    Attributes:
        address: host:port.
        process: its process.
    """

    def __init__(self, *options: str) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed in end()
        command = [sys.executable, "-m", "pypcd", "rpc-server", "--port=0", "--threads=1", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"listening on (\S+) ", line)
        assert found, line + self.log()
        self.address = found[1]

    def log(self) -> str:
        """What it wrote on stderr until now."""
        self._log.seek(0)
        return self._log.read()

    def kill(self) -> None:
        """As a machine that goes away at once."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def running(n: int = 2, *options: str) -> Iterator[list[RPCServer]]:
    """A block with n servers; what is added to the list is ended too."""
    started: list[RPCServer] = []
    try:
        for _ in range(n):
            started.append(RPCServer(*options))
        yield started
    finally:
        for server in started:
            server.end()


@pytest.fixture(scope="module")
def rpc_servers() -> Iterator[str]:
    """Two servers for the models of one test file, as the argument of pypcd.Llama. They serve one process: this one. They
    compute on the CPU, as models without servers do in tests: rows are then the same bit for bit."""
    with running(2, "--device=CPU") as servers:
        yield ",".join(server.address for server in servers)
