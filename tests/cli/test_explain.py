"""Explanations: columns are the model's rows, marks are at the right answer's tokens, the page is safe.

What the twin sees, and where an answer stands, are checked against places counted by hand; what it sees against the engine too.
"""

from __future__ import annotations

import html.parser

import numpy as np
import pytest
from conftest import F32, SMALL, contrasted, rounding_of
from rich.cells import cell_len
from tiny_gguf import write_tiny_gguf

import pypcd
from pypcd.cli import _text
from pypcd.cli.explain import table
from pypcd.decode import Session
from pypcd.decode.vocabulary import Vocabulary, shown
from pypcd.evaluation.tasks.kv import KV_SHORT
from pypcd.explain.page import page
from pypcd.explain.places import Mark, Written, between, excerpt, find, last_of, marks, named, seen
from pypcd.explain.steps import Candidate, Step, explain, strength_of

SAMPLE = next(iter(KV_SHORT.questions(1, 8, seed=2)))


@pytest.fixture(scope="module")
def llm() -> pypcd.Llama:
    llm = pypcd.Llama("demo", **{**SMALL, **F32, "n_ctx": 512})
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def vocabulary(llm) -> Vocabulary:
    return Vocabulary(llm)


@pytest.fixture(scope="module")
def prompt(llm) -> list[int]:
    return llm.tokenize(SAMPLE.prompt.text.encode(), special=False)


def probabilities(row: np.ndarray) -> np.ndarray:
    p = np.exp(row.astype(np.float64) - row.max())
    return p / p.sum()


@pytest.mark.parametrize("setting", [pypcd.PCDConfig(), pypcd.PCDConfig(beta=1.0, gamma=3, cache="separate")])
def test_columns_are_the_rows_of_a_fresh_evaluation(llm, vocabulary, prompt, setting) -> None:
    steps = list(explain(Session(llm), prompt, setting, vocabulary, n_tokens=4, gold=SAMPLE.answers[0]))
    written = list(prompt)
    for i, step in enumerate(steps):
        limit = rounding_of(llm, written)
        # a logit may be off by the limit, and so may those that it is normalised with
        near, contrasted_near = (float(np.expm1(2 * by)) for by in (limit, contrasted(limit, setting.beta)))
        llm.pcd = setting
        llm.eval(written)
        rows = llm.pcd_logits()
        llm.pcd = None
        before, over, after = map(probabilities, (rows.standard, rows.local, rows.contrasted))
        assert step.index == i and len(step.candidates) >= 3
        for c in step.candidates:
            assert c.before == pytest.approx(before[c.token], rel=near)
            assert c.local == pytest.approx(over[c.token], rel=near)
            assert c.after == pytest.approx(after[c.token], rel=contrasted_near)
            assert (c.rank_after is None) == (not np.isfinite(rows.contrasted[c.token])) == (c.after == 0)
            assert c.text == vocabulary.shown(c.token)
        for row, attribute in ((rows.standard, "rank_before"), (rows.contrasted, "rank_after")):
            top = {int(t) for t in np.argsort(-row, kind="stable")[:3]}
            listed = {c.token: getattr(c, attribute) for c in step.candidates}
            assert top <= set(listed) and listed[int(row.argmax())] == 1
        [chosen] = [c for c in step.candidates if c.is_chosen]
        assert chosen.token == rows.contrasted.argmax() and step.text == chosen.text
        assert step.is_changed == (chosen.rank_before != 1)
        ranks = [c.rank_after or 10**6 for c in step.candidates]
        assert ranks == sorted(ranks)
        written.append(chosen.token)


def test_the_tokens_are_those_of_generate(llm, vocabulary, prompt) -> None:
    steps = list(explain(Session(llm), prompt, pypcd.PCDConfig(), vocabulary, n_tokens=20))
    llm.reset()
    wanted = []
    for token in llm.generate(prompt, temp=0.0, pcd="paper"):
        wanted.append(token)
        if token == llm.token_eos() or len(wanted) == 20:
            break
    assert [c.token for s in steps for c in s.candidates if c.is_chosen] == wanted
    assert steps[-1].text == "(end)"  # the demo model ends its answers
    assert not any(c.is_gold for s in steps for c in s.candidates)
    assert llm.pcd is None


def test_the_right_answers_tokens_are_marked_and_always_listed(llm, vocabulary, prompt) -> None:
    steps = list(
        explain(Session(llm), prompt, pypcd.PCDConfig(), vocabulary, n_tokens=8, n_top=1, gold=SAMPLE.answers[0])
    )
    written = ""
    for step in steps:
        rest = SAMPLE.answers[0][len(written) :]
        follows = SAMPLE.answers[0].startswith(written) and rest
        assert any(c.is_gold for c in step.candidates) == bool(follows)
        for c in step.candidates:
            piece = vocabulary.text(c.token).decode("utf-8", "replace")
            if c.is_gold:
                assert rest.startswith(piece.lstrip(' "') if not written else piece)
            if c.is_chosen:
                chosen = piece
        written = (written + chosen).lstrip()
    assert written == SAMPLE.answers[0]  # with PCD the demo model is right here


PLAIN_TWICE = ["min_context", "min_context", None, None]


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize(
    ("n_more", "fields", "below"),
    [
        (2, {}, PLAIN_TWICE),
        (2, {"adaptive": "jsd"}, PLAIN_TWICE),
        (2, {"relative_top": 1.0}, PLAIN_TWICE),  # the others are plain because one token alone is plausible
        (1, {"min_entropy": 100}, ["min_context", "min_entropy", "min_entropy"]),
        (1, {"min_first_entropy": 1e-9}, ["min_context"] * 3),
        (0, {"min_first_entropy": 100}, ["min_first_entropy"] * 3),
        (0, {"min_first_entropy": 1e-9}, [None] * 3),
    ],
)
def test_steps_without_a_contrast_say_which_floor_they_are_below(
    llm, vocabulary, prompt, evaluation, n_more, fields, below
) -> None:
    setting = pypcd.PCDConfig(evaluation=evaluation, min_context=len(prompt) + n_more, **fields)
    steps = list(explain(Session(llm), prompt, setting, vocabulary, n_tokens=len(below)))
    assert [step.below for step in steps] == below == [step.as_dict()["below"] for step in steps]
    for step in steps:
        if step.below:
            assert step.beta is None and not step.is_changed and all(c.after == c.before for c in step.candidates)
            assert strength_of(step) == f"no contrast: below {step.below}"
        else:
            assert (step.beta is None) == (setting.relative_top == 1.0) and "min_context" not in strength_of(step)
        if "min_first_entropy" not in fields and step.below:
            without = step.below == "min_context" or evaluation == "alternate"
            assert {c.local is None for c in step.candidates} == {without}
    assert page({}, "q", steps).count("no contrast: below min_context") == below.count("min_context")


def test_wrong_arguments(llm, vocabulary, prompt) -> None:
    with pytest.raises(ValueError, match="gold is empty"):
        list(explain(Session(llm), prompt, pypcd.PCDConfig(), vocabulary, gold=" "))
    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        list(explain(Session(llm), [], pypcd.PCDConfig(), vocabulary))


# -- for readers ------------------------------------------------------------------------------------------------------

HOSTILE = b"</code><script>alert(1)</script>\x1b[2J\xff\xe2\x80\xae" + "漢".encode() * 9


def candidate(text: bytes, **changes) -> Candidate:
    values = {"token": 7, "text": shown(text), "before": 0.25, "rank_before": 1, "local": 0.5, "after": 0.125,
              "rank_after": 2, "is_chosen": False, "is_gold": False}  # fmt: skip
    return Candidate(**{**values, **changes})


STEPS = [
    Step(
        0,
        shown(HOSTILE),
        (
            candidate(HOSTILE, is_chosen=True, is_gold=True, rank_before=2, rank_after=1),
            candidate(b"ab", local=None, rank_after=None, after=0.0),
        ),
        True,
    ),
    Step(1, "(end)", (candidate(b"", is_chosen=True),), False),
]


@pytest.mark.parametrize("columns", [36, 40, 51, 52, 80, 200])
def test_tables_fit_their_terminal_and_cannot_drive_it(columns: int) -> None:
    for step in STEPS:
        text = table(step, columns)
        assert all(cell_len(line) <= columns for line in text.split("\n"))
        assert _text.clean(text) == text and "\x1b" not in text
        assert "25.0%" in text and "12.5%" in text
    wide = table(STEPS[0], 80).split("\n")
    assert wide[2].startswith(">*") and wide[2].endswith("2 -> 1") and "50.0%" in wide[2]
    assert wide[3].endswith("1 -> -") and " - " in wide[3]
    assert 'plain: "ab"' in table(STEPS[0], 120).split("\n")[0]


class Reader(html.parser.HTMLParser):
    """Collects what a browser shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.data += data if self.open[-1:] != ["style"] else ""


def test_the_page_shows_hostile_text_and_does_not_obey_it() -> None:
    prompt = "</pre><img src=http://x.test/a onerror=alert(2)>&amp;\x1b]0;x\x07\u202e end"
    facts = {"model<b>": "a&b\"'.gguf", "right answer": "</dd><script>"}
    text = page(facts, prompt, STEPS)
    seen = Reader(text)
    assert seen.open == []  # every element is closed, in order
    assert set(seen.tags) <= {"html", "head", "meta", "title", "style", "body", "h1", "h2", "dl", "dt", "dd", "pre", "p",
                              "a", "section", "code", "table", "thead", "tbody", "tr", "th", "td", "span"}  # fmt: skip
    names = {name for name, _ in seen.attributes}
    assert names <= {"lang", "charset", "http-equiv", "content", "name", "class", "id", "href", "style"}
    assert all(value.startswith("#t") for name, value in seen.attributes if name == "href")
    assert "http" not in text.replace("http-equiv", "").replace("http://x.test/a", "")
    assert "url(" not in text and "@import" not in text
    assert "<script>alert(1)</script>" in seen.data and "<img src=http://x.test/a onerror=alert(2)>&amp;" in seen.data
    assert "model<b>" in seen.data and "a&b\"'.gguf" in seen.data
    assert not any(c in text for c in "\x1b\x07\u202e\xff")
    assert "default-src 'none'" in dict(seen.attributes)["content"] or "default-src 'none'" in text


def test_the_page_has_every_candidate_with_marks_beside_the_colours() -> None:
    seen = Reader(page({}, "q", STEPS))
    assert seen.tags.count("section") == 2 and seen.tags.count("tr") == 3 + 2
    assert seen.data.count("▶") == 2 + 1 and seen.data.count("★") == 1 + 1  # once each in the legend
    assert "underlined" in seen.data
    plain = Reader(page({}, "q", STEPS[1:]))
    assert "▶" in plain.data and "★" not in plain.data and "underlined" not in plain.data
    assert "not needed" in seen.data and "excluded" in seen.data and "25.0%" in seen.data
    assert ("class", "token changed") in seen.attributes


# -- what the twin sees, and where answers stand -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "fields", "wanted"),
    [
        (100, {"window": 64}, [(0, 4), (36, 100)]),
        (100, {"window": 64, "n_sink": 0}, [(36, 100)]),
        (100, {"window": 1, "n_sink": 1}, [(0, 1), (99, 100)]),
        (69, {"window": 64}, [(0, 4), (5, 69)]),  # all but one
        (68, {"window": 64}, [(0, 68)]),  # the first and the last touch
        (10, {"window": 64}, [(0, 10)]),
        (3, {"window": 1}, [(0, 3)]),
        (100, {"window": 64, "n_sink": 500}, [(0, 100)]),
        (100, {}, [(0, 100)]),
        (1_000_000, {"window": 64}, [(0, 4), (999_936, 1_000_000)]),
    ],
)
def test_the_twin_sees_the_first_tokens_and_the_last(n, fields, wanted) -> None:
    assert [(part.start, part.stop) for part in seen(n, pypcd.PCDConfig(**fields))] == wanted


def test_what_is_said_to_be_seen_is_what_the_engine_sees(tmp_path) -> None:
    """In a model of one layer a token's key depends on this token alone, so another one that is not seen changes nothing."""
    setting, n = pypcd.PCDConfig.preset("window").replace(window=6, n_sink=2), 14
    llm = pypcd.Llama(str(write_tiny_gguf(tmp_path / "one.gguf", n_layer=1)), **{**SMALL, **F32}, pcd=setting)

    def local(tokens: list[int]) -> np.ndarray:
        llm.reset()
        llm.eval(tokens)
        return llm.pcd_logits().local.copy()

    tokens = [10 + 3 * i for i in range(n)]
    first = local(tokens)
    changed = [not np.array_equal(first, local([*tokens[:i], 200, *tokens[i + 1 :]])) for i in range(n)]
    llm.close()
    assert [i for i, is_changed in enumerate(changed) if is_changed] == [i for part in seen(n, setting) for i in part]


def test_between_spans() -> None:
    spans = [range(6, 8), range(4), range(2, 3), range(7, 9)]
    assert between(spans, 10) == [range(4, 6), range(9, 10)] and between([], 3) == [range(3)]
    assert between([range(3)], 3) == []


#         0    1(control) 2    3    4    5    6     7     8    9
PIECES = [b"A", b"", b"my is", b" 2", b"81", b", B", b"ob is ", b"71", b".\n", b"Amy is 2813."]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("281", [(3, 5)]),  # not in 2813
        ("81", []),
        ("71", [(7, 8)]),
        ("Amy is", [(0, 3), (9, 10)]),
        ("281, Bob is 71.", [(3, 9)]),
        ("12345", []),
        (".", [(8, 9), (9, 10)]),
    ],
)
def test_a_text_is_found_in_whole_words(text, wanted) -> None:
    assert [(span.start, span.stop) for span in find(PIECES, text)] == wanted


def test_texts_in_any_script_are_found_though_a_token_ends_within_a_character() -> None:
    pieces = [b"caf\xc3", b"\xa9 \xe6\xbc", b"\xa2\xe5\xad\x97\xe3\x81", b"\xaf \xff", b"caf\xc3\xa9", b"s"]
    assert find(pieces, "café") == (range(2),)  # not in cafés
    assert find(pieces, "caf") == () and find(pieces, "漢字") == (range(1, 3),)
    assert excerpt(pieces, range(1, 3), 40) == "caf 漢字 cafés"  # what is not whole is left out


@pytest.mark.parametrize(
    ("answer", "start", "wanted"),
    [
        (" 71.\nAmy is", 0, "71"),  # its line
        ('"281, Bob"', 0, "281, Bob"),
        ("Bob is 99", 0, "Bob is"),
        ("Bob is 71", 8, "71"),  # the word in which the answers differ
        ("28", 0, ""),
        ("", 0, ""),
        ("99 71", 0, ""),
    ],
)
def test_what_an_answer_takes_from_the_prompt(answer, start, wanted) -> None:
    assert named(PIECES, answer, start) == wanted


def test_excerpts_are_a_line_and_say_what_they_leave_out() -> None:
    assert excerpt(PIECES, range(3, 5), 60) == "Amy is 281, Bob is 71."
    assert excerpt(PIECES, range(7, 8), 60) == "Amy is 281, Bob is 71."
    pieces = [b"first line\n", *[b"word "] * 500, b"28", *[b" more"] * 500]
    text = excerpt(pieces, range(501, 502), 40)
    assert text.startswith("…word ") and text.endswith("…") and " 28 " in text and len(text) <= 40
    assert last_of("a word", 6) == "a word" and last_of("many words", 7) == "…words" and last_of("x" * 9, 5) == "…xxxx"


def test_answers_are_judged_by_what_was_written() -> None:
    right, wrong = Written('": 281.\nBob', 0, False), Written(" 71.\n", 0, False)
    assert (right.line, wrong.line) == ("281. …", "71.") and Written("", 0, True).line == "(nothing)"
    assert (right.is_right("281"), wrong.is_right("281"), wrong.is_right("")) == (True, False, None)
    assert Written(" 71", 0, False).is_right("281") is None  # it may still come
    assert Written(" 71", 0, True).is_right("281") is False
    assert Written("It is 281.", 6, True).line == "281."
    assert Written("It is 281", 6, False).line == "281 …"  # it was cut


def test_the_right_answer_is_marked_first_and_what_was_written_in_its_place() -> None:
    right, wrong, none = Written(" 281.", 0, True), Written(" 71.", 0, True), Written(" 99.", 0, True)
    amy, bob = (range(3, 5),), (range(7, 8),)
    line = "Amy is 281, Bob is 71."
    gold = Mark("PCD", True, "281", amy, line)
    assert marks(PIECES, wrong, right, "281") == (gold, Mark("plain", False, "71", bob, line))
    assert marks(PIECES, right, wrong, "281") == (
        Mark("plain", True, "281", amy, line), Mark("PCD", False, "71", bob, line)
    )  # fmt: skip
    assert marks(PIECES, wrong, none, "281") == (
        Mark(None, True, "281", amy, line),
        Mark("plain", False, "71", bob, line),
    )
    assert marks(PIECES, none, right, "281") == (gold,) == marks(PIECES, right, right, "281")
    assert marks(PIECES, wrong, none, "12345")[0] == Mark(None, True, "12345")  # it does not stand there
    assert [mark.writer for mark in marks(PIECES, wrong, right, "")] == ["PCD", "plain"]
    assert not any(mark.is_right for mark in marks(PIECES, wrong, right, ""))
