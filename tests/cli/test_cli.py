"""chat, generate and info: a conversation's logic by itself, then the commands in this process and through pipes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import types
import unicodedata
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

import pypcd
from pypcd import engine, errors
from pypcd.ask import Answer, stoppable
from pypcd.cli import _options, _table, _terminal, _text, info
from pypcd.cli._conversation import Conversation
from pypcd.cli._figures import Figures
from pypcd.cli.chat import COMMANDS, Chat
from pypcd.decode import Answer as Written
from pypcd.decode import Replay, Session
from pypcd.decode.prompt_cache import PromptCache
from pypcd.document import Document
from pypcd.engine._results import Change
from pypcd.evaluation import executors
from pypcd.find.heads import keep_heads
from pypcd.prompt import Laid

ENV = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "GGML_NO_BACKTRACE": "1", "PYTHONUTF8": "1"}
TIMEOUT = 60  # for one expectation, on a machine that is busy


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return str(tiny(seed=3, chat_template=CHAT_TEMPLATE, n_ctx_train=16384, n_layer=2))


@pytest.fixture(scope="module")
def llm(model):
    with opened(model) as llm:
        yield llm


@pytest.fixture
def session(llm) -> Conversation:
    Session(llm).clear()
    llm.pcd = "paper"
    return Conversation(llm, _options.GenerationSettings(max_tokens=12))


def opened(model, n_ctx=512, **given):
    return pypcd.Llama(model, n_ctx=n_ctx, n_threads=1, n_threads_batch=1, **given)


def pypcd_command(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    how = {"input": stdin, "capture_output": True, "encoding": "utf-8", "timeout": TIMEOUT}
    return subprocess.run([sys.executable, "-m", "pypcd", *args], env={**ENV, **env}, check=False, **how)


NOTES = Document("notes", "ab ab\n\ncd cd\n\nee ff\n\nba ab")


def ask(session: Conversation, text: str) -> str:
    return "".join(session.send(text))


def passages(session: Conversation) -> list[str]:
    return [source.text for source in session.answer.passages]


def completed(llm, messages):
    """A prompt's tokens and those of its answer, by llama_cpp. Its text leaves out what is not UTF-8."""
    llm.create_chat_completion(messages, temperature=0, max_tokens=12, repeat_penalty=1.0)
    return llm.input_ids[: llm.n_tokens].tolist()


def writing(llm, prompt, most=12, **how):
    """What `pypcd generate` answers with."""
    sampling = _options.GenerationSettings()
    how["max_tokens"] = most
    return sampling.method(llm, 0).stream(Session(llm, repeatable=False), Laid(prompt, [], None, 0, []), **how)


# -- the session, without a terminal ---------------------------------------------------------------------------------


def test_turns_build_on_each_other_and_only_what_is_new_is_evaluated(session, llm, monkeypatch):
    """With the tokens that llama_cpp answers with."""
    prompts, evaluated, messages, asked = [], [], [], []
    start, evaluate, decode = Session.start, pypcd.Llama.eval, engine.decode
    monkeypatch.setattr(
        Session, "start", lambda s, tokens, *a, **k: prompts.append(tokens) or start(s, tokens, *a, **k)
    )
    monkeypatch.setattr(pypcd.Llama, "eval", lambda s, tokens: evaluated.extend(tokens) or evaluate(s, tokens))
    monkeypatch.setattr(engine, "decode", lambda s, e: evaluated.extend(one[0] for one in e) or decode(s, e))
    held: list[int] = []
    for text in ("one", "two", "three"):
        evaluated.clear()
        answer = ask(session, text)
        written = session.answer.written
        n_same = next((i for i, pair in enumerate(zip(held, prompts[-1])) if len(set(pair)) == 2), len(held))
        assert written.n_prompt == len(prompts[-1]) and written.n_evaluated == written.n_prompt - n_same
        assert evaluated == [*prompts[-1][n_same:], *written.tokens[:-1]] and len(written.tokens) == 12
        assert (n_same > 5) == bool(held)
        held = [*prompts[-1], *written.tokens[:-1]]
        asked.append(([*messages, {"role": "user", "content": text}], held))
        messages = [*asked[-1][0], {"role": "assistant", "content": answer}]
        assert session.messages == messages
    monkeypatch.undo()
    for before, tokens in asked:
        llm.reset()
        assert completed(llm, before)[: len(tokens)] == tokens


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


def test_undo_gives_the_documents_back_to_the_next_message(session):
    session.attached.append(NOTES)
    first, found = ask(session, "what is cd?"), passages(session)
    ask(session, "and ff?")
    session.undo()
    assert session.attached == [] and session.answer is None
    assert session.undo() == "what is cd?" and session.attached == [NOTES] and session.messages == []
    session.attached.append(other := Document("other", "gh"))
    session.attached.remove(other)
    assert (ask(session, "what is cd?"), passages(session)) == (first, found) and found == ["cd cd"]


def compared(session: Conversation) -> dict[str, Figures]:
    """The answers by title, each read to its end before the next."""
    answers = {}
    for title, pieces, asking in session.compare():
        assert "".join(pieces) == asking.answer.text
        answers[title] = Figures(session.llm, asking.answer)
    return answers


def test_compare_shows_replay_beside_none_unless_pcd_is_on(session, llm):
    llm.pcd = False
    session = Conversation(llm, session.sampling)
    session.set_pcd("window")
    session.set_pcd(False)
    session.attached.append(NOTES)
    answer = ask(session, "what is ab?")
    found = passages(session)
    answers = compared(session)
    assert list(answers) == ["replay", "plain"]
    assert answers["replay"].answer.text == answer and passages(session) == found and session.replay
    session.replay = None
    assert "".join(session.regen()) == answers["plain"].answer.text
    assert list(compared(session)) == ["PCD window", "PCD off"]
    session.set_pcd("paper")
    session.replay = Replay()
    assert list(compared(session)) == ["PCD paper", "PCD off"]


def test_a_stopped_answer_stays_and_a_message_without_one_is_a_draft(session):
    pieces = []
    pieces.extend(session.send("one", stopped=lambda: len(pieces) > 2))
    assert session.answer.written.end == "interrupted"
    assert session.messages[-1]["content"] == "".join(pieces) != ""
    kept = list(session.messages)
    session.set_pcd(False)
    session.attached.append(NOTES)  # which waits with its question
    assert list(session.send("two", stopped=lambda: True)) == [], "the prompt was not even read"
    assert session.messages == kept and session.draft == "two" and session.attached == [NOTES]
    list(session.regen())
    assert session.messages[2] == {"role": "user", "content": "two", "documents": [NOTES]}
    assert session.draft is None and session.attached == []
    kept, session.replay = list(session.messages), Replay(finder="attention")
    with pytest.raises(pypcd.UnsupportedError, match="pypcd probe"):
        list(session.regen())
    assert session.messages == kept


def test_a_full_context_loses_nothing(session):
    ask(session, "one")
    kept = list(session.messages)
    session.read = "all"
    n = next(n for n in range(600, 0, -1) if len(session.llm.tokenize(b"ba " * n)) < 470)
    session.attached.append(Document.of("long", "ba " * n))
    with pytest.raises(pypcd.PCDError, match=r"/undo.*--n-ctx"):
        list(session.send("what is it?"))
    assert session.messages == kept and session.draft == "what is it?"
    with pytest.raises(pypcd.PCDError, match="/file none takes back long, and /read auto reads parts$"):
        list(session.send("short"))  # the document is in front of this question now
    session.clear()
    list(session.regen())
    (asked, _), text = session.messages, session.attached
    assert (asked["content"], [d.name for d in asked["documents"]], text) == ("short", ["long"], [])


def test_what_is_cleared_does_not_get_into_the_next_conversation(session):
    session.attached.append(NOTES)
    session.clear()
    assert session.attached == [] and ask(session, "two") and "documents" not in session.messages[0]


@pytest.mark.parametrize("finder", ["bm25", "attention"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_a_question_about_a_document_has_its_passages_again(arch, finder, tmp_path, monkeypatch):
    """The same answer as llama_cpp gives to messages with the passages in them, also behind what looking has evaluated."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf", arch, seed=3, chat_template=CHAT_TEMPLATE))
    how = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
    stock = llama_cpp.Llama(path, verbose=False, **how)
    with contextlib.closing(stock), pypcd.Llama(path, **how) as llm:
        keep_heads(llm, {0 if arch == "lfm2" else 2: [0, 3]})  # layers that slide, or have no attention, are before it
        session, before = Conversation(llm, _options.GenerationSettings(max_tokens=12)), []
        session.attached.append(NOTES)
        session.replay = Replay(n=1, finder=finder)
        for question, wanted in (("what is cd?", "cd cd"), ("and ee, ff?", "ee ff")):
            answer = ask(session, question)
            (passage,) = passages(session)
            assert passage == wanted or (finder == "attention" and passage in NOTES.text)
            assert session.messages[-2]["content"] == question, "the history is as it was written"
            text = "" if before else f"{NOTES.text}\n\n"
            asked = f"{text}From the text above:\n\n{passage}\n\n{question}"
            stock.reset()
            stock._ctx.kv_cache_clear()
            tokens, written = completed(stock, [*before, {"role": "user", "content": asked}]), session.answer.written
            n = written.n_prompt
            assert tokens[n : n + 11] == list(written.tokens[:-1])
            assert finder == "attention" or arch == "lfm2" or (written.n_evaluated < n) == bool(before)
            before += [{"role": "user", "content": text + question}, {"role": "assistant", "content": answer}]


def test_an_answer_that_was_stopped_before_it_began_says_nothing_of_the_one_before(model):
    with pypcd.Llama(model, n_ctx=512, n_batch=32, n_threads=1, n_threads_batch=1, pcd="window") as llm:
        llm.create_completion("hello", max_tokens=4)
        assert llm.last_answer.n_tokens
        stopped = writing(llm, llm.tokenize(b"ba " * 100))
        assert list(stoppable(llm, stopped, lambda: True)) == []
        assert (llm.last_answer.n_tokens, llm.last_answer.changes, stopped.answer.end) == (0, (), "interrupted")


@pytest.mark.parametrize("arch", ["llama", "mamba", "lfm2"])
def test_what_was_stopped_leaves_nothing_that_is_not_known(tmp_path, arch):
    """Of a batch of several parts the first ones are in a recurrent state when it is stopped, and the state cannot go back."""
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf", arch, n_layer=2, seed=3))
    calls: list[int] = []
    with opened(path, n_batch=64, n_ubatch=16) as llm:
        prompt = llm.tokenize(b"ba ab cd " * 100)[:100]
        session = Session(llm, repeatable=False)
        method = _options.GenerationSettings().method(llm, 0)

        def answer(n: int) -> tuple[str, str, int]:
            """One that is stopped once n nodes behind its prompt's first tokens are computed, and the same answered to its end; and how
            many tokens of it were evaluated again."""
            session.clear()
            session.hold(prompt[:8])
            calls.clear()
            laid = Laid(prompt, [], None, 0, [])
            stopped = method.stream(session, laid, max_tokens=12)
            text = next(stoppable(llm, stopped, lambda: calls.append(1) or len(calls) > n), "")
            again = method.stream(session, laid, max_tokens=12)
            return text, "".join(again), again.answer.n_evaluated

        first, whole, _ = answer(10**9)
        total = len(calls)
        assert total > 20 and len(whole) > 5 and first
        found = [answer(n) for n in range(0, total, max(total // 24, 1))]
        assert all((text, again) == ("", whole) for text, again, _ in found), "as if it had not begun"
        n_again = [n for _, _, n in found]
        if arch == "llama":
            assert n_again == sorted(n_again)[::-1]
            assert (n_again[0], n_again[-1]) == (len(prompt) - 8, 1), "what was finished stays"


def test_stop_strings_never_show(llm):
    llm.pcd = False
    prompt = llm.tokenize(b"hello")
    whole = "".join(writing(llm, prompt, 30))
    for stop in re.findall("[^\ufffd]{3,}", whole)[:4]:
        shown = list(writing(llm, prompt, 30, stop=[stop, "never", ""]))
        assert "".join(shown) == whole[: whole.index(stop)]
    assert "".join(writing(llm, prompt, 30, stop=whole[-2:] + "no")) == whole, "what was held back comes after all"


def test_the_pieces_of_an_answer_are_its_tokens_as_utf_8(llm):
    """Although a character's bytes may be of several tokens, and some bytes are no character."""
    llm.pcd = "window:window=2:n_sink=0"
    written = writing(llm, llm.tokenize(b"hello"), 120)
    shown = "".join(written)
    pieces = b"".join(llm.detokenize([token], prev_tokens=[1], special=True) for token in written.answer.tokens)
    assert shown == written.answer.text == pieces.decode("utf-8", "replace") and "\ufffd" in shown
    figures = Figures(llm, Answer(shown, (), "", (), written.answer))
    assert figures.did.changes and len(figures.changed) == len(figures.did.changes)


def test_what_is_saved(session, tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")  # which UTF-8 does not have
    session.system = "be kind"
    session.set_pcd("paper:beta=1.5")
    session.attached.append(Document(name, NOTES.text, (0, 7, 14), unit="slide"))
    answer = ask(session, "what is ff?")
    assert session.answer.passages[0].place == "slide 3"
    path = tmp_path / "talk.json"
    session.save(str(path))
    record = json.loads(path.read_text())
    asked, answered = record["messages"]
    assert (asked["content"], answered["content"], record["system"]) == ("what is ff?", answer, "be kind")
    assert (asked["documents"][0]["name"], asked["documents"][0]["text"]) == (name, NOTES.text)
    assert record["pcd"]["beta"] == 1.5 and record["settings"]["max_tokens"] == 12
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is there already"):
        session.save(str(path))
    assert path.read_bytes() == before


def test_system_message_and_template_errors(session, llm, monkeypatch):
    ask(session, "one")
    n = session.answer.written.n_prompt
    session.system = "be kind"
    ask(session, "two")
    assert session.answer.written.n_prompt > n + 12
    monkeypatch.setitem(llm.metadata, "tokenizer.chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(pypcd.PCDError, match="template rejects"):
        list(Conversation(llm).send("x"))


# -- settings --------------------------------------------------------------------------------------------------------


def chances(row: np.ndarray, s: _options.GenerationSettings) -> np.ndarray:
    """What llama.cpp's own chain of samplers draws from; float64[n_vocab]."""
    array = (llama_cpp.llama_token_data * len(row))(*((i, float(logit), 0.0) for i, logit in enumerate(row)))
    data = llama_cpp.llama_token_data_array(data=array, size=len(row), selected=-1, sorted=False)
    for sampler in (
        llama_cpp.llama_sampler_init_top_k(s.top_k),
        llama_cpp.llama_sampler_init_top_p(s.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(s.min_p, 1),
        llama_cpp.llama_sampler_init_temp(s.temperature),
        llama_cpp.llama_sampler_init_dist(1),
    ):
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(data))
        llama_cpp.llama_sampler_free(sampler)
    p = np.zeros(len(row))
    for one in data.data[: data.size]:
        p[one.id] = one.p
    return p


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        # of 4: 0.515, 0.258, 0.155, 0.072; of these 3 reach 0.9; the third has less than 0.4 of the best; the root of 2 to 1 is left
        ({"temperature": 2, "top_k": 4, "top_p": 0.9, "min_p": 0.4}, [0.5858, 0.4142, 0, 0, 0]),
        ({"temperature": 0.5, "top_k": 0, "top_p": 1, "min_p": 0.1}, [0.7355, 0.1839, 0.0662, 0.0144, 0]),
        ({"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}, [0.5, 0.25, 0.15, 0.07, 0.03]),
        ({"temperature": 1, "top_k": 2, "top_p": 1, "min_p": 0}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 1, "top_k": 0, "top_p": 0.7, "min_p": 0}, [2 / 3, 1 / 3, 0, 0, 0]),  # 0.5 + 0.25 reaches it
        ({"temperature": 1, "top_k": 0, "top_p": 0, "min_p": 0}, [1, 0, 0, 0, 0]),
        # those with 0.4 of the best one's probability, whatever the temperature is: 2 to 1 has a 50th root of 1.014
        ({"temperature": 50, "top_k": 0, "top_p": 1, "min_p": 0.4}, [0.5035, 0.4965, 0, 0, 0]),
        ({"temperature": 1.3}, None),
    ],
)
def test_a_temperature_draws_from_what_llama_cpp_draws_from(setting, wanted):
    sampling = _options.GenerationSettings(**setting)
    row = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))
    p, n = chances(row, sampling), 4000
    if wanted:
        np.testing.assert_allclose(p, wanted, atol=1e-3)
    draw = sampling.method(types.SimpleNamespace(pcd=None), 7).search.chooser(b"")
    found = np.bincount([draw(row) for _ in range(n)], minlength=5) / n
    assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 1e-300])
def test_a_temperature_near_0_takes_the_best(temperature):
    draw = (
        _options.GenerationSettings(temperature=temperature, top_k=0)
        .method(types.SimpleNamespace(pcd=None), 7)
        .search.chooser(b"")
    )
    with np.errstate(all="raise", under="ignore"):
        assert {draw(np.array([-1e4, 3.5, -30, 3.25], np.float32)) for _ in range(20)} == {1}


def test_every_seed_that_is_drawn_or_given_draws(monkeypatch):
    monkeypatch.setattr("random.randrange", lambda end: end - 1)  # the largest
    for sampling in (_options.GenerationSettings(1.0), _options.GenerationSettings(1.0, seed=2**32 - 2)):
        method = sampling.method(types.SimpleNamespace(pcd=None), sampling.draw_seed())
        assert method.search.chooser(b"")(np.zeros(5, np.float32)) in range(5)


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
    ("/pcd paper:beta=1.5", "PCD paper:beta=1.5"),
    ("/pcd off", "PCD off"),
    ("/pcd betta=2", "did you mean 'beta'"),
    (
        "/compare",
        r"PCD paper:beta=1.5: 12 tokens \|.*PCD \(paper:beta=1.5\) changed",
        r"PCD off: 12 tokens \|.*PCD off",
    ),
    ("/regen", r"12 tokens \|.*PCD off"),
    ("/undo", "two"),
    ("/system be kind", "be kind"),
    ("/system", "be kind"),
    ("/set", "temperature=0"),
    ("/set top_k 5", "top_k is 5"),
    ("/set max-tokens 12", "max_tokens is 12"),
    ("/set temp=0", "temperature is 0"),
    ("/set seed random", "seed is random"),
    ("/set temperature 9", "temperature is 9; allowed: from 0 to 2"),
    ("/set tpo_k 5", "did you mean 'top_k'"),
    ("/set top_k", "/set NAME VALUE"),
    ("/save", "needs a file name"),
    ("/save talk.json", "saved to"),
    ("/file nowhere", "nowhere: No such file"),
    ("/file ~nowhere.txt", "~nowhere.txt: No such file"),
    ("/file notes.txt", "parts of it will be read"),
    ("/file none", "no document goes in front"),
    ("/file short.txt", r"short.txt: \d+ tokens, 3 parts; in front of your next message\n"),
    ("/read all", "read all"),
    ("/read some", "read is 'some'; allowed: "),
    ("/read auto", "if they fit"),
    ("/file none", "no document goes in front"),
    ("/file 'short.txt'", "3 parts"),
    ("/file none", "no document"),
    ("/file two\\ words.txt", "two words.txt: \\d+ tokens"),
    ("/file .", r"4 documents, \d+ parts; in front of your next message; parts of it will be read"),
    ("/file none", "no document"),
    ("", ""),
    ("/file short.txt", "3 parts"),
    ("what is baba", r"1\. short\.txt, line 3: baba\n", "keyword search alone", r"12 tokens \|.*replay, PCD off"),
    ("/read 3", "read 3"),
    ("/regen", r"read 1 of 3 parts; /read all reads all"),
    ("/read auto", "read all of the documents if they fit, else parts of 4096 tokens"),
    ("/regen", r"12 tokens \|"),
    ("/file", r"short\.txt, line 3:\nbaba\n"),
    ("/compare", r"replay: 12 tokens \|.*replay, PCD off", r"plain: 12 tokens \|[^,]*PCD off"),
    ("/replay", "replay on"),
    ("/replay maybe", "allowed: on, off"),
    ("/replay off", "replay off"),
    ("/regen", r"12 tokens \|"),
    ("/file", "nothing was repeated"),
    ("/clear", "forgotten"),
    ("/save talk.json", "is there already"),
    ("/load talk.json", "left the chat"),
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
    assert all(f"--- {title} ---" in out for title in ("PCD paper:beta=1.5", "PCD off", "replay", "plain"))
    assert [m["content"] for m in session.messages[::2]] == ["/exit is a message"]
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


def drawn(bar):
    with bar:
        bar._timer.join()


WAYS = {
    "print": print,
    "print an error": lambda text: print(text, file=sys.stderr),
    "write": _terminal.write,
    "say": _terminal.say,
    "note": _terminal.note,
    "a table": lambda text: print(_table.table([text, "x"], [[text, text]], [False, True], 30)),
    "Markdown": lambda text: print(_table.aligned(MARKDOWN.replace("?", re.sub("[|\n]", "", text)), 30)),
    "a bar": lambda text: drawn(_terminal.Bar(9, text)),
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
    shown = re.sub(
        r"\x1b\[(\d*(;\d+)*m|\?25[lh]|1A|2K)|\r(?=\x1b\[(?:2K|1A))", "", "".join(s.getvalue() for s in screens)
    )
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
    assert done.stderr.splitlines()[-1].startswith("pypcd: PCD (unsure) cannot run here: the architecture 'mamba'")


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


def test_generate_reads_its_prompt_from_a_pipe_too(model, run):
    command = ("generate", model, "--threads=1", "--max-tokens=6", "--pcd=paper:beta=1.5")
    record = json.loads(pypcd_command(*command, "--json", stdin="hello\n").stdout)
    assert record["completion_tokens"] == 6 and record["finish_reason"] == "length" and record["pcd"]["beta"] == 1.5
    out, err = run(*command, "-p", "hello")
    assert out == record["text"] + "\n"
    assert err.count("\n") == 1 and "PCD (paper:beta=1.5) changed" in err


def raised(kind):
    """An error of a mistake in our code, or of what a user or the system can mend."""
    if isinstance(kind, Exception):
        raise kind
    {"TypeError": lambda: len(1), "ValueError": lambda: int("x"), "KeyError": lambda: {}["x"]}[kind]()


@pytest.fixture
def failing(run, monkeypatch):
    """`pypcd info`, in which something is raised: here, or in a process beside."""

    def beside(kind):
        todo = {("kv-short", 200, i): ["greedy"] for i in range(2)}
        list(executors.ask(2, functools.partial(raised, kind), todo))

    def fail(kind, is_beside, status):
        monkeypatch.setattr(info, "run", lambda _: beside(kind) if is_beside else raised(kind))
        return run("info", status=status)

    return fail


@pytest.mark.parametrize(("kind", "is_beside"), [("TypeError", False), ("ValueError", False), ("KeyError", True)])
def test_a_fault_of_ours_shows_where_it_is_and_where_to_report_it(kind, is_beside, failing):
    out, err = failing(kind, is_beside, 1)
    *shown, last = err.splitlines()
    assert out == "" and "Traceback (most recent call last):" in shown[:3]  # a process's own has a title
    assert 'test_cli.py", line' in err
    assert last.startswith("pypcd: this is a fault of pypcd's own; please report") and "pypcd info" in last


MENDED = [
    (errors.PCDError("it cannot"), "it cannot"),
    (errors.InputError("beta is -1; allowed: more"), "beta is -1; allowed: more"),
    (errors.ArgumentError("there is no 'bta'"), "there is no 'bta'"),
    (FileNotFoundError(2, "No such file or directory", "x.gguf"), "No such file or directory"),
    (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
    (MemoryError(), "there is not enough memory"),
]


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_the_user_or_the_system_can_mend_is_one_sentence(is_beside, failing):
    for error, said in MENDED[is_beside :: 1 + is_beside]:  # of a process beside every second one
        _, err = failing(error, is_beside, 2 if isinstance(error, (errors.InputError, FileNotFoundError)) else 1)
        assert err.count("\n") == 1 and said in err


def test_an_answer_that_ends_at_once_says_so(model, run, monkeypatch):
    monkeypatch.setattr(engine, "is_end", lambda llm, token: True)
    out, err = run("generate", model, "-p", "hello", "--threads=1", "--max-tokens=20")
    assert out == "\n" and "the model ended at once | context" in err and "tok/s" not in err


def test_what_needs_no_chat_template_runs_with_a_broken_one(tmp_path, run):
    path = write_tiny_gguf(tmp_path / "broken.gguf", chat_template="{% for m in messages %}{{ m.content }")
    for command in (("generate", path, "-p=hi"), ("answer", path, "-p=hi", "--no-chat", "--method=greedy")):
        run(*command, "--threads=1", "--max-tokens=2")
    run("info", path, "--no-test")
    for command in ("answer", "chat"):
        _, err = run(command, path, "-p=hi", "--threads=1", status=1)
        assert err.startswith("pypcd: the model's chat template is broken: ") and err.count("\n") == 1


def test_layers_for_a_gpu_that_is_not_there_are_said(run, monkeypatch):
    for has_gpu, layers, is_said in ((False, "99", True), (False, "0", False), (True, "99", False)):
        monkeypatch.setattr("pypcd.llama.machine.has_gpu", lambda *_, has_gpu=has_gpu: has_gpu)
        options = ["--threads=1", "--max-tokens=1", f"--gpu-layers={layers}"]
        _, err = run("generate", "demo", "-p", "x", *options)
        assert ("no GPU is found" in err) == is_said


def test_info(model, run):
    record = json.loads(run("info", model, "--json")[0])
    machine, rope = record["machine"], record["model"]["rope"]
    assert Path(record["library"]["libllama"]).exists() and machine["backends"]
    assert set(machine["idle_backends"]) < set(machine["backends"])
    assert machine["amx"].partition(":")[0] in ("on", "off", "none")
    assert 1 <= machine["threads"] and 1 <= machine["threads_batch"] and machine["threads_why"]
    assert (rope["base"], rope["n_rot"], rope["frequencies"]) == (10000, 16, 8)
    assert rope["turned"] == 7  # all but the fastest, which keeps its angle
    assert record["model"]["pcd"] == "yes"
    assert [c["passed"] for c in record["self_test"]["checks"]] == [True] * 4
    machine["idle_backends"] = ["CUDA"]
    assert re.search(r"(?m)^no CUDA device +found: there is none, or its driver is missing", info.report(record))
    text, _ = run("info", model)
    assert "a question about one gets replay" in " ".join(text.split())
    assert "of 8 frequencies" in text and text.count("PASS") == 4 and re.search(r"up to \d\.\de-0\d", text)


def test_disabled_pcd_is_said(model):
    off = {"PYPCD_DISABLE": "1"}
    info = pypcd_command("info", model, **off)
    assert info.returncode == 0 and "skipped        PYPCD_DISABLE is set in the environment" in info.stdout
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
        ("unsure", 299, 0, 0, "PCD (unsure) left this answer alone: the text has fewer than 300 tokens"),
        ("unsure", 300, 0, 0, "PCD (unsure) left this answer alone: the model was sure"),
    ],
)
def test_an_answer_says_what_pcd_did(setting, n_prompt, n_contrasted, changes, said):
    made = (Change(0, 1, 2),) * changes
    assert str(pypcd.PCDAnswer(pypcd.PCDConfig.resolve(setting), 5, n_contrasted, made, n_prompt)) == said


def test_the_line_below_an_answer_has_the_first_changes(llm):
    llm.pcd = "window"

    def figures(did: pypcd.PCDAnswer) -> Figures:
        written = Written("", (5,) * did.n_tokens, 9, 4, 3.0, did, prompt_seconds=1.0, end="length")
        return Figures(llm, Answer("", (), "", (), written))

    assert "| PCD (window) |" in figures(pypcd.PCDAnswer()).line() + " |", "stopped before the first token"
    changes = tuple(Change(0, 3 + ord(after), 3 + ord(before)) for before, after in ("ab", "12", "xy", "pq"))
    made = figures(pypcd.PCDAnswer(llm.pcd, 5, 5, changes))
    changed = "PCD (window) changed 4 of 5 tokens: 'a' to 'b', '1' to '2', 'x' to 'y' and 1 more"
    assert made.line() == f"5 tokens | 2.0 tok/s | prompt 4.0 tok/s | context 14/512 | {changed} | cut at max_tokens"
    record = made.as_dict()
    assert (record["pcd_contrasted"], record["pcd_changed"]) == (5, 4)
    assert (record["prompt_tokens"], record["cached_tokens"], record["finish_reason"]) == (9, 5, "length")


# -- documents on disk ---------------------------------------------------------------------------------------------------


BOOK = "\n\n".join(f"Part {i} of the notes: {'ab ' * 20}{i * 7}." for i in range(12))


@pytest.fixture
def cache(tmp_path):
    return PromptCache(tmp_path / "prompts", 2**30)


def test_what_is_known_of_reading_a_document_is_true(model, cache):
    """Another one of the same length was not read before, nor a longer one that begins as it does; one in the context needs nothing."""
    with opened(model, 4096) as llm:

        def attached(document: Document) -> Conversation:
            chat = Conversation(llm, _options.GenerationSettings(max_tokens=2), cache=cache)
            chat.attached.append(document)
            return chat

        notes = Document("notes", BOOK)
        assert attached(notes).reading_takes() == "", "nothing was ever read with this model"
        ask(attached(notes), "what is 21?")
        llm.reset()
        assert attached(notes).reading_takes() == "; it was read before"
        assert attached(Document("short", "ab")).reading_takes() == ""
        other = Document("other", BOOK.replace("ab", "ba"))
        longer = Document("longer", f"{BOOK}\n\n{BOOK}")
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
            chat.attached.append(Document("notes", BOOK))
            first, written = ask(chat, "?"), chat.answer.written
            cached.append(written.n_prompt - written.n_evaluated)
            answers.append((first, ask(chat, "and what is 42, please?"), tuple(passages(chat))))
    assert len(set(answers)) == 1 and answers[0][2]
    (entry,) = cache.entries()
    assert cached[:3] == [0, 0, entry.n_tokens] and entry.about["documents"] == ["notes"]
    assert cached[3] < entry.n_tokens and "not this one" in caplog.text


def test_answer_reads_a_document_once_and_pypcd_cache_lists_and_clears(model, tmp_path, monkeypatch, run):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYPCD_CACHE_GIB", "1")
    (tmp_path / "notes.txt").write_text(BOOK)
    command = ["answer", model, "--context", tmp_path / "notes.txt", "-p", "what is 21?", "--threads", 1]
    command += ["--max-tokens", 4, "--n-ctx", 2048, "--json", "--method", "greedy"]
    (first, said), (second, said_again) = run(*command), run(*command)
    records = json.loads(first), json.loads(second)
    assert records[0]["text"] == records[1]["text"]
    assert records[1]["n_evaluated"] < 40 and records[0]["n_evaluated"] > 256
    assert "it was read before" in said_again and "read before" not in said
    assert "notes.txt" in run("cache")[0]
    with monkeypatch.context() as patch:
        about = {**PromptCache().entries()[0].about, "documents": ["a\x1b[31m\x07\nb"]}
        patch.setattr("pypcd.decode.prompt_cache.Entry.about", about)
        out, _ = run("cache")
        assert not set("\x1b\x07") & set(out) and "b\n" in out
    run("cache", "clear")
    assert "notes.txt" not in run("cache")[0]
