"""LongBench's question answering tasks, as in the paper's Table 3.

LongBench (arXiv 2308.14508; github.com/THUDM/LongBench, folder LongBench): config/dataset2prompt.json has the
templates, config/dataset2maxlen.json the longest answers, pred.py the truncation, metrics.py and eval.py the metrics.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import pathlib
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from pypcd.errors import InputError, PCDError
from pypcd.evaluation.tasks.extras import require
from pypcd.evaluation.tasks.metrics import qa_f1, qa_f1_zh
from pypcd.evaluation.tasks.rows import drawn, read_rows
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell
from pypcd.prompt import Prompt

__all__ = ["LONGBENCH_TASKS", "LongBench"]

REPOSITORY = "zai-org/LongBench"  # formerly THUDM/LongBench; its loading script does not run with a recent `datasets`
KEPT = 500  # tokens kept for the template and the answer; published prompts have 3500, 7500, 15500 and 31500


@dataclasses.dataclass(frozen=True)
class _Format:
    """How a task's questions are put and scored. {context} and {input} stand for a row's fields."""

    template: str
    max_tokens: int
    score: Callable[[str, Sequence[str]], float] = qa_f1


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_BRIEFLY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"  # sic
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)

_FORMATS = {
    "narrativeqa": _Format(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        + _BRIEFLY
        + "Story: {context}\n\nNow, answer the question based on the story "
        + _BRIEFLY
        + "Question: {input}\n\nAnswer:",
        128,
    ),
    "qasper": _Format(
        "You are given a scientific article and a question. Answer the question "
        + _ARTICLE
        + "Article: {context}\n\n Answer the question based on the above article "
        + _ARTICLE
        + "Question: {input}\n\nAnswer:",
        128,
    ),
    "multifieldqa_en": _Format(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
    ),
    "multifieldqa_zh": _Format(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"
        "不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        qa_f1_zh,
    ),
    "hotpotqa": _Format(_PASSAGES, 32),
    "2wikimqa": _Format(_PASSAGES, 32),
    "musique": _Format(_PASSAGES, 32),
}

LONGBENCH_TASKS = tuple(_FORMATS)


@dataclasses.dataclass(frozen=True)
class LongBench:
    """A LongBench task.

    A cell (the task at a length) has all of its rows, in their order, or n rows drawn with the seed. A prompt of more than
    n_tokens - 500 tokens is cut in the middle, as published: the first and the last (n_tokens - 500) / 2 tokens, decoded
    and joined.

    Args:
        dataset: one of LONGBENCH_TASKS.
        data: where its rows are: a file <dataset>.jsonl, a folder with such files, or LongBench's data.zip. None:
            data.zip is downloaded from the Hugging Face hub, once.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder does not have the dataset.
    """

    dataset: str
    data: str | pathlib.Path | None = None

    metric = "F1"
    one_text = False
    stop = ""
    may_exceed = False

    def __post_init__(self) -> None:
        if self.data is not None:
            _find(self.dataset, pathlib.Path(self.data))

    @property
    def name(self) -> str:
        return f"longbench-{self.dataset}"

    @property
    def max_tokens(self) -> int:
        return _FORMATS[self.dataset].max_tokens

    @property
    def n_questions(self) -> int:
        return len(self._rows)

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        if n_tokens < KEPT + 2:
            raise InputError(
                f"n_tokens is {n_tokens}; allowed: at least {KEPT + 2}, since {KEPT} are kept for the template and the answer"
            )
        chosen = drawn(self._rows, n, self.name, seed)
        return [self._sample(i, row, n_tokens, tokenizer) for i, row in enumerate(chosen)]

    def score(self, prediction: str, sample: Sample) -> float:
        return _FORMATS[self.dataset].score(prediction, sample.answers)

    def data_sha256(self) -> str:
        """The SHA-256 of the rows' file, also if it is part of data.zip.

        Raises:
            PCDError, ValueError: as samples().
        """
        return hashlib.sha256(_content(self.dataset, self._path)).hexdigest()

    @functools.cached_property
    def _path(self) -> pathlib.Path:
        return _fetched() if self.data is None else _find(self.dataset, pathlib.Path(self.data))

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        stat = self._path.stat()
        return _read(self.dataset, self._path, stat.st_size, stat.st_mtime_ns)

    def _sample(self, i: int, row: dict[str, Any], n_tokens: int, tokenizer: Tokenizer) -> Sample:
        before, after = _FORMATS[self.dataset].template.split("{context}")
        whole = _in_parts(before, row["context"], after.replace("{input}", row["input"]))
        prompt = _truncated(whole, n_tokens - KEPT, tokenizer)
        needed = tokenizer.count(prompt) + self.max_tokens
        if needed > n_tokens:
            raise InputError(
                f"n_tokens is {n_tokens}, but question {i} of {self.name} takes {needed} after truncation: this model's "
                f"chat template is longer than the {KEPT} tokens that LongBench keeps for it and the answer; run without it"
            )
        extra = {"id": row.get("_id"), "truncated": prompt is not whole}
        answers = tuple(row["answers"])
        return Sample(i, prompt, answers, None, extra, gold=f" {answers[0]}")


def _truncated(prompt: Prompt, max_length: int, tokenizer: Tokenizer) -> Prompt:
    """The prompt as LongBench cuts it. It keeps its parts if the cut is inside the context."""
    tokens = tokenizer.encode(prompt.text)
    if len(tokens) <= max_length:
        return prompt
    half = max_length // 2
    head, tail = tokenizer.decode(tokens[:half]), tokenizer.decode(tokens[-half:])
    if not (head.startswith(prompt.before) and tail.endswith(prompt.after)):
        return Prompt(after=head + tail)
    return _in_parts(prompt.before, head[len(prompt.before) :] + tail[: len(tail) - len(prompt.after)], prompt.after)


def _in_parts(before: str, context: str, after: str) -> Prompt:
    """A prompt whose segments are the context's passages, if it has any, else its paragraphs, else its lines."""
    passages = re.split(r"(?<=[^\n])(\n+)(?=Passage \d+:\n)", context)  # passages and the line breaks between them
    if len(passages) > 1:
        joiner = min(passages[1::2], key=len)
        divided = itertools.zip_longest(passages[::2], passages[1::2], fillvalue=joiner)
        return Prompt(before, tuple(passage + gap[len(joiner) :] for passage, gap in divided), joiner, after)
    joiner = "\n\n" if "\n\n" in context.strip("\n") else "\n"
    return Prompt(before, tuple(re.split(rf"(?<=[^\n]){joiner}(?!\n*\Z)", context)), joiner, after)


def _find(dataset: str, path: pathlib.Path) -> pathlib.Path:
    """The file that has a dataset's rows: a .jsonl, or a .zip of several."""
    path = path.expanduser()
    if path.is_file():
        if path.stem != dataset and path.stem in LONGBENCH_TASKS:
            raise FileNotFoundError(
                f"{path} has the rows of {path.stem}, not of {dataset}; give {dataset}.jsonl, or a folder with both"
            )
        return path
    names = (f"{dataset}.jsonl", f"data/{dataset}.jsonl", "data.zip")
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        what = "there is no" if not path.exists() else f"{' or '.join(names)} is missing in"
        raise FileNotFoundError(
            f"{what} {path}; give LongBench's {dataset}.jsonl, its folder, or data.zip from "
            f"https://huggingface.co/datasets/{REPOSITORY}"
        )
    return found[0]


@functools.lru_cache(maxsize=len(LONGBENCH_TASKS))
def _read(dataset: str, path: pathlib.Path, n_bytes: int, changed: int) -> list[dict[str, Any]]:
    """The rows of a file, which is read once while it stays as it is: a run makes its tasks several times.

    Raises:
        ValueError: a line is not a row of LongBench; the message says which.
    """
    right = "a row of LongBench; allowed: a JSON object with context, input and a list of answers"
    rows = read_rows(_content(dataset, path), path, _is_row, right)
    for k, row in rows:
        other = row.get("dataset", dataset)
        if other != dataset and other in LONGBENCH_TASKS:
            raise InputError(
                f"line {k} of {path} is a row of {other}, not of {dataset}; give {dataset}.jsonl, or a folder with both"
            )
    if not rows:
        raise InputError(f"{path} is empty; give LongBench's data.zip, or {dataset}.jsonl from it")
    return [row for _, row in rows]


def _is_row(row: Any) -> bool:
    answers = row["answers"]
    texts = (row["context"], row["input"], *answers)
    return isinstance(answers, list) and bool(answers) and all(isinstance(text, str) for text in texts)


def _content(dataset: str, path: pathlib.Path) -> bytes:
    if path.suffix != ".zip":
        return path.read_bytes()
    name = f"data/{dataset}.jsonl"
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except (zipfile.BadZipFile, KeyError) as error:
        what = f"has no {name}" if isinstance(error, KeyError) else "is not a zip archive, or is incomplete"
        raise InputError(f"{path} {what}; give LongBench's data.zip, or {dataset}.jsonl from it") from error


def _fetched() -> pathlib.Path:
    """LongBench's data.zip from the Hugging Face hub, or from its cache.

    Raises:
        PCDError: huggingface_hub is not installed, or the hub cannot be reached.
    """
    hub = require("huggingface_hub", "hub", "downloading LongBench")
    try:
        return pathlib.Path(hub.hf_hub_download(REPOSITORY, "data.zip", repo_type="dataset"))
    except Exception as error:  # its own, or one of requests or httpx, depending on its version
        raise PCDError(
            f"LongBench could not be downloaded from the Hugging Face hub ({type(error).__name__}); without a network, get "
            f"https://huggingface.co/datasets/{REPOSITORY}/resolve/main/data.zip elsewhere and give it as the task's data"
        ) from error
