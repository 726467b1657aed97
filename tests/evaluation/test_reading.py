"""Questions on long texts and in chats: those of other lengths than the published ones, and scores. What is asked is in test_published.py."""

from __future__ import annotations

import re

import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation.tasks.chats import CHATS, Chat
from pypcd.evaluation.tasks.frozen import rows
from pypcd.evaluation.tasks.metrics import first_named, same_sentence
from pypcd.evaluation.tasks.reading import READING, Reading
from pypcd.evaluation.tasks.sample import Sample

TASKS = {made.kind: made for made in READING}
_, EARLIER = CHATS

few = settings(max_examples=25)
seeds = st.integers(0, 999)


def parts_in(sample: Sample) -> list[str]:
    """The sentences or lines of a text, in order."""
    return [one for part in sample.prompt.segments for one in re.split(r"(?<=\.)\s+", part.strip())]


@few
@pytest.mark.parametrize("kind", TASKS)
@given(data=st.data())
def test_a_longer_text_is_the_longest_published_one_with_unrelated_paragraphs(kind: str, data: st.DataObject) -> None:
    """The published text is in it whole and in order, and what is new names no answer, right or wrong."""
    made, published = TASKS[kind], max(text["size"] for row in rows("reading", kind) for text in row["texts"])
    for own, sample in zip(made.questions(3, published), made.questions(3, published + data.draw(st.integers(1, 900)))):
        assert [part for part in sample.prompt.segments if part in own.prompt.segments] == list(own.prompt.segments)
        new = " ".join(part for part in sample.prompt.segments if part not in own.prompt.segments)
        assert new and not re.search(rf"\b(?:{'|'.join(map(re.escape, sample.answers))})\b", new)
        assert not any(re.search(rf"\b{other}\b", new) for other in sample.extra.get("others", ()))
        assert sample.answers == own.answers and sample.prompt.after == own.prompt.after


@few
@pytest.mark.parametrize("kind", TASKS)
@given(data=st.data())
def test_a_shorter_text_has_all_that_the_answer_needs_in_the_published_order(kind: str, data: st.DataObject) -> None:
    of_kind = rows("reading", kind)[:3]
    least, most = max(len(row["needed"]) for row in of_kind), min(row["texts"][0]["size"] for row in of_kind) - 1
    size = data.draw(st.integers(least, most))
    for row, sample in zip(of_kind, TASKS[kind].questions(3, size)):
        text = {**row, **row["texts"][0]}
        order = [text["sentences"][k] for paragraph in text["paragraphs"] for k in paragraph]
        rest, kept = sample.prompt.context, []
        for sentence in order:
            if re.match(rf"{re.escape(sentence)}(?:\s|$)", rest):
                rest, kept = rest[len(sentence) :].lstrip(), [*kept, sentence]
        assert not rest and len(kept) <= size
        assert {text["sentences"][k] for k in text["needed"]} <= set(kept)
        assert sample.answers[0] in sample.prompt.context


@few
@given(st.integers(450, 2500), seeds)
def test_a_quoted_sentence_is_beside_the_one_that_is_asked_about(n_tokens: int, seed: int) -> None:
    for sample in TASKS["quote"].samples(4, n_tokens, Words(), seed):
        lines = parts_in(sample)
        asked = re.search(r'^Question: .*"(.+)"', sample.prompt.after, re.MULTILINE)
        if asked:
            assert lines.count(asked[1]) == 1
            step = -1 if "before the sentence" in asked[0] else 1
            assert lines[lines.index(asked[1]) + step] == sample.answers[0]
        assert lines.count(sample.answers[0]) == 1


@few
@given(st.integers(350, 2500), seeds)
def test_the_user_of_a_chat_has_said_it_once_and_nobody_else(n_tokens: int, seed: int) -> None:
    for sample in EARLIER.samples(4, n_tokens, Words(), seed):
        (value,) = sample.answers
        whole = "".join(question + answer for question, answer in sample.prompt.shots)
        assert len(re.findall(rf"\b{value}\b", whole)) == 1 and sample.depth is not None
        question, _ = sample.prompt.shots[round(sample.depth * (len(sample.prompt.shots) - 1))]
        (said,) = [one for one in re.split(r"(?<=[.?:]) (?=[A-Z])", question) if re.search(rf"\b{value}\b", one)]
        assert re.search(r"\b(?:I|[Mm]y|me)\b", said) and "neighbour" not in said
        (other,) = [one for one in re.split(r"(?<=[.?:]) (?=[A-Z])", whole) if re.search("[Mm]y neighbour", one)]
        assert sample.extra["other"] in other


def test_turns_of_a_chat_grow_and_say_nothing_twice() -> None:
    short, long = (EARLIER.samples(3, n_tokens, Words(), 0) for n_tokens in (400, 4000))
    for few_words, many in zip(short, long):
        assert few_words.prompt.after == many.prompt.after and few_words.answers == many.answers
        for (question, answer), (longer, other) in zip(few_words.prompt.shots, many.prompt.shots):
            assert len(longer) > 3 * len(question) and len(other) > 2 * len(answer)
        answers = [line for _, text in many.prompt.shots for line in re.split(r"(?<=\.) ", text)]
        assert len(set(answers)) > 0.97 * len(answers)


@few
@pytest.mark.parametrize(
    "made", [*(TASKS[kind] for kind in TASKS if kind != "quote"), *CHATS], ids=lambda made: made.name
)
@given(seed=seeds)
def test_a_wrong_value_may_stand_behind_the_right_one_only(made: Reading | Chat, seed: int) -> None:
    """Which may be spelt, and begin as the prompt does."""
    for sample in made.samples(3, 600, Words(), seed):
        (answer,), extra = sample.answers, sample.extra
        told = [extra[name] for name in ("conflict", "other") if made.name != "chat-known" and name in extra]
        others = [*extra["others"], *told] or ["7.35"]
        for text in (extra.get("spelt") or answer, f"{sample.prompt.answer_prefix}{sample.gold}."):
            assert made.score(text, sample) == 1.0
        for other in others:
            assert made.score(f"It is {answer}, not {other}.", sample) == 1.0
            assert made.score(f"not {other}, but {answer}", sample) == 0.0


@pytest.mark.parametrize(
    ("prediction", "answer", "others", "spelt", "right"),
    [
        ("7.50", "7.50", (), "", True),
        ("7,50 euros", "7.50", (), "", True),
        ("7.5", "7.50", (), "", True),
        ("17.50", "7.50", (), "", False),
        ("1,000 metres", "1000", (), "thousand", True),
        ("a thousand", "1000", (), "thousand", True),
        ("at 7:50", "7.50", (), "", False),
        ("twelve", "12", (), "twelve", True),
        ("twelve", "12", (), "", False),
        ("3 or 12", "12", (), "twelve", False),
        ("one hundred", "100", (), "hundred", True),
        ("Rome", "Rome", ("Lima",), "", True),
        ("Romeo", "Rome", ("Lima",), "", False),
        ("LIMA, then Rome", "Rome", ("Lima",), "", False),
        ("Mexico City", "Mexico", ("Mexico City",), "", False),  # the longer name is meant
    ],
)
def test_the_first_value_named_counts(
    prediction: str, answer: str, others: tuple[str, ...], spelt: str, right: bool
) -> None:
    assert first_named(prediction, answer, others, spelt) == right


def test_a_sentence_is_the_same_up_to_white_space_quotation_marks_and_its_last_mark() -> None:
    answer = "At noon the mayor read the newspaper."
    bare = answer[:-1]
    for text in (answer, f' "{answer}"', bare.replace(" ", "  "), f"'{bare}!'"):
        assert same_sentence(text, answer) == 1.0, text
    for text in ("", answer.lower(), f"{answer} It rained.", "At noon the mayor read", "the newspaper."):
        assert same_sentence(text, answer) == 0.0, text
