"""InfiniteBench's Retrieve.KV: the value of one key in a long JSON object.

Questions, prompt and metric are those of InfiniteBench (arXiv 2402.13718; github.com/OpenBMB/InfiniteBench:
data/construct_synthetic_dataset.py, src/prompt.py, src/compute_scores.py); the pairs are random UUIDs, as in
lost-in-the-middle.
"""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Iterator, Sequence

from pypcd.evaluation.tasks.metrics import word_match
from pypcd.evaluation.tasks.sample import Sample
from pypcd.evaluation.tasks.size import Sized
from pypcd.prompt import Prompt

__all__ = ["KV", "KV_OFFICIAL", "KV_SHORT"]

UUID = (8, 4, 4, 4, 12)


@dataclasses.dataclass(frozen=True)
class KV(Sized):
    """Retrieve.KV. Answers are spread evenly over the context: sample i of n asks for pair i * n_pairs // n.

    Attributes:
        groups: hexadecimal digits in each dash-separated group of a key or value; (8, 4, 4, 4, 12) is a UUID.
        before: the instruction before the JSON data.
    """

    name: str
    max_tokens: int
    groups: tuple[int, ...] = UUID

    before = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    metric = "accuracy"
    smallest = 2

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        """n questions about objects of `size` pairs; extra["nearest"] is the last value of the object."""
        # published figures of `pypcd eval demo` are on these questions: seeding and order of draws must not change
        rng = random.Random(f"kv {seed} {size} {self.groups}")
        for i in range(n):
            yield self.question(i, self._pairs(rng, size), i * size // n)

    def question(self, i: int, pairs: Sequence[tuple[str, str]], at: int) -> Sample:
        """Question i, for the value of one of the pairs."""
        key, value = pairs[at]
        prompt = Prompt(
            before=self.before + "JSON data:\n{",
            segments=tuple(f'"{k}": "{v}"' for k, v in pairs),
            joiner=", ",
            after=f'}}\n\n\nKey: "{key}"\n',
            # begun for the model: an instruct model writes it in longer words, and its answer is cut off
            answer_prefix="The value associated with the specified key is: ",
        )
        return Sample(i, prompt, (value,), at / max(len(pairs) - 1, 1), {"nearest": pairs[-1][1]})

    def score(self, prediction: str, sample: Sample) -> float:
        return word_match(prediction, sample.answers[0])

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
