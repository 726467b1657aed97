"""MRCR of OpenAI: a long conversation with several equal requests, such as for a poem, and one of the answers word for word.

The data set's card (huggingface.co/datasets/openai/mrcr) has the format and the metric. A row's "prompt" is the text of a JSON
list of messages, of which the last asks to repeat one of these answers behind a given random string. The rows have from some
4,000 to a million tokens. They are in Parquet files, which have to be made JSONL.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import pathlib
from typing import Any

from pypcd.errors import InputError
from pypcd.evaluation.tasks.rows import FromFile, Row, check_length, drawn, found_in, read_rows
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell
from pypcd.prompt import Prompt

__all__ = ["MRCR"]

FILE = "mrcr.jsonl"
GIVE = (
    f"a JSONL file made of https://huggingface.co/datasets/openai/mrcr, or a folder with it as {FILE} (docs/evaluate.md has the "
    "command)"
)
TEXTS = ("prompt", "answer", "random_string_to_prepend")
A_ROW = f"a row of MRCR; allowed: a JSON object with the texts {', '.join(TEXTS)}"
ROLES = ("system", "developer", "user", "assistant")
MESSAGES = (
    "a JSON list of messages, each with a role (user or assistant; system and developer are read as user) and a content, of "
    "which the first and the last are the user's"
)


@dataclasses.dataclass(frozen=True)
class MRCR(FromFile):
    """MRCR, as its authors score it.

    A cell (the task at a length) has all rows of the file, in their order, or n rows drawn with the seed. So n_tokens changes
    nothing: it names the cell, and the longest question may take from half to twice as many.

    Messages of the user that follow each other are one, with an empty line between them, since chat templates want turns. Each
    ends with a newline, which sets it apart in plain text.

    Args:
        data: where the rows are: a JSON or JSONL file, or a folder with mrcr.jsonl.

    Raises:
        ValueError: data is None: nothing is downloaded.
        FileNotFoundError: there is no such file or folder, or the folder has no mrcr.jsonl.
    """

    data: str | pathlib.Path | None

    name = "mrcr"
    metric = "ratio"
    max_tokens = 2048
    one_text = False
    stop = ""
    may_exceed = True

    def __post_init__(self) -> None:
        self._find()

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        samples = [self._sample(i, *row) for i, row in enumerate(drawn(self._rows, n, self.name, seed))]
        longest = self._sample(0, *max(self._rows, key=lambda row: len(row[1]["prompt"])))
        needed = self.max_tokens + max(tokenizer.count(sample.prompt) for sample in (longest, *samples))
        check_length(n_tokens, needed, self.name, self._path, "the length that the rows were chosen for")
        return samples

    def score(self, prediction: str, sample: Sample) -> float:
        """How alike the prediction and the answer are behind the random string; 0 if the prediction does not begin with it."""
        begun = sample.extra["begun"]
        if not prediction.startswith(begun):
            return 0.0
        given, right = (text.removeprefix(begun) for text in (prediction, *sample.answers))
        return difflib.SequenceMatcher(None, given, right).ratio()

    def _find(self) -> pathlib.Path:
        return found_in(self.data, (FILE,), self.name, GIVE)

    def _parsed(self, content: bytes, path: pathlib.Path) -> list[Row]:
        return read_rows(content, path, _is_row, A_ROW, GIVE)

    def _sample(self, i: int, k: int, row: dict[str, Any]) -> Sample:
        turns = _turns(row["prompt"])
        if turns is None:
            raise InputError(f"the prompt of row {k} of {self._path} is no conversation; allowed: {MESSAGES}")
        *questions, last = turns[::2]
        answers = turns[1::2]
        prompt = Prompt(shots=tuple((f"{asked}\n", said) for asked, said in zip(questions, answers)), after=f"{last}\n")
        begun, answer = row["random_string_to_prepend"], row["answer"]
        places = [at for at, said in enumerate(answers) if begun + said == answer]
        depth = places[0] / max(len(answers) - 1, 1) if len(places) == 1 else None
        extra = {"row": k, "begun": begun, "n_needles": row.get("n_needles")}
        return Sample(i, prompt, (answer,), depth, extra)


def _is_row(row: Any) -> bool:
    return all(isinstance(row[name], str) and row[name] for name in TEXTS)


def _turns(text: str) -> list[str] | None:
    """The texts of a conversation: the user's, the assistant's and so on up to the user's last; None if it is none."""
    try:
        said = [(message["role"], message["content"]) for message in json.loads(text)]
    except (ValueError, KeyError, TypeError):
        return None
    if not all(role in ROLES and isinstance(one, str) for role, one in said):
        return None
    turns = [
        (by_user, "\n\n".join(one for _, one in group))
        for by_user, group in itertools.groupby(said, lambda message: message[0] != "assistant")
    ]
    return [one for _, one in turns] if turns and turns[0][0] and turns[-1][0] else None
