"""Documents in requests to llama-server: their text, and that prompts are those of pypcd.ask. Passages and answers are compared in
test_serve_attention.py."""

from __future__ import annotations

import base64
import concurrent.futures
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serving
from conftest import F32, Tiny
from documents import pdf
from processes import children, lives, within
from serving import HELD, answered, ask, begun, complete, meant, ready, refused, with_workers
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd import ask as asking
from pypcd.document import Document
from pypcd.engine import token_text
from pypcd.prompt import lay
from pypcd.server import Server

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
    return "\n\n".join(lines)


def path_of(tiny: Tiny, arch: str = "llama", template: str = TEMPLATE, **given: Any) -> str:
    """A model whose attention is spread: that of the included model is so sharp that segments get equally much."""
    return str(tiny(arch, **{"seed": 3, "chat_template": template, "n_ctx_train": 8192, **given}))


def opened(path: str, **given: Any) -> pypcd.Llama:
    small: dict[str, Any] = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "n_gpu_layers": 0, **F32}
    return pypcd.Llama(path, pcd=False, **{**small, **given})


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> str:
    return path_of(tiny)


@pytest.fixture(scope="module")
def wide(model: str) -> Iterator[Server]:
    """One with room for documents in each of its four slots."""
    with ready(model=model, parallel=4) as running:
        yield running


@pytest.fixture(scope="module")
def talking(model: str) -> Iterator[pypcd.Llama]:
    with opened(model) as llm:
        yield llm


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_part(text: str, name: str = "notes.txt") -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": coded(text.encode())}}


def with_file(text: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [file_part(text), {"type": "text", "text": question}]}]


def chat(server: Server, messages: Any, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    return dict(answered(server, path, {"messages": messages, "max_tokens": TOKENS, **fields}))


def whole(text: str) -> str:
    """Without a letter that the end has cut."""
    return text.rstrip("\ufffd")


def said(answer: dict[str, Any]) -> str:
    return whole(answer["choices"][0]["message"]["content"])


def in_python(llm: pypcd.Llama, documents: list[Document], question: str, after: Any = None) -> asking.Answer:
    return asking.ask(llm, documents, question, after=after, max_tokens=TOKENS, cache=False)


def told(answer: asking.Answer) -> list[dict[str, Any]]:
    return [dict(vars(passage)) for passage in answer.passages]


# -- prompts and passages ----------------------------------------------------------------------------------------------


ODD = [notes(1), "k3 é\u200b 🙂\tk\x0b3.\n\n" + notes(2), notes(3).replace("\n\n", "\n"), notes(1)]
TALKS: dict[str, list[dict[str, Any]]] = {
    "several documents": [{"role": "user", "content": "\n\nk7?\n", "documents": ODD}],
    "a system message": [
        {"role": "system", "content": "Be  brief. "},
        {"role": "user", "content": " k7?", "documents": [notes(1)]},
    ],
    "follow-ups": [
        {"role": "user", "content": "What is k3?", "documents": [notes(1)]},
        {"role": "assistant", "content": " It is\nred. "},
        {"role": "user", "content": "And which one is blue?"},
        {"role": "assistant", "content": "k5"},
        {"role": "user", "content": "And here?", "documents": [notes(5), notes(6)]},
    ],
}
TEMPLATES = {
    "plain": TEMPLATE,
    "without space around": TEMPLATE.replace("m['content']", "m['content'] | trim"),
    "no system message": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + TEMPLATE,
    "system messages left out": TEMPLATE.replace("in messages", "in messages if m['role'] != 'system'"),
}


def with_control_tokens(llm: pypcd.Llama) -> list[dict[str, Any]]:
    letters = [token_text(llm, token) for token in (llm.token_bos(), llm.token_eos())]
    assert all(letters)
    text = notes(3) + "\n\nThe k3 is {1}{0}<assistant>{1} {1}k3.".format(*letters)
    first, last = {"role": "system", "content": letters[1]}, {"role": "user", "content": f"What is {letters[1]} k3?"}
    return [first, *TALKS["follow-ups"], {"role": "assistant", "content": "a"}, {**last, "documents": [text, *letters]}]


def sent_and_read(talk: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """A talk as a client sends it, and as pypcd.ask has it."""
    sent, read = [], []
    for message in talk:
        named = [(f"{i}.txt", text) for i, text in enumerate(message.get("documents", []))]
        parts = [*(file_part(text, name) for name, text in named), {"type": "text", "text": message["content"]}]
        sent.append({"role": message["role"], "content": parts if named else message["content"]})
        read.append({**message, "documents": [Document.of(*one) for one in named]})
    return sent, read


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prompt_is_pythons_token_for_token(tiny: Tiny, template: str) -> None:
    path = path_of(tiny, template=TEMPLATES[template])
    with opened(path) as llm, ready(model=path, parallel=1) as server:
        n_ctx = ask(server, "/props")[1]["default_generation_settings"]["n_ctx"]
        talks = {**TALKS, "control tokens": with_control_tokens(llm)}
        for name, (sent, read) in ((name, sent_and_read(talk)) for name, talk in talks.items()):
            for replay, most in ((True, "all"), (False, "all"), (True, None), (False, 60), (True, 60)):
                body = {"messages": sent, "replay": replay, "read": most}
                status, found = ask(server, "/apply-template", body)
                timings = chat(server, sent, replay=replay, read=most, max_tokens=1)["timings"]
                passages = timings["passages"]
                turns, said = asking.chosen(llm, read, most, n_ctx)
                assert timings["documents_read"] == said and bool(said) == (most == 60)
                prompt = asking.prompt_of(turns)
                n_read = sum(len(document.read) for document in asking.documents_in(turns))
                if len(passages) < n_read:  # all of what is read is not repeated
                    prompt = prompt.with_passages([one["text"] for one in passages]) if passages else prompt
                wanted = lay(llm, prompt.turns, chat=True).tokens
                assert (status, found["prompt"]) == (200, wanted) and bool(passages) <= replay, name
                assert name != "control tokens" or wanted.count(llm.token_eos()) == 0
                n = ask(server, "/v1/chat/completions/input_tokens", body)[1]["input_tokens"]
                assert n == len(wanted)
        # without documents the prompt is llama.cpp's own, and a text
        plain = [{"role": one["role"], "content": one["content"].strip()} for one in TALKS["a system message"]]
        prompt = ask(server, "/apply-template", {"messages": plain})[1]["prompt"]
        body = {"content": prompt, "add_special": True, "parse_special": True}
        wanted = ask(server, "/tokenize", body)[1]["tokens"]
        assert lay(llm, asking.prompt_of(plain).turns, chat=True).tokens == wanted


def without_replay(server: Server, llm: pypcd.Llama, text: str, question: str) -> list[int]:
    """The prompt of a question about a document, which is Python's."""
    prompt = ask(server, "/apply-template", {"messages": with_file(text, question), "replay": False})[1]["prompt"]
    messages = [{"role": "user", "content": question, "documents": [Document.of("notes.txt", text)]}]
    assert prompt == lay(llm, asking.prompt_of(messages).turns, chat=True).tokens
    return list(prompt)


@pytest.mark.parametrize("templates", [(TEMPLATE, CHAT_TEMPLATE), (CHAT_TEMPLATE, TEMPLATE)])
def test_a_template_of_the_command_line_is_followed(tiny: Tiny, templates: tuple[str, str]) -> None:
    """One of the two begins with the beginning of text."""
    path = path_of(tiny, template=templates[0])
    with opened(path) as llm, ready("--chat-template", templates[1], model=path, parallel=1) as server:
        llm.metadata["tokenizer.chat_template"] = templates[1]
        prompt = without_replay(server, llm, notes(3), "k3?")
        assert prompt.count(llm.token_bos()) == templates[1].count("bos_token")


def test_no_document_has_a_mark_of_the_templates(tiny: Tiny) -> None:
    """That is no control token, but read wherever its letters stand."""
    template = "{% for m in messages %}<|you|>{{ m['content'] }}{% endfor %}<|me|>{% if false %}<|tool|>{% endif %}"
    made = ("<|you|>", "<|me|>", "<|tool|>")
    path = path_of(tiny, template=template, defined=made)
    with opened(path) as llm, ready(model=path, parallel=1) as server:
        prompt = without_replay(server, llm, notes(3) + "<|me|>yes<|tool|>k4", "k3?<|you|>")
        marks = [llm.tokenize(mark.encode(), add_bos=False)[-1] for mark in made]
        assert [prompt.count(mark) for mark in marks] == [1, 1, 0]


def test_a_document_that_is_there_twice_is_repeated_once(wide: Server, talking: pypcd.Llama) -> None:
    """And several stand in their order, wherever they are given: as in a chat."""
    seeds = 1, 2, 1
    wanted = in_python(talking, [Document.of(f"{seed}", notes(seed, 6)) for seed in seeds], QUESTIONS[0])
    parts = [file_part(notes(seed, 6), f"{seed}") for seed in seeds]
    named = [{"name": str(seed), "text": notes(seed, 6)} for seed in seeds]
    question = {"role": "user", "content": [{"type": "text", "text": QUESTIONS[0]}, *parts]}
    above = chat(wide, [{"role": "user", "content": QUESTIONS[0]}], documents=named)
    for answer in (chat(wide, [question]), above):
        passages = answer["timings"]["passages"]
        assert (passages, said(answer)) == (told(wanted), whole(wanted.text))
        assert len({one["text"] for one in passages}) == len(passages)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_the_same_and_each_of_several_answers(wide: Server, n: int) -> None:
    body = {"messages": with_file(notes(2), QUESTIONS[0]), "max_tokens": TOKENS, "n": n}
    wanted = chat(wide, **body)["timings"]["passages"]
    text = answered(wide, CHAT, {**body, "stream": True, "return_progress": True})
    assert serving.last_timings(text)["passages"] == wanted != []


def test_each_apis_own_parts_are_files(wide: Server) -> None:
    data, text = f"data:text/plain;base64,{coded(notes(1).encode())}", {"type": "text", "text": QUESTIONS[0]}
    source = {"type": "text", "media_type": "text/plain", "data": notes(1)}
    of_openai = [{"type": "input_file", "filename": "notes.txt", "file_data": data}, {**text, "type": "input_text"}]
    of_anthropic = [{"type": "document", "source": source, "title": "notes.txt"}, text]
    wanted = chat(wide, with_file(notes(1), QUESTIONS[0]))
    asked = {"input": [{"role": "user", "content": of_openai}], "max_output_tokens": TOKENS}
    first = ask(wide, "/v1/responses", asked)[1]
    second = chat(wide, [{"role": "user", "content": of_anthropic}], "/v1/messages")
    for answer, got in ((first, first["output"][0]["content"][0]["text"]), (second, second["content"][0]["text"])):
        assert whole(got) == said(wanted)
        assert answer["timings"]["passages"] == wanted["timings"]["passages"] != []


def test_what_is_left_out_of_a_document_is_said_apart(wide: Server) -> None:
    file = {"filename": "a.html", "file_data": coded(f"<html><img>{notes(1)}".encode())}
    read = ask(wide, "/documents", file)[1]
    assert read["note"] == "pictures are left out"
    for given in (file, {"filename": "a.html", "text": read["text"], "note": read["note"]}):
        parts = [{"type": "file", "file": given}, {"type": "text", "text": QUESTIONS[0]}]
        timings = chat(wide, [{"role": "user", "content": parts}], max_tokens=1)["timings"]
        assert timings["documents_note"] == "a.html: pictures are left out"
        assert "left out" not in timings["passages_note"] and timings["documents_read"] == ""


def test_why_nothing_is_repeated(wide: Server) -> None:
    for messages, note in (
        ([*with_file(notes(1), QUESTIONS[0]), {"role": "assistant", "content": "It is"}], ".*not the user's"),
        (with_file(notes(4, 2), "k0, k1?"), ".*no more than these passages"),
        (with_file(notes(1), "Zebra?"), ".*no passage has a word of the question"),
        (with_file(notes(1), "\n"), "$"),  # nothing is asked
    ):
        timings = chat(wide, messages)["timings"]
        assert timings["passages"] == [] and re.match(note, timings["passages_note"])


# -- the process that reads documents ---------------------------------------------------------------------------------


def workers(server: Server) -> list[int]:
    assert server._process is not None
    return [pid for pid, command in children(server._process.pid).items() if "pypcd.server.worker" in command]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux")
def test_one_that_ended_is_replaced_and_there_are_two_at_most() -> None:
    with ready(parallel=8) as server:
        assert not workers(server), "none before one is needed"
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: chat(server, with_file(notes(i), "k3?"))["timings"]["passages"], range(8)))
        assert all(found) and 1 <= len(workers(server)) <= 2
        for pid in workers(server):
            os.kill(pid, signal.SIGKILL)
        assert chat(server, with_file(notes(1), "k3?"))["timings"]["passages"] == found[1]
        left = workers(server)
    assert not any(map(lives, left)), "they end with the server"


def test_what_takes_too_long_is_a_sentence(tmp_path: Path) -> None:
    with with_workers("import sys\nsys.argv[1] = '0.0001'", tmp_path) as server:
        said = refused(server, CHAT, documents=[{"name": "a", "text": "b"}])
        assert said.startswith("the documents took more than 60 seconds"), said
        assert complete(server, "a", n_predict=1)["tokens"]


def test_one_that_writes_many_errors_goes_on(tmp_path: Path) -> None:
    """Their pipe has room for some 64 KiB."""
    code = "import sys\nprint('so it is\\n' * 10**5, file=sys.stderr)\n"
    with with_workers(code, tmp_path) as server:
        assert ask(server, "/documents", {"filename": "a", "text": "b"})[1]["text"] == "b"
    with with_workers(code + "sys.exit('that is all')", tmp_path) as server:
        status, answer = ask(server, "/documents", {"filename": "a", "text": "b"})
        assert status == 500 and answer["error"]["message"].endswith("cannot be read: that is all")


def test_nothing_is_read_for_a_client_that_left_while_it_waited_for_its_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def read(name: str) -> Any:
        return ask(server, "/documents", {"filename": name, "text": "b"})[1]["name"]

    held = with_workers(HELD.format(name="_answer"), tmp_path)
    with held as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.map(read, "ab")
        assert within(lambda: log.exists() and len(log.read_text()) == 2)
        left = begun(server, "/documents", {"filename": "left", "text": "b"})
        left.sock.shutdown(socket.SHUT_WR)  # the server sees no difference, and we hear of it
        try:
            assert left.getresponse().status == 500
        finally:
            (tmp_path / "go").touch()
            left.close()
        assert [*first, read("c")] == ["a", "b", "c"] and sorted(log.read_text()) == ["a", "b", "c"]


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_document_is_read_and_counted(wide: Server, talking: pypcd.Llama) -> None:
    files = {"a.txt": (b"\xef\xbb\xbffirst\r\n\r\nsecond\n", 0), "a.pdf": (pdf("first", "second"), 2)}
    for name, (data, n_pages) in files.items():
        body = {"filename": name, "file_data": coded(data)}
        for _ in range(2):  # the second time it is kept
            status, answer = ask(wide, "/documents", body)
            assert (status, answer["name"], answer["text"]) == (200, name, "first\n\nsecond"), answer
            n = len(talking.tokenize(b"first\n\nsecond", add_bos=False, special=False))
            assert answer["n_tokens"] == n
            assert (answer["unit"], len(answer["pages"]), answer["note"]) == ("page", n_pages, "")
    answer = ask(wide, "/documents", {"name": "n", "text": "a b"})[1]
    assert (answer["name"], answer["text"]) == ("n", "a b")


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ({"filename": "a.pdf", "file_data": coded(b"%PDF-nonsense")}, "a.pdf cannot be read as a PDF"),
        ({"filename": "a.txt", "file_data": "!"}, "file_data of a.txt is not base64"),
        ({"filename": "a.txt", "file_data": coded(b" \n")}, "a.txt has no text"),
        ({"file_id": "file-1"}, "a file has no file_data but an id or an address; allowed: "),
        (3, "a file has no file_data; allowed: "),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(wide: Server, file: Any, word: str) -> None:
    message = {"role": "user", "content": [{"type": "file", "file": file}, {"type": "text", "text": "a"}]}
    assert refused(wide, CHAT, messages=[message]).startswith(f"Field 'file': {word}")
    if isinstance(file, dict):
        assert refused(wide, "/documents", **file).startswith(word)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"documents": 3}, "Field 'documents': it is 3; allowed: a list of "),
        ({"documents": [{"name": "a"}]}, "Field 'documents': it has "),
        (
            {"documents": [{"text": "abc", "pages": [2]}]},
            "pages is [2]; allowed: the offsets at which the text's pages begin, in order, from 0 to at most 3",
        ),
        ({"documents": [{"text": "abc", "pages": [0, 4]}]}, "pages is [0, 4]; allowed: "),
        ({"documents": [{"text": "a"}], "messages": [{"role": "system", "content": "a"}]}, "no message of the user"),
        ({"replay": "yes"}, "Field 'replay': it is \"yes\"; allowed: true, false"),
        ({"read": 0}, "Field 'read': read is 0; allowed: \"all\", or the most tokens"),
    ],
)
def test_a_wrong_field_is_refused_with_a_sentence(wide: Server, body: dict[str, Any], word: str) -> None:
    assert word in refused(wide, CHAT, **body)


def test_a_long_value_is_not_sent_back_whole(wide: Server) -> None:
    said = refused(wide, CHAT, read="x" * 1_000_000)
    assert len(said) < 2100 and "read is 'xxx" in said and said.endswith("to read of the documents, such as 4096")


def test_documents_belong_to_chats(wide: Server) -> None:
    for field in ({"documents": [{"name": "a", "text": "b"}]}, {"replay": True}, {"read": 9}):
        assert "it belongs to chats" in refused(wide, **field)
    assert complete(wide, "a", documents=None, n_predict=1)["tokens"]
    forged = {"names": [], "n_kept": 1, "passages": [], "note": ""}
    assert "passages" not in complete(wide, "a", n_predict=1, pcd_documents=forged)["timings"]
    assert "passages" not in chat(wide, [{"role": "user", "content": "a"}], pcd_documents=forged)["timings"]
    part = {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1/a"}}
    said = refused(wide, "/v1/messages", messages=[{"role": "user", "content": [part]}])
    assert 'type "url"; allowed: "text", "base64"' in said


def test_without_pypcd_serve_there_is_a_sentence() -> None:
    server = serving.server_of(parallel=1)
    del server.environment["PYPCD_PYTHON"]
    with server.running():
        assert server.wait_until_ready()
        assert "`pypcd serve`" in refused(server, CHAT, documents=[{"name": "a", "text": "b"}])
        assert "`pypcd serve`" in refused(server, CHAT, pcd="paper:beta=2")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux")
def test_a_setting_is_read_once() -> None:
    with ready(parallel=1) as server:
        for known in (True, False, "on", "off", "cautious", "window"):
            meant(server, pcd=known)
        assert not workers(server), "presets are known from the start"
        settings = [{"pcd": "paper:beta=2"}, {"pcd": {"gamma": 3}}, {"pcd": {"gamma": 3}, "model": "demo:pcd-cautious"}]
        read = [meant(server, **fields) for fields in settings]
        assert [(one["beta"], one["gamma"]) for one in read] == [(2, 30), (2.5, 3), (1.5, 3)]
        (pid,) = workers(server)
        os.kill(pid, signal.SIGKILL)
        assert [meant(server, **fields) for fields in settings] == read
        assert set(workers(server)) <= {pid}, "no other process was needed"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux")
def test_what_reads_documents_ends_with_the_server() -> None:
    with ready(parallel=1) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(ask, server, "/documents", {"filename": "a.pdf", "file_data": coded(pdf("first"))})
        assert within(lambda: any(map(children, workers(server))))
        (worker,) = workers(server)
        (reader,) = children(worker)
        os.kill(reader, signal.SIGSTOP)  # a document that takes long
        os.kill(server._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        try:
            assert within(lambda: not lives(worker), 30), "or it waits for the reader"
        finally:
            os.kill(reader, signal.SIGCONT)
        assert within(lambda: not lives(reader), 30)


def test_no_module_of_the_folder_that_it_starts_in_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with ready(parallel=1) as server:
        assert ask(server, "/documents", {"name": "a", "text": "b"})[0] == 200
