"""Questions that RULER made itself: rows in its format, the parts of their prompts, lengths and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import Pieces
from hypothesis import given
from hypothesis import strategies as st

from pypcd.evaluation import TASKS, Plan, counts_of, task, tasks_of
from pypcd.evaluation.tasks.metrics import any_match
from pypcd.evaluation.tasks.ruler_files import RULER_TASKS, RulerFile
from pypcd.evaluation.tasks.sample import Sample

# RULER's names, in the order of its synthetic.yaml, and the longest answers of its constants.py
LONGEST = {"niah_single_1": 128, "niah_single_2": 128, "niah_single_3": 128, "niah_multikey_1": 128, "niah_multikey_2": 128, "niah_multikey_3": 128, "niah_multivalue": 128, "niah_multiquery": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}  # fmt: skip

ESSAY = (
    "I had a thought. One of the special magic numbers for old-hat is: 1234567. It was late. What is a hat? Nothing."
)
DOCUMENTS = (
    "Document 1:\nBats\nBats fly.\n\nDocument 2:\nHats\nThe following are given documents. Not so.\nHats do not."
)
WHICH = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

ROWS: dict[str, dict[str, Any]] = {
    "niah_single_2": {
        "index": 0,
        "input": "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the number afterwards.\n{ESSAY}\nWhat is the special magic number for old-hat mentioned in the provided text?",
        "outputs": ["1234567"],
        "length": 90,
        "answer_prefix": " The special magic number for old-hat mentioned in the provided text is",
    },
    "qa_1": {
        "index": 0,
        "input": f"{WHICH}\n\nThe following are given documents.\n\n{DOCUMENTS}\n\n{WHICH}\n\nQuestion: Who flies?",
        "outputs": ["Bats", "all bats"],
        "length": 90,
        "answer_prefix": " Answer:",
    },
}
ROW = json.dumps(ROWS["niah_single_2"])
OURS = {"niah_single_1": "niah-single-1", "niah_multikey_2": "niah-multikey-2", "niah_multikey_3": "niah-multikey-3", "niah_multivalue": "niah-multivalue", "niah_multiquery": "niah-multiquery", "vt": "vt", "cwe": "cwe", "fwe": "fwe"}  # fmt: skip


def _write(folder: Path, ruler_task: str, rows: list[dict[str, Any]]) -> Path:
    file = folder / ruler_task / "validation.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def _row(sample: Sample) -> dict[str, Any]:
    """A question as RULER writes it."""
    prompt = sample.prompt
    return {"input": prompt.text, "outputs": list(sample.answers), "answer_prefix": prompt.answer_prefix}


def test_there_are_rulers_thirteen_tasks(tmp_path: Path) -> None:
    assert tuple(LONGEST) == RULER_TASKS
    for name in RULER_TASKS:
        _write(tmp_path, name, [])
        made = task(f"ruler-{name}", data=tmp_path)
        assert made.name == f"ruler-{name}" and made.name in TASKS
        assert made.max_tokens == LONGEST[name] and made.may_exceed
        assert made.metric == ("accuracy" if name.startswith("qa") else "recall")


@pytest.mark.parametrize("name", OURS)
def test_a_row_is_the_question_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    asked = task(OURS[name]).samples(3, 2000, Pieces(), 0)
    data = _write(tmp_path, name, [_row(sample) for sample in asked])
    made = RulerFile(name, data)
    for k, (sample, other) in enumerate(zip(made.samples(3, 2000, Pieces(), 7), asked)):
        prompt = sample.prompt
        assert (prompt.text, prompt.answer_prefix) == (other.prompt.text, other.prompt.answer_prefix)
        assert prompt.context == other.prompt.context.strip()
        assert (prompt.before, prompt.shots) == (other.prompt.before, ())
        assert (sample.index, sample.answers, sample.gold) == (k, other.answers, other.gold)
        assert sample.extra == {"line": k + 1}
        assert made.score(sample.gold, sample) == 1.0
    assert made.one_text == task(OURS[name]).one_text
    words = name in ("cwe", "fwe")
    assert prompt.joiner == (" " if words else "\n") and len(prompt.segments) > 5


def test_needles_in_an_essay_are_its_sentences(tmp_path: Path) -> None:
    row = ROWS["niah_single_2"]
    (sample,) = RulerFile("niah_single_2", _write(tmp_path, "niah_single_2", [row])).samples(1, 200, Pieces(), 0)
    assert sample.prompt.text == row["input"] and sample.prompt.answer_prefix == row["answer_prefix"]
    assert sample.prompt.segments == tuple(ESSAY.split(". ")) and sample.prompt.joiner == ". "
    assert sample.prompt.before.endswith("afterwards.\n") and sample.prompt.after.startswith("\nWhat is the special")
    assert (sample.answers, sample.gold, sample.depth) == (("1234567",), " 1234567", None)


def test_answers_to_documents_are_alternatives(tmp_path: Path) -> None:
    row = ROWS["qa_1"]
    made = RulerFile("qa_1", _write(tmp_path, "qa_1", [row]))
    (sample,) = made.samples(1, 200, Pieces(), 0)
    assert sample.prompt.text == row["input"] and sample.prompt.answer_prefix == " Answer:"
    assert sample.prompt.after == f"\n\n{WHICH}\n\nQuestion: Who flies?"
    assert sample.gold == " Bats" and not made.one_text
    for prediction, score in (("all BATS do", 1.0), (" bats.", 1.0), ("Birds", 0.0), ("", 0.0)):
        assert made.score(prediction, sample) == score


def test_one_of_the_answers_is_enough_for_any_match_only() -> None:
    assert any_match("the second", ["first", "SECOND"]) == any_match("first, second", ["first", "second"]) == 1.0
    assert any_match("sec\x00ond", ["second"]) == any_match("", ["second"]) == 0.0


def test_four_values_are_recalled_one_by_one(tmp_path: Path) -> None:
    (asked,) = task("niah-multivalue").samples(1, 1000, Pieces(), 0)
    made = RulerFile("niah_multivalue", _write(tmp_path, "niah_multivalue", [_row(asked)]))
    (sample,) = made.samples(1, 1000, Pieces(), 0)
    for n in range(5):
        assert made.score(" and ".join(asked.answers[:n]), sample) == n / 4


def test_rows_of_older_versions_have_the_prefix_in_their_input(tmp_path: Path) -> None:
    row = dict(ROWS["niah_single_2"])
    row["input"] += row.pop("answer_prefix")
    (sample,) = RulerFile("niah_single_2", _write(tmp_path, "niah_single_2", [row])).samples(1, 200, Pieces(), 0)
    assert sample.prompt.text == row["input"] and sample.prompt.answer_prefix == ""
    assert sample.prompt.context == ESSAY


@pytest.mark.parametrize("name", OURS)
def test_rows_without_line_breaks_have_their_context(name: str, tmp_path: Path) -> None:
    """RULER's --remove_newline_tab."""
    (asked,) = task(OURS[name]).samples(1, 2000, Pieces(), 0)
    row = {**_row(asked), "input": " ".join(asked.prompt.text.split())}
    (sample,) = RulerFile(name, _write(tmp_path, name, [row])).samples(1, 2000, Pieces(), 0)
    assert sample.prompt.text == row["input"]
    assert sample.prompt.context == " ".join(asked.prompt.context.split())


def test_a_cell_is_the_whole_file_or_rows_drawn_from_the_seed(tmp_path: Path) -> None:
    rows = [{**ROWS["qa_1"], "outputs": [str(k)]} for k in range(30)]
    made = RulerFile("qa_2", _write(tmp_path, "qa_2", rows))

    def chosen(n: int, seed: int) -> list[int]:
        samples = made.samples(n, 200, Pieces(), seed)
        assert [sample.index for sample in samples] == list(range(n))
        assert [sample.extra["line"] - 1 for sample in samples] == [int(sample.answers[0]) for sample in samples]
        return [int(sample.answers[0]) for sample in samples]

    assert chosen(30, 0) == chosen(30, 1) == list(range(30))
    assert chosen(8, 0) == chosen(8, 0) == sorted(chosen(8, 0)) != chosen(8, 1)
    with pytest.raises(ValueError, match="n is 31; allowed: 1 to 30, the questions of ruler-qa_2"):
        chosen(31, 0)


@given(n_tokens=st.integers(1, 700), template=st.integers(0, 50))
def test_a_length_far_from_the_files_is_refused(
    tmp_path_factory: pytest.TempPathFactory, n_tokens: int, template: int
) -> None:
    """A run has room for twice its length, and a length is in the name of a cell."""
    folder, tokenizer = tmp_path_factory.mktemp("rows"), Pieces(template)
    short, long = (dict(ROWS["qa_1"]) for _ in range(2))
    long["input"] = long["input"].replace("Bats fly.", "Bats fly. " * 20)
    made = RulerFile("qa_1", _write(folder, "qa_1", [short] * 20 + [long]))
    needed = len(tokenizer.encode(long["input"] + " Answer:")) + template + 32
    if n_tokens <= 2 * needed <= 4 * n_tokens:
        assert made.samples(1, n_tokens, tokenizer, 0)
        return
    with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}, but .* takes {needed} in ") as error:
        made.samples(1, n_tokens, tokenizer, 0)
    allowed = f"allowed: {(needed + 1) // 2} to {2 * needed}, "
    assert allowed in str(error.value)


def test_data_goes_to_the_tasks_that_read_it(tmp_path: Path) -> None:
    _write(tmp_path / "data", "vt", [ROWS["qa_1"]] * 2)
    _write(tmp_path, "cwe", [ROWS["qa_1"]] * 3)
    plan = Plan("demo", ("kv-short", "ruler-vt", "ruler-cwe"), ("greedy",), (1024,), n=9, data=str(tmp_path))
    assert counts_of(plan) == {"kv-short": 9, "ruler-vt": 2, "ruler-cwe": 3}
    hashes = {made.data_sha256() for made in tasks_of(plan).values() if isinstance(made, RulerFile)}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("", "", "cwe/validation.jsonl or data/cwe/validation.jsonl is missing in"),  # the folder, which has neither
        ("nowhere", "", "there is no .*nowhere; give RULER's folder with cwe/validation.jsonl"),
        ("vt/validation.jsonl", ROW, "vt/validation.jsonl has the questions of vt, not of cwe"),
        ("vt.jsonl", ROW, "vt.jsonl has the questions of vt, not of cwe"),
        ("rows.jsonl", "\n", "rows.jsonl is empty"),
        ("rows.jsonl", ROW, r"line 1 of .*rows.jsonl is not a question of RULER's cwe: its input is not made by"),
        ("rows.jsonl", f"\n\n{ROW}", "line 3 of .*rows.jsonl is not a question of RULER's cwe"),
        ("rows.jsonl", f"{ROW}\n\nno json", "line 3 of .*rows.jsonl is not a row of RULER"),
        ("rows.jsonl", f"{ROW}\n{ROW[:-9]}", "line 2 of .*rows.jsonl is not a row of RULER"),
        ("rows.jsonl", f"{ROW}\n\n[]", "line 3 of .*rows.jsonl"),
        ("rows.jsonl", '{"input": "q"}', "line 1 of .*rows.jsonl"),
        ("rows.jsonl", '{"input": "q", "outputs": []}', "line 1 of .*rows.jsonl"),
        ("rows.jsonl", '{"input": "q", "outputs": "word"}', "line 1 of .*rows.jsonl"),
        ("rows.jsonl", '{"input": "q", "outputs": ["word", ""]}', "line 1 of .*rows.jsonl"),
        ("rows.jsonl", '{"input": "q", "outputs": [7]}', "line 1 of .*rows.jsonl"),
        ("rows.jsonl", '{"input": "q", "outputs": ["word"], "answer_prefix": null}', "line 1 of .*rows.jsonl"),
        ("rows.jsonl", '{"context": "c", "input": "q", "answers": ["LongBench"]}', "line 1 of .*rows.jsonl"),
    ],
)
def test_what_are_no_rows_of_a_task_is_named(name: str, content: str, named: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        RulerFile("cwe", tmp_path / name).samples(1, 200, Pieces(), 0)


def test_rows_may_be_in_a_file_of_any_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(ROW, encoding="utf-8")
    assert RulerFile("niah_single_2", file).n_questions == RulerFile("niah_single_3", str(file)).n_questions == 1
