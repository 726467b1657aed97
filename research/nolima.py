"""NoLiMa: a sentence (the needle) in a book, and a question that has hardly a word of it. What links them is known of the world,
such as the city in which a building stands.

NoLiMa (arXiv 2502.05167; github.com/adobe-research/NoLiMa): evaluation/run_tests.py reads the needle sets and makes the
questions, evaluation/async_evaluate.py scores the answers ("contains", as in all its run_config), data/book_haystack.py puts
the needle into a book. Its licence allows research that is not commercial, and nothing of it is here: needles, questions and
books come from files, and so does the text around them. A needle set without such a text gets one of ours.

The folder is given by `python -m research.eval … --data FOLDER`, or in the environment as NOLIMA, which other processes inherit.

Two things differ. The book is shown from its beginning in whole lines, while NoLiMa cuts at tokens. Our own random numbers draw the
questions, which are fewer than NoLiMa's: it asks each at 26 depths in each of five books.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import random
import re
from typing import Any

from pypcd import files
from pypcd.errors import InputError
from pypcd.evaluation.tasks import register
from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer
from pypcd.evaluation.tasks.size import check_cell, largest
from pypcd.prompt import Prompt

__all__ = ["NoLiMa"]

FILES = ("needlesets/needle_set.json", "data/needlesets/needle_set.json")
BOOKS = "haystack/rand_shuffle"
GIVE = (
    f"a folder with {FILES[0]} and {BOOKS} from https://huggingface.co/datasets/amodaresi/NoLiMa, or another needle set in that "
    "folder's needlesets"
)
A_ROW = (
    "a needle of NoLiMa; allowed: a JSON object with an id, a needle that has {CHAR}, a character_set, questions and tests with "
    "input_args, perhaps with a task_template that has {haystack} and {question}, and without distractors"
)
N_DEPTHS = 26
TEMPLATE = (
    "This is a part of a book:\n\n{haystack}\n\nAnswer the question about it. The book may not say the answer in the words of the "
    "question.\n\nQuestion: {question}\nAnswer only with the name."
)


@dataclasses.dataclass(frozen=True)
class NoLiMa(Task):
    """NoLiMa's questions, in turn, at one of 26 depths of a book. Question i is the same at every length: the same needle with
    the same name, at the same depth of the same book.

    Args:
        data: a folder with needlesets/needle_set.json and haystack/rand_shuffle, or another needle set in its needlesets;
            None: what the environment's NOLIMA names.
    """

    data: str | pathlib.Path | None = None

    name = "nolima"
    metric = "accuracy"
    max_tokens = 192

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        """As Task.samples().

        Raises:
            ValueError: there are no data, a needle is not one, or a book is too short.
            FileNotFoundError: there is no such file or folder, or the folder has no needle set, or there is no book.
        """
        check_cell(n, n_tokens)
        path = self._needle_set()
        books = _books_of(path)
        cases = [
            (entry, question, test)
            for entry in _entries(path)
            for question in entry["questions"]
            for test in entry["tests"]
        ]
        random.Random(f"{self.name} {seed}").shuffle(cases)
        made: list[Sample] = []
        size = 1
        for i in range(n):
            asked = _Asked(*cases[i % len(cases)], books, random.Random(f"{self.name} {seed} {i}"))
            make = functools.partial(asked.sample, i)
            size = largest(make, 1, n_tokens, self.max_tokens, tokenizer, near=size, most=len(asked.lines))
            made.append(make(size))
            if size == len(asked.lines):
                needed = tokenizer.count(made[-1].prompt) + self.max_tokens
                raise InputError(
                    f"n_tokens is {n_tokens}, but the whole of {asked.book} takes {needed}; allowed: less than {needed}, or longer "
                    f"books in {BOOKS}"
                )
        return made

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the prediction contains the name."""
        return float(sample.answers[0] in prediction)

    def _needle_set(self) -> pathlib.Path:
        data = self.data or os.environ.get("NOLIMA")
        if not data:
            raise InputError(f"nolima has no data; give {GIVE}")
        path = pathlib.Path(data).expanduser()
        found = [file for file in (path, *(path / name for name in FILES)) if file.is_file()]
        if not found:
            what = f"{' or '.join(FILES)} is missing in" if path.exists() else "there is no"
            raise FileNotFoundError(f"{what} {path}; give {GIVE}")
        return found[0]


def _books_of(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
    folder = path.absolute().parent.parent / BOOKS
    found = tuple(sorted(folder.glob("*.txt")))
    if not found:
        raise FileNotFoundError(f"there is no book (*.txt) in {folder}; give {GIVE}")
    return found


def _entries(path: pathlib.Path) -> list[dict[str, Any]]:
    """The needles of a set.

    Raises:
        ValueError: it is no JSON list of needles; the message says which is not.
    """
    try:
        entries = files.parsed(path.read_bytes())
    except ValueError:
        entries = None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path} is no JSON list of needles; give {GIVE}")
    for k, entry in enumerate(entries, 1):
        try:
            ok = _is_row(entry)
        except (ValueError, LookupError, TypeError, AttributeError):
            ok = False
        if not ok:
            raise InputError(f"row {k} of {path} is not {A_ROW}")
    return entries


class _Asked:
    """A question, with as many lines of its book as are wanted."""

    def __init__(
        self, entry: dict[str, Any], question: str, test: str, books: tuple[pathlib.Path, ...], rng: random.Random
    ) -> None:
        self.name: str = rng.choice(entry["character_set"])
        self.book = rng.choice(books)
        self.lines = _lines(self.book, self.book.stat().st_mtime_ns)
        self._depth = rng.randrange(N_DEPTHS) / (N_DEPTHS - 1)
        arguments = entry["tests"][test]["input_args"]
        self._needle, asked = (
            _filled(text, self.name, arguments) for text in (entry["needle"], entry["questions"][question])
        )
        system = entry.get("system_prompt") or ""
        before, after = entry.get("task_template", TEMPLATE).split("{haystack}")
        self._before = (system and f"{system}\n\n") + before.format(question=asked)
        self._after = after.format(question=asked)
        self._extra = {"id": entry["id"], "test": test, "question": question}

    def sample(self, i: int, size: int) -> Sample:
        lines = list(self.lines[:size])
        at = round(self._depth * size)
        if at:  # at the end of a line, as NoLiMa puts it
            lines[at - 1] += f" {self._needle}"
        else:
            lines.insert(0, f" {self._needle}")
        prompt = Prompt(self._before, tuple(lines), "\n", self._after)
        depth = max(at - 1, 0) / max(len(lines) - 1, 1)
        return Sample(i, prompt, (self.name,), depth, {**self._extra, "book": self.book.name}, gold=f" {self.name}")


def _filled(text: str, name: str, arguments: list[str]) -> str:
    text = text.replace("{CHAR}", name)
    for k, argument in enumerate(arguments, 1):
        text = text.replace(f"{{{k}}}", argument)
    return text


@functools.lru_cache(maxsize=32)
def _lines(path: pathlib.Path, changed: int) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").strip("\n").split("\n"))


def _is_row(row: Any) -> bool:
    names, needle = row["character_set"], row["needle"]
    questions, tests = row["questions"].values(), row["tests"].values()
    template = row.get("task_template", TEMPLATE)
    template.format(haystack="", question="")
    holes = max((int(hole) for text in (needle, *questions) for hole in re.findall(r"\{(\d+)\}", text)), default=0)
    texts = (row["id"], *names, *(one for test in tests for one in test["input_args"]), row.get("system_prompt", ""))
    return (
        isinstance(names, list)
        and all(isinstance(text, str) for text in texts)
        and all((names, questions, tests))
        and all(len(test["input_args"]) >= holes for test in tests)
        and "{CHAR}" in needle
        and template.count("{haystack}") == 1
        and "{question}" in template
        and "distractors" not in row
    )


register(NoLiMa())
