"""Several models behind one address: each with its setting, loaded and unloaded, and what happens when a process dies."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serving
from conftest import F32, Tiny
from processes import SECONDS, children, lives, within
from serving import BASE, MUTE_ROUTES, PROMPTS, ROUTES, SMALL, ask, begun, complete, is_greedy, meant, ready, refused

import pypcd
from pypcd import PCDConfig
from pypcd.gguf import DEMO_MODEL
from pypcd.llama import machine
from pypcd.server import OptionError, Server, model_list
from pypcd.settings.config import PRESETS

WINDOW = "window:evaluation=fused:window=4:n_sink=0"
ENDLESS = {"prompt": "a", "n_predict": -1, "ignore_eos": True}
linux = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc: run it on Linux")


@pytest.fixture(scope="module")
def ini(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """A file of models: two of the start, one that is loaded when it is asked for."""
    path = tmp_path_factory.mktemp("models") / "models.ini"
    small = shutil.copy(tiny("llama"), path.parent / "a = b [ü].gguf")
    path.write_text(
        f"version = 1\n\n[*]\nload-on-startup = true\n\n[demo]\nmodel = demo\npcd = {BASE}\n\n[père noël]  ; by any name\n"
        f"model = {small}\npcd = {WINDOW}\nctx-size = 2048\nparallel = 3\nalias = nick\n\n[late]\n"
        f"model = {DEMO_MODEL}\nload-on-startup = off\npcd = off\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def server(ini: Path) -> Iterator[Server]:
    options = SMALL[2:]  # the context is each model's own
    with ready(model=[str(ini)], pcd="cautious", parallel=4, options=options) as running:
        yield running


@pytest.fixture(scope="module")
def of_name(tiny: Tiny) -> Iterator[dict[str, pypcd.Llama]]:
    paths = {"demo": "demo", "père noël": tiny("llama")}
    settings = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "n_gpu_layers": 0, **F32}
    made = {name: pypcd.Llama(path, pcd=BASE, **settings) for name, path in paths.items()}
    yield made
    for llm in made.values():
        llm.close()


def statuses(server: Server) -> dict[str, str]:
    return {entry["id"]: entry["status"]["value"] for entry in server._entries() if ":pcd" not in entry["id"]}


# -- answers ----------------------------------------------------------------------------------------------------------


def test_each_model_answers_with_its_own_setting_and_tells_it(server: Server, of_name: dict[str, pypcd.Llama]) -> None:
    """All at the same time; what the server's setting is for a model, what a suffix asks for, and what a body does."""
    strong = {"beta": 30.0, "relative_top": 0.01}
    jobs: list[tuple[str, str, dict[str, Any], Any]] = []
    for prompt in PROMPTS:
        for name, setting in (("demo", BASE), ("père noël", WINDOW)):
            config = PCDConfig.resolve(setting)
            jobs.append((prompt, name, {"model": name}, config))
            jobs.append((prompt, name, {"model": f"{name}:pcd-cautious"}, "cautious"))
            jobs.append((prompt, name, {"model": f"{name}:pcd-cautious", "pcd": False}, False))
            jobs.append((prompt, name, {"model": name, "pcd": strong}, PCDConfig.resolve(strong, config)))
        jobs.append((prompt, "père noël", {"model": "nick"}, PCDConfig.resolve(WINDOW)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: complete(server, job[0], **job[2]), jobs))
    for (prompt, name, _, setting), answer in zip(jobs, answers):
        assert answer["model"] == name
        is_greedy(of_name[name], prompt, setting, answer["tokens"])
    assert len({answer["content"] for answer in answers}) > len(PROMPTS) * 2, "or this shows nothing"
    assert meant(server, model="nick:pcd-window")["window"] == 64, "an alias has the suffixes too"
    noel = "p%C3%A8re%20no%C3%ABl"
    assert ask(server, f"/props?model={noel}")[1]["pcd"]["setting"]["window"] == 4
    assert [len(ask(server, f"/slots?model={name}")[1]) for name in ("demo:pcd-cautious", noel)] == [4, 3]
    assert "llamacpp:pcd_twins_total" in ask(server, f"/metrics?model={noel}")[1]


@pytest.mark.parametrize("path", [*ROUTES, "/tokenize", "/detokenize", "/apply-template", "/documents"])
def test_every_route_takes_a_name_with_its_suffix(server: Server, path: str) -> None:
    body = {**ROUTES, **MUTE_ROUTES}[path]
    for name in ("demo", "demo:pcd", "demo:pcd-cautious"):
        serving.answered(server, path, {**body, "model": name})
    if path in MUTE_ROUTES:
        assert "Field 'pcd'" in refused(server, path, **body, model="demo", pcd="unsure")
    if path == "/v1/chat/completions":
        text = "The key is red.\n\nThe lamp is blue.\n\nNobody knows."
        answer = ask(server, path, {**body, "model": "demo", "documents": [{"name": "a", "text": text}]})[1]
        assert answer["timings"]["passages"] != []


# -- names ------------------------------------------------------------------------------------------------------------


def test_models_list_the_settings_of_what_is_loaded(ini: Path) -> None:
    with ready(model=[str(ini)]) as server:
        demo, late, noel = (
            [name, f"{name}:pcd", *(f"{name}:pcd-{run}" for run in ("off", *PRESETS))] for name in statuses(server)
        )
        assert server.names() == [*demo, "late", *noel]
        assert statuses(server) == {"demo": "loaded", "late": "unloaded", "père noël": "loaded"}
        assert ask(server, "/props?model=late&autoload=false")[1]["error"]["message"] == "model is not loaded"
        assert meant(server, model="late:pcd-cautious")["beta"] == 1.5  # loaded for it
        assert meant(server, model="late") is False
        assert server.names() == [*demo, *late, *noel]
        assert ask(server, "/models/unload", {"model": "late:pcd"})[0] == 200
        assert within(lambda: statuses(server)["late"] == "unloaded")
        assert server.names() == [*demo, *late, *noel], "what was learnt of a model is still true"
        entries = {entry["id"]: entry for entry in ask(server, "/v1/models")[1]["data"]}
        assert entries["late"]["pcd"]["default"] is False and entries["demo"]["pcd"]["default"] is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "nobody:pcd-cautious"}, "model 'nobody:pcd-cautious' not found"),
        ({"model": "demo:q4"}, 'Field \'model\': it is "demo:q4"; allowed: "demo", "demo:pcd", "demo:pcd-off", '),
        ({"model": "père noël:pcd-widow"}, 'it is "père noël:pcd-widow"; allowed: "père noël", "père noël:pcd"'),
    ],
)
def test_a_wrong_name_is_refused_with_a_sentence(server: Server, fields: dict[str, Any], message: str) -> None:
    assert message in refused(server, **fields)


def test_a_body_that_names_no_model_is_refused(server: Server) -> None:
    for bodies, status, message in (
        ((b"[]", b'{"model": ["demo"]}', b'{"model": 5}'), 400, "model name is missing"),
        ((b"", b"\xff"), 500, "parse error"),  # as stock does (test_serve_stock.py)
    ):
        for got, answer in (ask(server, "/completion", body) for body in bodies):
            assert got == status and message in answer["error"]["message"]


def with_an_endless_one(folder: Path, *options: str) -> Server:
    """A server of two models: the first never ends loading, for its file has become a pipe that nobody writes to."""
    slow = Path(shutil.copy(DEMO_MODEL, folder / "slow.gguf"))
    made = serving.server_of(*options, model=[str(slow), "demo"])
    slow.unlink()
    os.mkfifo(slow)
    return made


@linux
def test_a_fault_of_the_router_is_a_500(tmp_path: Path) -> None:
    """Clients ask again after a 500, and never after a 400."""
    with with_an_endless_one(tmp_path, "--models-max", "1").running() as server:
        assert within(lambda: statuses(server) == {"demo": "unloaded", "slow": "loading"})
        status, answer = ask(server, "/models/load", {"model": "demo"})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert answer["error"]["message"] == "model limit reached, try again later"


# -- what holds for one model holds for each --------------------------------------------------------------------------


def test_a_key_is_asked_for_by_every_process(ini: Path) -> None:
    with ready(model=[str(ini)], api_key="secret") as server:
        key = {"Authorization": "Bearer secret"}
        assert ask(server, "/v1/models")[0] == 401
        words = ask(server, "/v1/models", **key)[1]["data"][0]["status"]["args"]
        body = {"prompt": "a", "n_predict": 1, "model": "demo"}
        assert ask(server, "/completion", body, **key)[0] == 200 and ask(server, "/completion", body)[0] == 401
        own = serving.at(f"http://127.0.0.1:{words[words.index('--port') + 1]}")
        assert ask(own, "/completion", body)[0] == 401, "the model's own port"


def test_one_at_a_time_where_no_more_may_be_loaded(ini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(model.size for model in model_list.read([str(ini)]))
    monkeypatch.setattr(machine, "room_for_weights", lambda: largest)
    given = serving.server_of("--models-max", "2", model=[str(ini)])
    assert given.command.count("--models-max") == 1, "a user's counts"
    with ready(model=[str(ini)]) as server:
        assert sum("--models-max" in remark for remark in server.remarks) == 1
        assert statuses(server) == {"demo": "loaded", "late": "unloaded", "père noël": "unloaded"}
        names = ["late", "demo", "père noël", "late"]

        def asked(name: str) -> str:  # again, where its model was unloaded in the moment in which it was asked
            for _ in range(20):
                status, answer = ask(server, "/completion", {"prompt": "a", "n_predict": 2, "model": name})
                if status != 500 or "the next request loads the model again" not in answer["error"]["message"]:
                    break
            assert status == 200, answer
            return answer["model"]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(asked, names)) == names
        assert sorted(statuses(server).values()).count("unloaded") >= 2


# -- ends -------------------------------------------------------------------------------------------------------------


@linux
def test_a_model_whose_process_dies_is_reported_and_loaded_again(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        connection = begun(server, "/completion", {**ENDLESS, "model": "demo", "stream": True})
        stream = connection.getresponse()
        assert stream.status == 200 and stream.readline().startswith(b"data: ")
        waiting = pool.submit(ask, server, "/completion", {**ENDLESS, "model": "demo"})
        other = pool.submit(complete, server, PROMPTS[0], model="père noël", n_predict=200, ignore_eos=True)
        assert within(lambda: sum(slot["is_processing"] for slot in ask(server, "/slots?model=demo")[1]) == 2)
        assert server._process
        (demo,) = (pid for pid, command in children(server._process.pid).items() if "--alias demo " in command)
        os.kill(demo, signal.SIGKILL)
        last = stream.read().decode().strip().splitlines()[-2:]
        status, answer = waiting.result()
        assert other.result()["tokens_predicted"] == 200, "another model's request is not touched"
    connection.close()
    told = json.loads(last[1].removeprefix("data: "))
    assert last[0] == "event: error" and "ended before the answer did" in told["error"]["message"]
    assert status == 500 and answer["error"] == told["error"]
    body = {"prompt": "a", "n_predict": 1, "model": "demo"}
    assert within(lambda: ask(server, "/completion", body)[0] == 200), "it is loaded again, once its end was noticed"


@linux
@pytest.mark.parametrize(
    ("who", "number"), [("command", signal.SIGINT), ("command", signal.SIGKILL), ("router", signal.SIGKILL)]
)
def test_no_process_outlives_the_others(
    ini: Path, who: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a client reads an answer without an end, too."""
    monkeypatch.setenv("TMPDIR", str(ini.parent))  # a command that is killed cannot tidy up
    with serving.serving(str(ini)) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(7)]
        connection = begun(serving.at(lines[4].split()[1]), "/completion", {**ENDLESS, "model": "demo", "stream": True})
        assert connection.getresponse().readline().startswith(b"data: ")
        (router,) = children(process.pid)
        servers = children(router)
        assert len(servers) == 2
        os.kill(router if who == "router" else process.pid, number)
        assert within(lambda: not any(map(lives, [router, *servers])))
        assert process.wait(SECONDS) == (-9 if number == signal.SIGKILL else 0) or who == "router"
        connection.close()


@linux
def test_a_process_that_still_loads_ends_with_its_router(tmp_path: Path) -> None:
    """It does not read its input yet, by which it hears of the router's end later: here it never would, as the file does not end."""
    with with_an_endless_one(tmp_path).running() as server:
        assert server._process
        router = server._process.pid
        assert within(lambda: statuses(server) == {"demo": "loaded", "slow": "loading"})
        servers = children(router)
        assert len(servers) == 2 and not server._are_loaded()
        os.kill(router, signal.SIGKILL)
        assert within(lambda: not any(map(lives, servers)))


@pytest.mark.parametrize(
    ("name", "message"),
    [("cut", "is incomplete or damaged"), ("noise", "is damaged, download it again, or of a newer")],
)
def test_a_broken_model_says_what_to_do_and_leaves_the_others(
    tmp_path: Path, tiny: Tiny, name: str, message: str
) -> None:
    data = tiny("llama").read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: len(data) // 2] if name == "cut" else data[:4] + bytes(range(256)) * 20)
    with serving.server_of(model=["demo", str(broken)]).running() as server:
        with pytest.raises(pypcd.ModelError, match=rf"cannot serve .*broken\.gguf: the file {message}"):
            server.wait_until_ready()
        status, answer = ask(server, "/completion", {"prompt": "a", "model": "broken"})
        assert status == 500 and answer["error"]["message"].startswith("model 'broken' did not load; ")
        assert ask(server, "/completion", {"prompt": "a", "n_predict": 1, "model": "demo"})[0] == 200


def test_a_model_that_cannot_run_its_setting_does_not_load(tiny: Tiny) -> None:
    made = serving.server_of(model=["demo", f"{tiny('mamba')}=cautious"])
    with made.running() as server, pytest.raises(pypcd.ModelError, match="PCD cannot run here: "):
        server.wait_until_ready()


# -- what is served ---------------------------------------------------------------------------------------------------


def test_a_word_is_a_model_and_its_setting_whatever_is_in_their_names(tmp_path: Path, tiny: Tiny) -> None:
    odd = tmp_path / "a = b:c ü=.gguf"
    shutil.copy(tiny("llama"), odd)
    for path, setting in ((odd, "window:relative_top=0.1"), (odd, "off"), ("demo", "window:relative_top=0.1")):
        (model,) = model_list.read([f"{path}={setting}"])
        assert model.pcd == setting and model.name == (Path(path).stem if path != "demo" else path)
    (plain,) = model_list.read([str(odd)])
    assert plain.pcd is None and plain.name == odd.stem


def test_a_folder_stands_for_the_models_in_it(tmp_path: Path, tiny: Tiny) -> None:
    names = ["b.gguf", "a.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "a-mmproj.gguf", "mtp-a.gguf"]
    for name in [*names, "notes.txt"]:
        shutil.copy(tiny("llama"), tmp_path / name)
    models = model_list.read([f"{tmp_path}=off"])
    assert [model.name for model in models] == ["a", "b", "big-00001-of-00002"]
    assert all(model.pcd == "off" and not model.at_start for model in models)
    assert models[2].size == 2 * models[0].size


def test_of_a_folder_what_cannot_be_served_is_left_out_with_a_note(tmp_path: Path, tiny: Tiny) -> None:
    whole, data = tmp_path / "whole.gguf", tiny("llama").read_bytes()
    for name, content in {"whole": data, "empty": b"", "text": b"GGML?", "a,b": data, "c;d": data, "e:f": data}.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.gguf")
    left_out: list[str] = []
    assert [model.path for model in model_list.read([str(tmp_path)], left_out)] == [str(whole)]
    assert len(left_out) == 8 and all(tmp_path.name in said and "\n" not in said for said in left_out)
    words = ["empty.gguf is empty", "text.gguf is not a GGUF file", "'a,b'", "c;d", "'e:f'"]
    for word in [*words, "folder.gguf is no file", "pipe.gguf is no file", "link to nothing"]:
        assert sum(word in said for said in left_out) == 1, word
    whole.unlink()
    with pytest.raises(pypcd.ModelError, match=r"without a \.gguf file; .* left out: "):
        model_list.read([str(tmp_path)])
    with pytest.raises(pypcd.ModelError, match="is empty"):  # it is asked for by its name
        model_list.read(["demo", str(tmp_path / "empty.gguf")])


def test_a_model_that_is_named_comes_before_one_of_a_folder(tmp_path: Path, tiny: Tiny) -> None:
    for name in ("a/same", "b/same", "b/other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(tiny("llama"), tmp_path / f"{name}.gguf")
    folders, named, left_out = [str(tmp_path / name) for name in "ab"], f"{tmp_path}/b/same.gguf=unsure", list[str]()
    models = model_list.read([*folders, named], left_out)
    found = [(model.name, model.pcd, model.at_start) for model in models]
    assert found == [("other", None, False), ("same", "unsure", True)]
    assert left_out == [f"{tmp_path}/a/same.gguf is left out: {tmp_path}/b/same.gguf is called 'same' too"]


def test_the_file_of_models_in_the_docs_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    (text,) = re.findall(r"(?ms)^```ini\n(.*?)^```", page.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large", "models"):
        shutil.copy(DEMO_MODEL, f"{name}.gguf")
    Path("models.ini").write_text(text)
    small, large = model_list.read(["models.ini"])
    assert (small.pcd, small.at_start, small.options) == ("window:relative_top=0.1", True, {"parallel": "2"})
    assert (large.pcd, large.at_start) == ("off", False)
    ini = Server([small, large], port=0)._ini
    assert ini.count("parallel = 2") == 2 and "ctx-size = 16384" in ini and "kv-unified-per-slot = 8192" in ini


def test_a_wrong_option_of_one_model_is_said(tmp_path: Path) -> None:
    path = tmp_path / "models.ini"
    path.write_text("[a]\nmodel = demo\nload-on-startup = on\nctx-size = x\n")
    made = serving.server_of(model=[str(path)], options=SMALL[4:])
    with made.running() as server, pytest.raises(OptionError, match="ctx-size"):
        server.wait_until_ready()
