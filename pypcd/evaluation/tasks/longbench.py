"""LongBench's question answering tasks, as in the paper's Table 3, and LongBench v2.

LongBench (arXiv 2308.14508; github.com/THUDM/LongBench, folder LongBench): config/dataset2prompt.json has the
templates, config/dataset2maxlen.json the longest answers, pred.py the truncation, metrics.py and eval.py the metrics.
LongBench v2 (arXiv 2412.15204; the same repository): README.md has the format, prompts/0shot.txt the template, pred.py the
longest answer, the truncation and the metric.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from pypcd.errors import InputError, PCDError
from pypcd.evaluation.tasks.metrics import qa_f1, qa_f1_zh
from pypcd.evaluation.tasks.rows import FromFile, Row, drawn, found_in, read_rows
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.evaluation.tasks.size import check_cell
from pypcd.extras import require
from pypcd.prompt import Prompt

__all__ = ["LONGBENCH_TASKS", "LongBench", "LongBenchV2"]

REPOSITORY = "zai-org/LongBench"  # formerly THUDM/LongBench; its loading script does not run with a recent `datasets`
A_ROW = "a row of LongBench; allowed: a JSON object with context, input and a list of answers"
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
class LongBench(FromFile):
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
            self._find()

    @property
    def name(self) -> str:
        return f"longbench-{self.dataset}"

    @property
    def max_tokens(self) -> int:
        return _FORMATS[self.dataset].max_tokens

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        chosen = drawn(self._rows, n, self.name, seed)
        return [self._sample(i, row, n_tokens, tokenizer) for i, (_, row) in enumerate(chosen)]

    def score(self, prediction: str, sample: Sample) -> float:
        return _FORMATS[self.dataset].score(prediction, sample.answers)

    def _find(self) -> pathlib.Path:
        if self.data is None:
            return _fetched()
        names = (f"{self.dataset}.jsonl", f"data/{self.dataset}.jsonl", "data.zip")
        give = f"LongBench's {self.dataset}.jsonl, its folder, or data.zip from https://huggingface.co/datasets/{REPOSITORY}"
        path = found_in(self.data, names, self.name, give)
        if path.stem != self.dataset and path.stem in LONGBENCH_TASKS:
            raise FileNotFoundError(
                f"{path} has the rows of {path.stem}, not of {self.dataset}; give {self.dataset}.jsonl, or a folder with both"
            )
        return path

    def _content(self) -> bytes:
        if self._path.suffix != ".zip":
            return super()._content()
        name = f"data/{self.dataset}.jsonl"
        try:
            with zipfile.ZipFile(self._path) as archive:
                return archive.read(name)
        except (zipfile.BadZipFile, KeyError) as error:
            what = f"has no {name}" if isinstance(error, KeyError) else "is not a zip archive, or is incomplete"
            raise InputError(f"{self._path} {what}; give {self._whole}") from error

    def _parsed(self, content: bytes, path: pathlib.Path) -> list[Row]:
        rows = read_rows(content, path, _is_row, A_ROW, self._whole)
        for k, row in rows:
            other = row.get("dataset", self.dataset)
            if other != self.dataset and other in LONGBENCH_TASKS:
                raise InputError(
                    f"line {k} of {path} is a row of {other}, not of {self.dataset}; give {self.dataset}.jsonl, or a folder "
                    "with both"
                )
        return rows

    @property
    def _whole(self) -> str:
        return f"LongBench's data.zip, or {self.dataset}.jsonl from it"

    def _sample(self, i: int, row: dict[str, Any], n_tokens: int, tokenizer: Tokenizer) -> Sample:
        before, after = _FORMATS[self.dataset].template.split("{context}")
        whole = _in_parts(before, row["context"], after.replace("{input}", row["input"]))
        prompt = _fitted(whole, i, self.name, n_tokens, self.max_tokens, tokenizer)
        extra = {"id": row.get("_id"), "truncated": prompt is not whole}
        answers = tuple(row["answers"])
        return Sample(i, prompt, answers, None, extra, gold=f" {answers[0]}")


V2_FILE = "data.json"
V2_GIVE = f"LongBench v2's {V2_FILE}, or a folder with it; it is at https://huggingface.co/datasets/THUDM/LongBench-v2"
V2_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
V2_AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
V2_TEXTS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
V2_ROW = (
    f"a row of LongBench v2; allowed: a JSON object with the texts {', '.join(V2_TEXTS)}, and an answer from A to D"
)


@dataclasses.dataclass(frozen=True)
class LongBenchV2(FromFile):
    """LongBench v2: questions with four choices on long texts, without the authors' chain of thought.

    A cell (the task at a length) has all rows, in their order, or n rows drawn with the seed. A prompt of more than
    n_tokens - 500 tokens is cut in the middle, as a prompt of LongBench.

    Args:
        data: where the rows are: a JSON or JSONL file, or a folder with data.json.

    Raises:
        ValueError: data is None: nothing is downloaded.
        FileNotFoundError: there is no such file or folder, or the folder has no data.json.
    """

    data: str | pathlib.Path | None

    name = "longbench-v2"
    metric = "accuracy"
    max_tokens = 128
    one_text = False
    stop = ""
    may_exceed = False

    def __post_init__(self) -> None:
        self._find()

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        chosen = drawn(self._rows, n, self.name, seed)
        return [self._sample(i, row, n_tokens, tokenizer) for i, (_, row) in enumerate(chosen)]

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the first sentence of the form "The correct answer is (A)", or else of that form without parentheses, names the
        right choice. Asterisks do not count."""
        text = prediction.replace("*", "")
        begun = "The correct answer is "
        found = re.search(rf"{begun}\(([A-D])\)", text) or re.search(rf"{begun}([A-D])", text)
        return float(found is not None and found[1] == sample.answers[0])

    def _find(self) -> pathlib.Path:
        return found_in(self.data, (V2_FILE,), self.name, V2_GIVE)

    def _parsed(self, content: bytes, path: pathlib.Path) -> list[Row]:
        return read_rows(content, path, _is_v2_row, V2_ROW, V2_GIVE)

    def _sample(self, i: int, row: dict[str, Any], n_tokens: int, tokenizer: Tokenizer) -> Sample:
        texts = {name.replace("choice_", ""): row[name].strip() for name in V2_TEXTS}
        whole = _in_parts(V2_BEFORE, texts["context"], V2_AFTER.format(**texts))
        prompt = _fitted(whole, i, self.name, n_tokens, self.max_tokens, tokenizer)
        known = {key: row.get(key) for key in ("domain", "sub_domain", "difficulty", "length")}
        extra = {"id": row.get("_id"), "truncated": prompt is not whole, **known}
        gold = f"\n\nThe correct answer is ({row['answer']})"
        return Sample(i, prompt, (row["answer"],), None, extra, gold=gold)


def _is_v2_row(row: Any) -> bool:
    return all(isinstance(row[name], str) for name in V2_TEXTS) and row["answer"] in ("A", "B", "C", "D")


def _fitted(prompt: Prompt, i: int, name: str, n_tokens: int, n_answer: int, tokenizer: Tokenizer) -> Prompt:
    """Prompt i of a task, cut if it is too long.

    Raises:
        ValueError: n_tokens is too short, or the prompt and its answer do not fit in it.
    """
    if n_tokens < KEPT + 2:
        raise InputError(
            f"n_tokens is {n_tokens}; allowed: at least {KEPT + 2}, since {KEPT} are kept for the template and the answer"
        )
    cut = _truncated(prompt, n_tokens - KEPT, tokenizer)
    needed = tokenizer.count(cut) + n_answer
    if needed > n_tokens:
        raise InputError(
            f"n_tokens is {n_tokens}, but question {i} of {name} takes {needed} after truncation: this model's chat template is "
            f"longer than the {KEPT} tokens that LongBench keeps for it and the answer; run without it"
        )
    return cut


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


def _is_row(row: Any) -> bool:
    answers = row["answers"]
    texts = (row["context"], row["input"], *answers)
    return isinstance(answers, list) and bool(answers) and all(isinstance(text, str) for text in texts)


def _fetched() -> pathlib.Path:
    """LongBench's data.zip from the Hugging Face hub, or from its cache.

    Raises:
        PCDError: huggingface_hub is not installed, or the hub cannot be reached.
    """
    hub = require("huggingface_hub", "downloading LongBench")
    try:
        return pathlib.Path(hub.hf_hub_download(REPOSITORY, "data.zip", repo_type="dataset"))
    except Exception as error:  # its own, or one of requests or httpx, depending on its version
        raise PCDError(
            f"LongBench could not be downloaded from the Hugging Face hub ({type(error).__name__}); without a network, get "
            f"https://huggingface.co/datasets/{REPOSITORY}/resolve/main/data.zip elsewhere and give it as the task's data"
        ) from error
