"""RULER's variable tracking, needles in a haystack, and common and frequent words: the tasks that need no download.

RULER (arXiv 2404.06654; github.com/NVIDIA/RULER, scripts/data/synthetic): constants.py has the templates,
variable_tracking.py, niah.py, common_words_extraction.py and freq_words_extraction.py make the questions, synthetic.yaml
has the settings; scripts/eval/synthetic has the metric. Two things differ from RULER's own files:
random choices come from Python's `random` with our seed, and all questions of a task at one length have the same number
of sentences or words, while RULER shortens single ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import string
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from pypcd.evaluation.tasks.metrics import recall
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import Make, Sized
from pypcd.prompt import Prompt

__all__ = ["CWE", "FWE", "NIAH", "NOISE", "N_HOPS", "VT", "chain", "hidden", "names_of", "tracking"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

N_HOPS = 4


class _Ruler(Sized):
    """What RULER's tasks have in common."""

    metric = "recall"

    def score(self, prediction: str, sample: Sample) -> float:
        return recall(prediction, sample.answers)


class VT(_Ruler):
    """Variable tracking as in today's RULER: one chain of four hops, one worked example before the question.

    The example has as many sentences as fit in 500 tokens. Where its chain is hidden is drawn once; its names and value
    are drawn for every question. Answers are the names in the chain's order, but the metric ignores the order.
    """

    name = "vt"
    max_tokens = 30
    smallest = N_HOPS + 1

    def at_length(self, n_tokens: int, tokenizer: Tokenizer, seed: int) -> Make:
        n_noises = self.smallest
        while len(tokenizer.encode(self._example(n_noises + 1, seed))) <= 500:
            n_noises += 1
        return functools.partial(self.questions, n_example_noises=n_noises)

    def questions(self, n: int, size: int, seed: int = 0, n_example_noises: int = smallest) -> Iterator[Sample]:
        rng = random.Random(f"vt {seed} {size}")
        for i in range(n):
            value, example_value = rng.sample(range(10000, 99999), 2)
            names, example_names = names_of(rng, 5), names_of(rng, 3)
            before, after, answer_prefix = tracking(value)
            example = self._example(n_example_noises, seed, example_names, example_value)
            prompt = Prompt(
                before=f"{example} {' '.join(example_names)}\n\n{before}",
                segments=hidden(rng, [NOISE] * size, chain(names, value)),
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
        before, after, answer_prefix = tracking(value)
        return before + "\n".join(hidden(rng, [NOISE] * n_noises, chain(names, value))) + after + answer_prefix


Kind = Literal["words", "numbers", "uuids", "coded"]


@dataclasses.dataclass(eq=False)
class NIAH(_Ruler):
    """Needles (the sentences to find) in a haystack of one repeated noise sentence or of other needles; never last.

    Numbers have seven digits; UUIDs are random ones of version 4. A word is an adjective and a noun of the package
    wonderwords with a hyphen between them, each drawn with equal probability from the sorted list; another version of
    these lists makes other questions. No two needles share a value, and only the n_values needles of one key share it.

    RULER's niah_multivalue and niah_multiquery have a haystack of essays, which it downloads. Ours have the noise
    sentence in their place, as niah_single_1 has it.

    Attributes:
        n_values: needles for each key that the question names; each has a value of its own.
        n_queries: keys that the question names.
    """

    name: str
    haystack: Literal["noise", "needles"]
    keys: Kind
    values: Kind
    max_tokens: int = 128
    n_values: int = 1
    n_queries: int = 1

    def __post_init__(self) -> None:
        self.smallest = self.n_queries * self.n_values  # the needles that the question is about

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        # published figures are on these questions: seeding and order of draws must not change
        rng = random.Random(f"{self.name} {seed} {size}")
        one = self.smallest == 1  # RULER's template is in the singular then
        a, what, are, are_all = ("A", self.values[:-1], "is", "is") if one else ("Some", self.values, "are", "are all")
        n_others = size if self.haystack == "needles" else 0
        for i in range(n):
            keys = _distinct(rng, self.keys, self.n_queries + n_others)
            values = _distinct(rng, self.values, self.smallest + n_others)
            asked = keys[: self.n_queries]
            pairs = list(zip([*(key for key in asked for _ in range(self.n_values)), *keys[self.n_queries :]], values))
            wanted, others = pairs[: self.smallest], pairs[self.smallest :]
            rng.shuffle(wanted)
            needles = self._sentences(wanted)
            segments = hidden(rng, self._sentences(others) or [NOISE] * size, needles)
            query = listed(asked)
            prompt = Prompt(
                before=f"{a} special magic {what} {are} hidden within the following text. Make sure to memorize it. "
                f"I will quiz you about the {what} afterwards.\n",
                segments=segments,
                joiner="\n",
                after=f"\nWhat {are_all} the special magic {what} for {query} mentioned in the provided text?",
                answer_prefix=f" The special magic {what} for {query} mentioned in the provided text {are}",
            )
            answers = tuple(value for key in asked for other, value in wanted if other == key)
            depth = segments.index(needles[0]) / size if one else None
            yield Sample(i, prompt, answers, depth, gold=f" {listed(answers)}")

    def _sentences(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        return [f"One of the special magic {self.values} for {key} is: {value}." for key, value in pairs]


N_COMMON = 10


class CWE(_Ruler):
    """Common words extraction: the ten words that a numbered list has most often, after one worked example.

    In the question each common word stands 30 times and each other word 3 times; below 4096 tokens 6 times and once. The
    words are the nouns, adjectives and verbs of wonderwords. If a list needs more words than there are, about 8,000, RULER
    takes all of its words from a file of its own. Ours are then an adjective and a noun with a hyphen, like a needle's.
    """

    name = "cwe"
    max_tokens = 120
    smallest = N_COMMON + 1

    def at_length(self, n_tokens: int, tokenizer: Tokenizer, seed: int) -> Make:
        return functools.partial(self.questions, n_tokens=n_tokens)

    def questions(self, n: int, size: int, seed: int = 0, n_tokens: int = 4096) -> Iterator[Sample]:
        rng = random.Random(f"cwe {seed} {size}")
        n_example_words, example_repeats, repeats = (20, (3, 1), (6, 1)) if n_tokens < 4096 else (40, (10, 3), (30, 3))
        before = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
            "appear most often.\n"
        )
        after = "\nQuestion: What are the 10 most common words in the above list?"
        answer_prefix = " Answer: The top 10 words that appear most often in the list are:"
        for i in range(n):
            example, in_example = _word_list(rng, n_example_words, *example_repeats)
            words, common = _word_list(rng, size, *repeats)
            shown = f"{before}{' '.join(numbered(example))}{after}{answer_prefix} {' '.join(numbered(in_example))}\n"
            prompt = Prompt(shown + before, numbered(words), " ", after, answer_prefix)
            yield Sample(i, prompt, common, gold=" " + " ".join(numbered(common)))  # as in the example


ALPHA = 2.0
ZETA_OF_ALPHA = math.pi**2 / 6

FEWEST_CODED = 74
"""With fewer, the fourth and the fifth rank may be equally frequent: with 42, for example, both words stand once."""


class FWE(_Ruler):
    """Frequent words extraction: the three most frequent of the coded words, which are six random letters each.

    Of n words, the one of rank k stands n * k**-2 / zeta(2) times, rounded down (a Zeta distribution with alpha 2). Rank 1
    is "...", which the question says to ignore, so that ranks 2 to 4 are the answers. There is one rank for each 50 tokens
    of the prompt, as in RULER, but here at least ten.
    """

    name = "fwe"
    max_tokens = 50
    smallest = FEWEST_CODED

    def at_length(self, n_tokens: int, tokenizer: Tokenizer, seed: int) -> Make:
        return functools.partial(self.questions, n_ranks=max(10, (n_tokens - self.max_tokens) // 50))

    def questions(self, n: int, size: int, seed: int = 0, n_ranks: int = 10) -> Iterator[Sample]:
        rng = random.Random(f"fwe {seed} {size}")
        counts = [int(size * rank**-ALPHA / ZETA_OF_ALPHA) for rank in range(1, n_ranks + 1)]
        counts = [count for count in counts if count]
        for i in range(n):
            ranked = ["...", *_distinct(rng, "coded", len(counts) - 1)]
            words = [word for word, count in zip(ranked, counts) for _ in range(count)]
            rng.shuffle(words)
            prompt = Prompt(
                before="Read the following coded text and track the frequency of each coded word. Find the three most "
                "frequently appeared coded words. ",
                segments=tuple(words),
                joiner=" ",
                after="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                "frequently appeared words in the above coded text?",
                answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            )
            answers = tuple(ranked[1:4])
            yield Sample(i, prompt, answers, gold=f" {listed(answers)}")


def listed(items: Sequence[str]) -> str:
    """Items as RULER lists the keys of a question: a comma stands before "and" also if there are two."""
    *most, last = items
    return f"{', '.join(most)}, and {last}" if most else last


def numbered(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{i}. {word}" for i, word in enumerate(words, 1))


def tracking(value: int) -> tuple[str, str, str]:
    """The text before the context, the question after it, and the beginning of the answer."""
    before = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    after = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    answer_prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{N_HOPS + 1} variables are assigned the value {value}, they are: "
    )
    return before, after, answer_prefix


def names_of(rng: random.Random, n_letters: int) -> tuple[str, ...]:
    names: list[str] = []
    while len(names) < N_HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=n_letters))
        if name != "VAR" and name not in names:
            names.append(name)
    return tuple(names)


def chain(names: Sequence[str], value: int) -> list[str]:
    hops = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def hidden(rng: random.Random, sentences: Sequence[str], lines: Sequence[str]) -> tuple[str, ...]:
    """The sentences with the lines inserted in their order, each before a different, randomly chosen sentence."""
    places = sorted(rng.sample(range(len(sentences)), len(lines)))
    hidden = list(sentences)
    for j, (place, line) in enumerate(zip(places, lines)):
        hidden.insert(place + j, line)
    return tuple(hidden)


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
    if kind == "coded":
        return "".join(rng.choices(string.ascii_lowercase, k=6))
    return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"


def _word_list(
    rng: random.Random, n_words: int, common_repeats: int, other_repeats: int
) -> tuple[list[str], tuple[str, ...]]:
    """A list of n_words different words in any order, and those of them that it repeats most often."""
    known = _words("adjective", "noun", "verb")
    drawn = rng.sample(known, n_words) if n_words <= len(known) else _distinct(rng, "words", n_words)
    common, others = drawn[:N_COMMON], drawn[N_COMMON:]
    words = common * common_repeats + others * other_repeats
    rng.shuffle(words)
    return words, tuple(common)


@functools.cache
def _words(*categories: str) -> list[str]:
    """All words of wonderwords in these categories."""
    import wonderwords  # type: ignore[import-untyped]  # here, since its lists take a while to load

    words = wonderwords.RandomWord()
    return sorted({word for category in categories for word in words.filter(include_categories=[category])})
