"""The demo: its questions are those of its published figures, its answers and candidates are the model's."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

import pypcd
from pypcd.cli import demo, main
from pypcd.evaluation import ModelTokenizer, Sample, task
from pypcd.evaluation.tasks.kv import KV_SHORT

PAIRS = (16, 40, 80, 120)


@pytest.fixture(scope="module")
def llm() -> pypcd.Llama:
    return pypcd.Llama("demo", n_ctx=2048, n_threads=1, n_threads_batch=1)


def digest(samples: list[Sample]) -> bytes:
    parts = ((s.prompt.text, s.answers[0], s.extra["nearest"], repr(s.depth)) for s in samples)
    return "".join("\0".join(part) for part in parts).encode()


def test_the_questions_are_those_of_the_published_figures(llm: pypcd.Llama) -> None:
    whole, tokenizer = hashlib.sha256(), ModelTokenizer(llm)
    for length, n_pairs in zip(demo.LENGTHS, PAIRS):
        for n, seed in ((75, 0), (demo.N_POOL, 1)):
            samples = task(demo.TASK).samples(n, length, tokenizer, seed)
            assert samples == list(KV_SHORT.questions(n, n_pairs, seed))
            whole.update(digest(samples))
    assert whole.hexdigest() == "3bdb5f69313e07e4179b250f4f346058079900035b0870b430dfe26aabb42efa"


def test_the_command_prints_figures_that_add_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LENGTHS", (120,))
    monkeypatch.setattr(demo, "N_POOL", 2)
    assert main(["demo", "--n", "3", "--threads", "1", "--pcd", "beta=0:gamma=30", "--json"]) == 0
    *cells, yours = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["method"] for cell in cells] == list(demo.METHODS)
    for cell in cells:
        assert cell["n"] == 3
        assert cell["difference"] == pytest.approx(100 * (cell["wins"] - cell["losses"]) / 3)
        assert cell["score"] == pytest.approx(cells[0]["score"] + cell["difference"])
    assert (yours["method"], yours["wins"], yours["losses"]) == ("yours", 0, 0)  # beta 0 is plain

    assert main(["demo", "--n", "3", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "was planted" in out and "says nothing about any other model" in out and out.count("control") >= 2
    assert out.count("unsure (on)") == 2  # in the table and below it
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["demo", "--n", "3", "--threads", "1"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split()[:99] == out.split()[:99]  # wrapped at words
    for cell in cells[1:]:
        figures = re.escape(f" {cell['score']:.1f}  {cell['difference']:+.1f} [")
        assert re.search(rf"{figures}.*\]( ~)? +{cell['wins']} / {cell['losses']}\n", out)


def test_examples_are_questions_that_greedy_gets_wrong_and_pcd_right_if_there_are_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LENGTHS", (1010,))  # greedy gets half of these wrong
    monkeypatch.setattr(demo, "METHODS", {"greedy": "greedy", "PCD": "pcd"})
    monkeypatch.setattr(demo, "N_EXAMPLES", 2)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["demo", "--n", "12", "--threads", "1"]) == 0
    found = re.findall(
        r"question (\d+): the right value is (\S+), the last one is (\S+)\. greedy answers '(.*)', PCD '(.*)'",
        capsys.readouterr().out,
    )
    wanted = list(KV_SHORT.questions(12, 80))
    assert len(found) == 2
    for number, right, last, plain, pcd in found:
        sample = wanted[int(number) - 1]
        assert (sample.answers[0], sample.extra["nearest"]) == (right, last)
        assert right not in plain and right in pcd


def test_a_question_can_be_had_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--n", "3", "--question", "5"]) == 0
    out, err = capsys.readouterr()
    wanted = list(KV_SHORT.questions(3, 40))[1]  # the fifth: second of the second length
    assert out == wanted.prompt.text
    assert wanted.answers[0] in err
    assert main(["demo", "--n", "3", "--question", "13"]) == 2
    assert "question 13 is none of the demo's; allowed: 1 to 12" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--n", "1"])
    assert "--n: '1'; allowed: an integer of at least 2" in capsys.readouterr().err
