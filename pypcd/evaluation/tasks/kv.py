"""InfiniteBench's Retrieve.KV: the value of one key in a long JSON object.

Questions, prompt and metric are those of InfiniteBench (arXiv 2402.13718; github.com/OpenBMB/InfiniteBench:
data/construct_synthetic_dataset.py, src/prompt.py, src/compute_scores.py); the pairs are random UUIDs, as in
lost-in-the-middle. `kv-authors` is the variant of PCD's authors (github.com/ZackZikaiXiao/Long_Contrastive_Decoding).
"""

from __future__ import annotations

import dataclasses
import math
import random
import uuid
from collections.abc import Iterator, Sequence

from pypcd.errors import InputError
from pypcd.evaluation.tasks.metrics import KV_SEPARATORS, word_match
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, fill
from pypcd.prompt import Prompt

__all__ = ["KV", "KV_AUTHORS", "KV_OFFICIAL", "KV_SHORT"]

UUID = (8, 4, 4, 4, 12)
FEWEST_PAIRS = 2


@dataclasses.dataclass(frozen=True)
class KV:
    """Retrieve.KV. Answers are spread evenly over the context: sample i of n asks for pair i * n_pairs // n.

    Attributes:
        groups: hexadecimal digits in each dash-separated group of a key or value; (8, 4, 4, 4, 12) is a UUID.
        before: the instruction before the JSON data.
        after: the text after the question.
        separators: characters that the metric treats as spaces.
        pairs_per_4000: pairs for each 4000 tokens of length, whatever the tokenizer; a prompt may then be longer than
            its length. None: as many pairs as fit.
        depths: ask only for these depths, in turn: 0 is the first pair, 1 the last.

    Raises:
        ValueError: a depth is not from 0 to 1.
    """

    name: str
    max_tokens: int
    groups: tuple[int, ...] = UUID
    before: str = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    after: str = ""
    separators: tuple[str, ...] = KV_SEPARATORS
    pairs_per_4000: int | None = None
    depths: tuple[float, ...] = ()

    metric = "accuracy"
    one_text = True
    stop = ""

    @property
    def n_questions(self) -> int | None:
        return None

    @property
    def may_exceed(self) -> bool:
        return self.pairs_per_4000 is not None

    def __post_init__(self) -> None:
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise InputError(f"a depth is {depth!r}; allowed: from 0 (the first pair) to 1 (the last)")

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        if self.pairs_per_4000 is None:
            return fill(
                lambda n_pairs: self.questions(n, n_pairs, seed), FEWEST_PAIRS, n_tokens, self.max_tokens, tokenizer
            )
        n_pairs = round(n_tokens * self.pairs_per_4000 / 4000)
        if n_pairs < FEWEST_PAIRS:
            raise InputError(
                f"n_tokens is {n_tokens}; allowed: at least {math.ceil((FEWEST_PAIRS - 0.5) * 4000 / self.pairs_per_4000)}, "
                f"which makes {FEWEST_PAIRS} pairs at {self.pairs_per_4000} pairs in 4000 tokens"
            )
        return list(self.questions(n, n_pairs, seed))

    def questions(self, n: int, n_pairs: int, seed: int = 0) -> Iterator[Sample]:
        """n questions about objects of n_pairs pairs; extra["nearest"] is the last value of the object."""
        # published figures of `pypcd demo` are on these questions: seeding and order of draws must not change
        rng = random.Random(f"kv {seed} {n_pairs} {self.groups}")
        for i in range(n):
            pairs = self._pairs(rng, n_pairs)
            at = round(self.depths[i % len(self.depths)] * (n_pairs - 1)) if self.depths else i * n_pairs // n
            yield self.question(i, pairs, at)

    def question(self, i: int, pairs: Sequence[tuple[str, str]], at: int) -> Sample:
        """Question i, for the value of one of the pairs."""
        key, value = pairs[at]
        prompt = Prompt(
            before=self.before + "JSON data:\n{",
            segments=tuple(f'"{k}": "{v}"' for k, v in pairs),
            joiner=", ",
            after=f'}}\n\n\nKey: "{key}"\nThe value associated with the specified key is: {self.after}',
        )
        return Sample(i, prompt, (value,), at / max(len(pairs) - 1, 1), {"nearest": pairs[-1][1]})

    def score(self, prediction: str, sample: Sample) -> float:
        return word_match(prediction, sample.answers[0], self.separators)

    def _pairs(self, rng: random.Random, n_pairs: int) -> list[tuple[str, str]]:
        """Keys and values, all different, so that an answer occurs in its context only once."""
        pairs: list[tuple[str, str]] = []
        seen: set[str] = set()
        while len(pairs) < n_pairs:
            value, key = self._identifier(rng), self._identifier(rng)
            if value != key and seen.isdisjoint((key, value)):
                pairs.append((key, value))
                seen.update((key, value))
        return pairs

    def _identifier(self, rng: random.Random) -> str:
        if self.groups == UUID:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return "-".join(f"{rng.getrandbits(4 * n):0{n}x}" for n in self.groups)


KV_OFFICIAL = KV("kv", max_tokens=50)

KV_SHORT = KV("kv-short", max_tokens=16, groups=(4, 4))  # short enough for the model that comes with pypcd

KV_AUTHORS = KV(
    "kv-authors",
    max_tokens=100,
    before="Given the JSON object below, extract and return only the value corresponding to the specified key.\n\n",
    after=". Return only the value and do not include any additional text in your response:",
    separators=(*KV_SEPARATORS, "</s>"),
    pairs_per_4000=75,
)
