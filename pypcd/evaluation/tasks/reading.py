"""Reading: one question on a long text, whose answer is not one of many values of the same form.

What is said of people in running prose, lists with names as keys, a story of one day. A question has the texts of the published figures,
in a few sizes. A shorter prompt has sentences of the smallest one, with all that the answer needs; any other prompt has the next smaller one
with unrelated paragraphs. Question i is the same at every length, except where the question itself depends on the text (`reading-quote`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from pypcd.evaluation.tasks import frozen
from pypcd.evaluation.tasks.metrics import first_named, same_sentence
from pypcd.evaluation.tasks.sample import Sample
from pypcd.evaluation.tasks.size import Sized
from pypcd.prompt import Prompt

__all__ = ["READING", "Reading"]

QUOTED = 'The sentence is: "'


@dataclasses.dataclass(eq=False)
class Reading(Sized):
    """A kind of texts with questions.

    Attributes:
        is_list: whether a part of its texts is a line of a list and no paragraph.
    """

    kind: str
    is_list: bool = False
    max_tokens: int = 16

    metric = "accuracy"

    def __post_init__(self) -> None:
        self.name = f"reading-{self.kind}"

    @property
    def n_questions(self) -> int:
        return len(frozen.rows("reading", self.kind))

    @property
    def smallest(self) -> int:  # type: ignore[override]
        return max(len(row["needed"]) for row in frozen.rows("reading", self.kind))

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer's first line names the right answer before any wrong one; a quoted sentence must be the same."""
        if sample.prompt.answer_prefix.endswith(QUOTED):
            return same_sentence(prediction, sample.answers[0])
        return first_named(prediction, sample.answers[0], sample.extra["others"])

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        """n questions on texts of this number of sentences, or of lines and sentences."""
        rows = list(enumerate(frozen.rows("reading", self.kind)))
        for i, (at, row) in enumerate(frozen.in_order(rows, seed)[:n]):
            yield self._sample(i, at, row, size)

    def _sample(self, i: int, at: int, row: frozen.Row, size: int) -> Sample:
        fitting = [text for text in row["texts"] if text["size"] <= size]
        row = {**row, **(fitting[-1] if fitting else row["texts"][0])}
        text = [[row["sentences"][k] for k in paragraph] for paragraph in row["paragraphs"]]
        needed = {row["sentences"][k] for k in row["needed"]}
        rng = random.Random(f"{self.name} {at}")
        if size < row["size"]:
            text = _shortened(text, needed, size, rng)
        elif size > row["size"]:
            text = self._lengthened(text, size - row["size"], at, rng)
        parts = tuple(" ".join(paragraph) for paragraph in text)
        depth = None
        if row["at"] is not None:
            (place,) = (k for k, paragraph in enumerate(text) if row["sentences"][row["at"]] in paragraph)
            depth = place / max(len(text) - 1, 1)
        prompt = Prompt(
            row["before"], parts, "\n" if self.is_list else "\n\n", row["after"], answer_prefix=row["answer_prefix"]
        )
        return Sample(i, prompt, (row["answer"],), depth, row["extra"], gold=row["gold"], end=row["end"])

    def _lengthened(self, text: list[list[str]], n: int, at: int, rng: random.Random) -> list[list[str]]:
        """The text with n more sentences in new paragraphs behind its first one; those of a list stand before it."""
        own = {sentence for paragraph in text for sentence in paragraph}
        more = list(itertools.islice((sentence for sentence in frozen.unrelated(at) if sentence not in own), n))
        new = frozen.paragraphs(more)
        if self.is_list:
            return [*([f"{paragraph}\n"] for paragraph in new), *text]
        before: list[list[list[str]]] = [[] for _ in range(len(text) + 1)]
        for paragraph in new:
            before[rng.randint(1, len(text))].append([paragraph])
        return [one for k, new_ones in enumerate(before) for one in (*new_ones, *text[k : k + 1])]


def _shortened(text: list[list[str]], needed: set[str], n: int, rng: random.Random) -> list[list[str]]:
    """The n sentences that are needed most: all that the answer needs, then whole paragraphs in any order."""
    order = rng.sample(range(len(text)), len(text))
    others = [(k, j) for k in order for j, sentence in enumerate(text[k]) if sentence not in needed]
    n_needed = sum(sentence in needed for paragraph in text for sentence in paragraph)
    kept = set(others[: max(0, n - n_needed)])
    left = (
        [sentence for j, sentence in enumerate(paragraph) if sentence in needed or (k, j) in kept]
        for k, paragraph in enumerate(text)
    )
    return [paragraph for paragraph in left if paragraph]


READING = (
    Reading("prose"),
    Reading("conflict"),
    Reading("keys", is_list=True),
    Reading("hops"),
    Reading("quote", max_tokens=48),
    Reading("story"),
)
