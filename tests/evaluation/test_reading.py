"""Questions on long texts: every answer found again in its text by another way, what is the only answer, lengths and scores."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation import GROUPS, task
from pypcd.evaluation.tasks.metrics import first_named, same_sentence
from pypcd.evaluation.tasks.reading import READING, Reading
from pypcd.evaluation.tasks.sample import Sample

TASKS = {made.kind: made for made in READING}

few = settings(max_examples=25)
seeds, lengths = st.integers(0, 999), st.integers(450, 2500)


def some(kind: str, n: int = 8, n_tokens: int = 900, seed: int = 0) -> list[Sample]:
    return TASKS[kind].samples(n, n_tokens, Words(), seed)


def asked(sample: Sample) -> str:
    (question,) = re.findall(r"^Question: (.+)$", sample.prompt.after, re.MULTILINE)
    return question


# -- the answers, found again ----------------------------------------------------------------------------------------


def named(line: str, sample: Sample) -> list[str]:
    """Which answers a line has, right and wrong ones."""
    values = (*sample.answers, *sample.extra["others"])
    return re.findall(rf"\b(?:{'|'.join(values)}{'' if sample.extra['others'] else '|[0-9]{4}'})\b", line)


def about(sample: Sample, name: str) -> list[str]:
    return [part for part in sample.prompt.segments if name in part]


def prose(sample: Sample) -> str:
    (paragraph,) = about(sample, sample.extra["name"])
    (value,) = named(paragraph, sample)
    return value


MARKS = r"mistaken|error|wrong|misprint|correct|made that up|mixed up|\bago\b|As a child|At school|another choir|A cousin of|not related|not to be"
MARKS += r" confused|dreamed|wanted to|thought of|would have liked"


def conflict(sample: Sample) -> str:
    paragraph, later = about(sample, sample.extra["name"])
    (sentence,) = [one for one in re.split(r"(?<=\.) ", later) if sample.extra["name"] in one]
    assert named(sentence, sample) == [sample.extra["conflict"]] and re.search(MARKS, sentence)
    assert not re.search(MARKS, paragraph)
    (value,) = named(paragraph, sample)
    return value


def keys(sample: Sample) -> str:
    form = r"(?:[-*|] )?(?P<key>[^:|()]+?)(?:: | \| | \(| - )(?:bus )?(?P<value>[\w.]+)\)?(?: \|)?"
    at = [i for i, line in enumerate(sample.prompt.segments) if re.fullmatch(r"[A-Z][^.]+:", line)]
    assert len(at) == 1, "one heading"
    pairs = []
    for line in sample.prompt.segments[at[0] + 1 :]:
        if line.startswith("\n"):
            break  # unrelated text
        match = re.fullmatch(form, line)
        assert match, line
        pairs.append((match["key"], match["value"]))
    known = dict(pairs)
    assert len(known) == len(pairs) >= 4
    named = [key for key in known if re.search(rf"(?<![\w-]){key}(?![\w-])", asked(sample))]
    value = known[max(named, key=len)]
    assert list(known.values()).count(value) == 1
    return value


def hops(sample: Sample) -> str:
    (first,) = about(sample, sample.extra["name"])
    assert sample.extra["firm"] in first and not named(first, sample)
    (second,) = [part for part in about(sample, sample.extra["firm"]) if part != first]
    (city,) = named(second, sample)
    return city


def quote(sample: Sample) -> str:
    lines = re.split(r"(?<=\.)\s+", sample.prompt.context)
    quoted = re.search(r'"(.+)"', asked(sample))
    if quoted is None:
        (name,) = re.findall(r"[A-Z]\w+", asked(sample).removeprefix("Which").removeprefix("Quote"))
        (line,) = [line for line in lines if re.search(rf"\b{name}\b", line)]
        return line
    assert lines.count(quoted[1]) == 1
    return lines[lines.index(quoted[1]) + (-1 if "before the sentence" in asked(sample) else 1)]


ROOMS = "attic|bathroom|bedroom|cellar|garage|hall|kitchen|library|office|studio"


def story(sample: Sample) -> str:
    """Every event again, and what is asked of them."""
    first, *lines = re.split(r"(?<=\.)\s+", sample.prompt.context)
    names = re.findall(r"[A-Z]\w+", first)
    events = []
    for line in lines:
        if who := [name for name in names if re.search(rf"\b{name}\b", line)]:
            (room,) = re.findall(rf"\b(?:{ROOMS})\b", line)
            events.append((who[0], room, line))
            assert len(who) == 1
    assert len(names) == 4 and len(events) == 10
    way, _, of = sample.extra["way"].partition(" ")
    at = -1 if way == "last" else 0
    if of == "one":
        return [name for name, room, _ in events if room == sample.extra["room"]][at]
    if of == "room":
        return [room for name, room, _ in events if name == sample.extra["name"]][at]
    ((name, room, _),) = [event for event in events if re.search(rf"\ban? {sample.extra['thing']}\b", event[2])]
    return name if way == "who" else room


ORACLES: dict[str, Callable[[Sample], str]] = {
    "prose": prose,
    "conflict": conflict,
    "keys": keys,
    "hops": hops,
    "quote": quote,
    "story": story,
}


@few
@pytest.mark.parametrize("kind", TASKS)
@given(n_tokens=lengths, seed=seeds)
def test_every_answer_stands_in_its_text(kind: str, n_tokens: int, seed: int) -> None:
    for sample in some(kind, 4, n_tokens, seed):
        assert (ORACLES[kind](sample),) == sample.answers, sample.prompt.text
        assert sample.answers[0] not in asked(sample)


@few
@given(st.sampled_from(["prose", "conflict", "hops", "quote"]), lengths, seeds)
def test_an_answer_occurs_once(kind: str, n_tokens: int, seed: int) -> None:
    for sample in some(kind, 3, n_tokens, seed):
        assert len(re.findall(rf"\b{re.escape(sample.answers[0])}", sample.prompt.context)) == 1


@few
@given(st.sampled_from([kind for kind in TASKS if kind != "hops"]), lengths, seeds)
def test_the_answer_is_at_its_depth(kind: str, n_tokens: int, seed: int) -> None:
    for sample in some(kind, 3, n_tokens, seed):
        assert sample.depth is not None and 0 <= sample.depth <= 1
        part = sample.prompt.segments[round(sample.depth * (len(sample.prompt.segments) - 1))]
        assert sample.answers[0] in part
        if kind == "conflict":
            later = [i for i, other in enumerate(sample.prompt.segments) if sample.extra["name"] in other]
            assert sample.prompt.segments.index(part) == later[0]


def test_two_facts_have_no_single_depth() -> None:
    assert {sample.depth for sample in some("hops")} == {None}


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_questions_of_all_forms_are_asked() -> None:
    assert len({sample.extra["attribute"] for sample in some("prose", 50)}) == 6
    assert {sample.extra["why"] for sample in some("conflict", 50)} == {"rumour", "earlier", "other person", "wish"}
    assert len({sample.extra["way"] for sample in some("story", 50)}) == 6
    assert {sample.extra["way"] for sample in some("quote", 30)} == {-1, 0, 1}
    headings = {re.findall(r"^[A-Z][^.]+:$", sample.prompt.context, re.MULTILINE)[0] for sample in some("keys", 50)}
    assert len(headings) == 5


@few
@given(st.sampled_from([kind for kind in TASKS if kind != "quote"]), lengths, lengths, seeds)
def test_a_question_is_the_same_at_every_length(kind: str, n_tokens: int, other: int, seed: int) -> None:
    for first, second in zip(some(kind, 4, n_tokens, seed), some(kind, 4, other, seed)):
        assert (asked(first), first.answers, first.gold) == (asked(second), second.answers, second.gold)


@pytest.mark.parametrize("kind", TASKS)
def test_questions_differ(kind: str) -> None:
    samples = some(kind, TASKS[kind].n_questions, 600)
    assert len({sample.prompt for sample in samples}) == len(samples) == 50


# -- lengths ---------------------------------------------------------------------------------------------------------


@few
@given(st.sampled_from(READING), st.integers(1, 4), st.integers(450, 4000), seeds, st.integers(0, 30))
def test_prompts_are_as_long_as_allowed(made: Reading, n: int, n_tokens: int, seed: int, template: int) -> None:
    tokenizer = Words(template)
    sizes = [tokenizer.count(sample.prompt) + made.max_tokens for sample in made.samples(n, n_tokens, tokenizer, seed)]
    assert max(sizes) <= n_tokens < max(sizes) + 90  # the sentence or line that no longer fits, in the longest of them


@pytest.mark.parametrize("kind", TASKS)
def test_long_texts_have_unrelated_text_and_right_answers(kind: str) -> None:
    for sample in some(kind, 2, 12_000):
        assert (ORACLES[kind](sample),) == sample.answers
        assert len(re.findall(r"\b(?:the baker|the mayor|the postman)\b", sample.prompt.context, re.IGNORECASE)) > 20
        assert len(TASKS[kind].name) > len(kind)


# -- scores ----------------------------------------------------------------------------------------------------------


@few
@pytest.mark.parametrize("kind", TASKS)
@given(seed=seeds)
def test_usual_forms_of_the_answer_score_and_wrong_ones_do_not(kind: str, seed: int) -> None:
    made = TASKS[kind]
    for sample in some(kind, 3, 600, seed):
        (answer,) = sample.answers
        right = [answer, sample.gold, f'"{answer}"', f"\n {answer} \n", f"{answer}\nQuestion: And then?"]
        right += [sample.written(chat=chat) for chat in (False, True)]
        wrong = ["", "I do not know.", answer[1:], f"x{answer}", f"x\n{answer}"]
        if kind == "quote":
            right += [answer.rstrip("."), f'{answer}" That is it.', answer.replace(" ", "  "), f"\u201c{answer}\u201d"]
            wrong += [f"{answer} {answer}", answer.replace("the ", "a ", 1) + " too", answer[: len(answer) // 2]]
        else:
            right += [f"{answer}, as the text says.", f"It is {answer}.", answer.upper(), f"**{answer}**"]
            others = sample.extra["others"] or ["7.35"]
            wrong += [f"{others[0]}.", f"{others[-1]} or {answer}"]
            if kind == "conflict":
                wrong += [sample.extra["conflict"], f"not {sample.extra['conflict']}, but {answer}"]
                right += [f"{answer}, not {sample.extra['conflict']}"]
        for text in right:
            assert made.score(text, sample) == 1.0, (text, answer)
        for text in wrong:
            assert made.score(text, sample) == 0.0, (text, answer)


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
    for text in (
        answer,
        f' "{answer}"',
        "At noon  the mayor read the newspaper",
        "'At noon the mayor read the newspaper!'",
    ):
        assert same_sentence(text, answer) == 1.0, text
    for text in (
        "",
        "at noon the mayor read the newspaper.",
        f"{answer} It rained.",
        "At noon the mayor read",
        "the newspaper.",
    ):
        assert same_sentence(text, answer) == 0.0, text


def test_the_group_stands_for_its_tasks() -> None:
    assert GROUPS["reading"] == tuple(f"reading-{kind}" for kind in TASKS)
    for name, made in zip(GROUPS["reading"], READING):
        assert task(name) == made


@few
@given(st.sampled_from(["reading-prose", "reading-conflict", "chat-earlier", "chat-known"]), seeds)
def test_no_article_of_the_given_beginning_depends_on_the_answer(name: str, seed: int) -> None:
    """Else "a" would be a part of "an artist", and of a wrong answer too."""
    for sample in task(name).samples(3, 500, Words(), seed):
        assert sample.gold == f" {sample.answers[0]}"
        assert not sample.prompt.answer_prefix.endswith(" a") or sample.answers[0][0] not in "aeiou"
