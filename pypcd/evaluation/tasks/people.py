"""What texts say of people: where they live, what they do. Each fact has several wordings, questions, and mentions of
another value that do not answer them."""

from __future__ import annotations

import dataclasses
import random

from pypcd.evaluation.tasks import words as w

__all__ = ["ATTRIBUTES", "JOBS", "Attribute"]


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A kind of fact about a person.

    Attributes:
        values: its possible values.
        statements: sentences that say it; {who} is the person.
        questions: for a person's {name}.
        begun: the beginning of an answer.
        conflicts: why another value is not the answer, and a sentence that mentions it; {namesake} is another person with the
            same first name.
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    begun: str
    conflicts: tuple[tuple[str, str], ...]

    def said(self, who: str, value: str, rng: random.Random) -> str:
        return rng.choice(self.statements).format(who=who, value=value)


_ELSEWHERE = ("baker", "carpenter", "driver", "gardener", "librarian", "nurse", "student", "teacher")
JOBS = tuple(job for job in w.PROFESSIONS if job not in _ELSEWHERE and job[0] not in "aeiou")
"""Professions that unrelated text (`prose`) does not mention, and that "a" stands before."""

ATTRIBUTES = (
    Attribute(
        "home",
        w.CITIES,
        (
            "{who} lives in {value}.",
            "{who} has a small flat in {value}, and is at home there.",
            "For some time now {who} has been living in {value}.",
            "The home of {who} is in {value}.",
            "{who} shares a house in {value} with two friends and lives there gladly.",
        ),
        ("In which city does {name} live?", "Where is the home of {name}?"),
        "{name} lives in",
        (
            ("rumour", "Some neighbours believe that {name} lives in {value}, but they are mistaken."),
            ("rumour", "An old list says that the home of {name} is in {value}; that is an error in the list."),
            ("earlier", "Many years ago {name} lived in {value} for a while."),
            ("other person", "{namesake}, who is not related to {name}, lives in {value}."),
            ("other person", "A cousin of {name} lives in {value}."),
            ("wish", "{name} once dreamed of living in {value}, but nothing came of it."),
        ),
    ),
    Attribute(
        "job",
        JOBS,
        (
            "{who} works as a {value}.",
            "By profession {who} is a {value}.",
            "{who} earns a living as a {value}.",
            "{who} is a {value} and likes the work.",
            "If you need a {value}, ask {who}, who does that for a living.",
        ),
        ("What is the profession of {name}?", "What does {name} do for a living?"),
        "{name} works as a",
        (
            ("rumour", "It was said in the street that {name} works as a {value}, and that was wrong."),
            ("rumour", "The telephone book calls {name} a {value}, which is a misprint."),
            ("earlier", "Long ago, before the present job, {name} worked as a {value}."),
            ("other person", "{namesake}, not to be confused with {name}, works as a {value}."),
            ("other person", "A cousin of {name} works as a {value}."),
            ("wish", "As a child {name} wanted to become a {value}, but that never happened."),
        ),
    ),
    Attribute(
        "born",
        tuple(map(str, range(1940, 2000))),
        (
            "{who} was born in {value}.",
            "{who} came into the world in {value}.",
            "The year in which {who} was born is {value}.",
            "It was in {value} that {who} was born.",
            "{who} was born in {value}, the youngest of four children.",
        ),
        ("In which year was {name} born?", "What is the year of birth of {name}?"),
        "{name} was born in",
        (
            ("rumour", "A newspaper once wrote that {name} was born in {value}, and had to correct it later."),
            ("rumour", "Someone guessed that {name} was born in {value}; the guess was wrong."),
            ("other person", "{namesake}, who is not related to {name}, was born in {value}."),
            ("other person", "A cousin of {name} was born in {value}."),
        ),
    ),
    Attribute(
        "pet",
        w.PETS,
        (
            "{who} keeps a {value}.",
            "{who} has a {value}, which everybody in the street knows.",
            "A {value} lives with {who}.",
            "The only animal that {who} keeps is a {value}.",
            "{who} gets up early to feed a {value}, a present from an aunt.",
        ),
        ("Which animal does {name} keep?", "What kind of animal does {name} have?"),
        "The animal that {name} keeps is a",
        (
            ("rumour", "The children say that {name} keeps a {value}, but they made that up."),
            ("earlier", "As a child {name} kept a {value}, which died long ago."),
            ("other person", "{namesake}, who is not related to {name}, keeps a {value}."),
            ("other person", "A cousin of {name} keeps a {value}."),
            ("wish", "{name} thought of buying a {value}, and decided against it."),
        ),
    ),
    Attribute(
        "instrument",
        w.INSTRUMENTS,
        (
            "{who} plays the {value}.",
            "In the evening {who} plays the {value}.",
            "The instrument that {who} plays is the {value}.",
            "{who} plays the {value} at weddings.",
            "When the window is open, one can hear {who} playing the {value}.",
        ),
        ("Which instrument does {name} play?", "What instrument is played by {name}?"),
        "{name} plays the",
        (
            ("rumour", "A poster said that {name} plays the {value}, but the printer had mixed up two names."),
            ("earlier", "At school {name} played the {value}, and gave it up."),
            ("other person", "{namesake}, who is not related to {name}, plays the {value}."),
            ("other person", "A cousin of {name} plays the {value}."),
            ("wish", "{name} would have liked to learn the {value}, but never did."),
        ),
    ),
    Attribute(
        "day",
        w.DAYS,
        (
            "{who} sings in the choir every {value}.",
            "Every {value} {who} goes to the choir.",
            "On {value} {who} has no time, for that is the day of the choir.",
            "The choir of {who} meets on {value}.",
            "{who} is in the choir that sings on {value}.",
        ),
        ("On which day does {name} go to the choir?", "On which day of the week does {name} sing in the choir?"),
        "{name} goes to the choir on",
        (
            (
                "rumour",
                "The notice on the door said that {name} goes to the choir on {value}, but the notice was wrong.",
            ),
            ("earlier", "Some years ago {name} went to another choir, which met on {value}."),
            ("other person", "{namesake}, who is not related to {name}, goes to the choir on {value}."),
            ("other person", "A cousin of {name} goes to the choir on {value}."),
        ),
    ),
)
