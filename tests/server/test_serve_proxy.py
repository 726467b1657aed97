"""Two servers behind one address: nginx, with the file that the docs show."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import BASE, PROMPTS, SECONDS, SMALL, N, Quiet, ask, is_greedy, listening, within

import pypcd
from pypcd.gguf import DEMO_MODEL
from pypcd.llama import machine
from pypcd.server import Server

pytest_plugins = ["serving"]  # fixtures

CONF = Path(__file__).parents[2] / "docs" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
KEY = {"Authorization": "Bearer secret"}
SETTINGS: list[Any] = [False, True, "cautious", {"beta": 8.0}]
ENDLESS = {"prompt": "a", "n_predict": -1, "ignore_eos": True}

pytestmark = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed: apt install nginx-light, or brew install nginx"
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("secret\nother\n")
    return path


def start(keys: Path, port: int = 0, model: str = "demo") -> Any:
    """A server; each needs a key, and knows two."""
    options = [*SMALL, "--api-key-file", str(keys), "--slots"]
    return Server(model, pcd=BASE, port=port, parallel=4, options=options).running()


@pytest.fixture
def servers(keys: Path) -> Iterator[list[Server]]:
    with start(keys) as one, start(keys) as other:
        assert one.wait_until_ready() and other.wait_until_ready()
        yield [one, other]


@contextlib.contextmanager
def nginx(servers: list[Server], folder: Path, change: Callable[[str], str] = lambda conf: conf) -> Iterator[Any]:
    """With the docs' file, but for its three ports."""
    port = machine.free_port("127.0.0.1", 0)
    conf = change(CONF.read_text(encoding="utf-8"))
    for old, new in ((8080, port), *zip((8081, 8082), (server.port for server in servers))):
        assert conf.count(f"127.0.0.1:{old}") == 1
        conf = conf.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = " ".join(f"{name}_temp_path {folder / name};" for name in paths)  # not the system's
    (folder / "nginx.conf").write_text(conf.replace("http {\n", f"http {{\n    {own}\n"))
    assert NGINX
    first = "daemon off; error_log stderr;" + f" pid {folder / 'pid'};"
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "log"), "-g", first]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert within(lambda: listens(port)), process.communicate()[1]
            yield SimpleNamespace(port=port)
        finally:
            process.terminate()
            process.communicate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def proxy(servers: list[Server], tmp_path: Path) -> Iterator[Any]:
    with nginx(servers, tmp_path) as made:
        yield made


# -- requests ---------------------------------------------------------------------------------------------------------


def n_active(server: Server) -> int:
    return sum(slot["is_processing"] for slot in ask(server, "/slots", **KEY)[1])


def n_tokens(server: Server) -> float:
    """Of all answers so far."""
    lines = ask(server, "/metrics", **KEY)[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total "))


def stream(port: int, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    body = json.dumps({**ENDLESS, "stream": True, **fields})
    connection.request("POST", "/completion", body, {"Content-Type": "application/json", **KEY})
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def test_both_answer_as_each_does(servers: list[Server], proxy: Any, llm: pypcd.Llama) -> None:
    body = {"n_predict": N, "temperature": 0, "return_tokens": True}
    jobs = [(prompt, setting) for prompt in PROMPTS for setting in SETTINGS]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        bodies = [{**body, "prompt": prompt, "pcd": setting} for prompt, setting in jobs]
        answers = list(pool.map(lambda body: ask(proxy, "/completion", body, **KEY), bodies))
    for (prompt, setting), (status, answer) in zip(jobs, answers):
        assert status == 200, answer
        is_greedy(llm, prompt, setting, answer["tokens"])
    assert all(n_tokens(server) > 0 for server in servers), "both had some"
    assert ask(proxy, "/completion", {**body, "prompt": "a"})[0] == 401
    status, answer = ask(proxy, "/completion", {**body, "prompt": "a", "pcd": {"beta": -1}}, **KEY)
    assert status == 400 and "beta is -1" in answer["error"]["message"]


def test_a_stream_ends_with_its_client(servers: list[Server], proxy: Any) -> None:
    connection, response = stream(proxy.port)
    assert response.readline().startswith(b"data: ") and sum(map(n_active, servers)) == 1
    response.close()
    connection.close()
    assert within(lambda: sum(map(n_active, servers)) == 0)


def test_one_is_killed_and_the_other_goes_on(
    servers: list[Server],
    proxy: Any,
    keys: Path,
    llm: pypcd.Llama,
) -> None:
    """A stream that breaks off is an error, not an end; a request that nothing was answered to is answered by the other."""
    broken, response = stream(proxy.port)
    assert response.readline().startswith(b"data: ")
    dying, living = sorted(servers, key=n_active, reverse=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        whole = {"prompt": PROMPTS[0], "n_predict": 400, "ignore_eos": True, "temperature": 0, "return_tokens": True}
        waiting = [pool.submit(ask, proxy, "/completion", {**whole, "pcd": setting}, **KEY) for setting in SETTINGS]
        assert within(lambda: n_active(dying) > 1 and n_active(living) > 0)
        assert dying._process
        os.kill(dying._process.pid, signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        broken.close()
        for setting, answer in zip(SETTINGS, waiting):
            status, said = answer.result()
            assert status == 200, said
            is_greedy(llm, PROMPTS[0], setting, said["tokens"][:N], ends=False)
    for _ in range(6):
        assert ask(proxy, "/completion", {"prompt": "a", "n_predict": 1}, **KEY)[0] == 200

    with start(keys, dying.port) as again:  # it is found again, 10 seconds after its failure
        assert again.wait_until_ready()

        def gets_some() -> bool:
            first, second = stream(proxy.port), stream(proxy.port)
            active = n_active(again)
            for connection, response in (first, second):
                response.close()
                connection.close()
            return active > 0

        assert within(gets_some)


def test_nginx_holds_nothing_back(tmp_path: Path) -> None:
    """In place of a server: what writes one event, and the next one only when that has arrived."""
    arrived = threading.Event()

    class Slow(Quiet):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for i in range(2):
                self.wfile.write(b"data: %d\n\n" % i)
                assert arrived.wait(SECONDS)

    with listening(Slow) as port:
        upstream: Any = SimpleNamespace(port=port)
        with nginx([upstream, upstream], tmp_path) as proxy:
            connection, response = stream(proxy.port)
            assert response.readline() == b"data: 0\n"
            arrived.set()
            assert response.read() == b"\ndata: 1\n\n"
            connection.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes: run it on Linux or a Mac")
def test_nginx_passes_over_a_server_that_still_loads(keys: Path, tmp_path: Path) -> None:
    slow = shutil.copy(DEMO_MODEL, tmp_path / "slow.gguf")
    loading, ready = start(keys, model=str(slow)), start(keys)
    os.unlink(slow)
    os.mkfifo(slow)  # which is read without an end
    with loading as one, ready as other, nginx([one, other], tmp_path) as proxy:
        assert other.wait_until_ready() and within(lambda: listens(one.port))
        assert ask(one, "/completion", {"prompt": "a"}, **KEY)[0] == ask(one, "/health")[0] == 503
        for _ in range(4):
            assert ask(proxy, "/completion", {"prompt": "a", "n_predict": 1}, **KEY)[0] == 200
