"""The demo: its questions are those of its published figures."""

from __future__ import annotations

import hashlib

import pytest

import pypcd
from pypcd.cli import demo, main
from pypcd.evaluation import ModelTokenizer, Sample, task
from pypcd.evaluation.tasks.kv import KV_SHORT

PAIRS = (16, 40, 80, 120)


def digest(samples: list[Sample]) -> bytes:
    parts = ((s.prompt.text, s.answers[0], s.extra["nearest"], repr(s.depth)) for s in samples)
    return "".join("\0".join(part) for part in parts).encode()


def test_the_questions_are_those_of_the_published_figures() -> None:
    tokenizer = ModelTokenizer(pypcd.Llama("demo", n_ctx=2048, n_threads=1, n_threads_batch=1))
    whole = hashlib.sha256()
    for length, n_pairs in zip(demo.LENGTHS, PAIRS):
        for n, seed in ((demo.N, 0), (12, 1)):  # and those that the control takes its prior from
            samples = task("kv-short").samples(n, length, tokenizer, seed)
            assert samples == list(KV_SHORT.questions(n, n_pairs, seed))
            whole.update(digest(samples))
    assert whole.hexdigest() == "3bdb5f69313e07e4179b250f4f346058079900035b0870b430dfe26aabb42efa"


def test_a_question_can_be_had_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "77"]) == 0
    out, err = capsys.readouterr()
    wanted = list(KV_SHORT.questions(75, 40))[1]  # the second of the second length
    assert out == wanted.prompt.text
    assert wanted.answers[0] in err
    assert main(["demo", "301"]) == 2
    assert "question 301 is none of the demo's; allowed: 1 to 300" in capsys.readouterr().err
