"""A model whose layers, caches and second keys lie on two servers on loopback: its rows and texts, and `--rpc`."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import TOKENS, Load, Tiny
from rpc_servers import needs_rpc, running
from test_backend import SHAPE

import pypcd
from pypcd import engine
from pypcd.llama import machine
from pypcd.settings.remote import handshake

pytestmark = needs_rpc


def command(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pypcd", *args], input=stdin, check=False, capture_output=True, text=True, timeout=300
    )


# -- rows: those of more settings are compared with the reference by `scripts/test --backend rpc` ---------------------


@pytest.mark.parametrize("name, pcd", [("native", "paper"), ("native", {"cache": "separate"}), ("stock", "window")])
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
    return command("demo", "--question", "215").stdout


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


def ask(url: str, **body: Any) -> Any:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def serving(*args: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pypcd", "serve", *args, "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if "OpenAI" in line:
            return process, line.split()[1].removesuffix("/v1")
    raise AssertionError(process.stderr.read())


def test_serve_answers_as_a_model_here_does_and_tells_of_a_server_that_is_lost(question: str) -> None:
    llm = pypcd.Llama("demo", pcd="paper", n_ctx=2048, n_threads=1)
    text = llm(question, max_tokens=12, temperature=0)["choices"][0]["text"]
    llm.close()
    with running() as servers:
        process, url = serving("demo", "--rpc", ",".join(server.address for server in servers))
        try:
            body = {"prompt": question, "max_tokens": 12, "temperature": 0}
            assert ask(url, pcd="paper", **body)["choices"][0]["text"] == text
            assert ask(url, pcd=False, **body)["choices"][0]["text"]

            servers[1].kill()
            with pytest.raises((OSError, http.client.HTTPException)):  # no answer that looks like a whole one
                ask(url, pcd="paper", **body)
            assert process.wait(30) == 1
            assert process.stderr is not None
            said = process.stderr.read()
            both = ", ".join(server.address for server in servers)
            assert f"the connection to an RPC server ({both}) was lost, so ggml ended llama-server; docs/rpc.md" in said
            assert len(said.splitlines()) < 5, said
        finally:
            process.kill()
            process.communicate()
