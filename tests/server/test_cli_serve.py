"""`pypcd serve`: how it starts and ends, what it prints, and what it says of mistakes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny

import pypcd
from pypcd import PCDConfig
from pypcd import server as server_module
from pypcd.cli import main
from pypcd.config import PRESETS
from pypcd.gguf import DEMO_MODEL

try:
    server_module.executable()
    BUILT = True
except pypcd.LibraryError:
    BUILT = False
needs_server = pytest.mark.skipif(
    not BUILT, reason="llama-server was not built (PYPCD_SERVER=OFF); pip install . without that builds it"
)

SMALL = ["--", "--ctx-size", "512", "--threads", "1", "--threads-batch", "1"]
SECONDS = 60


@contextlib.contextmanager
def serving(*args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pypcd", "serve", *args, "--port", "0", *SMALL]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "80"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = subprocess.Popen(command, env=env, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def greeting(process: subprocess.Popen[str]) -> dict[str, str]:
    """The lines that it prints once it is ready, by their first word."""
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(4)]
    assert all(lines), process.communicate()[1]
    return {"head": lines[0], **{line.split()[0]: line.split(None, 1)[1].strip() for line in lines[1:]}}


def gone(port: int) -> bool:
    """Whether nobody listens there any more, within some seconds."""
    for _ in range(SECONDS * 10):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return True
        time.sleep(0.1)
    return False


# -- it works ---------------------------------------------------------------------------------------------------------


@needs_server
def test_of_several_models_it_says_what_each_does(tiny: Tiny) -> None:
    mamba = tiny("mamba")
    with serving("demo=cautious", str(mamba)) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(6)]
        assert lines[0] == "2 models | Ctrl-C to end\n"
        width = max(len(mamba.stem), 4)
        assert lines[1] == f"  {'demo':<{width}}  PCD cautious where a request does not say\n"
        assert lines[2] == f"  {mamba.stem:<{width}}  PCD off where a request does not say\n"
        words = shlex.split(lines[5])[1:]
        request = urllib.request.Request(words[2], words[4].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "")
    assert err.startswith(f"pypcd: {mamba.stem}: PCD cannot run here: ") and err.count("\n") == 1


@needs_server
def test_a_folders_models_are_loaded_when_they_are_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(tiny("llama"), tmp_path / f"{name}.gguf")
    with serving(str(tmp_path), "--pcd", "cautious") as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(6)]
        assert lines[1:3] == [
            f"  {name}  PCD cautious where a request does not say; loaded when it is asked for\n" for name in "ab"
        ]
        address = lines[3].split()[1]
        for name in ("b", "a:pcd-window"):
            body = json.dumps({"model": name, "prompt": "a", "n_predict": 1}).encode()
            with urllib.request.urlopen(address + "completion", body, timeout=SECONDS) as answer:
                assert json.load(answer)["model"] == name[0]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "", "")


@needs_server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_and_ends_cleanly(number: signal.Signals) -> None:
    with serving("demo", "--pcd", "cautious") as process:
        said = greeting(process)
        assert said["head"].startswith("demo | PCD cautious where a request does not say")
        words = shlex.split(said["try"])
        assert words[0] == "curl" and words[2] == said["OpenAI"] + "/chat/completions"
        assert json.loads(words[4])["model"] == "demo:pcd-cautious"
        request = urllib.request.Request(words[2], words[4].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
        with urllib.request.urlopen(said["page"], timeout=SECONDS) as answer:
            assert b"<title>" in answer.read()
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "", "")
        assert gone(int(said["page"].rsplit(":", 1)[1].strip("/")))


HINT = (
    'pypcd: PCD is off; "pcd": "window:relative_top=0.1" in a request turns it on for that one, --pcd SETTING for all\n'
)


@needs_server
def test_pcd_is_off_until_a_request_asks_and_one_line_says_how() -> None:
    with serving("demo", "--parallel", "1") as process:  # gentle contrasts nothing below 300 tokens
        said = greeting(process)
        assert said["head"].startswith("demo | PCD off where a request does not say")

        def ask(path: str, **body: object) -> Any:
            data = json.dumps(body).encode() if body else None
            with urllib.request.urlopen(said["page"] + path, data, timeout=SECONDS) as answer:
                return json.load(answer)

        prompt = "".join(random.Random(0).choices("abcdef0123456789 ", k=600))
        fields = {"prompt": prompt, "n_predict": 12, "temperature": 0, "return_tokens": True}
        plain, off, gentle = (ask("completion", **fields, **pcd) for pcd in ({}, {"pcd": False}, {"pcd": "gentle"}))
        assert plain["generation_settings"]["pcd"] is False and "pcd_twins" not in plain["timings"]
        assert gentle["tokens_evaluated"] > 300 and gentle["timings"]["pcd_twins"] > 0
        assert plain["tokens"] == off["tokens"] != gentle["tokens"]

        props, models = ask("props")["pcd"], [entry["id"] for entry in ask("v1/models")["data"]]
        assert props["default"] is False and {"gentle", "window"} <= set(props["presets"]) and props["per_request"]
        assert {"demo", "demo:pcd-gentle", "demo:pcd-window"} <= set(models)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    with pypcd.Llama("demo", pcd=False, n_ctx=512, n_threads=1, n_threads_batch=1) as llm:
        tokens = [token for token, _ in zip(llm.generate(llm.tokenize(prompt.encode()), temp=0), range(12))]
    assert plain["tokens"] == tokens
    assert (process.returncode, out, err) == (0, "", HINT)


@needs_server
@pytest.mark.parametrize("args", [["demo", "--pcd", "off"], ["demo=off"], ["demo=gentle"]], ids=" ".join)
def test_who_chose_a_setting_is_not_told_how(args: list[str]) -> None:
    with serving(*args) as process:
        greeting(process)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS) == ("", "")


@needs_server
def test_it_ends_in_the_middle_of_an_answer() -> None:
    with serving("demo", "--parallel", "1") as process:
        said = greeting(process)
        body = json.dumps({"prompt": "a", "n_predict": -1, "ignore_eos": True, "stream": True}).encode()
        with urllib.request.urlopen(said["page"] + "completion", body, timeout=SECONDS) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
            with contextlib.suppress(OSError, http.client.IncompleteRead):
                stream.read()


@needs_server
def test_the_server_goes_with_the_command(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("Linux alone can promise that")
    with serving("demo") as process:
        port = int(greeting(process)["page"].rsplit(":", 1)[1].strip("/"))
        process.kill()
        process.wait(SECONDS)
        assert gone(port)


@needs_server
def test_another_address_without_a_key_is_warned_of() -> None:
    with serving("demo", "--pcd", "off", "--host", "0.0.0.0") as process:
        greeting(process)
        process.send_signal(signal.SIGINT)
        warning = process.communicate(timeout=SECONDS)[1]
    assert warning == "pypcd: anybody who reaches 0.0.0.0 can use this server; --api-key KEY keeps others out\n"


@needs_server
def test_a_key_is_asked_for_and_not_shown() -> None:
    with serving("demo", "--api-key", "secret", "--pcd", "off") as process:
        said = greeting(process)
        assert json.loads(shlex.split(said["try"])[-1])["model"] == "demo"  # there is no name for off
        assert "-H 'Authorization: Bearer KEY'" in said["try"] and "secret" not in str(said)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(said["OpenAI"] + "/models", timeout=SECONDS)
    command = server_module.Server("demo", port=0, api_key="secret").command
    assert "secret" not in str(command), "other users of the machine can read a command line"


@needs_server
def test_a_model_that_cannot_run_pcd_is_served_plainly_and_says_why(tiny: Tiny) -> None:
    with serving(str(tiny("mamba"))) as process:
        said = greeting(process)
        assert ":pcd" not in said["try"] and "| PCD off where" in said["head"]
        request = urllib.request.Request(
            said["page"] + "completion", b'{"prompt": "a", "n_predict": 1, "pcd": true}', method="POST"
        )
        with pytest.raises(urllib.error.HTTPError, match="400") as error:
            urllib.request.urlopen(request, timeout=SECONDS)
        assert "Field 'pcd': PCD cannot run here: " in json.load(error.value)["error"]["message"]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS)[1].startswith("pypcd: PCD cannot run here: ")


# -- mistakes ---------------------------------------------------------------------------------------------------------


@needs_server
def test_an_address_may_be_written_as_in_a_url() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("there is no IPv6: on a machine with it, this runs")
    for host in ("::1", "[::1]"):
        made = server_module.Server("demo", port=0, host=host)
        assert made.url == f"http://[::1]:{made.port}" and made.command[made.command.index("--host") + 1] == "::1"


def fails(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status and the sentence of a command that must not start a server."""
    try:
        status: Any = main(["serve", *args])
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return int(status), err


@needs_server
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nosuch.gguf"], "pypcd: there is no model file nosuch.gguf; "),
        (["demo", "--pcd", "cautius"], "pypcd: pcd is 'cautius', which is not a setting (did you mean 'cautious'?)"),
        (["demo", "--port", "70000"], "pypcd: port is 70000; allowed: an integer from 0 to 65535"),
        (["demo", "--parallel", "192"], "pypcd: parallel is 192; allowed: an integer from 1 to 191"),
        (["demo", "--host", "300.1.1.1"], "pypcd: host is '300.1.1.1', which is no address of this machine"),
        (["demo", "--port", "0", "--", "--nosuch"], "pypcd: llama-server: invalid argument: --nosuch; "),
        (["demo", "--port", "0", "--", "-t", "x"], 'pypcd: llama-server: error while handling argument "-t"'),
        (["demo", "--pot", "1"], "pypcd serve: error: there is no option --pot (did you mean '--port'?)"),
        (["demo", "--parallel", "x"], "argument --parallel: 'x'; allowed: an integer of at least 1"),
        (["demo", "other"], "pypcd: there is no model file other; "),
        (["demo", "demo=off"], "pypcd: two models are called 'demo': "),
        (["demo=cautius"], "pypcd: demo: pcd is 'cautius', which is not a setting (did you mean 'cautious'?)"),
        (["nosuch.ini"], "pypcd: there is no file of models nosuch.ini; "),
        (["x.ini=off"], "pypcd: x.ini has a setting behind it, 'off'; in a file of models each has its own, pcd = "),
        ([str(Path(__file__).parent)], " is a folder without a .gguf file; "),
        (
            ["demo", "--", "--models-dir", "x"],
            "pypcd: --models-dir stands behind --; give the folder or the file as MODEL",
        ),
        (["demo", "--", "--host", "0.0.0.0"], "pypcd: --host stands behind --; before it pypcd sees it too: "),
        (["demo", "--", "--port", "9000"], "pypcd: --port stands behind --; before it pypcd sees it too: "),
        (["demo", "--", "-np", "2"], "pypcd: -np stands behind --; before it pypcd sees it too: "),
        (
            ["a,b.gguf"],
            "pypcd: a model is called 'a,b'; a name may not have a comma in it, which llama-server reads as two; ",
        ),
        (["demo", "a,b.gguf"], "pypcd: a model is called 'a,b'; "),
        (["demo", "--host", "192.0.2.1"], "pypcd: host is '192.0.2.1', which is no address of this machine"),
        (["demo", "--threads", "1"], "'pypcd serve --help' lists the options; llama-server's own stand behind --"),
        (["demo", "--port", "1", "other"], "pypcd serve: error: unexpected argument 'other'"),
    ],
)
def test_a_mistake_is_one_sentence(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DEMO_MODEL, "a,b.gguf")
    status, said = fails(*args, capsys=capsys)
    assert status == 2 and message in said
    assert said.count("\n") == 1 or said.startswith("usage: ")


@needs_server
def test_a_port_that_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, said = fails("demo", "--port", str(port), capsys=capsys)
    assert status == 2
    assert re.fullmatch(
        rf"pypcd: port is {port}, which 127\.0\.0\.1 cannot listen on: .*; give another one, or 0 .*\n", said
    )


@needs_server
def test_a_model_or_setting_that_does_not_run_is_status_1(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = fails(str(tiny("mamba")), "--pcd", "paper", "--port", "0", *SMALL, capsys=capsys)
    assert status == 1 and "mamba" in said and "PCD cannot run here: " in said and said.count("\n") == 1


def test_without_the_executable_the_remedy_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pypcd.library.library_dirs", lambda: [tmp_path / "lib"])
    status, said = fails("demo", "--port", "0", capsys=capsys)
    assert status == 2 and "llama-server was not found" in said and "PYPCD_SERVER=OFF" in said


# -- what it is started with ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_the_settings_have_every_field_preset_and_name(name: str | None) -> None:
    config = None if name is None else PCDConfig.preset(name)
    given = json.loads(server_module.settings(config))
    assert given["default"] == (config is not None)
    assert list(given["presets"]) == list(PRESETS) and given["recommended"] in PRESETS
    of_computing = {"evaluation": "auto", "type_k_over": None, "sequences": "all"}
    for preset, fields in given["presets"].items():
        assert PCDConfig(**fields).replace(**of_computing) == PCDConfig.preset(preset)
    assert PCDConfig(**given["setting"]) == (config or PCDConfig()).replace(sequences="chosen")
    assert given["setting"] in given["contexts"] and "alpha" not in given["setting"]


@needs_server
def test_how_much_is_loaded_is_known() -> None:
    lines: list[str] = []
    with server_module.Server("demo", port=0, options=SMALL[1:], log=lines.append).running() as server:
        assert server.wait_until_ready() and server.loaded == 100
    assert lines and not any(line.startswith("loaded") for line in lines)


@needs_server
def test_it_outlives_the_thread_that_started_it() -> None:
    """Linux ties a process to the thread that started it, if it is to end with its parent."""
    with contextlib.ExitStack() as stack:
        server = server_module.Server("demo", port=0, options=SMALL[1:])
        starting = threading.Thread(target=lambda: stack.enter_context(server.running()))
        starting.start()
        starting.join()
        assert server.wait_until_ready()
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200


@needs_server
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ties it to pypcd")
def test_it_ends_when_pypcd_is_killed_and_nothing_ran_between_fork_and_exec() -> None:
    code = """if True:
        import os, signal
        from pypcd import server
        forked = []
        os.register_at_fork(before=lambda: forked.append(1))  # called where Python code is to run in the child
        with server.Server("demo", port=0, options=["--ctx-size", "512"]).running() as server:
            server.wait_until_ready()
            print(server._process.pid, forked, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    pid, forked = done.stdout.split(maxsplit=1)
    assert (done.returncode, forked) == (-signal.SIGKILL, "[]\n")
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        waiting = select.poll()
        waiting.register(os.pidfd_open(int(pid)))
        assert waiting.poll(SECONDS * 1000), "llama-server goes on"


@needs_server
def test_a_program_that_cannot_be_started_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_module.Server("demo", port=0)
    monkeypatch.setattr(server_module, "_tied", lambda command: ["/nowhere/llama-server"])
    with pytest.raises(FileNotFoundError, match="/nowhere/llama-server"), server.running():
        pass


@needs_server
def test_a_users_option_replaces_ours() -> None:
    command = server_module.Server("demo", port=0, options=["-c", "512", "--cors-origins", "*"]).command
    assert "--ctx-size" not in command and command.count("--cors-origins") == 1
    assert {"--threads", "--flash-attn", "--kv-unified"} < set(command)
