"""The kinds of everyday questions. Each question says what is wanted and has one right answer, which code works out.

A `Kind` draws a *topic* for each prompt, which its examples share with the question: a schema, a unit, two idioms of
Python. Knows nothing of prompts, lengths and models.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pypcd.evaluation.tasks import words as w

__all__ = ["KINDS", "Draw", "Kind", "Topic"]

T = TypeVar("T")

Pair = tuple[str, str]
"""A question and its answer. A question that ends with a line break has its answer below it."""

Draw = Callable[[random.Random], Pair]

Topic = Callable[[random.Random, int], Pair]
"""Draws a question for a place: 0 is the question's, 1 that of the example before it, and so on."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of questions.

    Attributes:
        name: of the task, after "everyday-".
        max_tokens: the longest answer; a right one takes about half of it.
        topic: draws what the examples and the question of one prompt share.
        n_examples: of a short prompt.
        in_lines: whether an answer may have several lines.
    """

    name: str
    max_tokens: int
    topic: Callable[[random.Random], Topic]
    n_examples: int
    in_lines: bool = False


def _one_of(*draws: Draw) -> Callable[[random.Random], Topic]:
    """A topic of one form, drawn for each prompt."""

    def topic(rng: random.Random) -> Topic:
        draw = rng.choice(draws)
        return lambda rng, place: draw(rng)

    return topic


def _two_of(*draws: Draw) -> Callable[[random.Random], Topic]:
    """A topic of two forms in any order."""

    def topic(rng: random.Random) -> Topic:
        form = _mixed(rng, rng.sample(draws, 2))
        return lambda rng, place: form(rng, place)(rng)

    return topic


def _mixed(rng: random.Random, forms: Sequence[T]) -> Callable[[random.Random, int], T]:
    """A form for each place: any for the question; the examples nearest to it show each form once, the others any."""
    near = [rng.choice(forms), *rng.sample(forms, len(forms))]
    return lambda rng, place: near[place] if place < len(near) else rng.choice(forms)


def _first_of(n_places: int, *draws: Draw) -> Callable[[random.Random], Topic]:
    """A topic of one form for the nearest places, and of all forms farther away: for forms with few questions."""

    def topic(rng: random.Random) -> Topic:
        draw = rng.choice(draws)
        return lambda rng, place: (draw if place < n_places else rng.choice(draws))(rng)

    return topic


# -- facts -----------------------------------------------------------------------------------------------------------


def _from(pairs: Sequence[Pair], question: str) -> Draw:
    def draw(rng: random.Random) -> Pair:
        one, other = rng.choice(pairs)
        return question.format(one), other

    return draw


_FACTS = (
    _from(w.CAPITALS, "Capital of {}:"),
    _from(w.CONTINENTS, "Continent of {}:"),
    _from(w.OPPOSITES, "Opposite of {}:"),
    _from(w.PAST, "Past tense of {}:"),
    _from(w.PLURALS, "Plural of {}:"),
)

# -- JSON ------------------------------------------------------------------------------------------------------------

Record = Callable[[random.Random], "tuple[str, dict[str, Any]]"]
"""A sentence and what it says, by name."""


def _person(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, age, city = rng.choice(w.NAMES), rng.randint(18, 79), rng.choice(w.CITIES)
    texts = (
        f"{name} is {age} years old and lives in {city}.",
        f"{name}, who is {age}, lives in {city}.",
        f"In {city} lives {name}, aged {age}.",
        f"My friend {name} from {city} is {age} years old.",
    )
    return rng.choice(texts), {"name": name, "age": age, "city": city}


def _order(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, n, item = rng.choice(w.NAMES), rng.randint(2, 19), rng.choice(w.COUNTED)
    texts = (
        f"{name} ordered {n} {item}.",
        f"Please put {n} {item} on the bill of {name}.",
        f"There is an order of {n} {item} from {name}.",
        f"{name} would like to have {n} {item}.",
    )
    return rng.choice(texts), {"customer": name, "item": item, "quantity": n}


def _job(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, job, city, years = rng.choice(w.NAMES), rng.choice(w.PROFESSIONS), rng.choice(w.CITIES), rng.randint(2, 30)
    a = "an" if job[0] in "aeiou" else "a"
    texts = (
        f"{name} has worked as {a} {job} in {city} for {years} years.",
        f"For {years} years {name} has been {a} {job} in {city}.",
        f"{name} came to {city} {years} years ago and works there as {a} {job}.",
    )
    return rng.choice(texts), {"name": name, "job": job, "city": city, "years": years}


def _product(rng: random.Random) -> tuple[str, dict[str, Any]]:
    thing, colour, price = rng.choice(w.THINGS), rng.choice(w.COLOURS), rng.randint(3, 199)
    texts = (
        f"The {colour} {thing} costs {price} dollars.",
        f"The price of the {colour} {thing} is {price} dollars.",
        f"For {price} dollars you get this {thing} in {colour}.",
    )
    return rng.choice(texts), {"product": thing, "colour": colour, "price": price}


_RECORDS: tuple[Record, ...] = (_person, _order, _job, _product)


def _as_json(record: Record) -> Draw:
    def draw(rng: random.Random) -> Pair:
        text, values = record(rng)
        return f"Text: {text}\nJSON:\n", json.dumps(values)

    return draw


def _into_schema(rng: random.Random) -> Topic:
    """Fill in an empty object. Its keys are some of a record's in any order, the same ones throughout a prompt."""
    record = rng.choice(_RECORDS)
    keys = list(record(rng)[1])
    keys = rng.sample(keys, rng.randint(2, len(keys)))

    def draw(rng: random.Random, place: int) -> Pair:
        text, values = record(rng)
        empty = {key: 0 if isinstance(values[key], int) else "" for key in keys}
        return f"Text: {text}\nFill in {json.dumps(empty)}:\n", json.dumps({key: values[key] for key in keys})

    return draw


# -- tool calls ------------------------------------------------------------------------------------------------------


def _call(tool: str, request: str, /, **arguments: Any) -> Pair:
    return f"Tool: {tool}({', '.join(arguments)})\nRequest: {request}\nArguments:\n", json.dumps(arguments)


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(6, 23)}:{rng.randrange(0, 60, 5):02}"


def _alarm(rng: random.Random) -> Pair:
    time, day = _clock(rng), rng.choice(w.DAYS)
    requests = f"Wake me at {time} on {day}.", f"On {day} I have to get up at {time}."
    return _call("set_alarm", rng.choice(requests), day=day, time=time)


def _weather(rng: random.Random) -> Pair:
    city, day = rng.choice(w.CITIES), rng.choice(w.DAYS)
    requests = f"Will it rain in {city} on {day}?", f"How warm will it be on {day} in {city}?"
    return _call("get_weather", rng.choice(requests), city=city, day=day)


def _train(rng: random.Random) -> Pair:
    (a, b), time = rng.sample(w.CITIES, 2), _clock(rng)
    requests = f"I want to go from {a} to {b} at {time}.", f"Is there a train to {b} at {time}? I am in {a}."
    return _call("find_train", rng.choice(requests), start=a, end=b, time=time)


def _shopping(rng: random.Random) -> Pair:
    item, n = rng.choice(w.COUNTED), rng.randint(2, 30)
    requests = f"We need {n} {item}.", f"Put {n} {item} on the list.", f"Don't forget to buy {n} {item}."
    return _call("add_to_list", rng.choice(requests), item=item, count=n)


def _light(rng: random.Random) -> Pair:
    room, level = rng.choice(w.ROOMS), rng.randrange(5, 100, 5)
    requests = f"Set the light in the {room} to {level} percent.", f"{level} percent light in the {room}, please."
    return _call("set_light", rng.choice(requests), room=room, level=level)


def _booking(rng: random.Random) -> Pair:
    name, n, time = rng.choice(w.NAMES), rng.randint(2, 9), _clock(rng)
    requests = f"A table for {n} at {time}, the name is {name}.", f"{name} needs a table for {n} people at {time}."
    return _call("book_table", rng.choice(requests), name=name, people=n, time=time)


# -- lists -----------------------------------------------------------------------------------------------------------


def _copied(rng: random.Random) -> Pair:
    text = ", ".join(rng.sample(w.THINGS, rng.randint(3, 5)))
    return f"List: {text}\nCopy:", text


def _copied_lines(rng: random.Random) -> Pair:
    text = "\n".join(f"{i}. {item}" for i, item in enumerate(rng.sample(w.THINGS, rng.randint(3, 4)), 1))
    return f"List:\n{text}\nCopy:\n", text


def _sorted(items: Sequence[Any], how: str, rng: random.Random) -> Pair:
    shuffled = ", ".join(map(str, rng.sample(items, len(items))))
    return f"{shuffled} {how}:", ", ".join(map(str, sorted(items)))


def _sorted_numbers(rng: random.Random) -> Pair:
    small, large = rng.randint(1, 9), rng.randint(10, 999)
    return _sorted((small, large), "sorted", rng)


def _sorted_far(rng: random.Random) -> Pair:
    return _sorted((rng.randint(10, 45), rng.randint(55, 99)), "sorted", rng)


def _sorted_words(rng: random.Random) -> Pair:
    first, second = rng.sample(w.FOODS, 2)
    while first[0] == second[0]:
        second = rng.choice(w.FOODS)
    return _sorted((first, second), "from A to Z", rng)


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _sum(rng: random.Random) -> Pair:
    a, b = rng.randint(2, 30), rng.randint(2, 9)
    return f"{a} + {b} =", str(a + b)


def _times(rng: random.Random) -> Pair:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return f"{a} * {b} =", str(a * b)


def _times_power(rng: random.Random) -> Pair:
    a, b = rng.randint(2, 99), rng.choice((10, 100))
    return f"{a} * {b} =", str(a * b)


def _tens(rng: random.Random) -> Pair:
    a, b = 10 * rng.randint(1, 29), 10 * rng.randint(1, 9)
    return f"{a} + {b} =", str(a + b)


# -- spelling --------------------------------------------------------------------------------------------------------

_SPELT = tuple(sorted({*w.THINGS, *w.FOODS, *w.ANIMALS, *w.PROFESSIONS, *w.COLOURS, *w.ADJECTIVES}))


def _spelt(question: str, answer: Callable[[str], str], given: Callable[[str], str] = str) -> Draw:
    def draw(rng: random.Random) -> Pair:
        word = rng.choice(_SPELT)
        return question.format(given(word)), answer(word)

    return draw


_SPELLINGS = (
    _spelt("{} in capital letters:", str.upper),
    _spelt("{} in small letters:", str, str.upper),
    _spelt("{} with a capital:", str.capitalize),
    _spelt("First letter of {}:", lambda word: word[0]),
)

# -- formats ---------------------------------------------------------------------------------------------------------


def _date(rng: random.Random) -> datetime.date:
    return datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(30000))


def _words_to_iso(rng: random.Random) -> Pair:
    date = _date(rng)
    return f"{date.day} {w.MONTHS[date.month - 1]} {date.year} as YYYY-MM-DD:", date.isoformat()


def _words_to_slashes(rng: random.Random) -> Pair:
    date = _date(rng)
    return f"{w.MONTHS[date.month - 1]} {date.day}, {date.year} as DD/MM/YYYY:", date.strftime("%d/%m/%Y")


def _month_of_iso(rng: random.Random) -> Pair:
    date = _date(rng)
    return f"Month of {date.isoformat()}:", w.MONTHS[date.month - 1]


def _duration(rng: random.Random) -> Pair:
    hours, minutes = rng.randint(2, 23), rng.randint(10, 59)
    return f"{hours} hours and {minutes} minutes as H:MM:", f"{hours}:{minutes}"


def _percent(rng: random.Random) -> Pair:
    n = rng.randint(11, 99)
    return f"0.{n} in percent:", f"{n}%"


def _price(rng: random.Random) -> Pair:
    dollars, cents = rng.randint(2, 99), rng.randint(10, 99)
    return f"{dollars} dollars and {cents} cents as a price:", f"${dollars}.{cents}"


def _last_name_first(rng: random.Random) -> Pair:
    first, last = rng.choice(w.NAMES), rng.choice(w.LAST_NAMES)
    return f"{first} {last}, last name first:", f"{last}, {first}"


def _unit(large: str, small: str, factor: int) -> Draw:
    def draw(rng: random.Random) -> Pair:
        n = rng.randint(2, 199)
        return f"{n} {large} in {small}:", f"{n * factor} {small}"

    return draw


# -- classification --------------------------------------------------------------------------------------------------


def _review(label: str, rng: random.Random) -> str:
    words, ends = (w.PRAISE, w.GLAD) if label == "positive" else (w.BLAME, w.SORRY)
    (a, b), (x, y), end = rng.sample(words, 2), rng.sample(w.REVIEWED, 2), rng.choice(ends)
    texts = f"The {x} was {a} and the {y} was {b}.", f"That was {a}! {end}", f"The {x} was {a}. {end}"
    return f"Review: {rng.choice(texts)}\nSentiment:"


def _report(label: str, rng: random.Random) -> str:
    return f"Text: {rng.choice(w.REPORTS[label]).format(rng.choice(w.CITIES))}\nTopic:"


_GROUPS = {"animal": w.ANIMALS, "city": w.CITIES, "colour": w.COLOURS, "food": w.FOODS, "job": w.PROFESSIONS}


def _word(label: str, rng: random.Random) -> str:
    while True:
        word = rng.choice(_GROUPS[label])
        if sum(word in words for words in _GROUPS.values()) == 1:  # an orange is no question, nor is a chicken
            return f"Word: {word}\nKind:"


_LABELS: tuple[tuple[Callable[[str, random.Random], str], tuple[str, ...]], ...] = (
    (_review, ("negative", "positive")),
    (_report, tuple(sorted(w.REPORTS))),
    (_word, tuple(_GROUPS)),
)


def _labelled(rng: random.Random) -> Topic:
    """Classification: the examples show every label."""
    question, labels = rng.choice(_LABELS)
    label_of = _mixed(rng, labels)

    def draw(rng: random.Random, place: int) -> Pair:
        label = label_of(rng, place)
        return question(label, rng), label

    return draw


# -- code ------------------------------------------------------------------------------------------------------------


def _code(comment: str, line: str) -> Draw:
    """A line of Python for a comment; {a} and {b} stand for variables, {many} for a list, {n} for a number."""

    def draw(rng: random.Random) -> Pair:
        a, b = rng.sample(w.VARIABLES, 2)
        names = {"a": a, "b": b, "many": rng.choice(w.LISTS), "n": rng.randint(2, 99)}
        return f"# {comment.format(**names)}\n", line.format(**names)

    return draw


_LINES = (
    _code("add {n} to {a}", "{a} += {n}"),
    _code("subtract {n} from {a}", "{a} -= {n}"),
    _code("set {a} to {n}", "{a} = {n}"),
    _code("print {a} and {b}", "print({a}, {b})"),
    _code("print the length of {many}, then {a}", "print(len({many}), {a})"),
    _code("append {a} to {many}", "{many}.append({a})"),
    _code("set {many} to a list of {n} zeros", "{many} = [0] * {n}"),
    _code("set {a} to the largest of {many}", "{a} = max({many})"),
    _code("set {a} to the sum of {many}", "{a} = sum({many})"),
    _code("for each {a} in {many}", "for {a} in {many}:"),
    _code("if {a} is greater than {n}", "if {a} > {n}:"),
    _code("if {a} equals {b}", "if {a} == {b}:"),
    _code("return {a} plus {b}", "return {a} + {b}"),
)


def _open(line: str, n_open: int) -> Draw:
    """A line of code without the brackets and quotes at its end; {a}, {many} and {n} as in _code()."""

    def draw(rng: random.Random) -> Pair:
        names = {"a": rng.choice(w.VARIABLES), "many": rng.choice(w.LISTS), "n": rng.randint(2, 99)}
        whole = line.format(**names)
        return f"Open: {whole[:-n_open]}\nClosed:", whole

    return draw


_BRACKETS = (
    _open("print(len({many}), {a}[{n}])", 2),
    _open("print({many}[{n}])", 2),
    _open('print({n}, "{a}")', 2),
    _open("{a} = max([{n}, {n}])", 2),
    _open('{many} = [{n}, "{a}"]', 2),
    _open('{many} = {{"{a}": {n}}}', 1),
    _open("{a} = int({many}[{n}])", 2),
    _open('{many}.append(("{a}", {n}))', 2),
    _open("f({a}, g({many}[{n}]))", 3),
    _open('{a} = {many}["{a}"]', 2),
)

KINDS = (
    Kind("facts", 12, _first_of(12, *_FACTS), 8),
    Kind("json", 48, _one_of(*map(_as_json, _RECORDS)), 3),
    Kind("schema", 48, _into_schema, 3),
    Kind("tools", 48, _two_of(_alarm, _weather, _train, _shopping, _light, _booking), 3),
    Kind("copy", 48, _one_of(_copied, _copied_lines), 4, in_lines=True),
    Kind("sort", 16, _one_of(_sorted_numbers, _sorted_far, _sorted_words), 8),
    Kind("arithmetic", 10, _one_of(_sum, _times, _times_power, _tens), 8),
    Kind("spelling", 16, _one_of(*_SPELLINGS), 8),
    Kind(
        "formats",
        24,
        _one_of(
            _words_to_iso,
            _words_to_slashes,
            _month_of_iso,
            _duration,
            _percent,
            _price,
            _last_name_first,
            _unit("m", "cm", 100),
            _unit("km", "m", 1000),
            _unit("kg", "g", 1000),
        ),
        5,
    ),
    Kind("classify", 8, _labelled, 7),
    Kind("code", 24, _two_of(*_LINES), 4),
    Kind("brackets", 32, _two_of(*_BRACKETS), 4),
)
