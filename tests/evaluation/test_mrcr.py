"""MRCR: conversations in the format of its card, their turns, scores and lengths; and the forms that rows may have in a file."""

from __future__ import annotations

import contextlib
import difflib
import json
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import Pieces
from hypothesis import given
from hypothesis import strategies as st

from pypcd.evaluation import Plan, counts_of, task
from pypcd.evaluation.tasks.mrcr import MRCR
from pypcd.evaluation.tasks.rows import check_length

EXAMPLES = "Here are examples of conversations.\n======EXAMPLE======\nUser: write a poem\nAssistant: Roses\n"
WRITTEN = ["Tapirs\nwalk at night.", "Rocks lie.", "A tapir\nswims."]
ASK = "Prepend aYooSG8CQg to the 2nd (1 indexed) poem about tapirs. Do not include any other text in your response."


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


MESSAGES = [
    _message("user", EXAMPLES),
    _message("user", "write a poem about tapirs"),
    _message("assistant", WRITTEN[0]),
    _message("user", "write a blog post about rocks"),
    _message("assistant", WRITTEN[1]),
    _message("user", "write a poem about tapirs"),
    _message("assistant", WRITTEN[2]),
    _message("user", ASK),
]


def _row(messages: list[dict[str, str]] = MESSAGES, **changes: Any) -> dict[str, Any]:
    row = {
        "prompt": json.dumps(messages),
        "answer": f"aYooSG8CQg{WRITTEN[2]}",
        "random_string_to_prepend": "aYooSG8CQg",
        "n_needles": 2,
        "desired_msg_index": 5,
        "total_messages": len(messages),
        "n_chars": sum(len(message["content"]) for message in messages),
        "date_added": "2025-04-12",
    }
    return {**row, **changes}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def made(tmp_path: Path) -> MRCR:
    return MRCR(_write(tmp_path / "mrcr.jsonl", [_row()]))


def test_a_row_is_a_conversation(made: MRCR) -> None:
    (sample,) = made.samples(1, 2000, Pieces(), 0)
    assert sample.prompt.shots == (
        (f"{EXAMPLES}\n\nwrite a poem about tapirs\n", WRITTEN[0]),
        ("write a blog post about rocks\n", WRITTEN[1]),
        ("write a poem about tapirs\n", WRITTEN[2]),
    )
    assert sample.prompt.text == sample.prompt.after == f"{ASK}\n" and not sample.prompt.answer_prefix
    assert sample.answers == (f"aYooSG8CQg{WRITTEN[2]}",) and sample.gold == sample.answers[0]
    assert sample.depth == 1.0 and sample.extra == {"row": 1, "begun": "aYooSG8CQg", "n_needles": 2}
    assert made.score(sample.gold, sample) == 1.0


turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text("ab \n", max_size=6)), max_size=9)


@given(turns)
def test_no_word_is_lost_and_turns_alternate(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[str, str]]
) -> None:
    said = [("user", "first"), *said, ("user", "last")]
    row = _row([_message(*one) for one in said])
    file = _write(tmp_path_factory.mktemp("rows") / "one.jsonl", [row])
    (sample,) = MRCR(file).samples(1, 1500, Pieces(), 0)
    texts = [text for turn in sample.prompt.shots for text in turn] + [sample.prompt.after]
    whole = "".join("".join(texts).split())
    assert whole == "".join("".join(text for _, text in said).split())
    changes = sum(a != b for a, b in zip(said[1:], said) for a, b in [(a[0] == "assistant", b[0] == "assistant")])
    assert len(texts) == changes + 1


def test_the_depth_is_the_place_of_the_wanted_answer(tmp_path: Path) -> None:
    for k, said in enumerate(WRITTEN):
        file = _write(tmp_path / f"{k}.jsonl", [_row(answer=f"aYooSG8CQg{said}")])
        assert MRCR(file).samples(1, 2000, Pieces(), 0)[0].depth == k / 2
    twice = [*MESSAGES[:-1], *MESSAGES[-3:]]
    for row in (_row(twice), _row(answer="aYooSG8CQg something else")):
        assert MRCR(_write(tmp_path / "none.jsonl", [row])).samples(1, 2000, Pieces(), 0)[0].depth is None


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("aYooSG8CQgA tapir\nswims.", 1.0),
        ("aYooSG8CQg", 0.0),  # the string, and nothing of the answer
        ("A tapir\nswims.", 0.0),  # no string
        (" aYooSG8CQgA tapir\nswims.", 0.0),  # not at the start
        ("ayoosg8cqgA tapir\nswims.", 0.0),
        ("aYooSG8CQg A tapir\nswims.", 28 / 29),  # 2 * 14 common characters of 15 + 14
        ("aYooSG8CQgA tapir\n", 16 / 22),
        ("aYooSG8CQgaYooSG8CQgA tapir\nswims.", 28 / 38),  # the string is taken away once
        ("", 0.0),
    ],
)
def test_the_score_is_the_ratio_of_what_follows_the_string(made: MRCR, prediction: str, score: float) -> None:
    (sample,) = made.samples(1, 2000, Pieces(), 0)
    assert made.score(prediction, sample) == pytest.approx(score)


@given(st.text("abc \n", max_size=40), st.text("abc \n", max_size=40), st.booleans(), st.booleans())
def test_the_score_is_that_of_the_card(
    tmp_path_factory: pytest.TempPathFactory, said: str, right: str, with_string: bool, known: bool
) -> None:
    prediction, answer = "x1" * with_string + said, "x1" * known + right
    row = _row(answer=answer or "a", random_string_to_prepend="x1")
    made = MRCR(_write(tmp_path_factory.mktemp("rows") / "one.jsonl", [row]))
    (sample,) = made.samples(1, 2000, Pieces(), 0)
    if not with_string:
        assert made.score(prediction, sample) == 0.0
        return
    wanted = row["answer"][2:] if known else row["answer"]
    assert made.score(prediction, sample) == difflib.SequenceMatcher(None, said, wanted).ratio()


def test_the_prediction_is_compared_with_the_answer_and_not_the_other_way_round(tmp_path: Path) -> None:
    """Python's documentation of difflib has this pair, whose ratio depends on the order."""
    for said, answer, score in (("tide", "diet", 0.25), ("diet", "tide", 0.5)):
        made = MRCR(_write(tmp_path / f"{said}.jsonl", [_row(answer=f"aYooSG8CQg{answer}")]))
        (sample,) = made.samples(1, 2000, Pieces(), 0)
        assert made.score(f"aYooSG8CQg{said}", sample) == score


# -- rows of a file -----------------------------------------------------------------------------------------------------


def test_a_cell_is_the_whole_file_or_rows_drawn_from_the_seed(tmp_path: Path) -> None:
    rows = [_row(answer=str(k)) for k in range(30)]
    made = MRCR(_write(tmp_path / "mrcr.jsonl", rows))

    def chosen(n: int, seed: int) -> list[int]:
        samples = made.samples(n, 2000, Pieces(), seed)
        assert [sample.index for sample in samples] == list(range(n))
        assert [sample.extra["row"] - 1 for sample in samples] == [int(sample.answers[0]) for sample in samples]
        return [int(sample.answers[0]) for sample in samples]

    assert chosen(30, 0) == chosen(30, 1) == list(range(30))
    assert chosen(8, 0) == chosen(8, 0) == sorted(chosen(8, 0)) != chosen(8, 1)
    with pytest.raises(ValueError, match="n is 31; allowed: 1 to 30, the questions of mrcr"):
        chosen(31, 0)
    plan = Plan("demo", ("mrcr",), ("greedy",), (2048,), n=99, data=str(tmp_path))
    assert counts_of(plan) == {"mrcr": 30}


@given(n_tokens=st.integers(500, 6000))
def test_a_length_far_from_the_files_is_refused(tmp_path_factory: pytest.TempPathFactory, n_tokens: int) -> None:
    long = [*MESSAGES[:2], _message("assistant", "rocks " * 80), *MESSAGES[3:]]
    made = MRCR(_write(tmp_path_factory.mktemp("rows") / "mine.jsonl", [_row()] * 20 + [_row(long)]))
    tokenizer = Pieces(template=9)
    needed = tokenizer.count(made.samples(21, 2000, tokenizer, 0)[-1].prompt) + made.max_tokens
    if n_tokens <= 2 * needed <= 4 * n_tokens:
        assert made.samples(1, n_tokens, tokenizer, 0)
        return
    with pytest.raises(
        ValueError, match=f"n_tokens is {n_tokens}, but .* mrcr takes {needed} in .*mine.jsonl"
    ) as error:
        made.samples(1, n_tokens, tokenizer, 0)
    assert f"allowed: {(needed + 1) // 2} to {2 * needed}, " in str(error.value)


@pytest.mark.parametrize(("n_tokens", "right"), [(49, False), (50, True), (200, True), (201, False)])
def test_half_and_twice_the_length_are_allowed(n_tokens: int, right: bool) -> None:
    with contextlib.nullcontext() if right else pytest.raises(ValueError, match="allowed: 50 to 200, best that one"):
        check_length(n_tokens, 100, "mrcr", Path("file"), "that one")


def test_rows_may_be_one_list_and_data_a_folder(tmp_path: Path) -> None:
    rows = [_row(), _row(answer="aYooSG8CQgno")]
    as_list = tmp_path / "rows.json"
    as_list.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    _write(tmp_path / "mrcr.jsonl", rows)
    one, other = (task("mrcr", data=data).samples(2, 2000, Pieces(), 0) for data in (as_list, tmp_path))
    assert one == other
    assert [sample.extra["row"] for sample in one] == [1, 2]


ROW = json.dumps(_row())
BAD_PROMPT = (
    "no json",
    "{}",
    "[]",
    '["text"]',
    '[{"role": "user"}]',
    '[{"role": "user", "content": 7}]',
    '[{"role": ["user"], "content": "a"}]',
    '[{"role": "tool", "content": "a"}]',
    '[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]',
    '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]',
)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("", "", "mrcr.jsonl is missing in .*; give a JSONL file made of"),
        ("nowhere", "", "there is no .*nowhere; give a JSONL file made of"),
        ("rows.jsonl", "\n", "rows.jsonl is empty; give a JSONL file"),
        ("rows.json", "[]", "rows.json is empty; give a JSONL file"),
        ("rows.json", f"[{ROW}, ", "rows.json is no complete JSON list; give a JSONL file"),
        (
            "rows.json",
            f"[{ROW}, 7]",
            "row 2 of .*rows.json is not a row of MRCR; allowed: a JSON object with the texts prompt",
        ),
        ("rows.jsonl", f"{ROW}\n\nno json", "line 3 of .*rows.jsonl is not a row of MRCR"),
        ("rows.jsonl", f"{ROW}\n[]", "line 2 of .*rows.jsonl is not a row of MRCR"),
        ("rows.jsonl", json.dumps(_row(random_string_to_prepend="")), "line 1 of .*rows.jsonl is not a row of MRCR"),
        ("rows.jsonl", json.dumps(_row(answer=None)), "line 1 of .*rows.jsonl is not a row of MRCR"),
        ("rows.jsonl", '{"prompt": "[]", "answer": "a"}', "line 1 of .*rows.jsonl is not a row of MRCR"),
        (
            "2needle.parquet",
            "PAR1\x15\x04",
            "2needle.parquet is a Parquet file; allowed: JSON or JSONL. Convert it: python",
        ),
        *(
            (
                "rows.jsonl",
                json.dumps(_row(prompt=prompt)),
                "row 1 of .*rows.jsonl is no conversation; allowed: a JSON list",
            )
            for prompt in BAD_PROMPT
        ),
    ],
)
def test_what_are_no_rows_is_named(name: str, content: str, named: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        MRCR(tmp_path / name).samples(1, 2000, Pieces(), 0)


def test_the_line_that_converts_parquet_is_python(tmp_path: Path) -> None:
    file = tmp_path / "two needles.parquet"
    file.write_bytes(b"PAR1...")
    with pytest.raises(ValueError) as error:
        MRCR(file).samples(1, 2000, Pieces(), 0)
    command = str(error.value).partition('python -c "')[2].removesuffix('"')
    compile(command, "command", "exec")
    assert repr(str(file)) in command and repr(str(tmp_path / "two needles.jsonl")) in command and '"' not in command
