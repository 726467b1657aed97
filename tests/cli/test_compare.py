"""pypcd compare: the questions of a file, what counts as right, and answers side by side."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import research.methods  # noqa: F401  whose names are a run's too
from pypcd.cli.compare import Question, read_questions
from pypcd.decode import Method

PAIRS = '{"9c34-54c5": "8044-44b2", "1d2e-77a0": "5fa0-913c"}'
BEFORE = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
ASKED = BEFORE + PAIRS + '\n\n\nKey: "KEY"\nThe value associated with the specified key is: '


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def command(asked: Path, n_tokens: int, methods: str) -> list[str]:
    return [*("compare", "demo", str(asked), "--threads", "1"), "--max-tokens", str(n_tokens), "--method", methods]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return write(
        tmp_path / "q.jsonl",
        {"prompt": ASKED.replace("KEY", "9c34-54c5"), "answer": "8044-44B2"},
        "",
        {"question": ASKED.replace("KEY", "1d2e-77a0"), "answer": "not this"},
        {"prompt": "x"},
    )


def test_lines_are_questions(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("One.\n\nTwo.")
    found = read_questions(
        write(
            tmp_path / "q.jsonl",
            {"file": "report.txt", "question": "Which?", "answer": " Two "},
            {"document": "a\n\nb", "prompt": "What?"},
        )
    )
    assert [(q.text, q.answer) for q in found] == [("Which?", "Two"), ("What?", "")]
    assert [[(d.name, d.text) for d in q.documents] for q in found] == [
        [("report.txt", "One.\n\nTwo.")],
        [("document", "a\n\nb")],
    ]


@pytest.mark.parametrize(
    ("text", "is_right"), [("It is  TWO\nmen.", True), ("two", False), ("tw o men", False), ("", False)]
)
def test_what_is_right(text: str, is_right: bool) -> None:
    assert Question("?", "two men").is_right(text) is is_right


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("what?", "line 2: .*write lines such as"),
        ("[1]", "line 2: it is a list"),
        ({"question": "a", "anser": "b"}, "there is no 'anser'; allowed: answer, document, file, prompt, question"),
        ({"question": "a", "prompt": "b"}, "one of"),
        ({"answer": "a"}, "one of"),
        ({"question": "a", "file": "x", "document": "y"}, "at most one"),
        ({"question": " "}, "the question is empty"),
        ({"question": 3}, "question is no text"),
        ({"question": "a", "document": " "}, "document has no text"),
        ({"file": "", "question": "x"}, "the name of the document's file is empty"),
        ({"file": "nowhere.txt", "question": "x"}, "line 2: .*nowhere.txt: No such file"),
        ('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: its brackets are nested more deeply"),
    ],
)
def test_what_is_no_question(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_questions(write(tmp_path / "q.jsonl", {"prompt": "fine"}, line))


def test_bytes_that_are_no_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", "")
    with pytest.raises(ValueError, match="has no questions"):
        read_questions(path)
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "M\xfcller"}\n')
    with pytest.raises(ValueError, match="line 2: .*utf-8"):
        read_questions(path)
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\n')
    assert read_questions(path)[0].text == "fine"


def test_answers_side_by_side(asked: Path, run: Run) -> None:
    words = command(asked, 6, "greedy,pcd:window:window=16")
    out, _ = run(*words)
    first, second, _ = out.split(" of 3: ")[1:]
    assert "greedy        right: 8044-44b2" in first and "right: as greedy" in first
    assert "greedy        wrong: 5fa0-913c" in second
    assert [line.split()[1:4] for line in out.splitlines() if line.endswith(" of 3")] == [["1", "of", "2"]] * 2
    assert out.rstrip().endswith("no reason to use one for questions like these.")
    records = [json.loads(line) for line in run(*words, "--json")[0].splitlines()]
    assert [record["right"] for record in records] == [True, True, False, False, None, None]
    assert [record["question"] for record in records] == [1, 1, 2, 2, 3, 3]


def test_what_is_not_read_of_a_folder_is_said_once(tmp_path: Path, run: Run) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "a.txt").write_text("The toll is 17 crowns.")
    (tmp_path / "papers" / "b.txt").write_text("")
    path = write(tmp_path / "q.jsonl", *({"file": "papers", "question": f"Toll {n}?"} for n in range(2)))
    assert run(*command(path, 1, "greedy"))[1].count("not read: papers/b.txt") == 1


def test_what_is_done_is_shown_if_it_is_stopped(asked: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n = Method.stream, itertools.count(1)

    def stream(*args: Any, **kwargs: Any) -> Any:
        if next(n) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(Method, "stream", stream)
    out, _ = run(*command(asked, 6, "greedy,pcd:window"), status=130)
    assert "stopped; so far:" in out and out.count("1 of 1") == 2


def test_a_method_that_fails_is_said_the_others_go_on_and_nothing_is_called_the_same(asked: Path, run: Run) -> None:
    out, err = run(*command(asked, 6, "cad,greedy"), status=1)
    assert "cad" in err and "as cad" not in out and out.count("greedy        right: ") == 1
    row = next(line for line in out.splitlines() if line.startswith("greedy") and line.endswith("0 of 0"))
    assert row.split()[1:4] == ["1", "of", "2"]
