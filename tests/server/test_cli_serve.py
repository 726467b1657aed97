"""`pypcd serve`: how it starts and ends, what it prints, and what it says of mistakes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from processes import SECONDS
from serving import OPTIONS, ask, at, complete, greeting, meant, ready, refused, server_of, serving

import pypcd
from pypcd.cli import main
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server


def ended(process: subprocess.Popen[str]) -> str:
    """Ends it as Ctrl-C does: it ends well and writes nothing more to its output; what it wrote to its errors."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "")
    return err


# -- it works ---------------------------------------------------------------------------------------------------------


def test_of_several_models_it_says_what_each_does(tiny: Tiny, tmp_path: Path) -> None:
    """Those of a folder are loaded when they are asked for; one that cannot run PCD is served plainly."""
    mamba = tiny("mamba")
    shutil.copy(tiny("llama"), tmp_path / "late.gguf")
    with serving("demo=cautious", str(mamba), str(tmp_path)) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(6)]
        assert lines[0].startswith("3 models | ")
        settings = [("demo", "cautious"), (mamba.stem, "off"), ("late", "off")]
        assert [line.split()[:3] for line in lines[1:4]] == [[name, "PCD", setting] for name, setting in settings]
        assert ["loaded when it is asked for" in line for line in lines[1:4]] == [False, False, True]
        server = at(lines[4].split()[1])
        assert meant(server, model="late:pcd-window")["window"] == 64
        assert "PCD cannot run here" in refused(server, model=f"{mamba.stem}:pcd")
        assert f"{mamba.stem}:pcd" not in [model["id"] for model in ask(server, "/v1/models")[1]["data"]]
        err = ended(process)
    assert err.startswith(f"pypcd: {mamba.stem}: PCD cannot run here: ")


def test_it_says_where_it_is_shows_no_key_and_ends_cleanly() -> None:
    with serving("demo", "--pcd", "cautious", "--api-key", "secret") as process:
        said = greeting(process)
        assert said["head"].startswith("demo | PCD cautious unless a request says otherwise")
        assert shlex.split(said["try"])[2] == said["OpenAI"] + "/chat/completions"
        assert '"demo:pcd-cautious"' in said["try"]
        assert "-H 'Authorization: Bearer KEY'" in said["try"] and "secret" not in str(said)
        assert "<title>" in ask(at(said["page"]), "/")[1]
        assert ended(process) == "", "who chose a setting is not told how"
        with pytest.raises(OSError):  # nothing listens there any more
            ask(at(said["page"]), "/health")
    command = server_of(api_key="secret").command
    assert "secret" not in str(command), "other users of the machine can read a command line"
    for key in ("", " ", ",secret"):  # such as a variable that is not set
        with pytest.raises(ValueError, match=f"api_key is '{key}'; allowed: a key"):
            server_of(api_key=key)


def test_pcd_is_off_until_a_request_asks_and_one_line_says_how() -> None:
    with serving("demo", "--parallel", "1") as process:
        said = greeting(process)
        assert said["head"].startswith("demo | PCD off unless a request says otherwise")
        assert "Authorization" not in said["try"] and meant(at(said["page"])) is False
        err = ended(process)
    assert re.fullmatch('pypcd: PCD is off; "pcd": .* --pcd SETTING .*\n', err)


def test_another_address_without_a_key_is_warned_of() -> None:
    with serving("demo", "--pcd", "off", "--host", "0.0.0.0") as process:
        greeting(process)
        warning = ended(process)
    assert "0.0.0.0" in warning and "--api-key KEY" in warning and warning.count("\n") == 1


# -- mistakes ---------------------------------------------------------------------------------------------------------


def fails(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status and the sentence of a command that must not start a server."""
    try:
        status: Any = main(["serve", *args])
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return int(status), err


WRONG_INI = {
    "none": ("", "names no model"),
    "unnamed": ("model = demo", "[*]"),
    "no-file": ("[a]\npcd = on", "[a] has no model"),
    "no-setting": ("[a]\nmodel = demo\npcd = cautius", "[a]: pcd is 'cautius'"),
    "twice": ("[a]\nmodel = demo\n[a]\nmodel = demo", "is not a file of models"),
}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nosuch.gguf", "nosuch.gguf"),
        ("demo --pcd cautius", "did you mean 'cautious'"),
        ("demo --port 70000", "port is 70000"),
        ("demo --parallel 192", "parallel is 192"),
        ("demo --port {taken}", "which 127.0.0.1 cannot listen on"),
        ("demo --host 127.0.0.1,300.1.1.1", "300.1.1.1"),
        ("demo --host 192.0.2.1", "192.0.2.1"),
        ("demo --port 0 -- --nosuch", "--nosuch"),
        ("demo --port 0 -- -t x", '"-t"'),
        ("demo --threads 1", "stand behind --"),
        ("demo --port 1 other", "'other'"),
        ("demo other", "no model file other"),
        ("demo demo=off", "two models are called 'demo'"),
        ("demo=cautius", "did you mean 'cautious'"),
        ("nosuch.ini", "nosuch.ini"),
        *((f"{name}.ini", word) for name, (_, word) in WRONG_INI.items()),
        ("x.ini=off", "x.ini has a setting behind it, 'off'"),
        ("empty", "a folder without a .gguf file"),
        ("demo -- --host 0.0.0.0", "--host stands behind --"),
        ("demo -- -np 2", "-np stands behind --"),
        ("demo -- --alias zeta", "with names of their own (models.ini)"),
        ("a,b.gguf", "'a,b'"),
        ("demo a;b.gguf", "# and ; begin a remark"),
        ("demo --port 0 --parallel 4 -- --batch-size 2", "--batch-size is 2; allowed: at least 4, with --parallel 4"),
        ("demo other.gguf --port 0 --parallel 1 -- -b 1", "--batch-size is 1; allowed: at least 2"),
        ("demo --port 0 -- -c 3", "--ctx-size is 3; allowed: at least 4"),
        ("demo --port 0 -- --api-prefix llm", "--api-prefix is 'llm'; allowed: a path such as /llm"),
        ("demo -- -hf someone/model", "-hf stands behind --"),
    ],
)
def test_a_mistake_is_one_sentence(
    line: str, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,b", "a;b", "other"):
        shutil.copy(DEMO_MODEL, f"{name}.gguf")
    for name, (text, _) in WRONG_INI.items():
        Path(f"{name}.ini").write_text(text)
    Path("empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, said = fails(*line.format(taken=other.getsockname()[1]).split(), capsys=capsys)
    assert status == 2 and word in said
    assert said.startswith("pypcd: ") and said.count("\n") == 1 or said.startswith("usage: ")


def test_a_model_or_setting_that_does_not_run_is_status_1(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = fails(str(tiny("mamba")), "--pcd", "paper", "--port", "0", "--", *OPTIONS, capsys=capsys)
    assert status == 1 and "mamba" in said and "PCD cannot run here: " in said and said.count("\n") == 1


def test_without_the_executable_the_remedy_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pypcd.library.library_dirs", lambda: [tmp_path / "lib"])
    status, said = fails("demo", "--port", "0", capsys=capsys)
    assert status == 2 and "native part, which is not installed" in said and "python -m llama_cpp.server" in said
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/ggml.json").touch()
    status, said = fails("demo", "--port", "0", capsys=capsys)
    assert status == 2 and "llama-server was not found" in said and "PYPCD_SERVER=OFF" in said


# -- what it is started with ------------------------------------------------------------------------------------------


def test_it_outlives_the_thread_that_started_it() -> None:
    """Linux ties a process to the thread that started it, if it is to end with its parent."""
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        server = server_of(options=OPTIONS, log=lines.append)
        # it lasts until the process is tied
        starting = threading.Thread(target=lambda: stack.enter_context(server.running()).wait_until_ready())
        starting.start()
        starting.join()
        while os.path.exists(f"/proc/self/task/{starting.native_id}"):  # Linux's thread ends after Python's
            pass
        assert ask(server, "/health")[0] == 200 and server.loaded == 100
    assert lines and not any(line.startswith("loaded") for line in lines), "progress is no line of its log"


MISTAKES: list[tuple[str, Any]] = [
    ("/completion", {"prompt": "a", "pcd": {"beta": -1}}),
    ("/completion", {"prompt": "a " * 3000}),
    ("/completion", {"prompt": "a", "model": "demo:pcd-x"}),
    ("/v1/chat/completions", {"messages": "a"}),
    ("/completion", b"{"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no such signal")
def test_a_clients_mistake_is_neither_shown_nor_a_reason_for_the_end() -> None:
    lines: list[str] = []
    with ready("--ctx-size", "1024", log=lines.append) as server:
        assert server._process
        for path, body in MISTAKES:
            assert ask(server, path, body)[0] in (400, 500), body
        assert lines == []
        os.kill(server._process.pid, signal.SIGKILL)
        told = "^llama-server ended by signal SIGKILL: another program ended it, or "
        with pytest.raises(pypcd.PCDError, match=told):
            server.wait()


def test_answers_are_the_most_probable_ones_unless_something_else_is_asked(tmp_path: Path) -> None:
    def temperature(server: Server, t: float | None = None, **fields: Any) -> float:
        return float(complete(server, "a", n_predict=1, temperature=t, **fields)["generation_settings"]["temperature"])

    with ready("--temperature", "0.25", parallel=1) as server:
        assert temperature(server) == 0.25 and temperature(server, t=0.5) == 0.5
    ini = tmp_path / "models.ini"
    ini.write_text("[plain]\nmodel = demo\n[warm]\nmodel = demo\ntemperature = 0.75\n", encoding="utf-8")
    with ready(model=[str(ini)], parallel=1) as server:
        assert temperature(server, model="plain") == 0 and temperature(server, model="warm") == 0.75


def test_a_users_option_replaces_ours() -> None:
    command = server_of(options=["-c", "512", "--cors-origins", "*"]).command
    assert "--ctx-size" not in command and command.count("--cors-origins") == 1
    assert {"--threads", "--flash-attn", "--kv-unified", "--batch-size"} < set(command)
    large = server_of(options=["-ub", "1024"]).command
    assert "--batch-size" not in large, "a micro-batch is never larger than a batch"
