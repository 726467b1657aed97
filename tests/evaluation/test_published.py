"""The questions of the published figures are still asked, word for word.

They are in data files, whose hashes are here, and are laid out at each length. Those hashes are of what the generators gave that first drew these questions, with the tokenizer of the demo model and with one of the tests.
"""

from __future__ import annotations

import bz2
import hashlib
import json
from collections.abc import Iterable

import pytest
from fake_tokenizer import Words

import pypcd
from pypcd.evaluation import GROUPS, ModelTokenizer, task
from pypcd.evaluation.tasks import frozen
from pypcd.evaluation.tasks.reading import READING
from pypcd.evaluation.tasks.sample import Sample, Tokenizer

CELLS = {  # tokenizer, group, length, questions of each task: the hash of all of them
    ("words", "everyday", 300, 100): "6f699a651f180145",
    ("words", "everyday", 600, 8): "b5ab63648c3472fe",
    ("words", "everyday-behind", 600, 8): "e604e77bf9bbeb81",
    ("words", "reading", 600, 8): "cd930afca8b03db9",
    ("words", "chats", 800, 8): "5950f3bdc280fb84",
    ("demo", "everyday", 600, 8): "37826e8de51ccf1b",
    ("demo", "everyday-behind", 600, 8): "a25a6f0691e02816",
    ("demo", "reading", 900, 8): "1840c6487765f7b1",
    ("demo", "chats", 800, 8): "2a3866c0faf1ee29",
}

TEXTS = {  # of reading, at the sizes of 600 tokens on SmolLM2 and on Gemma 3: kind, sentences: the hash of 50 questions
    ("prose", 35): "36898efc5431f60d",
    ("prose", 37): "7142f9672348e91b",
    ("conflict", 34): "402783b81b20cbfb",
    ("conflict", 35): "6cdf3b693c748866",
    ("keys", 46): "3734a5409e61ece6",
    ("keys", 47): "4b52379488808161",
    ("hops", 32): "2db28d071f0a2553",
    ("hops", 33): "fd374e2f6fcb676c",
    ("quote", 28): "63c8c64aaed52353",
    ("quote", 29): "4be5e6c2698035c4",
    ("story", 29): "35436bdaaf2a045e",
    ("story", 30): "9e12bb91edfdd9aa",
}


DATA = {
    "everyday": "ae196660b6114df7",
    "reading": "7e5ff4e857e5ca73",
    "chats": "356371833b3fb18d",
}  # of the files, uncompressed


def digest(samples: Iterable[Sample]) -> str:
    """The hash of all that decides on an answer and its score."""
    found = hashlib.sha256()
    for sample in samples:
        prompt = sample.prompt
        texts = ["".join(piece.text for piece in message) for _, message in prompt.turns]
        turns = list(zip(texts[::2], [*texts[1::2], ""]))  # questions with their answers
        parts = (turns, prompt.segments, prompt.joiner, prompt.answer_prefix)
        right = (
            sample.answers,
            sample.gold,
            sample.end,
            sample.depth,
            "",  # a grammar, which questions could have when the hashes were taken
            sorted(sample.extra.get("others", ())),
        )
        found.update(json.dumps([sample.index, parts, right]).encode())
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    llm = pypcd.Llama("demo", n_ctx=64, n_threads=1, n_threads_batch=1)
    return {"words": Words(), "demo": ModelTokenizer(llm)}


@pytest.mark.parametrize("file", DATA)
def test_the_data_are_the_published_ones(file: str) -> None:
    found = bz2.decompress((frozen.DATA / f"{file}.jsonl.bz2").read_bytes())
    assert hashlib.sha256(found).hexdigest()[:16] == DATA[file]


@pytest.mark.parametrize(("tokenizer", "group", "length", "n"), CELLS)
def test_published_questions_are_asked(
    tokenizers: dict[str, Tokenizer], tokenizer: str, group: str, length: int, n: int
) -> None:
    made = [task(name) for name in GROUPS.get(group, (group,))]
    samples = (sample for one in made for sample in one.samples(n, length, tokenizers[tokenizer], 0))
    assert digest(samples) == CELLS[tokenizer, group, length, n]


@pytest.mark.parametrize(("kind", "size"), TEXTS)
def test_published_texts_are_read(kind: str, size: int) -> None:
    (made,) = (one for one in READING if one.kind == kind)
    assert digest(made.questions(50, size)) == TEXTS[kind, size]
