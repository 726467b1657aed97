"""RULER's tasks as RULER itself makes them: its scripts write the questions, here they are asked and scored.

scripts/data/prepare.py of RULER (github.com/NVIDIA/RULER) writes <task>/validation.jsonl, a question in each line: "input",
the right "outputs" and "answer_prefix", the beginning of the answer. Older versions have that beginning at the end of the
input, where it stays. constants.py in scripts/data/synthetic has the longest answers, that in scripts/eval/synthetic the
metrics.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from pypcd.errors import InputError
from pypcd.evaluation.tasks.metrics import any_match, recall
from pypcd.evaluation.tasks.rows import FromFile, Row, check_length, drawn, found_in, read_rows
from pypcd.evaluation.tasks.ruler import listed, numbered
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell
from pypcd.prompt import Prompt, split_context

__all__ = ["RULER_TASKS", "RulerFile"]

FILE = "validation.jsonl"
PREPARED = "which scripts/data/prepare.py of https://github.com/NVIDIA/RULER makes"
A_ROW = "a row of RULER; allowed: a JSON object with input and a list of outputs, and with an answer_prefix or none"


@dataclasses.dataclass(frozen=True)
class _Format:
    """How the questions of some tasks are put and scored.

    Attributes:
        before, after: patterns of the text in front of the context and of that behind it; of several matches, the last
            one counts, since worked examples come first.
        gold: the right answers as one text.
        in_words: whether the context is a list of words.
    """

    before: str
    after: str
    max_tokens: int
    gold: Callable[[Sequence[str]], str]
    score: Callable[[str, Sequence[str]], float] = recall
    in_words: bool = False


_NEEDLES = _Format(r"I will quiz you about the \w+ afterwards\.", r"What (?:is|are all) the special magic", 128, listed)
_DOCUMENTS = _Format(
    r"The following are given documents\.",
    r"Answer the question based on the given documents\.",
    32,
    lambda answers: answers[0],
    any_match,
)

_FORMATS = {
    "niah_single_1": _NEEDLES,
    "niah_single_2": _NEEDLES,
    "niah_single_3": _NEEDLES,
    "niah_multikey_1": _NEEDLES,
    "niah_multikey_2": _NEEDLES,
    "niah_multikey_3": _NEEDLES,
    "niah_multivalue": _NEEDLES,
    "niah_multiquery": _NEEDLES,
    "vt": _Format(
        r"variable assignment hidden in the following text\.",
        r"Question: Find all variables that are assigned",
        30,
        " ".join,
    ),
    "cwe": _Format(
        r"Memorize the ones that appear most often\.",
        r"Question: What are the 10 most common words",
        120,
        lambda answers: " ".join(numbered(answers)),
        in_words=True,
    ),
    "fwe": _Format(
        r"Find the three most frequently appeared coded words\.",
        r"Question: Do not provide any explanation\.",
        50,
        listed,
        in_words=True,
    ),
    "qa_1": _DOCUMENTS,
    "qa_2": _DOCUMENTS,
}

RULER_TASKS = tuple(_FORMATS)


@dataclasses.dataclass(frozen=True)
class RulerFile(FromFile):
    """A task of RULER whose questions are in a file.

    A cell (the task at a length) has all of its rows, in their order, or n rows drawn with the seed. RULER has fixed how
    long they are, in another tokenizer's tokens or without a chat template. So n_tokens, the length that RULER was given,
    changes nothing: it names the cell, and the longest question may take from half to twice as many.

    Args:
        ruler_task: one of RULER_TASKS.
        data: where its rows are: the file, or a folder with <ruler_task>/validation.jsonl in it or in its folder "data".

    Raises:
        ValueError: data is None: nothing can be downloaded.
        FileNotFoundError: there is no such file or folder, or the folder does not have the task.
    """

    ruler_task: str
    data: str | pathlib.Path | None

    stop = ""
    may_exceed = True

    def __post_init__(self) -> None:
        self._find()

    @property
    def name(self) -> str:
        return f"ruler-{self.ruler_task}"

    @property
    def metric(self) -> str:
        return "recall" if self._format.score is recall else "accuracy"

    @property
    def max_tokens(self) -> int:
        return self._format.max_tokens

    @property
    def one_text(self) -> bool:
        return all(len(row["outputs"]) == 1 for _, row in self._rows)

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        samples = [self._sample(i, *row) for i, row in enumerate(drawn(self._rows, n, self.name, seed))]
        longest = self._sample(0, *max(self._rows, key=lambda row: len(row[1]["input"])))
        needed = self.max_tokens + max(tokenizer.count(sample.prompt) for sample in (longest, *samples))
        check_length(n_tokens, needed, self.name, self._path, "the length that RULER was given")
        return samples

    def score(self, prediction: str, sample: Sample) -> float:
        return self._format.score(prediction, sample.answers)

    @property
    def _format(self) -> _Format:
        return _FORMATS[self.ruler_task]

    def _find(self) -> pathlib.Path:
        right = f"{self.ruler_task}/{FILE}"
        give = f"RULER's folder with {right}, {PREPARED}"
        path = found_in(self.data, (right, f"data/{right}"), self.name, give)
        named = [name for name in (path.stem, path.absolute().parent.name) if name in RULER_TASKS]
        if named and self.ruler_task not in named:
            raise FileNotFoundError(
                f"{path} has the questions of {named[0]}, not of {self.ruler_task}; give {right}, or the folder with those of both"
            )
        return path

    def _parsed(self, content: bytes, path: pathlib.Path) -> list[Row]:
        return read_rows(content, path, _is_row, A_ROW, f"RULER's {FILE}, {PREPARED}")

    def _sample(self, i: int, line: int, row: dict[str, Any]) -> Sample:
        prompt = _in_parts(row["input"], self._format)
        if prompt is None:
            raise InputError(
                f"line {line} of {self._path} is not a question of RULER's {self.ruler_task}: its input is not made by that "
                f"task's template; give the folder with {self.ruler_task}/{FILE}"
            )
        answers = tuple(row["outputs"])
        prompt = prompt.replace(answer_prefix=row.get("answer_prefix", ""))
        return Sample(i, prompt, answers, None, {"line": line}, gold=f" {self._format.gold(answers)}")


def _in_parts(text: str, form: _Format) -> Prompt | None:
    """A question whose segments are the context's words, if it is a list of them, else its paragraphs, lines or sentences.

    None: the text is not made by the task's template.
    """
    before, after = (_last(pattern, text) for pattern in (form.before, form.after))
    if before is None or after is None or before.end() > after.start():
        return None
    between = text[before.end() : after.start()]
    context = between.strip()
    start = before.end() + between.index(context)
    segments, joiner = (tuple(context.split(" ")), " ") if form.in_words else split_context(context)
    return Prompt(text[:start], segments, joiner, text[start + len(context) :])


def _last(pattern: str, text: str) -> re.Match[str] | None:
    found = None
    for found in re.finditer(pattern, text):
        pass
    return found


def _is_row(row: Any) -> bool:
    outputs = row["outputs"]
    texts = (row["input"], *outputs)
    return (
        isinstance(outputs, list)
        and bool(outputs)
        and all(isinstance(text, str) and text for text in texts)
        and isinstance(row.get("answer_prefix", ""), str)
    )
