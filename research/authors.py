"""The tasks of the paper's Table 2 as PCD's authors run them: `kv-authors` and `vt-authors`.

Their code is github.com/ZackZikaiXiao/Long_Contrastive_Decoding, benchmark/super_retrieval.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
from collections.abc import Iterator, Sequence

from pypcd.errors import InputError
from pypcd.evaluation.tasks import register
from pypcd.evaluation.tasks.kv import KV
from pypcd.evaluation.tasks.ruler import N_HOPS, NOISE, chain, hidden, names_of, tracking
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import Sized
from pypcd.prompt import Prompt

__all__ = ["KVAuthors", "VTAuthors"]

PAIRS_PER_4000 = 75


@dataclasses.dataclass(frozen=True)
class KVAuthors(KV):
    """Retrieve.KV with 75 pairs for each 4000 tokens of length, whatever the tokenizer: a prompt may be longer than its length."""

    name: str = "kv-authors"
    max_tokens: int = 100

    before = "Given the JSON object below, extract and return only the value corresponding to the specified key.\n\n"
    may_exceed = True

    def question(self, i: int, pairs: Sequence[tuple[str, str]], at: int) -> Sample:
        sample = super().question(i, pairs, at)
        asked = f"{sample.prompt.after}{sample.prompt.answer_prefix}. Return only the value and do not include any additional text in your response:"
        return dataclasses.replace(sample, prompt=sample.prompt.replace(after=asked, answer_prefix=""))

    def score(self, prediction: str, sample: Sample) -> float:
        return super().score(prediction.replace("</s>", " "), sample)

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        self.check(n, n_tokens)
        n_pairs = round(n_tokens * PAIRS_PER_4000 / 4000)
        if n_pairs < self.smallest:
            raise InputError(
                f"n_tokens is {n_tokens}; allowed: at least {math.ceil((self.smallest - 0.5) * 4000 / PAIRS_PER_4000)}, "
                f"which makes {self.smallest} pairs at {PAIRS_PER_4000} pairs in 4000 tokens"
            )
        return list(self.questions(n, n_pairs, seed))


class VTAuthors(Sized):
    """Variable tracking: RULER of 2024, with the authors' request for a list and their one example turn.

    RULER of 2024 ends every noise sentence with a newline and joins all with spaces; "assgined" is its spelling. The
    authors do not give the number of chains in their questions; here it is RULER's default, one.
    """

    name = "vt-authors"
    metric = "F1"
    max_tokens = 300
    smallest = N_HOPS + 2  # with fewer noise sentences, RULER of 2024 splits them

    def score(self, prediction: str, sample: Sample) -> float:
        """F1 of a comma-separated list, as the authors score it (variable_trainking_eval.py).

        Items must equal a reference, upper or lower case. Precision is over all items, so a repeated item lowers it.
        """
        items = [item.strip().lower() for item in re.sub(r"[\x00-\x1f]", "\n", prediction).split(",")]
        n_right = sum(reference.lower() in items for reference in sample.answers)
        return 2 * n_right / (len(items) + len(sample.answers))

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        rng = random.Random(f"vt {seed} {size}")
        for i in range(n):
            value, names = rng.randrange(10000, 99999), names_of(rng, 5)
            before, after, answer_prefix = _tracking(value)
            prompt = Prompt(
                before="\n\n" + before,
                segments=hidden(rng, [NOISE + "\n"] * size, chain(names, value)),
                joiner=" ",
                after=f"{after}{answer_prefix} Your response should consist solely of listing all the variables in the "
                "specified format, such as 'AAA, BBB, CCC, DDD, EEE'; do not include any additional text in your "
                "response.",
                shots=(_shot(),),
            )
            yield Sample(i, prompt, names, gold=", ".join(names))  # as in the example turn


def _tracking(value: int) -> tuple[str, str, str]:
    before, after, answer_prefix = tracking(value)
    return before, after, answer_prefix.replace("assigned", "assgined")


@functools.cache
def _shot() -> tuple[str, str]:
    """The authors' example turn; in it the template's line breaks are written as \\n, and "above." is missing."""
    first, second = ("ZUG", "GOC", "TVZ", "NDR", "YEN"), ("NCQ", "VNF", "JEY", "XXP", "MCJ")
    a, b = iter(chain(first, 97498)), iter(chain(second, 47194))
    noise = NOISE + "\n"
    context = " ".join(
        [noise] * 3
        + [next(a), next(b), next(a), noise, next(b), next(a), noise, next(b), noise, next(b), noise, next(a)]
        + [noise] * 2
        + [next(b), next(a), noise]
    )
    before, after, answer_prefix = _tracking(47194)
    begin, end = (text.replace("\n", r"\n") for text in (before, after.removesuffix(" above.")))
    return begin + context + end + answer_prefix, ", ".join(second)


register(KVAuthors())
register(VTAuthors())
