"""Conversations: what the user has said in an earlier turn, turns of any length, and scores. What is asked is in test_published.py."""

from __future__ import annotations

import re

from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation.tasks.chats import CHATS, Chat

_, EARLIER = CHATS

few = settings(max_examples=25)
seeds, lengths = st.integers(0, 999), st.integers(350, 2500)


@few
@given(lengths, seeds)
def test_the_user_has_said_it_once_and_nobody_else(n_tokens: int, seed: int) -> None:
    for sample in EARLIER.samples(4, n_tokens, Words(), seed):
        (value,) = sample.answers
        whole = "".join(question + answer for question, answer in sample.prompt.shots)
        assert len(re.findall(rf"\b{value}\b", whole)) == 1 and sample.depth is not None
        question, _ = sample.prompt.shots[round(sample.depth * (len(sample.prompt.shots) - 1))]
        (said,) = [one for one in re.split(r"(?<=[.?:]) (?=[A-Z])", question) if re.search(rf"\b{value}\b", one)]
        assert re.search(r"\b(?:I|[Mm]y|me)\b", said) and "neighbour" not in said
        (other,) = [one for one in re.split(r"(?<=[.?:]) (?=[A-Z])", whole) if re.search("[Mm]y neighbour", one)]
        assert sample.extra["other"] in other


# -- conversations ---------------------------------------------------------------------------------------------------


def test_turns_grow_and_say_nothing_twice() -> None:
    short, long = (EARLIER.samples(3, n_tokens, Words(), 0) for n_tokens in (400, 4000))
    for few_words, many in zip(short, long):
        assert few_words.prompt.after == many.prompt.after and few_words.answers == many.answers
        for (question, answer), (longer, other) in zip(few_words.prompt.shots, many.prompt.shots):
            assert len(longer) > 3 * len(question) and len(other) > 2 * len(answer)
        answers = [line for _, text in many.prompt.shots for line in re.split(r"(?<=\.) ", text)]
        assert len(set(answers)) > 0.97 * len(answers)


# -- scores ----------------------------------------------------------------------------------------------------------


@few
@given(st.sampled_from(CHATS), seeds)
def test_the_answer_may_begin_as_the_prompt_does_or_be_spelt_and_no_other_may_stand_before_it(
    made: Chat, seed: int
) -> None:
    for sample in made.samples(6, 400, Words(), seed):
        (answer,), begun, spelt = sample.answers, sample.prompt.answer_prefix, sample.extra["spelt"]
        for text in (f"{begun}{sample.gold}.", f"{answer}\nUser: thanks", f"{spelt or answer}."):
            assert made.score(text, sample) == 1.0, (text, answer)
        wrong = [f"{other}, {answer}" for other in sample.extra["others"]]
        if made is EARLIER:
            wrong += [sample.extra["other"], f"{begun} {sample.extra['other']}"]
        for text in wrong:
            assert made.score(text, sample) == 0.0, (text, answer)
