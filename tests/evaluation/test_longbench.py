"""LongBench's templates, truncation and scores, on rows in its published format."""

from __future__ import annotations

import json
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import Pieces
from hypothesis import given
from hypothesis import strategies as st

from pypcd.errors import PCDError
from pypcd.evaluation.tasks.longbench import LONGBENCH_TASKS, LongBench, LongBenchV2, _in_parts, _truncated
from pypcd.prompt import Prompt

# as config/dataset2prompt.json has them
PASSAGES = "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
TEMPLATES = {
    "narrativeqa": "You are given a story, which can be either a novel or a movie script, and a question. Answer the question asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
    "qasper": 'You are given a scientific article and a question. Answer the question as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:',
    "multifieldqa_en": "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
    "multifieldqa_zh": "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
    "hotpotqa": PASSAGES,
    "2wikimqa": PASSAGES,
    "musique": PASSAGES,
}
LONGEST = {"narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64, "hotpotqa": 32, "2wikimqa": 32, "musique": 32}  # fmt: skip


def _row(context: str = "Some {text}.", question: str = "What {is} it?", **changes: Any) -> dict[str, Any]:
    row = {
        "input": question,
        "context": context,
        "answers": ["text", "a text"],
        "length": 2,
        "dataset": "x",
        "language": "en",
        "all_classes": None,
        "_id": "0a",
    }
    return {**row, **changes}


ROW = json.dumps(_row())


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _cut(text: str, max_length: int, tokenizer: Pieces) -> str:
    tokens = tokenizer.encode(text)
    if len(tokens) <= max_length:
        return text
    half = int(max_length / 2)
    return tokenizer.decode(tokens[:half]) + tokenizer.decode(tokens[-half:])


@pytest.mark.parametrize("dataset", LONGBENCH_TASKS)
def test_the_prompt_is_longbenchs(dataset: str, tmp_path: Path) -> None:
    assert set(LONGBENCH_TASKS) == set(TEMPLATES)
    task = LongBench(dataset, _write(tmp_path / f"{dataset}.jsonl", [_row()]))
    (sample,) = task.samples(1, 4000, Pieces(), 0)
    assert sample.prompt.text == TEMPLATES[dataset].format(context="Some {text}.", input="What {is} it?")
    assert sample.prompt.segments == ("Some {text}.",)
    assert sample.prompt.before + "{context}" == TEMPLATES[dataset].split("{context}")[0] + "{context}"
    assert not sample.prompt.answer_prefix and not sample.prompt.shots
    assert sample.answers == ("text", "a text")
    assert sample.depth is None
    assert sample.extra == {"id": "0a", "truncated": False}
    assert task.max_tokens == LONGEST[dataset]
    assert task.name == f"longbench-{dataset}"


text = st.text(st.sampled_from("ab é{}:1\n\n\n漢"), max_size=300)


@given(text, text, st.integers(2, 400))
def test_truncation_is_the_published_one_and_parts_stay_parts_where_they_can(
    context: str, question: str, max_length: int
) -> None:
    tokenizer = Pieces()
    whole = _in_parts("Read this.\n\n", context, f"\n\nQuestion: {question}\nAnswer:")
    assert whole.text == f"Read this.\n\n{context}\n\nQuestion: {question}\nAnswer:"
    cut = _truncated(whole, max_length, tokenizer)
    assert cut.text == _cut(whole.text, max_length, tokenizer)
    n_before, n_after = (len(tokenizer.encode(part)) for part in (whole.before, whole.after))
    if max_length // 2 > max(n_before, n_after):
        assert (cut.before, cut.after) == (whole.before, whole.after)
        assert cut.segments
    if cut.text == whole.text:
        assert cut == whole


def test_a_cut_in_the_question_leaves_no_parts() -> None:
    whole = _in_parts("Before. ", "context " * 20, " after " * 30)
    cut = _truncated(whole, 20, Pieces())
    assert cut == Prompt(after=_cut(whole.text, 20, Pieces()))


@pytest.mark.parametrize(
    ("context", "segments", "joiner"),
    [
        ("Passage 1:\nA\nx\nPassage 2:\nB\ny\n", ("Passage 1:\nA\nx", "Passage 2:\nB\ny\n"), "\n"),
        ("Passage 1:\nA\n\nx\n\nPassage 2:\nB\n\nPassage 10:\nC", ("Passage 1:\nA\n\nx", "Passage 2:\nB", "Passage 10:\nC"), "\n\n"),
        ("Passage 1:\nA\n\nPassage 2:\nB\nPassage 3:\nC", ("Passage 1:\nA\n", "Passage 2:\nB", "Passage 3:\nC"), "\n"),
        ("see Passage 2:\nA\n\nb", ("see Passage 2:\nA", "b"), "\n\n"),
        ("one\ntwo\n\nthree\n\n\nfour", ("one\ntwo", "three", "\nfour"), "\n\n"),
        ("one\n\ntwo\n\n", ("one", "two\n\n"), "\n\n"),
        ("\n\none\ntwo\n", ("\n\none", "two\n"), "\n"),
        ("one", ("one",), "\n"),
        ("", ("",), "\n"),
    ],
)  # fmt: skip
def test_segments_are_passages_or_paragraphs(context: str, segments: tuple[str, ...], joiner: str) -> None:
    prompt = _in_parts("<", context, ">")
    assert (prompt.segments, prompt.joiner) == (segments, joiner)
    assert prompt.text == f"<{context}>"


@given(
    st.text(st.sampled_from("ab \n"), max_size=40), st.lists(st.text(st.sampled_from("ab\n"), max_size=12), max_size=5)
)
def test_parts_make_the_context(first: str, passages: list[str]) -> None:
    context = first + "".join(f"\nPassage {k}:\n{passage}" for k, passage in enumerate(passages))
    prompt = _in_parts("", context, "")
    assert prompt.text == context
    assert all(prompt.segments) or not context


def test_prompts_are_cut_to_500_tokens_less_than_allowed(tmp_path: Path) -> None:
    long = _row(context="\n".join(f"line {k} of the story" for k in range(900)))
    task = LongBench("narrativeqa", _write(tmp_path / "narrativeqa.jsonl", [long]))
    tokenizer = Pieces(template=100)
    (sample,) = task.samples(1, 4000, tokenizer, 0)
    whole = TEMPLATES["narrativeqa"].format(**long)
    assert sample.prompt.text == _cut(whole, 3500, tokenizer)
    assert tokenizer.count(sample.prompt) - tokenizer.template in (3499, 3500)
    assert sample.extra["truncated"] is True
    assert sample.prompt.after.startswith("\n\nNow, answer the question")
    assert len(sample.prompt.segments) > 300

    with pytest.raises(ValueError, match=r"question 0 of longbench-narrativeqa takes 4\d\d\d"):
        task.samples(1, 4000, Pieces(template=400), 0)
    with pytest.raises(ValueError, match="n_tokens is 501; allowed: at least 502"):
        task.samples(1, 501, tokenizer, 0)


def test_a_cell_is_the_whole_task_or_rows_drawn_from_the_seed(tmp_path: Path) -> None:
    rows = [_row(question=f"{k}?", _id=str(k)) for k in range(30)]
    task = LongBench("musique", _write(tmp_path / "musique.jsonl", rows))

    def chosen(n: int, seed: int) -> list[int]:
        samples = task.samples(n, 4000, Pieces(), seed)
        assert [sample.index for sample in samples] == list(range(n))
        return [int(sample.extra["id"]) for sample in samples]

    assert chosen(30, 0) == chosen(30, 1) == list(range(30))
    assert chosen(8, 0) == chosen(8, 0) == sorted(chosen(8, 0)) != chosen(8, 1)
    with pytest.raises(ValueError, match="n is 31; allowed: 1 to 30, the questions of longbench-musique"):
        chosen(31, 0)


def test_answers_are_scored_by_the_tasks_metric(tmp_path: Path) -> None:
    for dataset, prediction, score in (("qasper", "The text", 1.0), ("multifieldqa_zh", "The text", 2 / 3)):
        task = LongBench(dataset, _write(tmp_path / f"{dataset}.jsonl", [_row()]))
        (sample,) = task.samples(1, 4000, Pieces(), 0)
        assert task.score(prediction, sample) == pytest.approx(score)


def test_rows_come_from_a_file_a_folder_or_the_archive(tmp_path: Path) -> None:
    file = _write(tmp_path / "mine.jsonl", [_row()])
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    _write(folder / "data" / "musique.jsonl", [_row()])
    _write(folder / "hotpotqa.jsonl", [_row()])
    archive = tmp_path / "zipped" / "data.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as made:
        made.write(file, "data/musique.jsonl")
    for dataset, data in (
        ("musique", file),
        ("musique", folder),
        ("hotpotqa", str(folder)),
        ("musique", archive),
        ("musique", archive.parent),
    ):
        assert LongBench(dataset, data).samples(1, 4000, Pieces(), 0)[0].extra["id"] == "0a"
    with pytest.raises(ValueError, match="data.zip has no data/qasper.jsonl"):
        LongBench("qasper", archive).samples(1, 4000, Pieces(), 0)


def test_rows_may_be_in_a_file_of_any_name(tmp_path: Path) -> None:
    file = _write(tmp_path / "rows.jsonl", [_row(dataset="hotpotqa")])
    assert LongBench("hotpotqa", file).n_questions == 1


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("", "", "qasper.jsonl or data/qasper.jsonl or data.zip"),  # the folder, which has none of these
        ("nowhere", "", "nowhere; give .*qasper.jsonl"),
        ("data.zip", "PK half an archive", "data.zip is not a zip archive"),
        ("qasper.jsonl", "\n", "qasper.jsonl is empty"),
        ("hotpotqa.jsonl", ROW, "hotpotqa.jsonl .*not of qasper"),
        ("rows.jsonl", ROW.replace('"x"', '"hotpotqa"'), "line 1 of .*rows.jsonl .*hotpotqa, not of qasper"),
        ("qasper.jsonl", f"{ROW}\n\nno json", "line 3 of .*qasper.jsonl"),
        ("qasper.jsonl", f"{ROW}\n\n[]", "line 3 of .*qasper.jsonl"),
        ("qasper.jsonl", ROW + '\n\n{"context": "c", "input": "q"}', "line 3 of .*qasper.jsonl"),
        ("qasper.jsonl", ROW + '\n\n{"context": "c", "input": "q", "answers": []}', "line 3 of .*qasper.jsonl"),
    ],
)
def test_what_are_no_rows_of_a_task_is_named(name: str, content: str, named: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        LongBench("qasper", tmp_path / name).samples(1, 4000, Pieces(), 0)


def test_a_separator_of_lines_within_a_row_is_text(tmp_path: Path) -> None:
    path = _write(tmp_path / "qasper.jsonl", [_row(context="one\u2028two\x85three")])
    assert LongBench("qasper", path).samples(1, 4000, Pieces(), 0)[0].prompt.context == "one\u2028two\x85three"


def test_without_data_the_archive_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("data/2wikimqa.jsonl", json.dumps(_row()) + "\n")
    asked = []

    def fetch(repository: str, name: str, *, repo_type: str) -> str:
        asked.append((repository, name, repo_type))
        return str(archive)

    hub = types.SimpleNamespace(hf_hub_download=fetch)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    task = LongBench("2wikimqa")
    assert not asked
    assert task.samples(1, 4000, Pieces(), 0) == task.samples(1, 4000, Pieces(), 0)
    assert asked == [("zai-org/LongBench", "data.zip", "dataset")]


def test_without_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    for hub, named in (
        (types.SimpleNamespace(hf_hub_download=fail), "ConnectionError.*data.zip"),
        (None, r"pip install huggingface-hub"),
    ):
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        with pytest.raises(PCDError, match=named):
            LongBench("qasper").samples(1, 4000, Pieces(), 0)


# -- version 2 ----------------------------------------------------------------------------------------------------------

# as prompts/0shot.txt has it
V2_TEMPLATE = """Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""


def _v2_row(**changes: Any) -> dict[str, Any]:
    row = {
        "_id": "66f3",
        "domain": "Single-Document QA",
        "sub_domain": "Legal",
        "difficulty": "hard",
        "length": "short",
        "question": " Who {pays}?\n",
        "choice_A": "The tenant ",
        "choice_B": "The {owner}",
        "choice_C": "Both",
        "choice_D": "\tNobody",
        "answer": "B",
        "context": "\n\nThe tenant pays.\n\nThe {owner} pays it back.\n",
    }
    return {**row, **changes}


V2_ROW = json.dumps(_v2_row())


def _v2_text(row: dict[str, Any]) -> str:
    text = V2_TEMPLATE.replace("$DOC$", row["context"].strip()).replace("$Q$", row["question"].strip())
    for letter in "ABCD":
        text = text.replace(f"$C_{letter}$", row[f"choice_{letter}"].strip())
    return text


def _v2(folder: Path, rows: list[dict[str, Any]]) -> LongBenchV2:
    (folder / "data.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return LongBenchV2(folder)


def test_the_prompt_is_that_of_version_2(tmp_path: Path) -> None:
    (sample,) = _v2(tmp_path, [_v2_row()]).samples(1, 4000, Pieces(), 0)
    assert sample.prompt.text == _v2_text(_v2_row()) and not sample.prompt.answer_prefix
    assert sample.prompt.segments == ("The tenant pays.", "The {owner} pays it back.")
    assert sample.answers == ("B",) and sample.depth is None
    assert sample.extra == {
        "id": "66f3",
        "truncated": False,
        "domain": "Single-Document QA",
        "sub_domain": "Legal",
        "difficulty": "hard",
        "length": "short",
    }


def test_prompts_of_version_2_are_cut_in_the_middle(tmp_path: Path) -> None:
    row = _v2_row(context="\n".join(f"line {k} of the contract" for k in range(900)))
    made, tokenizer = _v2(tmp_path, [row]), Pieces(template=100)
    (sample,) = made.samples(1, 4000, tokenizer, 0)
    assert sample.prompt.text == _cut(_v2_text(row), 3500, tokenizer)
    assert sample.extra["truncated"] is True and len(sample.prompt.segments) > 300
    with pytest.raises(ValueError, match="question 0 of longbench-v2 takes 40"):
        made.samples(1, 4000, Pieces(template=400), 0)
    with pytest.raises(ValueError, match="n_tokens is 501; allowed: at least 502"):
        made.samples(1, 501, tokenizer, 0)


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("The correct answer is (B).", "B"),
        ("The correct answer is B", "B"),
        ("**The correct answer is (**B**)**", "B"),
        ("It depends. The correct answer is (B), since both pay.", "B"),
        ("The correct answer is (C). The correct answer is (B)", "C"),  # the first one
        ("The correct answer is C, or rather: The correct answer is (B)", "B"),  # parentheses go first
        ("The correct answer is Both", "B"),  # a letter is enough
        ("The correct answer is (E)", ""),
        ("The correct answer is: (B)", ""),
        ("the correct answer is (B)", ""),
        ("(B)", ""),
        ("B", ""),
        ("", ""),
    ],
)
def test_the_choice_is_read_as_the_authors_read_it(tmp_path: Path, prediction: str, letter: str) -> None:
    for right in "ABCD":
        made = _v2(tmp_path, [_v2_row(answer=right)])
        (sample,) = made.samples(1, 4000, Pieces(), 0)
        assert made.score(prediction, sample) == (letter == right)
        assert made.score(sample.gold, sample) == 1.0


def test_rows_of_version_2_are_a_list_or_lines(tmp_path: Path) -> None:
    rows = [_v2_row(_id=str(k)) for k in range(7)]
    lines = _write(tmp_path / "mine.jsonl", rows)
    made = _v2(tmp_path, rows)
    assert made.n_questions == LongBenchV2(lines).n_questions == 7
    assert made.samples(3, 4000, Pieces(), 5) == LongBenchV2(lines).samples(3, 4000, Pieces(), 5)
    with pytest.raises(ValueError, match="n is 8; allowed: 1 to 7, the questions of longbench-v2"):
        made.samples(8, 4000, Pieces(), 0)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("", "", "data.json is missing in .*; give LongBench v2's data.json"),
        ("nowhere", "", "there is no .*nowhere; give LongBench v2's data.json"),
        ("data.json", "[]", "data.json is empty; give LongBench v2's data.json"),
        ("data.json", f"[{V2_ROW}", "data.json is no complete JSON list; give LongBench v2's data.json"),
        (
            "data.json",
            f"[{V2_ROW}, {ROW}]",
            "row 2 of .*data.json is not a row of LongBench v2; allowed: a JSON object",
        ),
        ("data.json", f"[{json.dumps(_v2_row(answer='E'))}]", "row 1 of .*data.json is not a row of LongBench v2"),
        ("data.json", f"[{json.dumps(_v2_row(answer='AB'))}]", "row 1 of .*data.json is not a row of LongBench v2"),
        ("data.json", f"[{json.dumps(_v2_row(choice_C=None))}]", "row 1 of .*data.json is not a row of LongBench v2"),
        ("lines.jsonl", f"{V2_ROW}\n\nno json", "line 3 of .*lines.jsonl is not a row of LongBench v2"),
    ],
)
def test_what_are_no_rows_of_version_2_is_named(name: str, content: str, named: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        LongBenchV2(tmp_path / name).samples(1, 4000, Pieces(), 0)
