"""Chats: conversations of three to six turns about everyday things, of which the last question is graded.

It asks for general knowledge (`chat-known`), or for something that the user has said in an earlier turn (`chat-earlier`). Longer
earlier turns make a conversation as long as is wanted. Both tasks have the same conversations, and question i is the same
at every length.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from pypcd.evaluation.tasks import words as w
from pypcd.evaluation.tasks.metrics import first_named
from pypcd.evaluation.tasks.people import JOBS
from pypcd.evaluation.tasks.prose import sentences
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, fill
from pypcd.prompt import Prompt

__all__ = ["CHATS", "Chat"]


@dataclasses.dataclass(frozen=True)
class _Topic:
    """What a turn is about.

    Attributes:
        asked, answered: how the user and the assistant begin.
        details, steps: what they go on with; see _filled().
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
            "There is still some {food} in the cupboard.",
            "I do not like {food} very much.",
            "The {food} has to be used today.",
            "Last time I burnt the {food}.",
            "I have no {food}, and the shop is closed.",
        ),
        (
            "Wash the {food} and dry it with a clean cloth.",
            "Fry the {food} slowly in a large pan.",
            "Add a little {food} before you serve it.",
            "If there is no {food}, take some {food} instead.",
            "Put the {food} aside until the {food} is done.",
            "Mix the {food} with the {food} in a bowl.",
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
            "There is a lot of dust in the {room}.",
            "Somebody left old newspapers in the {room}.",
            "The {room} is the worst of all.",
            "I have not been in the {room} for a week.",
            "The window of the {room} does not close.",
        ),
        (
            "Open the window of the {room} and let some air in.",
            "Sweep the floor of the {room} with care.",
            "Carry what is not needed from the {room} to the {room}.",
            "Leave the {room} for the end, when the {room} is done.",
            "Wipe the shelves in the {room} with a wet cloth.",
            "Have a rest before you go from the {room} to the {room}.",
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
            "The soil where the {plant} stood is dry.",
            "Snails ate the {plant} last summer.",
            "I tried {plant} once, without success.",
            "There is a sunny place for {plant} at the wall.",
            "Friends gave me some seeds of {plant}.",
        ),
        (
            "Give the {plant} water in the evening, not at noon.",
            "Do not put {plant} next to {plant}.",
            "Let the {plant} grow until the leaves are large.",
            "Take the weeds away around the {plant}.",
            "Cover the {plant} when the nights are cold.",
            "After the {plant} you can grow {plant} in the same place.",
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
            "What you write about the town is easy to picture.",
            "I would keep the part with the {weather}.",
            "The {weather} gives the page a calm mood.",
            "You might say more about the {weather} and how it felt.",
            "Perhaps begin with the {weather}, and end with the way home.",
            "A few words on the smell of the {weather} would be welcome.",
        ),
    ),
)

_FILLERS = {
    "food": tuple(food for food in w.FOODS if food not in ("chicken", "orange")),
    "room": w.ROOMS,
    "plant": w.VEGETABLES,
    "weather": w.WEATHER,
}


@dataclasses.dataclass(frozen=True)
class _Said:
    """Something that a user says, and is asked for later.

    Attributes:
        said: how the user says it; others: how the user says it of somebody else.
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
        ("My name is {}.", "I am called {}, by the way.", "You can call me {}.", "Before I go on: my name is {}."),
        ("My neighbour is called {}.", "The name of my neighbour is {}."),
        ("What is my name?", "Do you remember what I am called?"),
        "Your name is",
    ),
    _Said(
        "bought",
        w.BELONGINGS,
        (
            "This morning I bought a new {}.",
            "I have just bought a {}.",
            "In town I bought myself a {}.",
            "Yesterday I went out and bought a {}.",
        ),
        ("My neighbour bought a {} some time ago.", "My neighbour wanted to sell me a {}, but I said no."),
        ("What have I bought?", "I told you that I bought something. What was it?"),
        "You have bought a",
    ),
    _Said(
        "city",
        w.CITIES,
        (
            "Next week I am going to {}.",
            "I have a train ticket to {} for next week.",
            "Soon I shall travel to {}.",
            "My next journey is to {}.",
        ),
        ("My neighbour has just come back from {}.", "My neighbour grew up in {}."),
        ("Which city am I going to travel to?", "I told you about a journey. Which city am I going to?"),
        "The city that you are going to is",
    ),
    _Said(
        "guests",
        tuple(map(str, range(11, 60))),
        (
            "I have invited {} guests for my birthday.",
            "For my birthday there will be {} guests.",
            "On my birthday I expect {} guests.",
            "I am having {} guests for my birthday.",
        ),
        ("My neighbour had {} guests last year.", "The party of my neighbour, long ago, had {} guests."),
        ("How many guests will there be on my birthday?", "How many guests do I expect on my birthday?"),
        "The number of guests on your birthday is",
    ),
    _Said(
        "day",
        w.DAYS,
        (
            "I have to see the dentist on {}.",
            "My appointment with the dentist is on {}.",
            "On {} I shall be at the dentist.",
            "The dentist can see me on {}.",
        ),
        ("My neighbour goes swimming every {}.", "My neighbour always works on {}."),
        ("On which day do I see the dentist?", "When is my appointment with the dentist?"),
        "Your appointment with the dentist is on",
    ),
    _Said(
        "instrument",
        w.INSTRUMENTS,
        (
            "I am learning to play the {}.",
            "Since last month I have had lessons on the {}.",
            "These days I practise the {} every evening.",
            "I have begun to learn the {}.",
        ),
        ("My neighbour plays the {} very loudly.", "My neighbour used to play the {}."),
        ("Which instrument am I learning?", "What instrument did I say that I am learning?"),
        "The instrument that you are learning is the",
    ),
    _Said(
        "job",
        JOBS,
        (
            "I work as the only {} of this place.",
            "In my life I have always been the {} of the village.",
            "People know me as the {} of our village.",
            "My work is that of the village {}.",
        ),
        ("My neighbour works as a kind of {}.", "My neighbour dreams of being a {} one day."),
        ("What do I work as?", "What is my profession?"),
        "You work as the village",
    ),
)

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
        """The size is the number of sentences in the earlier turns, besides the beginnings of the turns."""
        check_cell(n, n_tokens)
        return fill(lambda size: self._questions(n, size, seed), 2, n_tokens, self.max_tokens, tokenizer)

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer's first line names the right answer before any wrong one."""
        return first_named(prediction, sample.answers[0], sample.extra["others"], sample.extra["spelt"])

    def _questions(self, n: int, size: int, seed: int) -> Iterator[Sample]:
        facts: list[Sequence[str]] = []
        for i in range(n):
            rng = random.Random(f"chat {seed} {i}")
            said, (value, other) = _said(rng)
            shots, at = _conversation(rng, size, said, value, other)
            known = {"said": said.name, "other": other, "spelt": ""}
            if self.what == "known":
                if not facts:  # each fact is asked once before one is asked again
                    facts = random.Random(f"chat-known {seed} {i}").sample(w.KNOWN, len(w.KNOWN))
                question, begun, answer, known["spelt"], group = facts.pop()
                wrong = [fact[2] for fact in w.KNOWN if fact[4] == group]
                wrong += {"day": w.DAYS, "month": w.MONTHS, "colour": w.COLOURS, "capital": w.CITIES}.get(group, ())
            else:
                question, begun, answer, wrong = rng.choice(said.questions), said.begun, value, list(said.values)
            others = {text for text in wrong if text != answer and text.lower() not in f"{question} {begun}".lower()}
            if answer.isdecimal():
                others = set()  # every other number is a wrong answer
            prompt = Prompt(
                shots=shots,
                after=rng.choice(_OPENERS).format(question) + "\n",
                answer_prefix=begun,
            )
            depth = at / max(len(shots) - 1, 1) if self.what == "earlier" else None
            yield Sample(i, prompt, (answer,), depth, {**known, "others": tuple(sorted(others))}, f" {answer}", ".")


def _said(rng: random.Random) -> tuple[_Said, list[str]]:
    """What the user says, the value, and the same kind of thing about somebody else."""
    said = rng.choice(_SAID)
    return said, rng.sample(said.values, 2)


def _conversation(
    rng: random.Random, size: int, said: _Said, value: str, other: str
) -> tuple[tuple[tuple[str, str], ...], int]:
    """The turns before the last question, and in which of them the user says the value."""
    n_turns = rng.randint(2, 5)
    topics = [
        *rng.sample(_TOPICS, min(n_turns, len(_TOPICS))),
        *rng.sample(_TOPICS[:3], max(0, n_turns - len(_TOPICS))),
    ]
    at, elsewhere = rng.sample(range(n_turns), 2)
    texts = [[rng.choice(begun)] for topic in topics for begun in (topic.asked, topic.answered)]
    texts[2 * at].insert(rng.randint(0, 1), rng.choice(said.said).format(value))
    texts[2 * elsewhere].insert(rng.randint(0, 1), rng.choice(said.others).format(other))
    streams = [
        _filled(forms, random.Random(f"{rng.random()} {i}")) if forms else sentences(random.Random(rng.random()))
        for topic in topics
        for i, forms in enumerate((topic.details, topic.steps))
    ]
    for j in range(size):
        texts[j % len(texts)].append(next(streams[j % len(texts)]))
    turns = [" ".join(text) for text in texts]
    return tuple((f"{question}\n", answer) for question, answer in zip(turns[::2], turns[1::2])), at


def _filled(forms: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Sentences of these forms without end, each with different words."""
    while True:
        form = rng.choice(forms)
        kind = form[form.index("{") + 1 : form.index("}")]
        words = rng.sample(_FILLERS[kind], form.count("{"))
        yield form.replace(f"{{{kind}}}", "{}").format(*words)


CHATS = (Chat("known"), Chat("earlier"))
