"""Conversations: what the last question asks for, found again in the earlier turns or worked out; lengths and scores."""

from __future__ import annotations

import calendar
import re

import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation import GROUPS, task
from pypcd.evaluation.tasks import words as w
from pypcd.evaluation.tasks.chats import CHATS, Chat
from pypcd.evaluation.tasks.sample import Sample

KNOWN, EARLIER = CHATS

few = settings(max_examples=25)
seeds, lengths = st.integers(0, 999), st.integers(350, 2500)


def sentences(sample: Sample) -> list[str]:
    """What the user has said before the last question."""
    return [one for text, _ in sample.prompt.shots for one in re.split(r"(?<=[.?:]) (?=[A-Z])", text.strip())]


ABOUT = {  # what a question is about, what the user says then, and all that the answer can be
    r"my name|I am called": (r"\b(?:my name|My name|am called|call me)\b", w.NAMES),
    r"bought": (r"\bI (?:have just )?bought|went out and bought", w.THINGS),
    r"[Ww]hich city": (r"\bI (?:am going|shall travel|have a train)|My next journey", w.CITIES),
    r"guests": (r"\bI have invited|[Mm]y birthday", tuple(map(str, range(100)))),
    r"dentist": (r"dentist", w.DAYS),
    r"instrument": (r"\bI (?:am learning|am a beginner|have begun)|I have had lessons", w.INSTRUMENTS),
    r"profession|work as": (r"\bI (?:work as|am a \w+ and|earn)|By profession", w.PROFESSIONS),
}


def earlier(sample: Sample) -> str:
    ((said, values),) = [known for about, known in ABOUT.items() if re.search(about, sample.prompt.after)]
    words = re.compile(rf"\b(?:{'|'.join(values)})\b")
    (line,) = [line for line in sentences(sample) if re.search(said, line) and words.search(line)]
    (value,) = words.findall(line)
    whole = "".join(question + answer for question, answer in sample.prompt.shots)
    assert words.findall(whole).count(value) == 1, "nothing else has it"
    others = [line for line in sentences(sample) if "My neighbour" in line or "of my neighbour" in line]
    assert len(others) == 1 and words.findall(others[0]) == [sample.extra["other"]] != [value]
    return value


@few
@given(lengths, seeds)
def test_the_user_has_said_it_once_and_something_else_of_a_neighbour(n_tokens: int, seed: int) -> None:
    for sample in EARLIER.samples(4, n_tokens, Words(), seed):
        value = earlier(sample)
        assert (value,) == sample.answers
        assert sample.depth is not None
        question, answer = sample.prompt.shots[round(sample.depth * (len(sample.prompt.shots) - 1))]
        assert value in question and value not in answer


def test_all_that_can_be_said_is_asked_for() -> None:
    assert len({sample.extra["said"] for sample in EARLIER.samples(60, 400, Words(), 0)}) == len(ABOUT)


# -- general knowledge -----------------------------------------------------------------------------------------------


def test_general_knowledge_is_what_other_lists_and_the_calendar_say() -> None:
    capitals, opposites = dict(w.CAPITALS), dict(w.OPPOSITES)
    past, plurals = dict(w.PAST), dict(w.PLURALS)
    days, months = list(calendar.day_name), list(calendar.month_name)[1:]
    numbers = {"seven times eight": 7 * 8, "twenty minus five": 20 - 5, "months does a year": len(months)}
    numbers |= {
        "days does a week": len(days),
        "hours does a day": 24,
        "letters does": len(set(map(chr, range(97, 123)))),
    }
    checked = 0
    for question, _, answer, _, group in w.KNOWN:
        of = re.sub(r'["?]|, the animal', "", question).rpartition(" ")[2]
        if group == "capital":
            assert capitals[re.findall(r"capital of (.+)\?", question)[0]] == answer
        elif group == "opposite" and of in opposites:
            assert opposites[of] == answer
        elif group in ("day", "month") and (order := re.search("after|before", question)):
            names = days if group == "day" else months
            assert names[(names.index(of) + (1 if order[0] == "after" else -1)) % len(names)] == answer
        elif group == "word":
            assert (past if "past" in question else plurals)[of.strip()] == answer
        elif group == "number" and any(text in question for text in numbers):
            assert [str(n) for text, n in numbers.items() if text in question] == [answer]
        else:
            continue
        checked += 1
    assert checked > 45


def test_there_are_enough_facts_and_no_question_tells_its_answer() -> None:
    assert len({fact[0] for fact in w.KNOWN}) == len(w.KNOWN) >= 60
    for question, begun, answer, spelt, _ in w.KNOWN:
        for text in filter(None, (answer, spelt)):
            assert not re.search(rf"\b{text}\b", f"{question} {begun}", re.IGNORECASE), question
        assert begun[0].isupper() and begun == begun.strip() and question.endswith("?")


def test_every_fact_is_asked_once_before_one_is_asked_again() -> None:
    n = len(w.KNOWN)
    asked = [sample.prompt.answer_prefix for sample in KNOWN.samples(2 * n, 300, Words(), 0)]
    assert len(set(asked[:n])) == len(set(asked[n:])) == n


@few
@given(lengths, seeds)
def test_the_fact_that_is_asked_for_has_its_answer(n_tokens: int, seed: int) -> None:
    by_question = {fact[0]: fact for fact in w.KNOWN}
    for sample in KNOWN.samples(4, n_tokens, Words(), seed):
        (fact,) = [fact for question, fact in by_question.items() if sample.prompt.after.endswith(f"{question}\n")]
        assert sample.answers == (fact[2],) and sample.prompt.answer_prefix == fact[1] and sample.depth is None


# -- conversations ---------------------------------------------------------------------------------------------------


@few
@given(lengths, seeds)
def test_both_tasks_have_the_same_conversations_of_three_to_six_turns(n_tokens: int, seed: int) -> None:
    for known, asked in zip(*(made.samples(6, n_tokens, Words(), seed) for made in CHATS)):
        assert len(known.prompt.shots) == len(asked.prompt.shots) in range(2, 6)
        for (first, answer), (second, other) in zip(known.prompt.shots, asked.prompt.shots):
            assert first[:30] == second[:30] and answer[:20] == other[:20]
            assert first.endswith("\n") and "\n" not in first[:-1] + answer
        assert not known.prompt.context and known.prompt.after.endswith("?\n")


@few
@given(st.sampled_from(CHATS), st.integers(1, 5), lengths, seeds)
def test_more_questions_leave_the_first_ones_as_they_are(made: Chat, n: int, n_tokens: int, seed: int) -> None:
    assert made.samples(n, n_tokens, Words(), seed) == made.samples(n + 4, n_tokens, Words(), seed)[:n]


def test_turns_grow_and_say_nothing_twice() -> None:
    short, long = (EARLIER.samples(3, n_tokens, Words(), 0) for n_tokens in (400, 4000))
    for few_words, many in zip(short, long):
        assert few_words.prompt.after == many.prompt.after and few_words.answers == many.answers
        for (question, answer), (longer, other) in zip(few_words.prompt.shots, many.prompt.shots):
            assert len(longer) > 3 * len(question) and len(other) > 2 * len(answer)
        said = [line for text, _ in many.prompt.shots for line in re.split(r"(?<=\.) ", text) if "{" in line]
        assert not said, "a form that is not filled"
        answers = [line for _, text in many.prompt.shots for line in re.split(r"(?<=\.) ", text)]
        assert len(set(answers)) > 0.97 * len(answers)


@few
@given(st.sampled_from(CHATS), st.integers(1, 4), st.integers(350, 4000), seeds, st.integers(0, 30))
def test_prompts_are_as_long_as_allowed(made: Chat, n: int, n_tokens: int, seed: int, template: int) -> None:
    tokenizer = Words(template)
    for sample in made.samples(n, n_tokens, tokenizer, seed):
        length = tokenizer.count(sample.prompt) + made.max_tokens
        assert length <= n_tokens < length + 50, "one sentence more may be the longest of all"


# -- scores ----------------------------------------------------------------------------------------------------------


@few
@given(st.sampled_from(CHATS), seeds)
def test_usual_forms_of_the_answer_score_and_wrong_ones_do_not(made: Chat, seed: int) -> None:
    for sample in made.samples(6, 400, Words(), seed):
        (answer,) = sample.answers
        begun = sample.prompt.answer_prefix
        right = [
            answer,
            sample.gold,
            f"{begun}{sample.gold}.",
            f" {answer}!",
            answer.upper(),
            f"{answer}\nUser: thanks",
        ]
        right += [sample.written(chat=chat) for chat in (False, True)]
        if sample.extra["spelt"]:
            right.append(f"{sample.extra['spelt']}.")
        wrong = ["", "I do not know.", f"x{answer}", f"x\n{answer}"]
        wrong += [f"{other}, {answer}" for other in sample.extra["others"]]
        if made is EARLIER:
            wrong += [sample.extra["other"], f"{begun} {sample.extra['other']}"]
        for text in right:
            assert made.score(text, sample) == 1.0, (text, answer)
        for text in wrong:
            assert made.score(text, sample) == 0.0, (text, answer)


@pytest.mark.parametrize("made", CHATS)
def test_the_group_stands_for_its_tasks(made: Chat) -> None:
    assert task(made.name) == made and made.name in GROUPS["chats"]
    assert len(GROUPS["chats"]) == len(CHATS)
