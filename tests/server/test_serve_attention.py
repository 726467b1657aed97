"""Passages that llama-server finds by the model's attention. The oracle: pypcd.ask, which reads attention in Python, and is held against
float64 (tests/engine/test_attention.py, tests/find/test_find.py)."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import test_serve_documents as documents
from conftest import Tiny
from processes import within
from serving import ask, begun, complete, counter, ready
from test_serve_documents import CHAT, QUESTIONS, chat, notes, path_of, said, told, whole, with_file

import pypcd
from pypcd import ask as asking
from pypcd.document import Document
from pypcd.find.heads import keep_heads
from pypcd.server import Server

HEADS = {0: [1, 3], 2: [0]}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@contextlib.contextmanager
def opened(path: str, heads: Any = None, **given: Any) -> Iterator[pypcd.Llama]:
    """Its heads are known from then on."""
    with documents.opened(path, **{"n_ctx": 8192, **given}) as llm:
        if heads:
            keep_heads(llm, heads)
        yield llm


@pytest.fixture(scope="module")
def talking(tiny: Tiny) -> Iterator[pypcd.Llama]:
    with opened(path_of(tiny), HEADS) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(talking: pypcd.Llama) -> Iterator[Server]:
    with ready(model=talking.model_path, parallel=4) as running:
        yield running


def in_python(llm: pypcd.Llama, text: str, question: str, after: asking.Answer | None = None) -> asking.Answer:
    return documents.in_python(llm, [] if after else [Document.of("notes.txt", text)], question, after)


def letters(text: str) -> str:
    """Without those that are none, which llama-server writes in other numbers."""
    return text.replace("\ufffd", "")


def check(answer: dict[str, Any], wanted: asking.Answer) -> set[str]:
    """That passages, prompt and answer are Python's; what found the passages."""
    found, passages = answer["timings"]["passages"], told(wanted)
    assert answer["timings"]["passages_note"] == wanted.note
    scores = [one.pop("score") for one in found]
    assert scores == pytest.approx([one.pop("score") for one in passages], rel=5e-3, abs=1e-6)
    assert found == passages != []
    assert answer["usage"]["prompt_tokens"] == wanted.written.n_prompt
    assert letters(said(answer)) == letters(whole(wanted.text))
    return {one["finder"] for one in found}


@pytest.mark.parametrize(
    ("arch", "heads", "options", "given"),
    [
        ("llama", HEADS, [], {}),
        ("llama", HEADS, ["--flash-attn", "off"], {"flash_attn": False}),
        ("llama", HEADS, ["--cache-type-k", "f16", "--cache-type-v", "f16"], {"type_k": 1, "type_v": 1}),
        ("llama", HEADS, ["--ubatch-size", "16", "--batch-size", "64"], {"n_ubatch": 16, "n_batch": 64}),
        ("gemma3", {2: [0, 1]}, [], {}),  # layers with a sliding window beside it
        ("gemma2", {1: [0, 3]}, [], {}),  # and capped logits
        ("bloom", HEADS, [], {}),  # ALiBi
        ("deepseek2", HEADS, [], {}),
        ("lfm2", {0: [0, 1]}, [], {}),  # with recurrent layers, which cannot go back
    ],
)
def test_passages_are_those_of_python(tiny: Tiny, arch: str, heads: Any, options: list[str], given: Any) -> None:
    path, by = path_of(tiny, arch), set[str]()
    with opened(path, heads, **given) as llm, ready(*options, model=path, parallel=2) as server:
        for seed in range(3):
            for question in QUESTIONS:
                wanted = in_python(llm, notes(seed, 30), question)
                by |= check(chat(server, with_file(notes(seed, 30), question)), wanted)
    assert by == {"attention", "bm25"}


def test_so_are_those_of_a_later_question(server: Server, talking: pypcd.Llama) -> None:
    wanted: asking.Answer | None = None
    messages: list[dict[str, Any]] = []
    for question in QUESTIONS:
        messages += [{"role": "user", "content": question}] if messages else with_file(notes(5), question)
        wanted = in_python(talking, notes(5), question, wanted)
        check(chat(server, messages), wanted)
        messages.append({"role": "assistant", "content": wanted.text})


@pytest.mark.parametrize(("arch", "heads"), [("llama", HEADS), ("lfm2", {0: [0, 1]}), ("lfm2", None)])
def test_a_document_is_read_once(tiny: Tiny, arch: str, heads: Any) -> None:
    """For the question, for the empty question, for the answer and for the next question.

    A recurrent state cannot go back, so there another question begins from a checkpoint near the document's end.
    """
    text, path = notes(8, 100), path_of(tiny, arch)
    with opened(path, heads), ready(model=path, parallel=2) as server:
        first = chat(server, with_file(text, QUESTIONS[0]))
        n = first["usage"]["prompt_tokens"]
        n_first = counter(server, "prompt_tokens_total")
        assert n > 1000 and n - 20 < n_first < n + 20
        assert first["timings"]["cache_n"] > 0.8 * n or not heads, "for the answer it is there already"
        for _ in range(2):  # the second time with passages
            before = counter(server, "prompt_tokens_total")
            chat(server, with_file(text, QUESTIONS[1]))
            assert counter(server, "prompt_tokens_total") - before < 0.25 * n


def test_several_at_once_are_answered_as_alone(server: Server, talking: pypcd.Llama) -> None:
    """Beside answers that are written meanwhile, which are as alone too; more questions than slots and processes that read documents."""
    prompts = ["1 2 3 4", "The red key"]
    alone = [complete(server, prompt, n_predict=200, pcd=False)["content"] for prompt in prompts]
    wanted = [in_python(talking, notes(i, 40), QUESTIONS[i % 3]) for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        written = [pool.submit(complete, server, prompt, n_predict=200, pcd=False) for prompt in prompts]
        asked = [pool.submit(chat, server, with_file(notes(i, 40), QUESTIONS[i % 3])) for i in range(6)]
        for answer, one in zip(asked, wanted, strict=True):
            check(answer.result(), one)
        assert [one.result()["content"] for one in written] == alone


def test_with_pcd_for_the_answer_the_passages_are_the_same(server: Server, talking: pypcd.Llama) -> None:
    for pcd in ("paper", "unsure"):
        talking.pcd = pcd
        wanted = in_python(talking, notes(3, 40), QUESTIONS[0])
        check(chat(server, with_file(notes(3, 40), QUESTIONS[0]), pcd=pcd), wanted)
    talking.pcd = False


def test_other_routes_give_the_same_prompt(server: Server, talking: pypcd.Llama) -> None:
    body = {"messages": with_file(notes(2, 40), QUESTIONS[2])}
    wanted = in_python(talking, notes(2, 40), QUESTIONS[2]).written.n_prompt
    assert len(ask(server, "/apply-template", body)[1]["prompt"]) == wanted
    assert ask(server, "/v1/chat/completions/input_tokens", body)[1]["input_tokens"] == wanted
    assert chat(server, **body, cache_prompt=False)["usage"]["prompt_tokens"] == wanted
    assert chat(server, **body, id_slot=3)["usage"]["prompt_tokens"] == wanted


@pytest.mark.parametrize(("arch", "heads"), [("llama", HEADS), ("gemma3", {2: [0, 1]}), ("lfm2", {0: [0, 1]})])
def test_passages_of_what_comes_from_disk_are_those_of_what_was_read(
    tiny: Tiny, arch: str, heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window have the end of the text alone then, and their cells are others."""
    monkeypatch.setenv("PYPCD_CACHE_GIB", "1")
    path, found, counts = path_of(tiny, arch), list[Any](), list[float]()
    with opened(path, heads):
        for _ in range(2):
            with ready(model=path, parallel=2) as server:
                timings = [chat(server, with_file(notes(9, 60), question))["timings"] for question in QUESTIONS]
                found.append([one["passages"] for one in timings])
                counts.append(counter(server, "prompt_tokens_total"))
    assert counts[1] < counts[0] - 600
    assert any(one["finder"] == "attention" for passages in found[0] for one in passages)
    for first, again in zip(*found):
        scores = [[one.pop("score") for one in passages] for passages in (first, again)]
        assert first == again != [] and scores[0] == pytest.approx(scores[1], rel=5e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("heads", "options", "why"),
    [
        (None, [], r"pypcd probe {path} finds out which heads of this model look, too"),
        (
            HEADS,
            ["--no-kv-unified"],
            "this server keeps the keys of each request apart; start it without --no-kv-unified",
        ),
        ({0: [99]}, [], "layer 0 of this model has 4 heads, so its head"),
        ({9: [0]}, [], "the attention of this model cannot be read in this context"),
    ],
)
def test_why_keyword_search_alone_found_them(tiny: Tiny, heads: Any, options: list[str], why: str) -> None:
    path = path_of(tiny, n_vocab=385 + len(why) % 7)  # another file, whose heads nobody knows yet
    with opened(path, heads) as llm, ready(*options, model=path, parallel=2) as server:
        timings = chat(server, with_file(notes(1), QUESTIONS[0]))["timings"]
        assert timings["passages_note"].startswith("found by keyword search alone: " + why.format(path=path))
        assert {one["finder"] for one in timings["passages"]} == {"bm25"}
        if not options:
            note = in_python(llm, notes(1), QUESTIONS[0]).note
            assert timings["passages_note"][:70] == note[:70]


def test_a_client_that_goes_ends_the_reading(tiny: Tiny) -> None:
    path = path_of(tiny, n_layer=16)
    with opened(path, HEADS), ready("--batch-size", "32", model=path, parallel=1) as server:
        gone = begun(server, CHAT, {"messages": with_file(notes(1, 300), "k3?"), "max_tokens": 1})
        assert within(lambda: ask(server, "/slots")[1][0]["is_processing"])
        gone.close()
        n = chat(server, [{"role": "user", "content": "1 2"}])["usage"]["prompt_tokens"]
        assert 0 < n < 100 and counter(server, "prompt_tokens_total") < 7000
