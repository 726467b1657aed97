"""Finders: keyword search worked by hand, attention against the float64 reference, what is chosen of what they find."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest
from conftest import Load, Tiny, close, reference, run_python, shape, tolerance

import pypcd
from pypcd import engine, find
from pypcd.decode import Session
from pypcd.decode.prompt_cache import N_LEFT, PromptCache
from pypcd.engine import token_bytes
from pypcd.errors import UnsupportedError
from pypcd.find import Asked, Passage, Ranked, attention, heads
from pypcd.find.bm25 import by_words, words
from pypcd.prompt import Messages, Piece, Prompt

TEXTS = ("The red fox runs.\n\n", "A red red hen.\n\n", "Seven crowns were paid.\n\n", "The fox sleeps; red roses.")
COUNTING: Any = SimpleNamespace(tokenize=lambda text, **_: text.split())  # a model, as far as its words are counted


def asked(question: str, texts: tuple[str, ...] = TEXTS, llm: Any = COUNTING) -> Asked:
    return Asked(llm, Prompt(segments=texts, after=question), False, lambda *_: {})


@pytest.fixture
def llm(tiny: Tiny, load: Load) -> pypcd.Llama:
    return load(tiny("llama"), False)


# -- keyword search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("It's 3.5 km, ＡＢＣ!", ["it", "s", "3", "5", "km", "abc"]),
        ("Die Straße heißt „Ährenweg“.", ["die", "strasse", "heisst", "ahrenweg"]),
        ("赵先生住在7号", ["赵先", "先生", "生住", "住在", "7", "号"]),
        ("a赵b", ["a", "赵", "b"]),
        ("カメラを買う", ["カメ", "メラ", "ラを", "を買", "買う"]),
        ("ตะเกียง", ["ตะเ", "ะเก", "เกี", "กีย", "ียง"]),
        ("दीपक की लौ।", ["दीपक", "की", "लौ"]),
        ("مِصباح أُمّـــي؟", ["مصباح", "امي"]),
        ("등불의 기름", ["등불의", "기름"]),
        ("... — !", []),
    ],
)
def test_words_of_any_script(text: str, wanted: list[str]) -> None:
    assert words(text) == wanted


def test_keyword_search_ranks_by_okapis_formula() -> None:
    """Lucene's form of it, with k1 = 1.5 and b = 0.75; "the", "a" and "were" are stop words. Each word counts, and each three letters."""
    red, fox = "red, re,red,ed ", "fox, fo,fox,ox "
    texts = (
        f"{red},{fox},runs, ru,run,uns,ns ",
        f"{red},{red},hen, he,hen,en ",
        "seven, se,sev,eve,ven,en ,crowns, cr,cro,row,own,wns,ns ,paid, pa,pai,aid,id ",
        f"{fox},sleeps, sl,sle,lee,eep,eps,ps ,{red},roses, ro,ros,ose,ses,es ",
    )
    bags = [text.split(",") for text in texts]
    mean = sum(map(len, bags)) / 4

    def score(bag: list[str]) -> float:
        total = 0.0
        for term in f"{red},{fox}".split(","):
            n, df = bag.count(term), sum(term in other for other in bags)
            total += math.log(1 + (4 - df + 0.5) / (df + 0.5)) * n / (n + 1.5 * (0.25 + 0.75 * len(bag) / mean))
        return total

    found = by_words(asked(" Is the fox red?"))
    hits = found.hits
    assert found.note == "" and {hit.finder for hit in hits} == {"bm25"} and [hit.index for hit in hits] == [0, 3, 1]
    np.testing.assert_allclose([hit.score for hit in hits], [score(bags[i]) for i in (0, 3, 1)], rtol=1e-5)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Wo ist die Küste?", "Der Damm schützt das Nordseeküstenland."),
        ("Who inherited it?", "It went to her niece by inheritance."),
        ("Ou est le cafe?", "Là se trouve un café."),
        ("من كتب الكتاب؟", "قرأتُ لِكِتابِهِ فصلاً."),
        ("लड़कों ने क्या खाया?", "वहाँ एक लड़का बैठा था।"),
        ("ใครจุดตะเกียง", "ผู้ดูแลถือตะเกียงไว้"),
    ],
)
def test_words_are_found_in_other_forms(question: str, text: str) -> None:
    others = ("Seven crowns.", "Μία νύχτα.", "Три реки.")
    assert [hit.index for hit in by_words(asked(question, (*others, text))).hits] == [3]


def test_a_key_is_found_alone() -> None:
    """Other keys have some of its letters, but under a fifth of the best score."""
    records = tuple(f"{n * 0x9E3779B97F4A7C15 % 2**64:016x}: {n:04d}\n" for n in range(1, 100))
    assert [hit.index for hit in by_words(asked(f"What is {records[41][:16]}?", records)).hits] == [41]


def test_a_question_goes_on_from_the_one_before_it() -> None:
    first = ("user", (*(Piece(text, "segment") for text in TEXTS), Piece("A hen?", "question")))
    turns = Messages((first, ("assistant", (Piece("1"),)), ("user", (Piece("And crowns?", "question"),))))
    assert turns.earlier == "A hen?" and Messages(turns.turns[:1]).earlier == ""
    one = Asked(COUNTING, turns, False, lambda *_: {})
    assert [hit.index for hit in by_words(one).hits] == [2, 1] and one.question == "A hen?\nAnd crowns?"


# -- what is chosen ------------------------------------------------------------------------------------------------------


def fixed(order: Sequence[int], name: str = "fixed") -> find.Finder:
    """A finder that has found segments in this order."""
    return lambda asked: Ranked([Passage(i, asked.segments[i].strip(), 9.0 - k, name) for k, i in enumerate(order)])


LETTERS = ("a a a\n\n", "b\n\n", "c c\n\n", " b \n", "d")


@pytest.mark.parametrize(
    ("order", "how", "wanted", "note"),
    [
        ([4, 0], {}, [0, 4], ""),
        ([4, 2, 0], {"n": 1}, [4], ""),
        ([2, 0, 4], {"n": 3, "n_tokens": 5}, [0, 2], ""),
        ([0, 4], {"n_tokens": 1}, [0], ""),  # the first one has as many as it has
        ([4, 0, 1], {"n": 3, "n_tokens": 3}, [4], ""),  # none that stands behind one without room
        ([3, 1, 4], {}, [3, 4], ""),  # one of a text that stands there twice
        ([0, 1, 2, 4], {"n": 4}, [], "the text has no more than these passages"),
        ([], {}, [], "no passage has a word of the question"),
    ],
)
def test_what_is_chosen(
    order: list[int], how: Any, wanted: list[int], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(find.FINDERS, "fixed", fixed(order))
    found = find.find(asked("?", LETTERS), finder="fixed", **how)
    assert [passage.index for passage in found.passages] == wanted and found.note == note
    for passage in found.passages:
        assert passage.text == LETTERS[passage.index].strip() and passage.finder == "fixed"
        assert passage.score == 9 - order.index(passage.index)


def test_what_cannot_be_searched() -> None:
    with pytest.raises(ValueError, match=r"finder is 'bm52'.*did you mean 'bm25'.*allowed: attention, bm25, both"):
        find.find(asked("?"), finder="bm52")
    assert find.find(asked("?", TEXTS[:1])).note == "the text is too short to have passages"
    assert find.find(asked("?", ())) == find.Found()


@pytest.mark.parametrize(
    ("by_attention", "by_words", "wanted", "n"),
    [
        ([3, 1], [1, 2], [3, 1, 2], 3),
        ([], [2, 0], [2, 0], 3),
        ([0, 1, 2], [], [0, 1, 2], 3),
        ([2], [2, 1], [2, 1], 2),
    ],
)
def test_both_take_the_best_of_each_in_turn(
    by_attention: list[int], by_words: list[int], wanted: list[int], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "by_attention", fixed(by_attention, "attention"))
    monkeypatch.setattr(find, "by_words", fixed(by_words, "bm25"))
    found = find.FINDERS["both"](asked("?"))
    assert [hit.index for hit in found.hits] == wanted and found.n == n
    assert all(hit.finder == ("attention" if hit.index in by_attention else "bm25") for hit in found.hits)


# -- attention -----------------------------------------------------------------------------------------------------------

SEGMENTS = ("nera tode. ", "lumi 3 sa. ", "Kiro ve. ")
TAIL = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %} Now think step by step, and then answer in a few words:"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("before", ["", "Answer with a few words from the text. "])
@pytest.mark.parametrize("question", [" Ve kiro?", "\n\nWhat, and where, is it really?"])
def test_a_segment_gets_what_the_questions_own_tokens_pay(
    question: str, before: str, chat: bool, tiny: Tiny, load: Load
) -> None:
    """Whatever stands before the text or behind the question."""
    path = tiny("llama", chat_template=TAIL)
    llm = load(path, False, flash_attn=True)
    prompt = Prompt(before, SEGMENTS, "", question)
    session = Session(llm)
    got = attention.attended(Asked(llm, prompt, chat, session.attention), question.strip())
    text = jinja2.Template(TAIL).render(messages=[{"role": "user", "content": prompt.text}]) if chat else prompt.text
    tokens = llm.tokenize(text.encode(), add_bos=not chat, special=False)  # as llama_cpp does
    ends = np.cumsum([len(token_bytes(llm, token)) for token in tokens])
    begins = ends - [len(token_bytes(llm, token)) for token in tokens]
    first = ends[-1] - len(text)  # a space before all

    def inside(part: str) -> np.ndarray:
        at = first + text.index(part)
        return (ends > at) & (begins < at + len(part))

    pays = reference(path, cpu_rounding=True).trace(tokens).attention
    assert sorted(got) == list(range(len(pays)))
    for il, weights in enumerate(pays):
        wanted = np.stack([weights[:, inside(question)][..., inside(part)].sum(-1).mean(-1) for part in SEGMENTS], -1)
        close(got[il], wanted, tolerance(path, of=1.0, **shape(llm)))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_text_from_disk_gets_the_same_and_so_does_the_next_question(
    arch: str, tiny: Tiny, load: Load, tmp_path: Path
) -> None:
    """A window's layers hold other cells then than if the text was read."""
    llm = load(tiny(arch), False, flash_attn=True, n_ctx=1024)
    texts = tuple(f"{i:03d}: {i * i:05d}. " for i in range(40))
    found, evaluated = [], []
    for _ in range(2):
        session = Session(llm, cache=PromptCache(tmp_path, 2**30))
        one = Asked(llm, Prompt(segments=texts, after="?"), False, session.attention)
        found.append([attention.attended(one, question) for question in ("What is 007?", "And 012?", "What is 007?")])
        evaluated.append(session.n_evaluated)
        engine.clear(llm)
        llm._n_changes += 1  # as if another had used it
    assert evaluated[0] > 256 and evaluated[1] < 3 * (N_LEFT + 4)
    for first, again in zip(*found, strict=True):
        assert first.keys() == again.keys() == set(range(3)) - reference(tiny(arch)).sliding
        for il, pays in first.items():
            close(pays, again[il], 1e-4)
    for il, pays in found[0][0].items():
        close(pays, found[0][2][il], 1e-4)


def test_scores_are_what_is_paid_beyond_an_empty_question(llm: pypcd.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    pays = {"Who?": {1: np.array([[1.0, 4.0, 2.0, 0.0]])}, attention.NULL: {1: np.array([[1.0, 1.0, 0.0, 2.0]])}}
    monkeypatch.setattr(attention, "attended", lambda asked, question, heads: pays[question])
    monkeypatch.setattr(attention, "heads_of", lambda llm: {1: [0]})
    hits = attention.by_attention(asked(" Who?", llm=llm)).hits  # others have under a fifth of the best
    assert [(hit.index, hit.score) for hit in hits] == [(1, 3.0), (2, 2.0)]


def test_a_text_that_the_tokenizer_changes_is_not_guessed_at(llm: pypcd.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pypcd.prompt.token_bytes", lambda llm, token: token_bytes(llm, token).upper())
    with pytest.raises(UnsupportedError, match="tokenizer changes the text"):
        attention.attended(asked(" Who?", llm=llm), "Who?")


# -- heads ---------------------------------------------------------------------------------------------------------------


def test_heads_that_were_found_here_come_before_those_that_ship(
    llm: pypcd.Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert heads.model_id(llm) == "llama" and heads.heads_of(llm) is None
    shipped, found = {0: [1]}, {0: [2, 3], 2: [0]}
    monkeypatch.setattr(heads, "_shipped", lambda: {"llama": json.loads(json.dumps(shipped))})
    assert heads.heads_of(llm) == shipped
    path = heads.keep_heads(llm, found)
    assert heads.heads_of(llm) == found and not caplog.records
    for damaged in (b"", b"[]", b"{}", b'{"x": [1]}', b"\xff", b'{"0": 3}'):
        path.write_bytes(damaged)
        caplog.clear()
        assert heads.heads_of(llm) == shipped
        assert f"{path} is left out" in caplog.text and "pypcd probe" in caplog.text


def test_the_lists_that_ship_are_lists() -> None:
    for name, record in heads._shipped().items():
        known = heads._heads(record)
        assert known and all(known.values()) and name == name.casefold()


def test_keyword_search_leaves_jax_alone(tmp_path: Path) -> None:
    """It would take most of a GPU's memory; whoever imports it afterwards gets it."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import pathlib; pathlib.Path(__file__).with_name('taken').touch()")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(scores, k): ...")
    code = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from pypcd.find import bm25
taken = pathlib.Path(sys.argv[1], "jax", "taken")
bm25.load()
print(taken.exists(), end=" ")
import jax.lax
print(taken.exists(), jax.lax.top_k is not None)
"""
    done = run_python(code, tmp_path)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
