"""Documents in requests to llama-server: their text, and that the passages of them are those of `pypcd chat`."""

from __future__ import annotations

import base64
import concurrent.futures
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import F32, Tiny
from documents import pdf
from serving import PROMPTS, SMALL, ask, complete, last_timings, ready
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd.cli import _options
from pypcd.cli._conversation import Conversation
from pypcd.document import SPACE, Document
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server, model_list

pytest_plugins = ["serving"]  # fixtures

CHAT = "/v1/chat/completions"
TOKENS = 12
TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE  # Python adds none itself
QUESTIONS = ["What is the value of k3?", "Which one is red? And which one was blue, and where?", "k7?"]


def notes(seed: int, n: int = 12) -> str:
    rng = random.Random(seed)
    lines = [
        f"The {rng.choice(['key', 'lamp', 'map'])} k{i} is {rng.choice(['red', 'blue'])}: {rng.randrange(10**4)}."
        for i in range(n)
    ]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> str:
    """One whose attention is spread: that of the included model is so sharp that segments get equally much."""
    return str(tiny("llama", seed=3, chat_template=TEMPLATE, n_ctx_train=8192))


@pytest.fixture(scope="module")
def wide(model: str) -> Iterator[Server]:
    """One with room for documents in each of its four slots."""
    with ready(model, parallel=4) as made:
        yield made


@pytest.fixture(scope="module")
def talking(model: str) -> Iterator[pypcd.Llama]:
    with pypcd.Llama(model, pcd=False, n_ctx=2048, n_threads=1, n_threads_batch=1, n_gpu_layers=0, **F32) as llm:
        yield llm


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_part(text: str, name: str = "notes.txt") -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": coded(text.encode())}}


def with_file(text: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [file_part(text), {"type": "text", "text": question}]}]


def chat(server: Server, messages: Any, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    status, answer = ask(server, path, {"messages": messages, "max_tokens": TOKENS, **fields})
    assert status == 200, answer
    return dict(answer)


def whole(text: str) -> str:
    """Without a letter that the end has cut."""
    return text.rstrip("\ufffd")


def said(answer: dict[str, Any]) -> str:
    return whole(answer["choices"][0]["message"]["content"])


def rejected(server: Server, path: str = CHAT, **body: Any) -> str:
    status, answer = ask(server, path, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **body})
    assert status == 400, answer
    return str(answer["error"]["message"])


def conversation(llm: pypcd.Llama, pcd: Any = False) -> Conversation:
    llm.reset()
    llm.pcd = pcd
    return Conversation(llm, _options.GenerationSettings(max_tokens=TOKENS))


def repeated(text: str, passages: list[str], question: str) -> str:
    """The message that a person would have written to get the same prompt."""
    return f"{text}\n\nFrom the text above:\n\n{SPACE.join(passages)}\n\n{question}"


# -- passages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pcd", [False, "paper", "unsure"])
def test_passages_and_answer_are_those_of_pypcd_chat(wide: Server, talking: pypcd.Llama, pcd: Any) -> None:
    for seed, question in enumerate(QUESTIONS):
        talk = conversation(talking, pcd)
        talk.attach(Document.of("notes.txt", notes(seed)))
        wanted = whole("".join(talk.send(question)))
        answer = chat(wide, with_file(notes(seed), question), pcd=pcd)
        assert answer["timings"]["passages"] == talk.passages != []
        assert "passages_left_out" not in answer["timings"]
        assert answer["usage"]["prompt_tokens"] == talk.figures[-1].prompt_tokens
        assert said(answer) == wanted


def test_so_are_those_of_a_hybrid_model(tiny: Tiny) -> None:
    """Its recurrent state cannot go back, so the server begins anew from a checkpoint at the documents' end."""
    path = str(tiny("lfm2", seed=3, chat_template=TEMPLATE, n_ctx_train=8192))
    talking = pypcd.Llama(path, pcd=False, n_ctx=2048, n_threads=1, n_threads_batch=1, n_gpu_layers=0, **F32)
    lines: list[str] = []
    options = [*SMALL, "--log-verbosity", "5"]
    with talking, ready(path, parallel=2, options=options, log=lines.append) as server:
        for question in QUESTIONS:
            talk = conversation(talking)
            talk.attach(Document.of("notes.txt", notes(1, 40)))
            wanted = whole("".join(talk.send(question)))
            answer = chat(server, with_file(notes(1, 40), question))
            assert answer["timings"]["passages"] == talk.passages != []
            assert said(answer) == wanted
    log = "\n".join(lines)
    assert "restored context checkpoint" in log and "forcing full prompt re-processing" not in log, (
        "the text is read once"
    )


def test_so_are_those_of_a_later_question(wide: Server, talking: pypcd.Llama) -> None:
    talk = conversation(talking)
    talk.attach(Document.of("notes.txt", notes(5)))
    messages: list[dict[str, Any]] = []
    for i, question in enumerate(QUESTIONS):
        wanted = whole("".join(talk.send(question)))
        messages += with_file(notes(5), question) if i == 0 else [{"role": "user", "content": question}]
        answer = chat(wide, messages)
        assert (answer["timings"]["passages"], said(answer)) == (talk.passages, wanted)
        assert (answer["timings"]["cache_n"] > 0) == (i > 0)
        messages.append(talk.messages[-1])


def test_a_document_is_read_once(wide: Server) -> None:
    def counted(name: str) -> float:
        lines = ask(wide, "/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"llamacpp:{name} "))

    names = ("prompt_tokens_total", "prompt_tokens_cached_total")
    before = [counted(name) for name in names]
    answer = chat(wide, with_file(notes(77), QUESTIONS[1]))
    assert answer["timings"]["passages"] and answer["timings"]["cache_n"] < 20
    n_read, n_cached = (counted(name) - b for name, b in zip(names, before))
    assert n_read < answer["usage"]["prompt_tokens"] + 40
    assert n_cached == answer["timings"]["cache_n"], "what was just read for its attention is no cache"


def test_a_document_that_is_there_twice_is_repeated_once(wide: Server, talking: pypcd.Llama) -> None:
    """And several stand in their order, wherever they are given: as in a chat."""
    seeds = 1, 2, 1
    talk = conversation(talking)
    for seed in seeds:
        talk.attach(Document.of("notes.txt", notes(seed, 6)))
    wanted = whole("".join(talk.send(QUESTIONS[0])))
    parts = [file_part(notes(seed, 6)) for seed in seeds]
    named = [{"name": str(seed), "text": notes(seed, 6)} for seed in seeds]
    question = {"role": "user", "content": [{"type": "text", "text": QUESTIONS[0]}, *parts]}
    for answer in (
        chat(wide, [question]),
        chat(wide, [{"role": "user", "content": QUESTIONS[0]}], documents=named),
    ):
        passages = answer["timings"]["passages"]
        assert (passages, said(answer)) == (talk.passages, wanted) and len(set(passages)) == len(passages)


@pytest.mark.parametrize(
    ("arch", "more"),
    [("llama", {}), ("llama", {"cache_prompt": False}), *((arch, {}) for arch in ("gemma3", "gpt2", "deepseek2"))],
)
def test_the_answer_is_that_to_a_message_with_the_passages(tiny: Tiny, arch: str, more: dict[str, Any]) -> None:
    """Also where sliding-window layers have forgotten the beginning; and where the cache has all of the prompt already."""
    path = tiny(arch, seed=3, chat_template=TEMPLATE)
    text = " ".join(f"ab{i} cd{i * 7} e." for i in range(40)).replace(". ", ".\n")
    options = [*SMALL, "--batch-size", "64", "--ubatch-size", "64"]
    with ready(path, parallel=2, options=options) as server, ready(path, parallel=2) as other:
        for question in ("what is ab?", "what is cd?", "what is cd?"):
            answer = chat(server, with_file(text, question), **more)
            passages = answer["timings"]["passages"]
            assert passages and all(passage in text for passage in passages)
            plain = chat(other, [{"role": "user", "content": repeated(text, passages, question)}], cache_prompt=False)
            assert plain["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
            assert said(plain) == said(answer)
            counts = answer["timings"]
            assert counts["cache_n"] + counts["prompt_n"] == answer["usage"]["prompt_tokens"]


def test_several_at_once_are_answered_as_alone(wide: Server) -> None:
    bodies: list[dict[str, Any]] = [{"messages": with_file(notes(i), QUESTIONS[i % 3])} for i in range(6)]
    bodies += [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    alone = [chat(wide, pcd=False, **body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: chat(wide, pcd=False, **body), bodies))
    for one, other in zip(alone, found):
        assert said(one) == said(other)
        assert one["timings"].get("passages") == other["timings"].get("passages")
    assert all("passages" not in answer["timings"] for answer in found[6:])


def test_without_replay_it_is_the_documents_text_and_the_question(wide: Server) -> None:
    answer = chat(wide, with_file(notes(1), QUESTIONS[0]), replay=False)
    plain = chat(wide, [{"role": "user", "content": f"{notes(1)}\n\n{QUESTIONS[0]}"}])
    assert said(answer) == said(plain) and answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert answer["timings"]["passages"] == [] and "passages_left_out" not in answer["timings"]
    assert chat(wide, with_file(notes(1), "\n"))["timings"]["passages"] == [], "nothing is asked"
    whole_of_it = chat(wide, with_file(notes(4, 2), QUESTIONS[0]))["timings"]
    assert whole_of_it["passages"] == [] and "passages_left_out" not in whole_of_it, "all would be repeated"


def test_a_stream_says_the_same(wide: Server) -> None:
    body = {"messages": with_file(notes(2), QUESTIONS[0]), "max_tokens": TOKENS}
    wanted = chat(wide, **body)["timings"]["passages"]
    status, text = ask(wide, CHAT, {**body, "stream": True, "return_progress": True})
    assert status == 200 and last_timings(text)["passages"] == wanted != []


def test_why_nothing_is_repeated(tiny: Tiny) -> None:
    with ready(parallel=2) as server:
        several = chat(server, with_file(notes(1), QUESTIONS[0]), n=2)
        assert "several answers" in several["timings"]["passages_left_out"] and several["timings"]["passages"] == []
        spoken = [*with_file(notes(1), QUESTIONS[0]), {"role": "assistant", "content": "It is"}]
        assert "not the user's" in chat(server, spoken)["timings"]["passages_left_out"]
    text = "\n\n".join(f"ab{i} cd{i}" for i in range(20))
    with ready(tiny("mamba", chat_template=TEMPLATE), parallel=2) as server:
        left_out = chat(server, with_file(text, "what?"))["timings"]["passages_left_out"]
        assert "this model has no attention weights" in left_out
    options = [*SMALL, "--ctx-checkpoints", "0"]
    with ready(tiny("lfm2", chat_template=TEMPLATE), parallel=2, options=options) as server:
        assert "cannot go back" in chat(server, with_file(text, "what?"))["timings"]["passages_left_out"]
    quantized = [*SMALL, "--flash-attn", "on", "--cache-type-v", "q8_0"]
    with ready("demo", parallel=2, options=quantized) as server:
        left_out = chat(server, with_file(notes(1), "what?"))["timings"]["passages_left_out"]
        assert "flash attention" in left_out
    narrow = [*SMALL, "--ctx-size", "512"]
    with ready("demo", parallel=1, options=narrow) as server:
        n = 8
        while len(ask(server, "/tokenize", {"content": notes(1, n)})[1]["tokens"]) < 460:
            n += 1
        answer, plain = (chat(server, with_file(notes(1, n), "what?"), max_tokens=1, replay=on) for on in (True, False))
        assert "no room" in answer["timings"]["passages_left_out"]
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_idle_slots_make_room(model: str, talking: pypcd.Llama) -> None:
    """Whose caches would fill the memory: 512 cells in all, which one request may take."""
    with ready(model, parallel=2, options=[*SMALL, "--ctx-size", "512", "--kv-unified-per-slot", "512"]) as server:
        complete(server, " ".join(PROMPTS) * 2, id_slot=1, n_predict=4)
        talk = conversation(talking)
        talk.attach(Document.of("a", notes(1, 7)))
        list(talk.send("what is k3?"))
        answer = chat(server, with_file(notes(1, 7), "what is k3?"), id_slot=0)
        assert answer["timings"]["passages"] == talk.passages != []


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_document_is_read_and_counted(wide: Server, talking: pypcd.Llama, tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    made = docx.Document()
    for word in ("first", "second"):
        made.add_paragraph(word)
    made.save(tmp_path / "a.docx")
    files = {
        "a.txt": b"\xef\xbb\xbffirst\r\n\r\nsecond\n",
        "a.pdf": pdf("first", "second"),
        "a.docx": (tmp_path / "a.docx").read_bytes(),
    }
    for name, data in files.items():
        body = {"filename": name, "file_data": coded(data)}
        for _ in range(2):  # the second time it is kept
            status, answer = ask(wide, "/documents", body)
            assert (status, answer["name"], answer["text"]) == (200, name, "first\n\nsecond"), answer
            n = len(talking.tokenize(b"first\n\nsecond", add_bos=False, special=False))
            assert answer["n_tokens"] == n
    answer = ask(wide, "/documents", {"name": "n", "text": "a b"})[1]
    assert (answer["name"], answer["text"]) == ("n", "a b")


DATA = coded(b"text")


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ({"filename": "a.pdf", "file_data": coded(b"%PDF-nonsense")}, "a.pdf cannot be read as a PDF"),
        ({"filename": "a.docx", "file_data": coded(b"PK\x03\x04nonsense")}, "a.docx cannot be read as a DOCX"),
        ({"filename": "a.png", "file_data": coded(b"\x89PNG\0")}, "a.png is not a text file; allowed: "),
        ({"filename": "a.txt", "file_data": "!"}, "file_data of a.txt is not base64"),
        ({"filename": "a.txt", "file_data": coded(b" \n")}, "a.txt has no text"),
        ({"file_id": "file-1"}, "a file has no file_data but an id or an address; allowed: "),
        (3, "a file has no file_data; allowed: "),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(wide: Server, file: Any, word: str) -> None:
    message = {"role": "user", "content": [{"type": "file", "file": file}, {"type": "text", "text": "a"}]}
    assert rejected(wide, messages=[message]).startswith(f"Field 'file': {word}")
    if isinstance(file, dict):
        assert rejected(wide, "/documents", **file).startswith(word)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"documents": 3}, "Field 'documents': it is 3; allowed: a list of "),
        ({"documents": [{"name": "a"}]}, "Field 'documents': it has "),
        ({"documents": [{"text": "a"}], "messages": [{"role": "system", "content": "a"}]}, "no message of the user"),
        ({"replay": "yes"}, "Field 'replay': it is \"yes\"; allowed: true, false"),
    ],
)
def test_a_wrong_field_is_refused_with_a_sentence(wide: Server, body: dict[str, Any], word: str) -> None:
    assert word in rejected(wide, **body)


def test_documents_belong_to_chats(wide: Server) -> None:
    for field in ({"documents": [{"name": "a", "text": "b"}]}, {"replay": True}):
        assert "it belongs to chats" in rejected(wide, "/completion", prompt="a", **field)
    assert complete(wide, "a", documents=None, n_predict=1)["tokens"]
    forged = {"documents": [], "prompt": "a", "mark": "b", "left_out": ""}
    assert "Field 'pcd_replay'" in rejected(wide, "/completion", prompt="a", pcd_replay=forged)
    assert "passages" not in chat(wide, [{"role": "user", "content": "a"}], pcd_replay=forged)["timings"]
    part = {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1/a"}}
    said = rejected(wide, "/v1/messages", messages=[{"role": "user", "content": [part]}])
    assert 'type "url"; allowed: "text", "base64"' in said


def test_the_route_needs_the_key_and_a_router_passes_it_on() -> None:
    body = {"filename": "a.txt", "file_data": DATA}
    with ready(parallel=1, api_key="secret") as server:
        assert ask(server, "/documents", body)[0] == 401
        assert ask(server, "/documents", body, Authorization="Bearer secret")[0] == 200

    with ready([model_list.Served(name, str(DEMO_MODEL)) for name in ("demo", "other")], parallel=1) as router:
        assert ask(router, "/documents", {**body, "model": "other"})[1]["n_tokens"] > 0
        answer = chat(router, with_file(notes(1, 6), "what?"), model="other")
        assert answer["timings"]["passages"] != []


def test_without_pypcd_serve_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("demo", port=0, parallel=1, options=SMALL)
    del server.environment["PYPCD_PYTHON"]
    with server.running():
        assert server.wait_until_ready()
        assert "`pypcd serve`" in rejected(server, documents=[{"name": "a", "text": "b"}])


def test_no_module_of_the_folder_that_it_starts_in_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with ready(parallel=1) as server:
        assert ask(server, "/documents", {"name": "a", "text": "b"})[0] == 200
