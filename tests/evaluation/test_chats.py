"""Conversations: what the last question asks for, found again in the earlier turns or worked out; lengths and scores."""

from __future__ import annotations

import re

import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation import GROUPS, task
from pypcd.evaluation.tasks.chats import CHATS, Chat
from pypcd.evaluation.tasks.sample import Sample

KNOWN, EARLIER = CHATS

few = settings(max_examples=25)
seeds, lengths = st.integers(0, 999), st.integers(350, 2500)


def sentences(sample: Sample) -> list[str]:
    """What the user has said before the last question."""
    return [one for text, _ in sample.prompt.shots for one in re.split(r"(?<=[.?:]) (?=[A-Z])", text.strip())]


def named(line: str, sample: Sample) -> list[str]:
    """Which answers a line has, right and wrong ones."""
    values = (*sample.answers, *sample.extra["others"])
    return re.findall(rf"\b(?:{'|'.join(values)}{'' if sample.extra['others'] else '|[0-9]+'})\b", line)


def earlier(sample: Sample) -> str:
    """What the user has said, and nobody else: all other mentions are of a neighbour."""
    of_neighbour = [line for line in sentences(sample) if re.search("[Mm]y neighbour", line)]
    assert len(of_neighbour) == 1 and sample.extra["other"] in named(of_neighbour[0], sample)
    whole = "".join(question + answer for question, answer in sample.prompt.shots)
    assert len(re.findall(rf"\b{sample.answers[0]}\b", whole)) == 1
    (line,) = [line for line in sentences(sample) if sample.answers[0] in named(line, sample)]
    assert re.search(r"\b(?:I|[Mm]y|me)\b", line) and line not in of_neighbour
    return named(line, sample)[-1]


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
    assert len({sample.extra["said"] for sample in EARLIER.samples(60, 400, Words(), 0)}) == 7


# -- general knowledge -----------------------------------------------------------------------------------------------


def test_general_knowledge_is_asked_once_before_it_is_asked_again() -> None:
    asked = [sample.prompt.answer_prefix for sample in KNOWN.samples(150, 400, Words(), 0)]
    n = len(set(asked))
    assert n >= 60 and len(set(asked[:n])) == n and len(set(asked[n:])) == 150 - n


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("How many days does a week have?", "7"),
        ("Which is the largest planet of the solar system?", "Jupiter"),
        ('Who painted the "Mona Lisa"?', "Vinci"),
        ("What does water become when it freezes?", "ice"),
    ],
)
def test_known_facts_have_their_answers(question: str, answer: str) -> None:
    asked = [sample for sample in KNOWN.samples(150, 400, Words(), 0) if sample.prompt.after.endswith(f"{question}\n")]
    assert asked and all(sample.answers == (answer,) and sample.depth is None for sample in asked)


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
