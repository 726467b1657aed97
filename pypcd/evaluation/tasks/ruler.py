"""RULER's variable tracking and needles in a haystack: those of its tasks that need no download.

RULER (arXiv 2404.06654; github.com/NVIDIA/RULER, scripts/data/synthetic): constants.py has the templates,
variable_tracking.py and niah.py make the questions, synthetic.yaml has the settings; scripts/eval/synthetic has the
metric. `vt-authors` is the variant of PCD's authors (github.com/ZackZikaiXiao/Long_Contrastive_Decoding,
benchmark/super_retrieval). Two things differ from RULER's own files: random choices come from Python's `random` with our
seed, and all questions of a task at one length have the same number of sentences, while RULER shortens single ones.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import string
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from pypcd.evaluation.tasks.metrics import list_f1, recall
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, fill
from pypcd.prompt import Prompt

__all__ = ["NIAH", "VT", "VTAuthors"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

N_HOPS = 4
TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text."
FIND = "Question: Find all variables that are assigned the value {value} in the text"
ACCORDING = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{n} variables are {assigned} the value {value}, they are: "
)


@dataclasses.dataclass(frozen=True)
class VT:
    """Variable tracking as in today's RULER: one chain of four hops, one worked example before the question.

    The example has as many sentences as fit in 500 tokens. Where its chain is hidden is drawn once; its names and value
    are drawn for every question. Answers are the names in the chain's order, but the metric ignores the order.
    """

    name: str = "vt"
    max_tokens: int = 30

    metric = "recall"
    one_text = False
    stop = ""
    may_exceed = False
    n_questions = None

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        n_noises = N_HOPS + 1
        while len(tokenizer.encode(self._example(n_noises + 1, seed))) <= 500:
            n_noises += 1
        return fill(
            lambda size: self._questions(n, size, n_noises, seed), N_HOPS + 1, n_tokens, self.max_tokens, tokenizer
        )

    def score(self, prediction: str, sample: Sample) -> float:
        return recall(prediction, sample.answers)

    def _questions(self, n: int, n_noises: int, n_example_noises: int, seed: int) -> Iterator[Sample]:
        rng = random.Random(f"vt {seed} {n_noises}")
        for i in range(n):
            value, example_value = rng.sample(range(10000, 99999), 2)
            names, example_names = _names(rng, 5), _names(rng, 3)
            before, after, answer_prefix = _tracking(value)
            example = self._example(n_example_noises, seed, example_names, example_value)
            prompt = Prompt(
                before=f"{example} {' '.join(example_names)}\n\n{before}",
                segments=_hidden(rng, [NOISE] * n_noises, _chain(names, value)),
                joiner="\n",
                after=after,
                answer_prefix=answer_prefix,
            )
            yield Sample(i, prompt, names, gold=" " + " ".join(names))  # as in the example

    def _example(
        self, n_noises: int, seed: int, names: Sequence[str] = ("AAA", "BBB", "CCC", "DDD", "EEE"), value: int = 12345
    ) -> str:
        """The worked example without its answer, which is what RULER counts the tokens of."""
        rng = random.Random(f"vt {seed} example")
        before, after, answer_prefix = _tracking(value)
        return before + "\n".join(_hidden(rng, [NOISE] * n_noises, _chain(names, value))) + after + answer_prefix


@dataclasses.dataclass(frozen=True)
class VTAuthors:
    """Variable tracking as PCD's authors run it: RULER of 2024, with their request for a list and their one example turn.

    RULER of 2024 ends every noise sentence with a newline and joins all with spaces; "assgined" is its spelling. The
    authors do not give the number of chains in their questions; here it is RULER's default, one.
    """

    name: str = "vt-authors"
    max_tokens: int = 300

    metric = "F1"
    one_text = False
    stop = ""
    may_exceed = False
    n_questions = None

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        # with fewer noise sentences, RULER of 2024 splits them
        return fill(lambda size: self._questions(n, size, seed), N_HOPS + 2, n_tokens, self.max_tokens, tokenizer)

    def score(self, prediction: str, sample: Sample) -> float:
        return list_f1(prediction, sample.answers)

    def _questions(self, n: int, n_noises: int, seed: int) -> Iterator[Sample]:
        rng = random.Random(f"vt {seed} {n_noises}")
        for i in range(n):
            value, names = rng.randrange(10000, 99999), _names(rng, 5)
            before, after, answer_prefix = _tracking(value, "assgined")
            prompt = Prompt(
                before="\n\n" + before,
                segments=_hidden(rng, [NOISE + "\n"] * n_noises, _chain(names, value)),
                joiner=" ",
                after=f"{after}{answer_prefix} Your response should consist solely of listing all the variables in the "
                "specified format, such as 'AAA, BBB, CCC, DDD, EEE'; do not include any additional text in your "
                "response.",
                shots=(_authors_shot(),),
            )
            yield Sample(i, prompt, names, gold=", ".join(names))  # as in the example turn


Kind = Literal["words", "numbers", "uuids"]


@dataclasses.dataclass(frozen=True)
class NIAH:
    """One needle (the sentence to find) in a haystack of one repeated noise sentence or of other needles; never last.

    Numbers have seven digits; UUIDs are random ones of version 4. A word is an adjective and a noun of the package
    wonderwords with a hyphen between them, each drawn with equal probability from the sorted list; another version of
    these lists makes other questions. No two needles share a key or a value.
    """

    name: str
    haystack: Literal["noise", "needles"]
    keys: Kind
    values: Kind
    max_tokens: int = 128

    metric = "recall"
    one_text = True
    stop = ""
    may_exceed = False
    n_questions = None

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        return fill(lambda size: self._questions(n, size, seed), 1, n_tokens, self.max_tokens, tokenizer)

    def score(self, prediction: str, sample: Sample) -> float:
        return recall(prediction, sample.answers)

    def _questions(self, n: int, n_sentences: int, seed: int) -> Iterator[Sample]:
        rng = random.Random(f"{self.name} {seed} {n_sentences}")
        what = self.values[:-1]  # RULER's template in the singular, since the question is about one value
        for i in range(n):
            n_needles = n_sentences if self.haystack == "needles" else 0
            keys, values = (_distinct(rng, kind, 1 + n_needles) for kind in (self.keys, self.values))
            needle, *others = (
                f"One of the special magic {self.values} for {key} is: {value}." for key, value in zip(keys, values)
            )
            sentences = others or [NOISE] * n_sentences
            at = rng.randrange(n_sentences)
            prompt = Prompt(
                before=f"A special magic {what} is hidden within the following text. Make sure to memorize it. "
                f"I will quiz you about the {what} afterwards.\n",
                segments=(*sentences[:at], needle, *sentences[at:]),
                joiner="\n",
                after=f"\nWhat is the special magic {what} for {keys[0]} mentioned in the provided text?",
                answer_prefix=f" The special magic {what} for {keys[0]} mentioned in the provided text is",
            )
            yield Sample(i, prompt, (values[0],), at / n_sentences, gold=f" {values[0]}")


def _tracking(value: int, assigned: str = "assigned") -> tuple[str, str, str]:
    """The text before the context, the question after it, and the beginning of the answer."""
    return (
        TRACK + "\n\n",
        "\n" + FIND.format(value=value) + " above.",
        ACCORDING.format(n=N_HOPS + 1, assigned=assigned, value=value),
    )


def _names(rng: random.Random, n_letters: int) -> tuple[str, ...]:
    names: list[str] = []
    while len(names) < N_HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=n_letters))
        if name != "VAR" and name not in names:
            names.append(name)
    return tuple(names)


def _chain(names: Sequence[str], value: int) -> list[str]:
    hops = [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:])]
    return [f"VAR {names[0]} = {value}", *hops]


def _hidden(rng: random.Random, sentences: Sequence[str], lines: Sequence[str]) -> tuple[str, ...]:
    """The sentences with the lines inserted in their order, each before a different, randomly chosen sentence."""
    places = sorted(rng.sample(range(len(sentences)), len(lines)))
    hidden = list(sentences)
    for j, (place, line) in enumerate(zip(places, lines)):
        hidden.insert(place + j, line)
    return tuple(hidden)


@functools.cache
def _authors_shot() -> tuple[str, str]:
    """The authors' example turn; in it the template's line breaks are written as \\n, and "above." is missing."""
    first, second = ("ZUG", "GOC", "TVZ", "NDR", "YEN"), ("NCQ", "VNF", "JEY", "XXP", "MCJ")
    a, b = iter(_chain(first, 97498)), iter(_chain(second, 47194))
    noise = NOISE + "\n"
    context = " ".join(
        [noise] * 3
        + [next(a), next(b), next(a), noise, next(b), next(a), noise, next(b), noise, next(b), noise, next(a)]
        + [noise] * 2
        + [next(b), next(a), noise]
    )
    question = FIND.format(value=47194) + ACCORDING.format(n=N_HOPS + 1, assigned="assgined", value=47194)
    return rf"{TRACK}\n\n{context}\n{question}", ", ".join(second)


def _distinct(rng: random.Random, kind: Kind, n: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[_drawn(rng, kind)] = None
    return list(found)


def _drawn(rng: random.Random, kind: Kind) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    adjectives, nouns = _words()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    """All adjectives and nouns of wonderwords."""
    import wonderwords  # type: ignore[import-untyped]  # here, since its lists take a while to load

    words = wonderwords.RandomWord()
    adjectives, nouns = (sorted(set(words.filter(include_categories=[k]))) for k in ("adjective", "noun"))
    return adjectives, nouns
