"""Explanations: columns are the model's rows, marks are at the right answer's tokens, the page is safe."""

from __future__ import annotations

import html.parser

import numpy as np
import pytest
from conftest import F32, SMALL, contrasted, rounding_of

import pypcd
from pypcd.cli import _text
from pypcd.cli.explain import table
from pypcd.decode import Session
from pypcd.evaluation.tasks.kv import KV_SHORT
from pypcd.explain.page import page
from pypcd.explain.steps import Candidate, Step, explain, strength_of
from pypcd.vocabulary import Vocabulary, shown

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
        limit = contrasted(rounding_of(llm, written), setting.beta)  # a probability moves by less than its logit
        llm.pcd = setting
        llm.eval(written)
        rows = llm.pcd_logits()
        llm.pcd = None
        before, over, after = map(probabilities, (rows.standard, rows.local, rows.contrasted))
        assert step.index == i and len(step.candidates) >= 3
        for c in step.candidates:
            assert c.before == pytest.approx(before[c.token], abs=limit)
            assert c.local == pytest.approx(over[c.token], abs=limit)
            assert c.after == pytest.approx(after[c.token], abs=limit)
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


def test_a_right_answer_that_no_candidate_begins_is_listed_below(llm, vocabulary, prompt) -> None:
    [step] = explain(Session(llm), prompt, pypcd.PCDConfig(), vocabulary, n_tokens=1, n_top=1, gold="{")
    [gold] = [c for c in step.candidates if c.is_gold]
    assert gold is step.candidates[-1] and gold.rank_before > 1


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
        assert all(_text.cells(line) <= columns for line in text.split("\n"))
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
    assert "not needed" in seen.data and "excluded" in seen.data and "25.0%" in seen.data
    assert ("class", "token changed") in seen.attributes
