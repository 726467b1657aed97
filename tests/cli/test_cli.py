"""chat, generate and info: a conversation's logic by itself, then the commands in this process and through pipes."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

import pypcd
from pypcd import errors
from pypcd.cli import _generation, _options, _reading, _table, _terminal, _text, info, main
from pypcd.cli._conversation import Conversation, _text_of, never
from pypcd.cli._generation import ContextFull, Figures, Generation
from pypcd.cli.chat import COMMANDS, Chat
from pypcd.decode import Replay, Session
from pypcd.decode.prompt_cache import PromptCache
from pypcd.decode.replay import attention
from pypcd.document import Document
from pypcd.engine._results import Change
from pypcd.evaluation import executors
from pypcd.prompt import Prompt, chat_tokens

ENV = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "GGML_NO_BACKTRACE": "1", "PYTHONUTF8": "1"}
TIMEOUT = 60  # for one expectation, on a machine that is busy


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    return str(write_tiny_gguf(path, seed=3, chat_template=CHAT_TEMPLATE, n_ctx_train=16384, n_layer=2))


@pytest.fixture(scope="module")
def llm(model):
    llm = opened(model)
    yield llm
    llm.close()


@pytest.fixture
def session(llm) -> Conversation:
    llm.reset()
    llm.pcd = "paper"
    return Conversation(llm, _options.GenerationSettings(max_tokens=12))


def opened(model, n_ctx=512, **given):
    return pypcd.Llama(model, n_ctx=n_ctx, n_threads=1, n_threads_batch=1, **given)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """A command in this process: its status, and what it has written to stdout and stderr."""
    monkeypatch.setattr(_terminal, "setup", lambda: None)

    def run(*words):
        return (main([str(word) for word in words]), *capsys.readouterr())

    return run


def pypcd_command(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pypcd", *args]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**ENV, **env},
        timeout=TIMEOUT,
        check=False,
    )


PARTS = ("ab ab", "cd cd", "ee ff", "ba ab")


def ask(session: Conversation, text: str) -> str:
    return "".join(session.send(text))


# -- the session, without a terminal ---------------------------------------------------------------------------------


def test_turns_build_on_each_other_and_reuse_the_prompt(session, llm):
    first = ask(session, "one")
    ask(session, "two")
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert session.messages[1]["content"] == first
    assert session.figures[0].cached_tokens == 0
    assert session.figures[1].cached_tokens > 5
    assert [f.completion_tokens for f in session.figures] == [12, 12]
    llm.reset()
    reply = llm.create_chat_completion(
        [{"role": "user", "content": "one"}], temperature=0, max_tokens=12, repeat_penalty=1.0
    )
    # llama_cpp drops what is not UTF-8
    assert reply["choices"][0]["message"]["content"] == first.replace("\ufffd", "")


def test_regen_and_undo(session):
    first = ask(session, "one")
    assert "".join(session.regen()) == first  # greedy
    assert len(session.messages) == 2
    session.sampling = _options.GenerationSettings(temperature=1.5, max_tokens=12, seed=5)
    assert "".join(session.regen()) == "".join(session.regen()) != first
    assert session.undo() == "one"
    assert session.messages == []
    with pytest.raises(ValueError, match="no turn"):
        session.undo()
    with pytest.raises(ValueError, match="no message"):
        list(session.regen())


def compared(session: Conversation) -> dict[str, Generation]:
    """The answers by title, each read to its end before the next."""
    answers = {}
    for title, answer in session.compare():
        assert "".join(answer) == answer.text
        answers[title] = answer
    return answers


def test_compare_leaves_everything_as_it_was(session, llm):
    with_pcd = ask(session, "one")
    llm.pcd = False
    before = json.dumps(session.messages)
    on, off = compared(session).values()
    assert (on.figures.pcd, off.figures.pcd) == (pypcd.PCDConfig(), None)
    assert on.text == with_pcd
    assert json.dumps(session.messages) == before
    assert llm.pcd is None
    assert "".join(session.regen()) == off.text


def test_compare_shows_replay_beside_none_if_pcd_was_never_on(session, llm, capsys):
    llm.pcd = False
    session = Conversation(llm, session.sampling)
    session.attach(Document("notes", PARTS, "\n\n"))
    answer = ask(session, "what is ab?")
    passages = list(session.passages)
    answers = compared(session)
    assert list(answers) == ["replay", "plain"]
    assert answers["replay"].text == answer and session.passages == passages and session.replay
    session.replay = None
    assert "".join(session.regen()) == answers["plain"].text
    assert list(compared(session)) == ["PCD unsure", "PCD off"]
    session.set_pcd("window")
    session.replay = Replay()
    assert list(compared(session)) == ["PCD window", "PCD off"]


def test_the_demo_asks_its_questions_one_by_one(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/demo 3\n/demo 2\n/demo 999\n"))
    with pypcd.Llama("demo", n_threads=1, n_threads_batch=1) as llm:
        chat = Chat(Conversation(llm, _options.GenerationSettings(max_tokens=4)))
        assert chat.run() == 1
        assert len(chat.session.messages) == 2
    said = capsys.readouterr().err
    assert (
        said.count("the conversation begins anew") == 2
        and "question 999 is none of the demo's; allowed: 1 to 300" in said
    )


def test_a_stopped_answer_stays_and_a_message_without_one_is_a_draft(session):
    pieces = []
    pieces.extend(session.send("one", stopped=lambda: len(pieces) > 2))
    assert session.figures[-1].finish_reason == "interrupted"
    assert session.messages[-1]["content"] == "".join(pieces) != ""
    kept = list(session.messages)
    session.set_pcd(False)
    session.attach(Document("notes", PARTS, "\n\n"))  # which waits with its question
    list(session.send("two", stopped=lambda: True))
    assert session.messages[:2] == kept
    if len(session.messages) == 2:  # the prompt was not even read
        assert session.draft == "two" and [d.name for d in session.attached] == ["notes"]
        list(session.regen())
    assert session.messages[2]["content"] == "two" and session.draft is None
    assert session.messages[2]["documents"] == [Document("notes", PARTS, "\n\n")] and session.attached == []


def test_a_full_context_loses_nothing(session, tmp_path):
    ask(session, "one")
    kept = list(session.messages)
    with pytest.raises(ContextFull, match=r"long has \d+ tokens.*Nothing is cut"):
        session.attach(Document.of("long", "ba " * 600))
    assert session.attached == []
    n = next(n for n in range(600, 0, -1) if len(session.llm.tokenize(b"ba " * n)) < 470)
    assert session.attach(Document.of("long", "ba " * n)) < session.llm.n_ctx()
    with pytest.raises(ContextFull, match=r"/undo.*--n-ctx"):
        list(session.send("what is it?"))
    assert session.messages == kept and session.draft == "what is it?"
    with pytest.raises(ContextFull, match="/file none takes back long$"):
        list(session.send("short"))  # the document is in front of this question now
    session.clear()
    list(session.regen())
    (asked, _), text = session.messages, session.attached
    assert (asked["content"], [d.name for d in asked["documents"]], text) == ("short", ["long"], [])


def test_what_was_meant_for_one_conversation_does_not_get_into_another(session, llm, tmp_path):
    ask(session, "one")
    session.save(str(tmp_path / "talk.json"))
    other = Conversation(llm, session.sampling)
    other.draft, other.passages = "of another talk", ["a passage"]
    other.attach(Document("notes", PARTS, "\n\n"))
    other.load(str(tmp_path / "talk.json"))
    assert (other.draft, other.attached, other.passages) == (None, [], [])
    session.attach(Document("notes", PARTS, "\n\n"))
    session.clear()
    assert session.attached == [] and ask(session, "two") and "documents" not in session.messages[0]


def test_a_question_about_a_document_has_its_passages_again(session, model):
    """The same answer as to a message with the passages in it, which another model's context reads at once."""
    session.set_pcd(False)
    session.attach(Document("notes", PARTS, "\n\n"))
    session.replay = Replay(n=1)
    document = "\n\n".join(PARTS) + "\n\n"
    for turn, question in enumerate(("what is ab?", "and ee?")):
        answer = ask(session, question)
        (passage,) = session.passages
        assert passage in PARTS and session.left_out == ""
        *before, asked, _ = session.messages
        assert asked["content"] == question, "the history is as it was written"
        texts = [{"role": m["role"], "content": text + m["content"]} for m, text in zip(before, [document, ""])]
        again = f"{'' if turn else document}From the text above:\n\n{passage}\n\n{question}"
        with opened(model) as fresh:
            other = Conversation(fresh, session.sampling)
            prompt, stop = chat_tokens(fresh, [*texts, {"role": "user", "content": again}])
            assert "".join(Generation(fresh, prompt, other.sampling, stop=stop)) == answer
        figures = session.figures[-1]
        assert figures.prompt_tokens == len(prompt) and (figures.cached_tokens > 0) == bool(turn)


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
@pytest.mark.parametrize("before", [None, Replay(n=1)])
def test_passages_are_those_of_the_method(tmp_path, arch, before):
    """Which evaluates the prompt anew. A hybrid model's state cannot go back; the cache may have all of the prompt already."""
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf", arch=arch, seed=3, chat_template=CHAT_TEMPLATE))
    with opened(path) as llm:
        asked = Conversation(llm, _options.GenerationSettings(max_tokens=12))
        asked.attach(Document("notes", PARTS, "\n\n"))
        asked.replay = before
        ask(asked, "what is ab?")
        asked.replay = Replay(n=1)
        list(asked.regen())
        found = asked.passages
    with opened(path) as fresh:
        prompt = Prompt(segments=PARTS, joiner="\n\n", after="\n\nwhat is ab?")
        scores = attention(Session(fresh), prompt, True, Replay().n_last).max(axis=0)
        edited = Replay(n=1).edit(Session(fresh), prompt, chat=True, answer=str)
    assert np.sort(scores)[-1] > 1.01 * np.sort(scores)[-2], "two parts get as much, so either may be found"
    assert found == [PARTS[scores.argmax()]]
    message = {"role": "user", "content": "what is ab?", "documents": [Document("notes", PARTS, "\n\n")]}
    assert edited.text == _text_of(message, found), "the method and the chat write passages in the same way"


def test_an_answer_that_was_stopped_before_it_began_says_nothing_of_the_one_before(model):
    with pypcd.Llama(model, n_ctx=512, n_batch=32, n_threads=1, n_threads_batch=1, pcd="window") as llm:
        llm.create_completion("hello", max_tokens=4)
        assert llm.last_answer.n_tokens
        sampling = _options.GenerationSettings(max_tokens=12)
        stopped = Generation(llm, llm.tokenize(b"ba " * 100), sampling, stopped=lambda: True)
        assert list(stopped) == [] and stopped.figures.answer == pypcd.PCDAnswer()


def test_a_batch_that_was_stopped_leaves_nothing_in_a_state_that_cannot_go_back(tmp_path):
    """Of a batch of several parts the first ones are in the state when it is stopped."""
    path = str(write_tiny_gguf(tmp_path / "mamba.gguf", "mamba", n_layer=2, seed=3))
    calls: list[int] = []
    with opened(path, n_batch=64, n_ubatch=16) as llm:
        prompt = llm.tokenize(b"ba ab cd " * 100)[:60]

        def answer(n: int) -> tuple[str, str]:
            """One that is stopped once n nodes of its prompt's second batch are computed, and the same answered to its end."""
            llm.reset()
            llm.eval(prompt[:8])
            calls.clear()
            sampling = _options.GenerationSettings(max_tokens=12)
            stopped = Generation(llm, prompt, sampling, stopped=lambda: calls.append(1) or len(calls) > n)
            text = "".join(stopped)
            end = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm._ctx.ctx), 0)
            assert end == llm.n_tokens - 1, "nothing is left of it that is not known"
            return text, "".join(Generation(llm, prompt, sampling))

        whole, _ = answer(10**9)
        half = len(calls) // 2
        assert half > 10 and len(whole) > 5
        assert answer(half) == answer(0) == ("", whole), "as if the batch had not begun"


def test_what_a_state_that_cannot_go_back_had_read_is_not_counted_as_kept(tmp_path):
    path = str(write_tiny_gguf(tmp_path / "mamba.gguf", "mamba", n_layer=2))
    with opened(path) as llm:
        prompt, other = llm.tokenize(b"ab ab ab"), llm.tokenize(b"ab ab cd cd")
        assert _reading.read(llm, prompt, len(prompt), never).n_cached == 0
        assert _reading.n_held(llm, other) > 2
        assert _reading.read(llm, other, len(other), never).n_cached == 0
        assert _reading.read(llm, [*other, 5], len(other) + 1, never).n_cached == len(other)


def test_which_messages_have_no_passages(session):
    session.set_pcd(False)
    for attach, text in ((Document("one", PARTS[:1], ""), "what?"), (Document("notes", PARTS, "\n"), "")):
        session.attach(attach)
        ask(session, text)
        assert session.passages == [] and session.left_out == ""
    ask(session, "what?")
    assert len(session.passages) == 2
    session.replay = None
    "".join(session.regen())
    assert session.passages == []


def test_passages_that_cannot_be_found_are_said(session, monkeypatch):
    def refuse(*_: object) -> None:
        raise pypcd.UnsupportedError("no attention here")

    monkeypatch.setattr("pypcd.cli._conversation.attention_weights", refuse)
    session.set_pcd(False)
    session.attach(Document("notes", PARTS, "\n\n"))
    assert ask(session, "what?") != "" and session.left_out == "no attention here"


def test_documents_are_saved_and_loaded(session, llm, tmp_path):
    session.attach(Document(os.fsdecode(b"caf\xe9.txt"), PARTS, "\n\n"))  # a name that UTF-8 does not have
    ask(session, "what?")
    session.save(str(tmp_path / "talk.json"))
    other = Conversation(llm, session.sampling)
    other.load(str(tmp_path / "talk.json"))
    assert other.messages == session.messages and other.messages[0]["documents"][0].segments == PARTS
    "".join(other.regen())
    assert other.passages == session.passages != []
    record = json.loads((tmp_path / "talk.json").read_text())
    for bad in ([3], [{"name": "x"}], "x", [{"name": "x", "text": ""}]):
        first, *others = record["messages"]
        damaged = {**record, "messages": [{**first, "documents": bad}, *others]}
        (tmp_path / "bad.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="its documents are not"):
            other.load(str(tmp_path / "bad.json"))


def test_the_answer_ends_where_the_context_does(llm):
    llm.pcd = "paper"
    prompt = llm.tokenize(b"ba " * 200)
    generation = Generation(llm, prompt, _options.GenerationSettings(max_tokens=0))
    assert "".join(generation) == generation.text
    assert generation.figures.finish_reason == "context"
    assert generation.figures.context_used == llm.n_ctx()


def test_stop_strings_never_show(llm):
    llm.pcd = False
    prompt = llm.tokenize(b"hello")
    whole = "".join(Generation(llm, prompt, _options.GenerationSettings(max_tokens=30)))
    stop = whole[8:11]
    shown = list(Generation(llm, prompt, _options.GenerationSettings(max_tokens=30), stop=[stop]))
    assert "".join(shown) == whole[: whole.index(stop)]


def test_the_pieces_of_an_answer_are_its_tokens_as_utf_8(llm):
    """Although a character's bytes may be of several tokens, and some bytes are no character."""
    llm.pcd = "window:window=2:n_sink=0"
    prompt = llm.tokenize(b"hello")
    generation = Generation(llm, prompt, _options.GenerationSettings(max_tokens=120))
    shown = "".join(generation)
    tokens = llm.input_ids[len(prompt) : llm.n_tokens].tolist()
    pieces = b"".join(llm.detokenize([token], prev_tokens=[1], special=True) for token in tokens)
    assert pieces.decode("utf-8", "replace").rstrip("\ufffd") in shown and "\ufffd" in shown and len(shown) > 100
    changes = llm.last_answer.changes
    assert changes and len(generation.figures.changed) == len(changes)


def full_disk(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_save_and_load(session, llm, tmp_path, monkeypatch):
    ask(session, "one")
    session.system = "be kind"
    session.sampling.set("top_k", "7")
    session.set_pcd("beta=1.5")
    path = tmp_path / "talk.json"
    session.save(str(path))
    session.save(str(path))  # over a session is fine
    before = path.read_text()
    monkeypatch.setattr("pypcd.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        session.save(str(path))
    assert path.read_text() == before and [file.name for file in tmp_path.iterdir()] == ["talk.json"]
    monkeypatch.undo()

    llm.pcd = False
    other = Conversation(llm)
    assert other.load(str(path)) == f"1 turn from {path}"
    assert (other.messages, other.system, other.sampling) == (session.messages, "be kind", session.sampling)
    assert llm.pcd.beta == 1.5

    precious = tmp_path / "notes.txt"
    precious.write_text("mine")
    with pytest.raises(ValueError, match="not a conversation"):
        session.save(str(precious))
    assert precious.read_text() == "mine"
    for damage in (
        {"messages": [{"role": "user"}]},
        {"messages": 3},
        {"settings": {"top_k": -1}},
        {"settings": 3},
        {"messages": [{"role": "user", "content": "x"}]},
        {"pcd": {"betta": 1}},
    ):
        path.write_text(json.dumps({"pypcd_session": 1, "messages": [], **damage}))
        with pytest.raises((ValueError, TypeError)):
            other.load(str(path))
        assert other.messages == session.messages
    path.write_text('{"pypcd_session": 1, "settings": null, "system": null, "messages": null, "pcd": null}')
    other.load(str(path))
    assert other.messages == []


def test_system_message_and_template_errors(session, llm, monkeypatch):
    ask(session, "one")
    n = session.figures[-1].prompt_tokens
    session.system = "be kind"
    ask(session, "two")
    assert session.figures[-1].prompt_tokens > n + 12
    monkeypatch.setitem(llm.metadata, "tokenizer.chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(pypcd.PCDError, match="template rejects"):
        list(Conversation(llm).send("x"))


# -- settings --------------------------------------------------------------------------------------------------------


def test_sampling_settings():
    sampling = _options.GenerationSettings()
    for name, text, value in (("temp", "0.8", 0.8), ("top_k", "5", 5), ("seed", "7", 7), ("max-tokens", "0", 0)):
        assert getattr(sampling, sampling.set(name, text)) == value
    sampling.set("seed", "random")
    assert sampling.seed is None
    for name, text, message in (
        ("temprature", "1", "did you mean 'temperature'"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("temperature", "nan", "temperature is nan"),
        ("top_p", "2", "top_p is 2"),
        ("top_k", "1.5", "top_k is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            sampling.set(name, text)


# -- the terminal ----------------------------------------------------------------------------------------------------


# lines of a chat, and what each is answered with on stderr, in this order
TALK = [
    ("/help", *(f"/{name}" for name in COMMANDS)),
    ("hello", r"12 tokens \| .* tok/s \| prompt .* tok/s \| context \d+/512 \| PCD off \| cut at max_tokens"),
    ("/pcd unsure", "PCD unsure"),
    ("/regen", r"PCD \(unsure\) left this answer alone: the text has fewer than 300 tokens \| cut at max_tokens"),
    ("two", r"12 tokens \|"),
    ("/pcd unsure:relative_top=0", "PCD unsure:relative_top=0.0"),
    ("/pcd", "PCD unsure:relative_top=0.0", "that are not the paper's: beta=0.75 .* window=64 .* min_context=300"),
    ("/pcd paper", "PCD paper"),
    ("/pcd", "PCD paper", "alpha 0.2, beta 2.5, gamma 30"),
    ("/pcd beta=1.5", "PCD paper:beta=1.5"),
    ("/pcd off", "PCD off"),
    ("/pcd betta=2", "did you mean 'beta'"),
    ("/compare", r"12 tokens \|.*PCD \(paper:beta=1.5\) changed", r"12 tokens \|.*PCD off"),
    ("/regen", r"12 tokens \|.*PCD off"),
    ("/undo", "two"),
    ("/system be kind", "be kind"),
    ("/system", "be kind"),
    ("/set", "temperature=0"),
    ("/set top_k 5", "top_k is 5"),
    ("/set tpo_k 5", "did you mean 'top_k'"),
    ("/set top_k", "/set NAME VALUE"),
    ("/save", "needs a file name"),
    ("/save talk.json", "saved to"),
    ("/file nowhere", "nowhere: No such file"),
    ("/file notes.txt", "--n-ctx"),
    ("/file short.txt", r"short.txt: \d+ tokens, 3 parts; it goes in front of your next message\n"),
    ("/file none", "no document goes in front"),
    ("/file 'short.txt'", "3 parts"),
    ("/file none", "no document"),
    ("/file two\\ words.txt", "two words.txt: \\d+ tokens"),
    ("/file none", "no document"),
    ("", ""),
    ("/file short.txt", "3 parts"),
    ("what is it", r"12 tokens \|", "replay repeated 2 passages"),
    ("/file", "ba"),
    ("/compare", r"12 tokens \|.*PCD \(paper:beta=1.5\)"),
    ("/replay", "replay on"),
    ("/replay maybe", "allowed: on, off"),
    ("/replay off", "replay off"),
    ("/regen", r"12 tokens \|"),
    ("/file", "nothing was repeated"),
    ("/clear", "forgotten"),
    ("/load talk.json", "1 turn from"),
    ("/cmopare", "did you mean 'compare'"),
    ("//exit is a message", r"12 tokens \|"),
]


def test_each_command_of_the_chat_does_what_it_says(session, llm, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([line for line, *_ in TALK] + ["/bye", "not read"])))
    (tmp_path / "notes.txt").write_text("bababa\n" * 400)
    (tmp_path / "short.txt").write_text("ba\n\nbaba\n\nbababa")
    (tmp_path / "two words.txt").write_text("bababa")
    llm.pcd = False
    chat = Chat(session)
    assert chat.run() == 1, "a program should hear of the unknown command"
    out, said = capsys.readouterr()
    for line, *patterns in TALK:
        for pattern in patterns:
            found = re.search(pattern, said)
            assert found, (line, said)
            said = said[found.end() :]
    assert "--- PCD paper:beta=1.5 ---" in out and "--- PCD off ---" in out
    assert [m["content"] for m in session.messages[::2]] == ["hello", "/exit is a message"]
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert saved["system"] == "be kind" and saved["settings"]["top_k"] == 5


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self):
        return True


def test_model_output_cannot_drive_the_terminal():
    assert _text.clean("a\x1b[31m\x07b\r\n\tc\x9b\u202e") == "a\u241b[31m\u2407b\n\tc\ufffd\ufffd"


MARKDOWN = "# ?\n- ?\n\n| ? | b |\n| --- | --- |\n| ? | ? |"

WAYS = {
    "print": print,
    "print an error": lambda text: print(text, file=sys.stderr),
    "write": _terminal.write,
    "say": _terminal.say,
    "note": _terminal.note,
    "a table": lambda text: print(_table.table([text, "x"], [[text, text]], [False, True], 30)),
    "Markdown": lambda text: print(_table.aligned(MARKDOWN.replace("?", re.sub("[|\n]", "", text)), 30)),
    "a bar": lambda text: _terminal.Bar(9, text, "", enabled=True).update(),
}


@pytest.mark.parametrize("way", WAYS)
@given(st.text(st.one_of(st.characters(max_codepoint=0xA0), st.sampled_from("漢👩\u200d[bold]\u202e\x1b\x9b"))))
def test_no_control_code_of_foreign_text_reaches_the_terminal(way, text):
    """What does stand there is what rich and we write for a text without any: colours, and moves of the cursor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "80")
        patch.setattr(_terminal.Bar, "delay", 0)
        screens = Screen(), Screen()
        patch.setattr("sys.stdout", screens[0])
        patch.setattr("sys.stderr", screens[1])
        _terminal.setup()
        WAYS[way](text)
    shown = re.sub(r"\x1b\[(\d*(;\d+)*m|\?25[lh]|1A|2K)|\r(?=\x1b\[2K)", "", "".join(s.getvalue() for s in screens))
    assert not {c for c in shown if unicodedata.category(c) == "Cc"} - {"\n", "\t"}
    assert not set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069") & set(shown)
    if way in ("print", "print an error", "write"):
        assert not re.search("\x1b", "".join(s.getvalue() for s in screens))


def test_a_pipe_gets_a_text_as_it_is(capsys):
    _terminal.setup()
    _terminal.write("a\x1b[31mb")
    print("c\x07")
    assert capsys.readouterr().out == "a\x1b[31mbc\x07\n"


def test_no_colour_but_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert _terminal.faint("x", Screen()) == "\x1b[2mx\x1b[0m"
    assert _terminal.faint("x", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert _terminal.faint("x", Screen()) == "x"


def test_ctrl_c_is_a_flag_and_a_second_one_raises():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), _terminal.interruptible() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# -- the commands, through pipes -------------------------------------------------------------------------------------


LONG = "hello " * 120  # unsure contrasts nothing below 300 tokens
HINT = "PCD is off; --pcd unsure turns it on\n"


def test_piped_chat_answers_line_by_line(model):
    lines = f'{LONG}\n\n"""two\nlines"""\n/pcd window:relative_top=0.1\n/regen\n/compare\n'
    done = pypcd_command("chat", model, "--threads=1", "--max-tokens=5", "--n-ctx=2048", "--json", stdin=lines)
    assert done.returncode == 0 and ">>>" not in done.stdout + done.stderr and done.stderr.count(HINT) == 1
    *records, compared = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["message"] for r in records] == [LONG, *["two\nlines"] * 2]
    assert [r["pcd"] and r["pcd"]["window"] for r in records] == [None, None, 64]
    assert records[0]["completion_tokens"] == 5
    assert [r["pcd"] is None for r in compared["compare"]] == [False, True]


def test_one_shot_chat_without_template(tmp_path):
    base = write_tiny_gguf(tmp_path / "base.gguf", "mamba")
    done = pypcd_command("chat", str(base), "-p", "/hi", "--threads=1", "--max-tokens=3")
    assert done.returncode == 0, done.stderr
    assert "no chat template" in done.stderr and "pypcd generate" in done.stderr
    assert "3 tokens |" in done.stderr and "PCD off" in done.stderr
    assert "llama_model_loader" not in done.stderr

    done = pypcd_command("chat", str(base), "-p", "hi", "--pcd=on")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("pypcd: PCD cannot run here: the architecture 'mamba'")


def test_pcd_is_off_until_a_setting_is_named_and_one_line_says_how(model):
    def run(*setting: str) -> tuple[str, str]:
        done = pypcd_command("generate", model, "-p", LONG, "--threads=1", "--max-tokens=12", "--n-ctx=2048", *setting)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    text, err = run()
    off, said_off = run("--pcd=off")
    unsure, said_unsure = run("--pcd=unsure")
    assert text == off != unsure, "or this shows nothing"
    assert err.count(HINT) == 1 and err.replace(HINT, "").count("\n") == said_off.count("\n")
    assert "PCD is off" not in said_off + said_unsure
    with opened(model, 2048, pcd=False) as llm:
        tokens = [t for t, _ in zip(llm.generate(llm.tokenize(LONG.encode(), special=True), temp=0), range(12))]
        assert off == llm.detokenize(tokens).decode("utf-8", "replace") + "\n"


def test_generate_reads_its_prompt_from_a_pipe_too(model, run_here):
    command = ("generate", model, "--threads=1", "--max-tokens=6", "--pcd=beta=1.5")
    record = json.loads(pypcd_command(*command, "--json", stdin="hello\n").stdout)
    assert record["completion_tokens"] == 6 and record["finish_reason"] == "length" and record["pcd"]["beta"] == 1.5
    status, out, err = run_here(*command, "-p", "hello")
    assert (status, out) == (0, record["text"] + "\n")
    assert err.count("\n") == 1 and "PCD (paper:beta=1.5) changed" in err


def raised(kind):
    """An error of a mistake in our code, or of what a user or the system can mend."""
    if isinstance(kind, Exception):
        raise kind
    numbers = {1}
    {
        "TypeError": lambda: len(1),
        "ValueError": lambda: int("x"),
        "KeyError": lambda: {}["x"],
        "numpy": lambda: np.zeros(2) + np.zeros(3),
        "RuntimeError": lambda: [numbers.add(n + 1) for n in numbers],  # a set that grows while it is read
    }[kind]()


@pytest.fixture(params=["here", "in a process beside"])
def failing(request, run_here, monkeypatch):
    """`pypcd info`, in which something is raised."""

    def beside(kind):
        todo = {("kv-short", 200, i): ["greedy"] for i in range(2)}
        list(executors.Processes(2).ask(functools.partial(raised, kind), todo, {}))

    def run(kind):
        ask = raised if request.param == "here" else beside
        monkeypatch.setattr(info, "run", lambda _: ask(kind))
        return run_here("info")

    return run


@pytest.mark.parametrize("kind", ["TypeError", "ValueError", "KeyError", "numpy", "RuntimeError"])
def test_a_fault_of_ours_shows_where_it_is_and_where_to_report_it(kind, failing):
    status, out, err = failing(kind)
    *shown, last = err.splitlines()
    assert (status, out, shown[0]) == (1, "", "Traceback (most recent call last):") and 'test_cli.py", line' in err
    assert last.startswith("pypcd: this is a fault of pypcd's own; please report") and "pypcd info" in last


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.PCDError("it cannot"), "it cannot"),
        (errors.InputError("beta is -1; allowed: more"), "beta is -1; allowed: more"),
        (errors.ArgumentError("there is no 'bta'"), "there is no 'bta'"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "No such file or directory"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (MemoryError(), "there is not enough memory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_user_or_the_system_can_mend_is_one_sentence(error, said, failing):
    status, _, err = failing(error)
    assert status == (2 if isinstance(error, (errors.InputError, FileNotFoundError)) else 1)
    assert err.count("\n") == 1 and said in err


def test_an_answer_that_ends_at_once_says_so(model, run_here, monkeypatch):
    monkeypatch.setattr(_generation.engine, "is_end", lambda llm, token: True)
    status, out, err = run_here("generate", model, "-p", "hello", "--threads=1", "--max-tokens=20")
    assert (status, out) == (0, "\n") and "the model ended at once | context" in err and "tok/s" not in err


def test_layers_for_a_gpu_that_is_not_there_are_said(run_here, monkeypatch):
    for has_gpu, layers, is_said in ((False, "99", True), (False, "0", False), (True, "99", False)):
        monkeypatch.setattr("pypcd.llama.machine.has_gpu", lambda *_, has_gpu=has_gpu: has_gpu)
        options = ["--threads=1", "--max-tokens=1", f"--gpu-layers={layers}"]
        status, _, err = run_here("generate", "demo", "-p", "x", *options)
        assert status == 0 and ("no GPU is found" in err) == is_said


def test_info(model, run_here):
    status, out, _ = run_here("info", model, "--json")
    record = json.loads(out)
    machine, rope = record["machine"], record["model"]["rope"]
    assert status == 0 and Path(record["library"]["libllama"]).exists() and machine["backends"]
    assert set(machine["idle_backends"]) < set(machine["backends"])
    assert machine["amx"].partition(":")[0] in ("on", "off", "none") and isinstance(machine["repacked"], bool)
    assert 1 <= machine["threads"] and 1 <= machine["threads_batch"] and machine["threads_why"]
    assert (rope["base"], rope["n_rot"], rope["frequencies"]) == (10000, 16, 8)
    assert rope["turned"] == 7  # all but the fastest, which keeps its angle
    assert record["model"]["pcd"] == "yes"
    assert [c["passed"] for c in record["self_test"]["checks"]] == [True] * 4
    machine["idle_backends"] = ["CUDA"]
    assert re.search(r"(?m)^no CUDA device +found: there is none, or its driver is missing", info.report(record))
    _, text, _ = run_here("info", model)
    assert "a question about one gets replay" in " ".join(text.split())
    assert "of 8 frequencies" in text and text.count("PASS") == 4 and re.search(r"up to \d\.\de-0\d", text)


def test_disabled_pcd_is_said_not_measured(model):
    off = {"PYPCD_DISABLE": "1"}
    info = pypcd_command("info", model, **off)
    assert info.returncode == 0 and "skipped        PYPCD_DISABLE is set in the environment" in info.stdout
    options = ("--length=16", "--method=pcd:cache=shared", "--n-tokens=2", "--rounds=1", "--threads=1")
    bench = pypcd_command("bench", model, *options, **off)
    assert "greedy" in bench.stdout and "shared" not in bench.stdout
    assert "cannot run pcd:cache=shared" in bench.stderr
    named = pypcd_command("generate", model, "-p=x", "--pcd=on", **off)
    assert named.returncode == 1 and "PYPCD_DISABLE is set" in named.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="closes streams as a POSIX shell does")
@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-"])
def test_closed_streams_give_no_traceback(model, closed):
    for command in ("info", "chat", "generate"):
        line = f'"{sys.executable}" -m pypcd {command} "{model}" {closed}'
        done = subprocess.run(line, shell=True, capture_output=True, text=True, env=ENV, timeout=TIMEOUT, check=False)
        assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("setting", "n_prompt", "n_contrasted", "changes", "said"),
    [
        ("off", 9, 0, 0, "PCD off"),
        ("window", 9, 5, 0, "PCD (window) changed 0 of 5 tokens"),
        ("window", 9, 5, 2, "PCD (window) changed 2 of 5 tokens"),
        ("unsure", 295, 0, 0, "PCD (unsure) left this answer alone: the text has fewer than 300 tokens"),
        ("unsure", 299, 0, 0, "PCD (unsure) left this answer alone: the text has fewer than 300 tokens"),
        (
            "window:min_context=300",
            299,
            0,
            0,
            "PCD (window:min_context=300) left this answer alone: the model was sure",
        ),
        ("unsure", 300, 0, 0, "PCD (unsure) left this answer alone: the model was sure"),
    ],
)
def test_an_answer_says_what_pcd_did(setting, n_prompt, n_contrasted, changes, said):
    made = (Change(0, 1, 2),) * changes
    assert str(pypcd.PCDAnswer(pypcd.PCDConfig.resolve(setting), 5, n_contrasted, made, n_prompt)) == said


def test_the_line_below_an_answer_has_the_first_changes():
    config = pypcd.PCDConfig.resolve("window")
    figures = Figures(512, config, 9, completion_tokens=5)
    assert "| PCD (window) |" in figures.line() + " |", "stopped before the first token"
    figures.answer = pypcd.PCDAnswer(config, 5, 5, (Change(0, 1, 2),) * 4)
    figures.changed = [(" a", " b"), ("1", "2"), ("x", "y"), ("p", "q")]
    assert (
        figures.line().split(" | ")[4]
        == "PCD (window) changed 4 of 5 tokens: ' a' to ' b', '1' to '2', 'x' to 'y' and 1 more"
    )
    record = figures.as_dict()
    assert (record["pcd_contrasted"], record["pcd_changed"]) == (5, 4)


# -- documents on disk ---------------------------------------------------------------------------------------------------


NOTES = tuple(f"Part {i} of the notes: {'ab ' * 20}{i * 7}." for i in range(12))


@pytest.fixture
def cache(tmp_path):
    return PromptCache(tmp_path / "prompts", 2**30)


def test_what_is_known_of_reading_a_document_is_true(model, cache):
    """Another one of the same length was not read before, nor a longer one that begins as it does; one in the context needs nothing."""
    with opened(model, 4096) as llm:

        def attached(document: Document) -> Conversation:
            chat = Conversation(llm, _options.GenerationSettings(max_tokens=2), cache=cache)
            chat.attach(document)
            return chat

        notes = Document("notes", NOTES, "\n\n")
        assert attached(notes).reading_takes() == "", "nothing was ever read with this model"
        ask(attached(notes), "what is 21?")
        llm.reset()
        assert attached(notes).reading_takes() == "; it was read before"
        assert attached(Document("short", ("ab",), "")).reading_takes() == ""
        other = Document("other", tuple(part.replace("ab", "ba") for part in NOTES), "\n\n")
        longer = Document("longer", (*NOTES, *NOTES), "\n\n")
        seconds = []
        for document in (other, longer):
            (found,) = re.findall(r"^; reading takes about (\d+) s$", attached(document).reading_takes())
            seconds.append(int(found))
        assert seconds[0] <= seconds[1] + 1, "of the longer one half is there"


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_a_document_begins_at_once_the_second_time_or_is_read_again(tmp_path, cache, monkeypatch, caplog, arch):
    """With the answers of a conversation without a cache. The attempt to load a file that cannot be empties the context."""

    def refuse(*_: object) -> None:
        raise pypcd.PCDError("not this one")

    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", arch, seed=3, chat_template=CHAT_TEMPLATE, n_ctx_train=16384))
    answers, cached = [], []
    for kept in (None, cache, cache, cache):
        with opened(model, 2048) as llm:
            chat = Conversation(llm, _options.GenerationSettings(max_tokens=12), "be kind", cache=kept)
            if len(answers) == 3:
                ask(chat, "hello")  # the system message and more are held then
                chat.clear()
                monkeypatch.setattr("pypcd.engine.load_sequence", refuse)
            chat.attach(Document("notes", NOTES, "\n\n"))
            # the first question has fewer tokens than replay looks at
            answers.append((ask(chat, "?"), ask(chat, "and what is 42, please?"), tuple(chat.passages)))
            cached.append(chat.figures[-2].cached_tokens)
    assert len(set(answers)) == 1 and answers[0][2]
    (entry,) = cache.entries()
    assert cached[:3] == [0, 0, entry.n_tokens] and entry.about["documents"] == ["notes"]
    assert cached[3] < entry.n_tokens and "not this one" in caplog.text


def test_answer_reads_a_document_once_and_pypcd_cache_lists_and_clears(model, tmp_path, monkeypatch, run_here):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYPCD_CACHE_GIB", "1")
    (tmp_path / "notes.txt").write_text("\n\n".join(NOTES))
    command = ["answer", model, "--context", tmp_path / "notes.txt", "-p", "what is 21?", "--threads", 1]
    command += ["--max-tokens", 4, "--n-ctx", 2048, "--json", "--method", "greedy"]
    (_, first, said), (_, second, said_again) = run_here(*command), run_here(*command)
    records = json.loads(first), json.loads(second)
    assert records[0]["text"] == records[1]["text"]
    assert records[1]["n_evaluated"] < 40 and records[0]["n_evaluated"] > 256
    assert "it was read before" in said_again and "read before" not in said
    (tmp_path / "notes.txt").write_text("\n\n".join(NOTES[1:]))
    _, _, said = run_here(*command)
    assert "reading takes about" in said and "read before" not in said
    assert "notes.txt" in run_here("cache")[1]
    with monkeypatch.context() as patch:
        patch.setattr(
            "pypcd.decode.prompt_cache.Entry.about",
            {**PromptCache().entries()[0].about, "documents": ["a\x1b[31m\x07\nb"]},
        )
        _, out, _ = run_here("cache")
        assert not set("\x1b\x07") & set(out) and "b\n" in out
    assert run_here("cache", "clear")[0] == 0
    assert "notes.txt" not in run_here("cache")[1]
