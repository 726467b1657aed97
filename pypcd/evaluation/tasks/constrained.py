"""Structured output: questions whose answer is a JSON object, written under the grammar of its JSON schema.

The everyday questions that have an object for an answer (JSON, a given schema, a tool's arguments), behind unrelated text;
RULER's needles among needles, where the value to be found stands in an object; and InfiniteBench's pairs of keys and values,
where a grammar allows nothing but a value. A prompt shows no object, so that the schema alone makes the answer one, or
("shown") two examples of the same form.

Knows llama.cpp's grammars of schemas, but no model.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from pypcd.evaluation.tasks import frozen
from pypcd.evaluation.tasks.everyday import KINDS, Asked, Kind, after, questions_of
from pypcd.evaluation.tasks.kv import KV
from pypcd.evaluation.tasks.ruler import NIAH
from pypcd.evaluation.tasks.sample import Sample, Task
from pypcd.prompt import Prompt

__all__ = ["CONSTRAINED", "ObjectKV", "ObjectNeedle", "Objects"]

SHOWN = 2  # examples

_NEEDLE = re.compile(r"One of the special magic numbers for (.+) is: (\d+)\.")


@dataclasses.dataclass(eq=False)
class Objects(frozen.Written[Asked]):
    """A kind of everyday questions with objects for answers.

    Attributes:
        shown: whether examples show the form of the answer.
    """

    kind: Kind
    shown: bool = False

    metric = "values"
    max_tokens = 64

    def __post_init__(self) -> None:
        self.name = f"constrained-{self.kind.name}" + ("-shown" if self.shown else "")

    @property
    def questions(self) -> Sequence[Asked]:
        return questions_of(self.kind)

    def score(self, prediction: str, sample: Sample) -> float:
        return share_of_values(prediction, sample.answers[0])

    def sample(self, i: int, asked: Asked, n_sentences: int) -> Sample:
        examples = asked.examples(SHOWN)[::-1] if self.shown else []
        (first, *others), answers = zip(*examples, (asked.question, asked.answer))
        *shown, question = [f"{frozen.paragraphs(asked.sentences(n_sentences))}\n\n{first}", *others]
        shots = tuple((text, after(text, answer)) for text, answer in zip(shown, answers))
        prompt = Prompt(shots=shots, after=question)
        return Sample(i, prompt, (asked.answer,), grammar=grammar_of(json.loads(asked.answer)))


@dataclasses.dataclass(eq=False)
class ObjectNeedle(NIAH):
    """Numbers among needles, asked for as an object with the asked word as its key.

    Attributes:
        shown: whether two of the other needles are asked for first, and answered.
    """

    shown: bool = False

    metric = "values"

    def score(self, prediction: str, sample: Sample) -> float:
        return share_of_values(prediction, sample.answers[0])

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        for sample in super().questions(n, size, seed):
            needles = {value: word for word, value in _NEEDLE.findall(sample.prompt.context)}
            value = sample.answers[0]
            word = needles.pop(value)
            rng = random.Random(f"constrained {seed} {sample.index} {size}")
            text = ""
            for other in rng.sample(sorted(needles), SHOWN if self.shown and len(needles) >= SHOWN else 0):
                text += f"{self._asked(needles[other])}{json.dumps({needles[other]: int(other)})}\n"
            record = {word: int(value)}
            prompt = sample.prompt.replace(after=text + self._asked(word), answer_prefix="")
            yield Sample(
                sample.index, prompt, (json.dumps(record),), sample.depth, sample.extra, grammar=grammar_of(record)
            )

    @staticmethod
    def _asked(word: str) -> str:
        return f"\nWhat is the special magic number for {word} mentioned in the provided text? Answer as JSON.\n"


@dataclasses.dataclass(frozen=True)
class ObjectKV(KV):
    """Pairs of keys and values; the grammar allows any value of their form, and nothing else."""

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        digits = ' "-" '.join(f"[0-9a-f]{{{n}}}" for n in self.groups)
        for sample in super().questions(n, size, seed):
            yield dataclasses.replace(sample, grammar=f"root ::= {digits}")


def grammar_of(record: Mapping[str, Any]) -> str:
    """The grammar of an object's schema, as llama.cpp makes it: its keys in their order, each with an integer or any text."""
    types = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in record.items()}
    return json_schema_to_gbnf(json.dumps({"type": "object", "properties": types, "required": list(types)}))


def share_of_values(prediction: str, answer: str) -> float:
    """The share of an object's values that an answer has; 0 where it is cut off, and no object."""
    right = json.loads(answer)
    try:
        given = json.loads(prediction)
    except ValueError:
        return 0.0
    if not isinstance(given, dict):
        return 0.0
    return sum(key in given and given[key] == value for key, value in right.items()) / len(right)


CONSTRAINED: tuple[Task, ...] = (
    *(Objects(kind, shown) for shown in (False, True) for kind in KINDS if kind.name in ("json", "schema", "tools")),
    ObjectNeedle("constrained-needle", "needles", "words", "numbers", 64),
    ObjectNeedle("constrained-needle-shown", "needles", "words", "numbers", 64, shown=True),
    ObjectKV("constrained-kv", max_tokens=16, groups=(4, 4)),
)
