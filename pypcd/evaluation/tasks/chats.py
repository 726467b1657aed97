"""Chats: conversations of three to six turns about everyday things, of which the last question is graded.

It asks for general knowledge (`chat-known`), or for something that the user has said in an earlier turn (`chat-earlier`). Longer
earlier turns make a conversation as long as is wanted. Both tasks have the same conversations, and question i is the same
at every length.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pypcd.evaluation.tasks import words as w
from pypcd.evaluation.tasks.metrics import first_named, wrong_values
from pypcd.evaluation.tasks.people import JOBS
from pypcd.evaluation.tasks.prose import sentences
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, largest
from pypcd.prompt import Prompt

__all__ = ["CHATS", "Chat"]


@dataclasses.dataclass(frozen=True)
class _Topic:
    """What a turn is about.

    Attributes:
        asked, answered: how the user and the assistant begin.
        details, steps: forms of the sentences that they go on with, filled with _WORDS; without details the user goes on with
            unrelated text (`prose`).
    """

    asked: tuple[str, ...]
    answered: tuple[str, ...]
    details: tuple[str, ...]
    steps: tuple[str, ...]


_TOPICS = (
    _Topic(
        (
            "I want to cook something for tonight. How do I begin?",
            "Can you help me with dinner?",
            "What can I make from what is left in the kitchen?",
        ),
        ("Gladly. Here is what I would do.", "Of course. Take your time, and go step by step."),
        (
            "There is some {side} left, and a bit of {taste}.",
            "I do not want to use the {vegetable} without {taste}.",
            "Last time I burnt the {vegetable} and forgot the {taste}.",
            "I could buy {vegetable} or {vegetable} on the way home.",
            "My family likes {side} with {taste}.",
            "We had {side} with {vegetable} only last week.",
            "I have {vegetable} and {vegetable}, but hardly any {taste}.",
        ),
        (
            "Fry the {vegetable} slowly in a large pan, with a little {taste}.",
            "Cook the {side} while the {vegetable} and the {vegetable} are in the oven.",
            "Taste the {side}, and add {taste} if you like.",
            "If there is no {taste}, take {taste} instead.",
            "Mix the {vegetable} with the {vegetable} in a bowl.",
            "Serve the {side} with the {vegetable}, and keep the rest for the next day.",
            "Do not cook the {vegetable} as long as the {vegetable}.",
        ),
    ),
    _Topic(
        (
            "I have to tidy up the whole house. Where do I start?",
            "The house is a mess. What should I do first?",
            "Visitors are coming, and nothing is in its place. What now?",
        ),
        ("Go from room to room.", "Start with what is quick to do, and then go on like this."),
        (
            "Somebody left {stuff} and {stuff} in the {room}.",
            "In the {room} there are {stuff} on every chair.",
            "I never know where to put the {stuff} from the {room}.",
            "I have not been in the {room} for a week, and the {room} is no better.",
            "The {room} is full of {stuff}, and so is the {room}.",
        ),
        (
            "Open the window of the {room}, and then sort the {stuff} there.",
            "Carry the {stuff} from the {room} to the {room}.",
            "Throw away the {stuff} that nobody needs, above all those in the {room}.",
            "Sweep the {room} before you go on to the {room}.",
            "Put the {stuff} next to the {stuff}, so that you find them again.",
            "Leave the {room} for the end, when the {room} is done.",
            "Ask somebody to help with the {stuff} in the {room}.",
        ),
    ),
    _Topic(
        (
            "I would like to plant something behind the house. What do you think?",
            "What should I do in the garden this year?",
            "My vegetables do not grow well. What can I change?",
        ),
        ("A garden needs patience. This is what I suggest.", "Let me tell you what has worked for others."),
        (
            "Last year I had {vegetable} next to the {vegetable}.",
            "The snails went for my {vegetable}, but not for my {vegetable}.",
            "A friend gave me seeds of {vegetable} and of {vegetable}.",
            "After the {weather} I found the {vegetable} in a bad state.",
            "I am not sure whether {vegetable} can stand {weather}.",
        ),
        (
            "Do not put {vegetable} next to {vegetable}.",
            "After the {vegetable} you can grow {vegetable} in the same place.",
            "Cover the {vegetable} if there is {weather}.",
            "Give the {vegetable} more room than the {vegetable}.",
            "Wait until the {weather} is over before you plant {vegetable}.",
            "Take the weeds away around the {vegetable} and the {vegetable}.",
        ),
    ),
    _Topic(
        (
            "My old bicycle makes strange noises. What can it be?",
            "I want to repair my bicycle myself. Where do I begin?",
            "How do I get a bicycle ready that nobody has used for years?",
        ),
        ("That can be done at home, with a little patience.", "Most of it needs no workshop."),
        (
            "The {part} was replaced last year, but not the {part}.",
            "I hear a noise from the {part} when I touch the {part}.",
            "After the {weather} the {part} got rusty.",
            "The {part} looks good to me, and the {part} does not.",
            "I am not sure what the {part} has to do with the {part}.",
        ),
        (
            "Clean the {part} first, and then look at the {part}.",
            "Put a drop of oil between the {part} and the {part}.",
            "Do not touch the {part} before the {part} is in order.",
            "Look at the {part} again after a short ride in {weather}.",
            "If the {part} is worn, replace it together with the {part}.",
            "Ask in a shop about the {part} and the {part}.",
        ),
    ),
    _Topic(
        (
            "I went for a walk today and want to tell you about it.",
            "I am writing down what I saw in town. May I show it to you?",
            "Here is a page of my diary. What do you think of it?",
        ),
        ("Thank you, I like to read that.", "That sounds like a full day."),
        (),
        (
            "I would keep the part with the {weather}, and shorten the one with the {weather}.",
            "The {weather} gives the page a calm mood, after so much {weather}.",
            "You might say more about the {weather} than about the {weather}.",
            "Perhaps begin with the {weather}, and end with the {weather}.",
            "A few words on the smell of {weather} would be welcome, or on the sound of {weather}.",
            "It reads as if {weather} and {weather} came on the same day.",
        ),
    ),
)

_WORDS = {
    "part": ("brake", "chain", "gear", "handlebar", "lever", "pedal", "rim", "saddle", "spoke", "stand", "tyre", "valve"),
    "room": w.ROOMS,
    "side": ("bread", "couscous", "pasta", "polenta", "quinoa", "rice"),
    "stuff": ("bags", "books", "bottles", "boxes", "cables", "cups", "cushions", "newspapers", "plates", "shoes", "toys", "towels"),
    "taste": ("butter", "cheese", "ginger", "honey", "lemon juice", "oil", "pepper", "salt", "sugar", "vinegar"),
    "vegetable": w.VEGETABLES,
    "weather": w.WEATHER,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Said:
    """Something that a user says, and is asked for later.

    Attributes:
        said: how the user says it; others: how the user says it of somebody else.
        begun: the beginning of an answer.
    """

    name: str
    values: tuple[str, ...]
    said: tuple[str, ...]
    others: tuple[str, ...]
    questions: tuple[str, ...]
    begun: str


_SAID = (
    _Said(
        "name",
        w.NAMES,
        (
            "My name is {value}.",
            "I am called {value}, by the way.",
            "You can call me {value}, that is my name.",
            "Before I go on: my name is {value}.",
        ),
        ("My neighbour is called {value}.", "The name of my neighbour is {value}."),
        ("What is my name?", "Do you remember what I am called?"),
        "Your name is",
    ),
    _Said(
        "bought",
        w.BELONGINGS,
        (
            "This morning I bought a {value}.",
            "I have just bought a {value}.",
            "In town I bought myself a {value}.",
            "Yesterday I went out and bought a {value}.",
        ),
        (
            "My neighbour bought a {value} some time ago.",
            "My neighbour wanted to sell me a {value}, but I said no.",
        ),
        ("What have I bought?", "I told you that I bought something. What was it?"),
        "You have bought a",
    ),
    _Said(
        "city",
        w.CITIES,
        (
            "Next week I am going to {value}.",
            "I have a train ticket to {value} for next week.",
            "Soon I shall travel to {value}.",
            "My next journey is to {value}.",
        ),
        ("My neighbour has just come back from {value}.", "My neighbour grew up in {value}."),
        ("Which city am I going to travel to?", "I told you about a journey. Which city am I going to?"),
        "The city that you are going to is",
    ),
    _Said(
        "guests",
        tuple(map(str, range(11, 60))),
        (
            "I have invited {value} guests for my birthday.",
            "For my birthday there will be {value} guests.",
            "On my birthday I expect {value} guests.",
            "I am having {value} guests for my birthday.",
        ),
        ("My neighbour had {value} guests last year.", "The party of my neighbour, long ago, had {value} guests."),
        ("How many guests will there be on my birthday?", "How many guests do I expect on my birthday?"),
        "The number of guests on your birthday is",
    ),
    _Said(
        "day",
        w.DAYS,
        (
            "I have to see the dentist on {value}.",
            "My appointment with the dentist is on {value}.",
            "On {value} I shall be at the dentist.",
            "The dentist can see me on {value}.",
        ),
        ("My neighbour goes swimming every {value}.", "My neighbour always works on {value}."),
        ("On which day do I see the dentist?", "When is my appointment with the dentist?"),
        "Your appointment with the dentist is on",
    ),
    _Said(
        "instrument",
        w.INSTRUMENTS,
        (
            "I am learning to play the {value}.",
            "Since last month I have had lessons on the {value}.",
            "I am a beginner on the {value} and practise every evening.",
            "I have begun to learn the {value}.",
        ),
        ("My neighbour plays the {value} very loudly.", "My neighbour used to play the {value}."),
        ("Which instrument am I learning?", "What instrument did I say that I am learning?"),
        "The instrument that you are learning is the",
    ),
    _Said(
        "job",
        JOBS,
        (
            "I work as a {value}.",
            "By profession I am a {value}.",
            "I am a {value} and come home late.",
            "I earn my living as a {value}.",
        ),
        ("My neighbour works as a {value}.", "My neighbour dreams of being a {value} one day."),
        ("What do I work as?", "What is my profession?"),
        "You work as a",
    ),
)

_GROUPS = {"capital": w.CITIES, "colour": w.COLOURS, "day": w.DAYS, "month": w.MONTHS}
"""More wrong answers of some groups of general knowledge."""

_TRIES = 20  # to fill a form as it was not filled before

_OPENERS = (
    "One more thing: {}",
    "By the way: {}",
    "Something else: {}",
    "Now another question: {}",
    "Before I forget: {}",
    "{}",
)


@dataclasses.dataclass(frozen=True)
class Chat:
    """Conversations with a last question that has one certain answer.

    Attributes:
        what: "known": general knowledge; "earlier": something that the user has said.
    """

    what: Literal["known", "earlier"]

    metric = "accuracy"
    one_text = True
    max_tokens = 16
    stop = ""
    may_exceed = False
    n_questions = None

    @property
    def name(self) -> str:
        return f"chat-{self.what}"

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        made: list[Sample] = []
        size = 0
        for i in range(n):
            size = largest(
                lambda size, i=i: self._sample(i, size, seed),  # type: ignore[misc]
                0,
                n_tokens,
                self.max_tokens,
                tokenizer,
                near=size,
            )
            made.append(self._sample(i, size, seed))
        return made

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer's first line names the right answer before any wrong one."""
        return first_named(prediction, sample.answers[0], sample.extra["others"], sample.extra["spelt"])

    def _sample(self, i: int, size: int, seed: int) -> Sample:
        """A conversation with this number of sentences in the earlier turns, besides the beginnings of the turns."""
        rng = random.Random(f"chat {seed} {i}")
        said = rng.choice(_SAID)
        value, other = rng.sample(said.values, 2)
        shots, at = _conversation(rng, size, said, value, other)
        if self.what == "known":
            question, begun, answer, spelt, group = _fact(i, seed)
            wrong = {fact[2] for fact in w.KNOWN if fact[4] == group}.union(_GROUPS.get(group, ()))
            depth = None
        else:
            question, begun, answer, spelt = rng.choice(said.questions), said.begun, value, ""
            wrong = set(said.values)
            depth = at / (len(shots) - 1)
        prompt = Prompt(shots=shots, after=rng.choice(_OPENERS).format(question) + "\n", answer_prefix=begun)
        others = wrong_values(wrong, answer, f"{question} {begun}")
        extra = {"said": said.name, "other": other, "spelt": spelt, "others": others}
        return Sample(i, prompt, (answer,), depth, extra, gold=f" {answer}", end=".")


def _fact(i: int, seed: int) -> tuple[str, str, str, str, str]:
    """The fact that question i asks for: each is asked for once before one is asked for again."""
    turn, place = divmod(i, len(w.KNOWN))
    return random.Random(f"chat-known {seed} {turn}").sample(w.KNOWN, len(w.KNOWN))[place]


def _conversation(
    rng: random.Random, size: int, said: _Said, value: str, other: str
) -> tuple[tuple[tuple[str, str], ...], int]:
    """The turns before the last question, and in which of them the user says the value. In another one the user says the other
    value, of somebody else."""
    n_turns = rng.randint(2, 5)
    topics = rng.sample(_TOPICS, n_turns)
    at, elsewhere = rng.sample(range(n_turns), 2)
    texts = [[rng.choice(begun)] for topic in topics for begun in (topic.asked, topic.answered)]
    told = [(2 * at, said.said, value, rng.random()), (2 * elsewhere, said.others, other, rng.random())]
    told_as = [rng.choice(forms).format(value=text) for _, forms, text, _ in told]
    streams = [
        _filled(forms, random.Random(rng.random())) if forms else sentences(random.Random(rng.random()))
        for topic in topics
        for forms in (topic.details, topic.steps)
    ]
    for j in range(size):
        texts[j % len(texts)].append(next(streams[j % len(texts)]))
    for (turn, _, _, where), sentence in zip(told, told_as):
        texts[turn].insert(1 + int(where * len(texts[turn])), sentence)
    turns = [" ".join(text) for text in texts]
    return tuple((f"{question}\n", answer) for question, answer in zip(turns[::2], turns[1::2])), at


def _filled(forms: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Sentences of these forms without end; one comes again only if others are hard to find."""
    seen: set[str] = set()
    while True:
        for _ in range(_TRIES):
            sentence = rng.choice(_all_of(rng.choice(forms)))
            if sentence not in seen:
                break
        seen.add(sentence)
        yield sentence


@functools.cache
def _all_of(form: str) -> tuple[str, ...]:
    """All sentences of a form; no word stands in one twice."""
    open_form, kinds = re.sub(r"\{\w+\}", "{}", form), re.findall(r"\{(\w+)\}", form)
    filled = itertools.product(*(_WORDS[kind] for kind in kinds))
    return tuple(open_form.format(*words) for words in filled if len(set(words)) == len(words))


CHATS = (Chat("known"), Chat("earlier"))
