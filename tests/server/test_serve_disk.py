"""Prompts that llama-server keeps on disk. The oracles: the same question to a server that keeps nothing, and pypcd.ask, which reads the
server's files, as the server reads its."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import F32, Tiny
from serving import SMALL, ask, complete, ready, with_workers, within
from test_serve_documents import CHAT, TEMPLATE, TOKENS, notes, said, whole, with_file

import pypcd
from pypcd import ask as asking
from pypcd.decode.prompt_cache import MIN_TOKENS, PromptCache
from pypcd.document import Document
from pypcd.server import Server
from pypcd.server.model_list import Served

pytest_plugins = ["serving"]  # fixtures

TEXT = notes(1, 40)
QUESTION, OTHER = "What is the value of k3?", "Which one is red?"


@pytest.fixture
def model(tiny: Tiny) -> str:
    return str(tiny("llama", seed=3, chat_template=TEMPLATE, n_ctx_train=8192))


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptCache]:
    """The user's cache, in a folder with a name as people give them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a näme"))
    monkeypatch.setenv("PYPCD_CACHE_GIB", "1")
    yield PromptCache()


def answer_of(server: Server, text: str = TEXT, question: str = QUESTION, **fields: Any) -> tuple[str, int, list[str]]:
    """The answer, the tokens of its prompt that were in memory or on disk, and its passages."""
    body = {"messages": with_file(text, question), "max_tokens": TOKENS, "seed": 1, **fields}
    status, answer = ask(server, CHAT, body)
    assert status == 200, answer
    return said(answer), answer["timings"]["cache_n"], answer["timings"]["passages"]


def without(monkeypatch: pytest.MonkeyPatch, model: str, ask_it: Callable[[Server], Any], **given: Any) -> Any:
    """What a server answers that keeps nothing."""
    with monkeypatch.context() as patch:
        patch.setenv("PYPCD_CACHE_GIB", "0")
        with ready(model, **given) as server:
            return ask_it(server)


@pytest.mark.parametrize(
    ("arch", "pcd"),
    [("llama", False), ("llama", "paper"), ("gemma3", "window"), ("lfm2", False)],
)
def test_a_new_process_goes_on_where_another_has_read(
    tiny: Tiny, prompts: PromptCache, monkeypatch: pytest.MonkeyPatch, arch: str, pcd: Any
) -> None:
    path = str(tiny(arch, seed=3, chat_template=TEMPLATE, n_ctx_train=8192))
    given: dict[str, Any] = {"pcd": pcd, "parallel": 1}
    expected = without(monkeypatch, path, lambda server: answer_of(server), **given)
    assert not prompts.entries()
    with ready(path, **given) as server:
        first = answer_of(server)
        again = answer_of(server)
    (entry,) = prompts.entries()
    assert first == (expected[0], 0, expected[2]) and again[0] == first[0] and again[1] >= entry.n_tokens
    with ready(path, **given) as server:
        assert answer_of(server) == (first[0], entry.n_tokens, first[2])
        assert answer_of(server, question=OTHER)[1] >= entry.n_tokens
    assert [one.path for one in prompts.entries()] == [entry.path], "it was written once"
    assert entry.about["documents"] == ["notes.txt"] and entry.about["model"] == Path(path).name
    assert entry.about["n_tokens"] == entry.n_tokens and entry.about["tokens_per_second"] > 0


@pytest.mark.parametrize("first", ["python", "server"])
def test_python_and_the_server_read_each_others(model: str, prompts: PromptCache, first: str) -> None:
    def in_python() -> tuple[str, int]:
        with pypcd.Llama(model, pcd=False, n_ctx=2048, n_threads=1, n_threads_batch=1, n_gpu_layers=0, **F32) as llm:
            answer = asking.ask(llm, Document.of("notes.txt", TEXT), QUESTION, max_tokens=TOKENS)
            return whole(answer.text), answer.written.n_prompt - answer.written.n_evaluated

    def in_server() -> tuple[str, int]:
        with ready(model) as server:
            return answer_of(server)[:2]

    order = [in_python, in_server] if first == "python" else [in_server, in_python]
    wrote, read = (one() for one in order)
    (entry,) = prompts.entries()
    assert wrote == (read[0], 0) and read[1] == entry.n_tokens >= MIN_TOKENS


WAITING = """
import pathlib, time
from pypcd.server import worker

keep, folder = worker._keep, pathlib.Path(__file__).parent

def kept(request, model):
    (folder / "begun").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return keep(request, model)

worker._keep = kept
worker.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_nobody_waits_while_a_text_is_written_to_disk(model: str, prompts: PromptCache, tmp_path: Path) -> None:
    with with_workers(WAITING, tmp_path, model, parallel=2) as server:
        first = answer_of(server)
        assert within((tmp_path / "begun").exists) and not prompts.entries()
        assert complete(server, "1 2 3", n_predict=4)["tokens"]
        again = answer_of(server)
        assert again[0] == first[0] and again[1] > 0.8 * MIN_TOKENS, (
            "its slot has the text, whose file is not there yet"
        )
        assert not prompts.entries()
        (tmp_path / "go").touch()
        assert within(lambda: len(prompts.entries()) == 1)


def test_only_what_is_equal_is_read_back(model: str, tiny: Tiny, prompts: PromptCache) -> None:
    with ready(model) as server:
        answer_of(server)
    with ready(model) as server:
        assert answer_of(server, TEXT.replace("k0", "k7"))[1] < MIN_TOKENS, "another document"
        (longer, cached, _) = answer_of(server, TEXT + "\n" + notes(2, 30), read="all")
        assert longer and cached >= MIN_TOKENS, "one that goes on"
    for options in (["--cache-type-k", "f16"], ["--rope-freq-scale", "0.5"], ["--override-kv", "x.y=int:1"]):
        with ready(model, options=[*SMALL, *options]) as server:
            assert answer_of(server)[1] == 0, options
    with ready(str(tiny("llama", seed=4, chat_template=TEMPLATE, n_ctx_train=8192))) as server:
        assert answer_of(server)[1] == 0, "another model"


def test_what_is_not_to_be_cached_is_not(model: str, prompts: PromptCache) -> None:
    with ready(model) as server:
        answer_of(server, cache_prompt=False)
        answer_of(server, notes(1, 3))
        status, _ = ask(server, CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1})
    assert status == 200 and not prompts.entries(), "a short document, and a text that is none"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def of_another_version(path: Path) -> None:
    """As another version of llama.cpp wrote it: whole, with a sum that is right."""
    data = bytearray(path.read_bytes())
    data[4] += 1
    struct.pack_into("<I", data, len(data) - 12, zlib.crc32(data[:-16]))
    path.write_bytes(data)


def test_what_is_not_the_servers_own_is_left_alone(model: str, prompts: PromptCache, tmp_path: Path) -> None:
    """A link in a file's place, to a damaged file, and a link to a folder among those that are written."""
    with ready(model) as server:
        first = answer_of(server)
    (entry,) = prompts.entries()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    entry.path.rename(elsewhere / "precious")
    flip(elsewhere / "precious")
    before = (elsewhere / "precious").read_bytes()
    entry.path.symlink_to(elsewhere / "precious")
    (prompts.folder / "writing-x").symlink_to(elsewhere)
    os.utime(elsewhere, (1000, 1000))
    with ready(model) as server:
        assert answer_of(server) == first
        answer_of(server, notes(2, 40))  # which prunes
    assert (elsewhere / "precious").read_bytes() == before
    assert entry.path.is_symlink() and (prompts.folder / "writing-x").is_symlink()


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(path.read_bytes()[:-5000]), of_another_version],
)
def test_a_damaged_file_is_removed_and_the_prompt_is_read_again(
    model: str, prompts: PromptCache, damage: Callable[[Path], Any]
) -> None:
    with ready(model) as server:
        first = answer_of(server)
    (entry,) = prompts.entries()
    damage(entry.path)
    lines: list[str] = []
    with ready(model, log=lines.append) as server:
        assert answer_of(server) == first
    (written,) = prompts.entries()
    assert written.path == entry.path and abs(written.n_bytes - entry.n_bytes) < 16, (
        "it was written again, with another speed"
    )
    assert any(f"{entry.path} is removed, and the prompt is read again" in line for line in lines)


def test_what_cannot_be_written_costs_no_answer(
    model: str, prompts: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without(monkeypatch, model, lambda server: answer_of(server))
    prompts.folder.parent.mkdir(parents=True)
    prompts.folder.write_text("a file where the folder should be")
    lines: list[str] = []
    with ready(model, log=lines.append) as server:
        assert answer_of(server) == expected
    assert any(f"the prompt is not kept in {prompts.folder}" in line for line in lines)


def test_the_limit_holds(model: str, prompts: PromptCache, monkeypatch: pytest.MonkeyPatch) -> None:
    left = prompts.folder / "writing-0123"
    with ready(model) as server:
        answer_of(server)
        assert within(lambda: bool(prompts.entries()))
        (entry,) = prompts.entries()
        left.write_text("of a process that was killed")
        os.utime(left, (1, 1))
        os.utime(entry.path, (2**33, 2**33))  # by a clock that goes wrong: what is written now is not the oldest
        monkeypatch.setenv("PYPCD_CACHE_GIB", str(1.5 * entry.n_bytes / 2**30))
    with ready(model) as server:
        answer_of(server, notes(2, 40))
    (kept,) = prompts.entries()
    assert kept.path != entry.path and not left.exists(), "that which was used for longest went"
    monkeypatch.setenv("PYPCD_CACHE_GIB", str(0.5 * entry.n_bytes / 2**30))
    lines: list[str] = []
    with ready(model, log=lines.append) as server:
        answer_of(server, notes(3, 40))
    assert [one.path for one in prompts.entries()] == [kept.path]
    assert any("the limit is" in line for line in lines)
    assert sorted(prompts.folder.iterdir()) == [kept.path], "nothing is left over"


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_nobody_else_may_read_them(model: str, prompts: PromptCache) -> None:
    for n in (1, 2):  # the second time in a folder that is open
        with ready(model) as server:
            answer_of(server, notes(n, 40))
        assert n > 1 or prompts.folder.stat().st_mode & 0o777 == 0o700
        assert {entry.path.stat().st_mode & 0o777 for entry in prompts.entries()} == {0o600}
        prompts.folder.chmod(0o755)
    assert len(prompts.entries()) == 2


def test_a_server_that_is_killed_leaves_nothing_wrong(model: str, prompts: PromptCache) -> None:
    long = notes(5, 200)
    with ready(model, parallel=1) as server:
        first = answer_of(server, long)
    (entry,) = prompts.entries()
    size = entry.n_bytes
    entry.path.unlink()
    for wait in (0.0, 0.005):
        with ready(model, parallel=1) as server:
            assert server._process is not None
            with concurrent.futures.ThreadPoolExecutor() as pool:
                asked = pool.submit(answer_of, server, long)
                while not asked.done() and not any(prompts.folder.glob("writing-*")):
                    time.sleep(0.0005)
                time.sleep(wait)
                server._process.kill()
                with contextlib.suppress(OSError, http.client.HTTPException):
                    asked.result()
        for one in prompts.entries():
            assert abs(one.n_bytes - size) < 9, "a file that has its name is whole"
            one.path.unlink()
    with ready(model, parallel=1) as server:
        assert answer_of(server, long) == first
    assert prompts.clear() >= size - 9 and not list(prompts.folder.iterdir())


def test_each_model_of_a_router_has_its_own(tiny: Tiny, prompts: PromptCache, tmp_path: Path) -> None:
    names = {}
    for seed in (3, 4):
        path = tmp_path / f"m{seed}.gguf"
        path.write_bytes(Path(tiny("llama", seed=seed, chat_template=TEMPLATE, n_ctx_train=8192)).read_bytes())
        names[f"m{seed}"] = path

    def run() -> list[int]:
        with ready([Served(name, str(path)) for name, path in names.items()]) as server:
            return [answer_of(server, model=name)[1] for name in names]

    assert run() == [0, 0] and len(prompts.entries()) == 2
    assert run() == [entry.n_tokens for entry in prompts.entries()]


@pytest.mark.parametrize("pcd", ["unsure", "window"])
def test_a_question_that_is_asked_again_gets_the_same_logits(model: str, pcd: Any) -> None:
    """A contrast multiplies rounding, so that the last token of a prompt is evaluated by itself."""

    def rows(server: Server) -> list[Any]:
        messages = [{"role": "user", "content": TEXT + QUESTION}]
        body = {"messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 5, "pcd": pcd}
        _, answer = ask(server, CHAT, body)
        return [answer["choices"][0]["logprobs"], answer["timings"]["cache_n"]]

    with ready(model, parallel=1) as server:
        first, again = rows(server), rows(server)
    assert first[1] == 0 and again[1] > MIN_TOKENS and first[0] == again[0]


@pytest.mark.parametrize("pcd", [False, "window"])
def test_a_question_about_a_document_that_is_asked_again_has_the_same_logits(
    model: str, prompts: PromptCache, pcd: Any
) -> None:
    """What is behind the document's beginning is read in the batches of the first time, on a cache that rounds too."""
    with ready(model, parallel=1, options=SMALL[:-4]) as server:
        body = {"max_tokens": 3, "logprobs": True, "top_logprobs": 5, "pcd": pcd}
        body["logit_bias"] = [["a", 1000]]  # llama-server tells no logprobs of a byte that is no whole character
        answers = [ask(server, CHAT, {"messages": with_file(TEXT, QUESTION), **body})[1] for _ in range(3)]
    first, *others = (answer["choices"][0]["logprobs"] for answer in answers)
    assert [first] * 2 == others
    assert answers[0]["timings"]["passages"] and answers[1]["timings"]["cache_n"] > MIN_TOKENS
