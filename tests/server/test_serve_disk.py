"""Prompts that llama-server keeps on disk. The oracles: the same question to a server that keeps nothing, and pypcd.ask, which reads the
server's files, as the server reads its. Which files there are, and for how long, is Python's: tests/llama/test_prompt_cache.py."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from processes import within
from serving import HELD, SMALL, answered, complete, ready, with_workers
from test_serve_documents import CHAT, TOKENS, notes, opened, path_of, said, whole, with_file

from pypcd import ask as asking
from pypcd.decode.prompt_cache import MIN_TOKENS, PromptCache
from pypcd.document import Document
from pypcd.server import Server

TEXT = notes(1, 40)
QUESTION, OTHER = "What is the value of k3?", "Which one is red?"


@pytest.fixture
def model(tiny: Tiny) -> str:
    return path_of(tiny)


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptCache]:
    """The user's cache, in a folder with a name as people give them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a näme"))
    monkeypatch.setenv("PYPCD_CACHE_GIB", "1")
    yield PromptCache()


def answer_of(server: Server, text: str = TEXT, question: str = QUESTION, **fields: Any) -> tuple[str, int, list[str]]:
    """The answer, the tokens of its prompt that were in memory or on disk, and its passages."""
    body = {"messages": with_file(text, question), "max_tokens": TOKENS, "seed": 1, **fields}
    answer = answered(server, CHAT, body)
    return said(answer), answer["timings"]["cache_n"], answer["timings"]["passages"]


def without(monkeypatch: pytest.MonkeyPatch, model: str, **given: Any) -> tuple[str, int, list[str]]:
    """What a server answers that keeps nothing."""
    with monkeypatch.context() as patch:
        patch.setenv("PYPCD_CACHE_GIB", "0")
        with ready(model=model, **given) as server:
            return answer_of(server)


@pytest.mark.parametrize(("arch", "pcd"), [("llama", False), ("llama", "paper"), ("gemma3", "window"), ("lfm2", False)])
def test_a_new_process_goes_on_where_another_has_read(
    tiny: Tiny, prompts: PromptCache, monkeypatch: pytest.MonkeyPatch, arch: str, pcd: Any
) -> None:
    path = path_of(tiny, arch)
    given: dict[str, Any] = {"pcd": pcd, "parallel": 1}
    expected = without(monkeypatch, path, **given)
    assert not prompts.entries()
    with ready(model=path, **given) as server:
        first = answer_of(server)
        again = answer_of(server)
    (entry,) = prompts.entries()
    assert first == (expected[0], 0, expected[2]) and again[0] == first[0] and again[1] >= entry.n_tokens
    with ready(model=path, **given) as server:
        assert answer_of(server) == (first[0], entry.n_tokens, first[2])
        assert answer_of(server, question=OTHER)[1] >= entry.n_tokens
    assert [one.path for one in prompts.entries()] == [entry.path], "it was written once"
    assert entry.about["documents"] == ["notes.txt"] and entry.about["model"] == Path(path).name
    assert entry.about["n_tokens"] == entry.n_tokens and entry.about["tokens_per_second"] > 0
    assert entry.path.stat().st_mode & 0o777 == 0o600 or os.name == "nt", "nobody else may read it"


@pytest.mark.parametrize("first", ["python", "server"])
def test_python_and_the_server_read_each_others(model: str, prompts: PromptCache, first: str) -> None:
    def in_python() -> tuple[str, int]:
        with opened(model) as llm:
            answer = asking.ask(llm, Document.of("notes.txt", TEXT), QUESTION, max_tokens=TOKENS)
            return whole(answer.text), answer.written.n_prompt - answer.written.n_evaluated

    def in_server() -> tuple[str, int]:
        with ready(model=model) as server:
            return answer_of(server)[:2]

    order = [in_python, in_server] if first == "python" else [in_server, in_python]
    wrote, read = (one() for one in order)
    (entry,) = prompts.entries()
    assert wrote == (read[0], 0) and read[1] == entry.n_tokens >= MIN_TOKENS


def test_nobody_waits_while_a_text_is_written_to_disk(model: str, prompts: PromptCache, tmp_path: Path) -> None:
    with with_workers(HELD.format(name="_keep"), tmp_path, model=model, parallel=2) as server:
        first = answer_of(server)
        assert within((tmp_path / "log").exists) and not prompts.entries()
        assert complete(server, "1 2 3", n_predict=4)["tokens"]
        again = answer_of(server)
        assert again[0] == first[0] and again[1] > 0.8 * MIN_TOKENS, "its slot has the text"
        assert not prompts.entries(), "whose file is not there yet"
        (tmp_path / "go").touch()
        assert within(lambda: len(prompts.entries()) == 1)


def test_only_what_is_equal_is_read_back(model: str, prompts: PromptCache) -> None:
    with ready(model=model) as server:
        answer_of(server)
    with ready(model=model) as server:
        (longer, cached, _) = answer_of(server, TEXT + "\n" + notes(2, 30), read="all")
        assert longer and cached >= MIN_TOKENS, "one that goes on"
    for options in (["--cache-type-k", "f16"], ["--rope-freq-scale", "0.5"], ["--override-kv", "x.y=int:1"]):
        with ready(*options, model=model) as server:
            assert answer_of(server)[1] == 0, options


def test_what_is_not_to_be_cached_is_not(model: str, prompts: PromptCache) -> None:
    with ready(model=model) as server:
        answer_of(server, cache_prompt=False)
        answer_of(server, notes(1, 3))
        answered(server, CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1})
    assert not prompts.entries(), "a short document, and a text that is none"


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


@pytest.mark.parametrize("damage", [flip, of_another_version])
def test_a_damaged_file_is_removed_and_the_prompt_is_read_again(
    model: str, prompts: PromptCache, damage: Callable[[Path], Any]
) -> None:
    with ready(model=model) as server:
        first = answer_of(server)
    (entry,) = prompts.entries()
    damage(entry.path)
    lines: list[str] = []
    with ready(model=model, log=lines.append) as server:
        assert answer_of(server) == first
    (written,) = prompts.entries()
    # it was written again, with another speed
    assert written.path == entry.path and abs(written.n_bytes - entry.n_bytes) < 16
    assert any(f"{entry.path} is removed, and the prompt is read again" in line for line in lines)


def test_what_cannot_be_written_costs_no_answer(
    model: str, prompts: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without(monkeypatch, model)
    prompts.folder.parent.mkdir(parents=True)
    prompts.folder.write_text("a file where the folder should be")
    lines: list[str] = []
    with ready(model=model, log=lines.append) as server:
        assert answer_of(server) == expected
    assert any(f"the prompt is not kept in {prompts.folder}" in line for line in lines)


def test_each_model_of_a_router_has_its_own(tiny: Tiny, prompts: PromptCache, tmp_path: Path) -> None:
    paths = [shutil.copy(path_of(tiny, seed=seed), tmp_path / f"m{seed}.gguf") for seed in (3, 4)]

    def run() -> list[int]:
        with ready(model=[*map(str, paths)]) as server:
            return [answer_of(server, model=path.stem)[1] for path in paths]

    assert run() == [0, 0] and len(prompts.entries()) == 2
    assert run() == [entry.n_tokens for entry in prompts.entries()]


ABOUT_A_FILE, ABOUT_A_TEXT = with_file(TEXT, QUESTION), [{"role": "user", "content": TEXT + QUESTION}]


@pytest.mark.parametrize(
    ("messages", "pcd"),
    [(ABOUT_A_FILE, False), (ABOUT_A_FILE, "window"), (ABOUT_A_TEXT, "unsure"), (ABOUT_A_TEXT, "window")],
    ids=["file-plain", "file-window", "text-unsure", "text-window"],
)
def test_what_is_asked_again_has_the_same_logits(model: str, prompts: PromptCache, messages: Any, pcd: Any) -> None:
    """On a cache that rounds, too: what is behind a document's beginning is read in the batches of the first time, and the last token of a
    prompt by itself, since a contrast multiplies rounding."""
    with ready(model=model, parallel=1, options=SMALL[:-4]) as server:
        body = {"max_tokens": 3, "logprobs": True, "top_logprobs": 5, "pcd": pcd}
        body["logit_bias"] = [["a", 1000]]  # llama-server tells no logprobs of a byte that is no whole character
        answers = [answered(server, CHAT, {"messages": messages, **body}) for _ in range(3)]
    first, *others = (answer["choices"][0]["logprobs"] for answer in answers)
    assert [first] * 2 == others
    assert answers[0]["timings"]["cache_n"] == 0 and answers[1]["timings"]["cache_n"] > MIN_TOKENS
    assert bool(answers[0]["timings"].get("passages")) == (messages is ABOUT_A_FILE)
