"""Reading: one question on a long text, whose answer is not one of many values of the same form.

The texts are written from templates: what is said of people in running prose, lists with names as keys, a story of one day.
Unrelated text (`prose`) makes them as long as is wanted. Question i is the same at every length, except where the question
itself depends on the text (`reading-quote`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pypcd.evaluation.tasks import words as w
from pypcd.evaluation.tasks.metrics import first_named, same_sentence, wrong_values
from pypcd.evaluation.tasks.people import ATTRIBUTES, Attribute
from pypcd.evaluation.tasks.prose import paragraphs, sentence_about, sentences
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, fill
from pypcd.prompt import Prompt

__all__ = ["READING", "Reading"]

MOST_PEOPLE = 60  # in one text: first names are all different
MOST_LINES = 100  # of a list
QUOTED = 'The sentence is: "'


@dataclasses.dataclass(frozen=True)
class Text:
    """A text with a question on it.

    Attributes:
        before: what the text is.
        parts: its paragraphs, or the lines of a list.
        at: the part that has the answer; None if several are needed.
        begun: the beginning of the answer.
        gold: the answer as it follows that beginning.
        others: all answers of the same kind; the first one that is named counts. Numbers need none.
        known: further facts for Sample.extra.
    """

    before: str
    parts: Sequence[str]
    at: int | None
    question: str
    begun: str
    answer: str
    gold: str
    others: Sequence[str] = ()
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Reading:
    """A kind of texts with questions.

    Attributes:
        draw: makes a text of a size: its number of sentences, or of lines and sentences. Equal random numbers give the same
            question at every size.
        smallest: the smallest size.
        joiner: the text between two parts.
    """

    kind: str
    draw: Callable[[random.Random, int], Text]
    smallest: int
    joiner: str = "\n\n"
    max_tokens: int = 16

    metric = "accuracy"
    one_text = True
    stop = ""
    may_exceed = False
    n_questions = None

    @property
    def name(self) -> str:
        return f"reading-{self.kind}"

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        return fill(lambda size: self._questions(n, size, seed), self.smallest, n_tokens, self.max_tokens, tokenizer)

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer's first line names the right answer before any wrong one; a quoted sentence must be the same."""
        if sample.prompt.answer_prefix.endswith(QUOTED):
            return same_sentence(prediction, sample.answers[0])
        return first_named(prediction, sample.answers[0], sample.extra["others"])

    def _questions(self, n: int, size: int, seed: int) -> Iterator[Sample]:
        for i in range(n):
            text = self.draw(random.Random(f"{self.name} {seed} {i}"), size)
            prompt = Prompt(
                before=f"{text.before}\n\n",
                segments=tuple(text.parts),
                joiner=self.joiner,
                after=f"\n\nQuestion: {text.question}\n",
                answer_prefix=f"Answer: {text.begun}",
            )
            yield Sample(
                i,
                prompt,
                (text.answer,),
                None if text.at is None else text.at / max(len(text.parts) - 1, 1),
                {**text.known, "others": wrong_values(text.others, text.answer, f"{text.question} {text.begun}")},
                gold=text.gold,
                end='"' if text.begun == QUOTED else ".",
            )


# -- people in prose -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Person:
    first: str
    last: str
    values: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"


def _people(rng: random.Random) -> list[_Person]:
    """The asked person, whose values nobody else has, and the others."""
    firsts = rng.sample(w.NAMES, MOST_PEOPLE)
    people: list[_Person] = []
    for first in firsts:
        taken = people[0].values if people else {}
        values = {
            attribute.name: rng.choice([value for value in attribute.values if value != taken.get(attribute.name)])
            for attribute in ATTRIBUTES
        }
        people.append(_Person(first, rng.choice(_LAST_NAMES), values))
    return people


_LAST_NAMES = tuple(name for name in w.LAST_NAMES if name.lower() not in w.PROFESSIONS)


def _said(person: _Person, attributes: Sequence[Attribute], rng: random.Random) -> list[str]:
    """A paragraph about a person: the whole name in its first sentence, the first name in the others."""
    said: list[str] = []
    for attribute in attributes:
        who = person.first if said else person.name
        said.append(attribute.said(who, person.values[attribute.name], rng))
    return said


def _around(others: Iterator[list[str]], unrelated: Iterator[str], n: int, rng: random.Random) -> list[list[str]]:
    """n sentences in paragraphs in any order: most of them the others while there are some, the rest unrelated text."""
    blocks: list[list[str]] = []
    while n > 0:
        other = next(others, None) if rng.random() < 0.7 else None
        blocks.append((other or list(itertools.islice(unrelated, rng.randint(2, 4))))[:n])
        n -= len(blocks[-1])
    rng.shuffle(blocks)
    return blocks


def _among(
    asked: list[str], others: Iterator[list[str]], size: int, rng: random.Random, later: str = ""
) -> tuple[list[str], int]:
    """Paragraphs with `size` sentences in all: the asked one, others, and unrelated text between them.

    Args:
        later: a sentence that stands somewhere after the asked paragraph, in unrelated text.

    Returns:
        The paragraphs, and which is the asked one.
    """
    unrelated = sentences(random.Random(rng.random()))
    n = len(asked)
    second: list[str] = []
    if later:
        second = [*itertools.islice(unrelated, rng.randint(0, min(2, max(0, size - n - 1)))), later]
        n += len(second)
    blocks = _around(others, unrelated, size - n, rng)
    at = rng.randint(0, len(blocks))
    blocks.insert(at, asked)
    if second:
        blocks.insert(rng.randint(at + 1, len(blocks)), second)
    return [" ".join(block) for block in blocks], at


def _prose(rng: random.Random, size: int, *, conflict: bool = False) -> Text:
    person, *others = _people(rng)
    attribute, *more = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
    chosen = [attribute, *more[: rng.randint(2, 3)]]
    asked = _said(person, rng.sample(chosen, len(chosen)), rng)
    value = person.values[attribute.name]
    question, begun = (text.format(name=person.name) for text in (rng.choice(attribute.questions), attribute.begun))
    later, known = "", {"name": person.name, "attribute": attribute.name}
    if conflict:
        wrong = rng.choice([other for other in attribute.values if other != value])
        kind, form = rng.choice(attribute.conflicts)
        namesake = rng.choice([last for last in _LAST_NAMES if last != person.last])
        later = form.format(name=person.name, namesake=f"{person.first} {namesake}", value=wrong)
        known.update(conflict=wrong, why=kind)

    def about_others() -> Iterator[list[str]]:
        for other in others:
            yield _said(other, rng.sample(ATTRIBUTES, rng.randint(3, 4)), rng)

    parts, at = _among(asked, about_others(), size, rng, later)
    return Text(
        "Read the text about the people of a district, and answer the question below it.",
        parts,
        at,
        question,
        begun,
        value,
        f" {value}",
        attribute.values,
        known,
    )


def _conflict(rng: random.Random, size: int) -> Text:
    return _prose(rng, size, conflict=True)


# -- two facts -------------------------------------------------------------------------------------------------------

_WORKS = (
    "{name} works for {firm}.",
    "{name} has a post at {firm}.",
    "The employer of {name} is {firm}.",
    "For some years {name} has been on the staff of {firm}.",
    "{name} found work at {firm} and stayed there.",
)
_SEAT = (
    "{firm} has its offices in {city}.",
    "The offices of {firm} are in {city}.",
    "All the offices of {firm} stand on one street in {city}.",
    "Everybody in {city} knows the offices of {firm}, which are in the middle of the city.",
    "Whoever visits the offices of {firm} takes the train to {city}.",
)
_SEAT_ASKED = (
    "In which city are the offices of the firm that {name} works for?",
    "{name} works for a firm. In which city are its offices?",
)


def _hops(rng: random.Random, size: int) -> Text:
    people = _people(rng)[: len(w.FIRMS)]
    firms, cities = rng.sample(w.FIRMS, len(people)), rng.sample(w.CITIES, len(people))
    attributes = [attribute for attribute in ATTRIBUTES if attribute.name not in ("home", "job")]
    question = rng.choice(_SEAT_ASKED).format(name=people[0].name)
    firm_first = rng.random() < 0.5

    def works(i: int) -> list[str]:
        more = [
            attribute.said(people[i].first, people[i].values[attribute.name], rng)
            for attribute in rng.sample(attributes, 2)
        ]
        return [rng.choice(_WORKS).format(name=people[i].name, firm=firms[i]), *more]

    def has_seat(i: int) -> list[str]:
        return [rng.choice(_SEAT).format(firm=firms[i], city=cities[i])]

    both = works(0), has_seat(0)
    unrelated = sentences(random.Random(rng.random()))
    others = [block for i in range(1, len(people)) for block in (works(i), has_seat(i))]
    blocks = _around(iter(others), unrelated, size - sum(map(len, both)), rng)
    third = len(blocks) // 3
    first, last = both[::-1] if firm_first else both
    early = rng.randint(0, third)
    late = rng.randint(len(blocks) - third, len(blocks)) + 1
    blocks.insert(early, first)
    blocks.insert(late, last)
    at = (early, late)[::-1] if firm_first else (early, late)
    return Text(
        "Read the text about people and the firms that they work for, and answer the question below it.",
        [" ".join(block) for block in blocks],
        None,
        question,
        f"The firm that {people[0].name} works for has its offices in",
        cities[0],
        f" {cities[0]}",
        w.CITIES,
        {"name": people[0].name, "firm": firms[0], "at": at},
    )


# -- lists -----------------------------------------------------------------------------------------------------------

_LINES = ("{key}: {value}", "- {key}: {value}", "| {key} | {value} |", "{key} ({value})", "* {key} - {value}")


@dataclasses.dataclass(frozen=True)
class _List:
    """A list that a person would look something up in.

    Attributes:
        title: what the list is.
        keys: draws a key.
        value: draws a value as it stands in the list.
        others: all values, if they are no numbers.
    """

    title: str
    key: Callable[[random.Random], str]
    value: Callable[[random.Random], str]
    questions: tuple[str, ...]
    begun: str
    others: tuple[str, ...] = ()


def _street(rng: random.Random) -> str:
    return f"{rng.choice(w.STREETS)} {rng.choice(('Street', 'Lane', 'Road', 'Avenue', 'Square', 'Row'))}"


_COOKED = tuple(
    food
    for food in w.FOODS
    if food not in ("butter", "honey", "milk", "oil", "rice", "salad", "salt", "soup", "sugar", "tea", "yogurt")
)


def _dish(rng: random.Random) -> str:
    food, other = rng.sample(_COOKED, 2)
    return rng.choice((f"{food} soup", f"{food} salad", f"{food} pie", f"rice with {food}", f"{food} and {other} stew"))


_SPECIES = (
    "common", "dwarf", "great", "lesser", "mountain", "northern", "red-eyed", "river", "southern", "spotted", "striped",
)  # fmt: skip

_LISTS = (
    _List(
        "The buses of the city, by street:",
        _street,
        lambda rng: f"bus {rng.randint(2, 98)}",
        ("Which bus stops in {key}?", "Which bus do I take to {key}?"),
        "The bus that stops in {key} is bus",
    ),
    _List(
        "The menu, with prices in euros:",
        _dish,
        lambda rng: f"{rng.randint(4, 29)}.{rng.choice((20, 40, 50, 60, 80, 90))}",
        ("How much is the {key}, in euros?", "What does the {key} cost, in euros?"),
        "The price of the {key} in euros is",
    ),
    _List(
        "The animals that were counted in the park:",
        lambda rng: f"{rng.choice(_SPECIES)} {rng.choice(w.WILD_ANIMALS)}",
        lambda rng: str(rng.randint(3, 400)),
        ("How many animals of the species {key} were counted?", "What is the number of animals of the species {key}?"),
        "The number of animals of the species {key} is",
    ),
    _List(
        "Where the things are in our house:",
        lambda rng: f"the {rng.choice(w.ADJECTIVES)} {rng.choice(w.BELONGINGS)}",
        lambda rng: rng.choice(w.ROOMS),
        ("In which room is {key}?", "Where in the house do I find {key}?"),
        "In our house {key} is in the",
        w.ROOMS,
    ),
    _List(
        "The day on which waste is collected, by street:",
        _street,
        lambda rng: rng.choice(w.DAYS),
        ("On which day is waste collected in {key}?", "When is the waste of {key} collected?"),
        "In {key} waste is collected on",
        w.DAYS,
    ),
)


def _keys(rng: random.Random, size: int) -> Text:
    made, line = rng.choice(_LISTS), rng.choice(_LINES)
    keys = [made.key(rng)]
    value = made.value(rng)
    question, begun = (text.format(key=keys[0]) for text in (rng.choice(made.questions), made.begun))
    n_lines = min(size, MOST_LINES)
    values = [value]
    while len(keys) < n_lines:
        key, other = made.key(rng), made.value(rng)
        if key not in keys and other != value:
            keys.append(key)
            values.append(other)
    lines = [line.format(key=key, value=value) for key, value in zip(keys, values)]
    asked, *others = lines
    rng.shuffle(others)
    at = rng.randint(0, len(others))
    others.insert(at, asked)
    unrelated = paragraphs(list(itertools.islice(sentences(random.Random(rng.random())), size - n_lines)))
    around = unrelated.split("\n\n") if unrelated else []
    n_before = rng.randint(0, len(around))
    before = [f"{part}\n" for part in around[:n_before]]
    after = [f"\n{part}" for part in around[n_before:]]
    answer = value.rpartition(" ")[2]
    return Text(
        "Read the text, and answer the question below it.",
        [*before, made.title, *others, *after],
        len(before) + 1 + at,
        question,
        begun,
        answer,
        f" {answer}",
        made.others,
        {"key": keys[0]},
    )


# -- quotations ------------------------------------------------------------------------------------------------------

_BEFORE_OR_AFTER = {
    1: ('Which sentence comes directly after the sentence "{}"?', 'Quote the sentence that follows the sentence "{}"'),
    -1: (
        'Which sentence stands directly before the sentence "{}"?',
        'Quote the sentence right before the sentence "{}"',
    ),
}
_ABOUT = ("Quote the sentence about {}.", "Which sentence of the text mentions {}?")


def _quote(rng: random.Random, size: int) -> Text:
    told = random.Random(rng.random())
    names = rng.sample(w.NAMES, MOST_PEOPLE)
    way = rng.choice((0, 1, -1))  # 0: by a name; else the sentence after or before another one
    drawn: dict[str, None] = {}  # sentences, all different
    while len(drawn) < size:
        i, part = divmod(len(drawn), 3)
        drawn[sentence_about(names[i] if part == 1 and i < len(names) else told.choice(_NOBODY), told)] = None
    lines = list(drawn)
    if way:
        at = rng.choice([i for i in range(size) if i % 5])  # with the sentence before it, in one paragraph
        here, asked = (at, at - 1) if way == 1 else (at - 1, at)
        question = rng.choice(_BEFORE_OR_AFTER[way]).format(lines[asked])
    else:
        about = rng.randrange(min(len(names), (size + 1) // 3))
        here = 3 * about + 1
        question = rng.choice(_ABOUT).format(names[about])
    return Text(
        "Read the text, and quote one of its sentences word for word.",
        paragraphs(lines).split("\n\n"),
        here // 5,
        question,
        QUOTED,
        lines[here],
        lines[here],
        (),
        {"line": here, "way": way},
    )


_NOBODY = (
    "the baker", "the old gardener", "a young teacher", "the postman", "our neighbour", "the librarian", "the mayor",
    "the tall carpenter", "a group of students", "a visitor from the coast", "the boy on the bridge", "the clockmaker",
)  # fmt: skip

# -- a story ---------------------------------------------------------------------------------------------------------

_EVENTS = (
    ("find", "found", "a", "silver coin"), ("hide", "hid", "a", "letter"), ("break", "broke", "a", "blue vase"),
    ("leave", "left", "an", "umbrella"), ("lose", "lost", "a", "leather glove"), ("wrap", "wrapped", "a", "gift"),
    ("drop", "dropped", "a", "teapot"), ("write", "wrote", "a", "poem"), ("mend", "mended", "a", "torn coat"),
    ("draw", "drew", "a", "map"), ("open", "opened", "a", "wooden box"), ("eat", "ate", "a", "piece of cake"),
    ("polish", "polished", "a", "mirror"), ("light", "lit", "a", "candle"), ("sharpen", "sharpened", "a", "knife"),
    ("spill", "spilled", "a", "glass of milk"),
)  # fmt: skip
_HAPPENED = (
    "{name} went into the {room} and {past} {a} {thing}.",
    "In the {room} of the old house {name} {past} {a} {thing}.",
    "Some time later {name} was in the {room} and {past} {a} {thing} there.",
    "The next one in the {room} was {name}, who {past} {a} {thing}.",
    "Then it was {name} who {past} {a} {thing} in the {room}.",
)
_WHICH_ROOM = (
    "In which room of the old house did {name} do something {end}?",
    "Which room of the old house was the {end} in which {name} did something?",
)
_WHICH_ONE = ("Who was the {end} to do something in the {room}?", "Who of the four did something in the {room} {end}?")
N_EVENTS = 10


def _story(rng: random.Random, size: int) -> Text:
    way = rng.choice(("who", "where", "first room", "last room", "first one", "last one"))
    names, rooms = rng.sample(w.NAMES, 4), rng.sample(w.ROOMS, 5)
    end, _, of = way.partition(" ")  # which end, and of what
    while True:
        events = [(rng.choice(names), *event, rng.choice(rooms)) for event in rng.sample(_EVENTS, N_EVENTS)]
        i = rng.randrange(N_EVENTS)
        name, base, past, _, thing, room = events[i]
        same = [j for j, event in enumerate(events) if (event[-1] == room if of == "one" else event[0] == name)]
        ends = [events[j][0 if of == "one" else -1] for j in (same[0], same[-1])]
        if not of or (i == same[0 if end == "first" else -1] and ends[0] != ends[1]):
            break
    if way == "who":
        question = rng.choice(("Who {past} the {thing}?", "Who of the four {past} the {thing}?"))
        begun = "The one who {past} the {thing} was"
    elif way == "where":
        question = rng.choice(("In which room did {name} {base} the {thing}?", "Where did {name} {base} the {thing}?"))
        begun = "{name} {past} the {thing} in the"
    elif of == "room":
        question = rng.choice(_WHICH_ROOM)
        begun = "The {end} room in which {name} did something is the"
    else:
        question = rng.choice(_WHICH_ONE)
        begun = "The {end} one who did something in the {room} was"
    asked = {"name": name, "base": base, "past": past, "thing": thing, "room": room, "end": end}
    answer = name if way == "who" or of == "one" else room
    told = [
        f"{', '.join(names[:-1])} and {names[-1]} spent that day in an old house.",
        *(
            rng.choice(_HAPPENED).format(name=name, past=past, a=a, thing=thing, room=room)
            for name, _, past, a, thing, room in events
        ),
    ]
    places = [0, *sorted(rng.sample(range(1, size), N_EVENTS))]
    unrelated = sentences(random.Random(rng.random()))
    waiting = dict(zip(places, told))
    lines = [waiting.get(j) or next(unrelated) for j in range(size)]
    return Text(
        "The text tells of one day in a small town, in the order in which things happened. Read it, and answer the question below it.",
        paragraphs(lines).split("\n\n"),
        places[1 + i] // 5,
        question.format(**asked),
        begun.format(**asked),
        answer,
        f" {answer}",
        w.NAMES if answer in w.NAMES else w.ROOMS,
        {"way": way, "name": name, "room": room, "thing": thing},
    )


READING = (
    Reading("prose", _prose, 5),
    Reading("conflict", _conflict, 7),
    Reading("keys", _keys, 5, joiner="\n"),
    Reading("hops", _hops, 9),
    Reading("quote", _quote, 5, max_tokens=48),
    Reading("story", _story, N_EVENTS + 1),
)
