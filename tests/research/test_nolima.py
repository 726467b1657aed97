"""NoLiMa: needle sets and books in its format, where the needle stands, lengths and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import Pieces, Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation import task
from research.nolima import NoLiMa

SET = "needlesets/needle_set.json"
BOOKS = "haystack/rand_shuffle"
TEMPLATE = "A book {{so}}:\n\n{haystack}\n\nQuestion: {question}\n\n Only the name."

ENTRIES: list[dict[str, Any]] = [
    {
        "id": "0401",
        "reasoning_type": "world_knowledge",
        "system_prompt": "",
        "task_template": TEMPLATE,
        "needle": "Actually, {CHAR} lives beside {1}.",
        "questions": {"onehop": "Who has been to {2}?", "twohop": "Who has been to {3}?"},
        "character_set": ["Yuki", "Stuart", "Katie"],
        "tests": {
            "T1": {"input_args": ["the old opera", "Dresden", "Saxony"]},
            "T2": {"input_args": ["the glass museum", "Helsinki", "Uusimaa"]},
        },
    },
    {
        "id": "0402",
        "needle": "{CHAR} never eats {1}.",
        "questions": {"onehop": "Who among {CHAR} and the others cannot eat {2}?"},
        "character_set": ["Mandy", "Calvin"],
        "tests": {"T9": {"input_args": ["meat", "stew"]}},
    },
]
CASES = {
    ("0401", "onehop", "T1"): ("Actually, {} lives beside the old opera.", "Who has been to Dresden?"),
    ("0401", "twohop", "T1"): ("Actually, {} lives beside the old opera.", "Who has been to Saxony?"),
    ("0401", "onehop", "T2"): ("Actually, {} lives beside the glass museum.", "Who has been to Helsinki?"),
    ("0401", "twohop", "T2"): ("Actually, {} lives beside the glass museum.", "Who has been to Uusimaa?"),
    ("0402", "onehop", "T9"): ("{} never eats meat.", "Who among {} and the others cannot eat stew?"),
}


def _write(folder: Path, entries: Any = ENTRIES, name: str = SET, n_lines: int = 400) -> Path:
    for path in (folder / name, folder / BOOKS / "a.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(entries, indent=1), encoding="utf-8")
    for book in "ab":
        lines = "".join(f"Line {k} of book {book} tells of a ship and of a farm.\n" for k in range(n_lines))
        (folder / BOOKS / f"{book}.txt").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> NoLiMa:
    return NoLiMa(_write(tmp_path_factory.mktemp("nolima")))


few = settings(max_examples=30)
lengths, seeds = st.integers(400, 2500), st.integers(0, 999)


@few
@given(n_tokens=lengths, seed=seeds)
def test_the_book_has_the_needle_once_at_the_end_of_a_line_and_is_else_as_it_was(
    made: NoLiMa, n_tokens: int, seed: int
) -> None:
    folder = Path(made.data or "")
    for sample in made.samples(6, n_tokens, Words(), seed):
        (name,) = sample.answers
        needle, question = (
            text.format(name) for text in CASES[sample.extra["id"], sample.extra["question"], sample.extra["test"]]
        )
        text = sample.prompt.text
        assert text.count(f" {needle}\n") == 1 or text.count(f" {needle}\n\n") == 1
        assert text.count(question) == 1 and text.index(question) > text.index(needle)
        context = sample.prompt.context
        book = (folder / BOOKS / sample.extra["book"]).read_text(encoding="utf-8")
        if context.startswith(f" {needle}\n"):
            left = context.removeprefix(f" {needle}\n")
        else:
            left = context.replace(f" {needle}", "")
        assert book.startswith(f"{left}\n")
        at = round((sample.depth or 0) * (len(sample.prompt.segments) - 1))
        assert needle in sample.prompt.segments[at]


@few
@given(n_tokens=lengths, template=st.integers(0, 60), seed=seeds)
def test_another_line_would_not_fit(made: NoLiMa, n_tokens: int, template: int, seed: int) -> None:
    tokenizer = Words(template)
    line = len(tokenizer.encode("Line 399 of book a tells of a ship and of a farm.\n"))
    for sample in made.samples(4, n_tokens, tokenizer, seed):
        needed = tokenizer.count(sample.prompt) + made.max_tokens
        assert needed <= n_tokens < needed + 2 * line


@few
@given(short=lengths, long=lengths, seed=seeds)
def test_a_question_is_the_same_at_every_length_and_all_are_asked_in_turn(
    made: NoLiMa, short: int, long: int, seed: int
) -> None:
    one, other = (made.samples(10, n_tokens, Words(), seed) for n_tokens in (short, long))
    assert [sample.index for sample in one] == list(range(10))
    assert [(a.answers, a.extra, a.prompt.after) for a in one] == [(a.answers, a.extra, a.prompt.after) for a in other]
    asked = [(sample.extra["id"], sample.extra["question"], sample.extra["test"]) for sample in one]
    assert asked[:5] == asked[5:] and set(asked) == set(CASES)


def test_the_text_around_the_book_is_the_sets_or_ours(tmp_path: Path) -> None:
    entry = {**ENTRIES[0], "system_prompt": "Be brief."}
    (sample,) = NoLiMa(_write(tmp_path, [entry])).samples(1, 700, Words(), 0)
    assert sample.prompt.before == "Be brief.\n\nA book {so}:\n\n"
    assert sample.prompt.after.startswith("\n\nQuestion: Who has been to ") and sample.prompt.after.endswith(
        "?\n\n Only the name."
    )
    (sample,) = NoLiMa(_write(tmp_path, ENTRIES[1:])).samples(1, 700, Words(), 0)
    assert "book" in sample.prompt.before
    assert f"\nQuestion: Who among {sample.answers[0]} and the others cannot eat stew?\n" in sample.prompt.after


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Yuki", 1.0),
        ("It was Yuki.", 1.0),
        ("Katie or Yuki", 1.0),
        ("YukiX", 1.0),
        ("yuki", 0.0),
        ("Yu ki", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_with_the_name_is_right(tmp_path: Path, prediction: str, score: float) -> None:
    made = NoLiMa(_write(tmp_path, [{**ENTRIES[0], "character_set": ["Yuki"]}]))
    (sample,) = made.samples(1, 700, Words(), 0)
    assert made.score(prediction, sample) == score
    assert made.score(sample.gold, sample) == 1.0 and sample.answers == ("Yuki",)


def test_a_book_that_is_too_short_is_named(tmp_path: Path) -> None:
    made = NoLiMa(_write(tmp_path, n_lines=30))
    with pytest.raises(
        ValueError, match=r"n_tokens is 9000, but the whole of .*[ab].txt takes (\d+); allowed: less than"
    ) as error:
        made.samples(1, 9000, Words(), 0)
    whole = int(str(error.value).partition("less than ")[2].partition(",")[0])
    assert made.samples(1, whole - 1, Words(), 0)


def test_data_is_a_folder_or_a_needle_set(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a")
    repository = _write(tmp_path / "b" / "data").parent
    hard = _write(tmp_path / "a", ENTRIES[1:], "needlesets/needle_set_hard.json") / "needlesets/needle_set_hard.json"
    ids = [
        {sample.extra["id"] for sample in NoLiMa(data).samples(9, 700, Pieces(), 0)}
        for data in (folder, repository, hard)
    ]
    assert ids == [{"0401", "0402"}, {"0401", "0402"}, {"0402"}]


def test_the_folder_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOLIMA", raising=False)
    with pytest.raises(ValueError, match="nolima has no data; give a folder with needlesets"):
        task("nolima").samples(1, 700, Words(), 0)
    monkeypatch.setenv("NOLIMA", str(_write(tmp_path)))
    assert task("nolima").samples(3, 700, Words(), 0) == NoLiMa(tmp_path).samples(3, 700, Words(), 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[{]", "[" * 9999])
def test_what_is_no_list_of_needles_is_named(text: str, tmp_path: Path) -> None:
    (_write(tmp_path) / SET).write_text(text)
    with pytest.raises(ValueError, match=r"needle_set.json is no JSON list of needles; give a folder with"):
        NoLiMa(tmp_path).samples(1, 700, Words(), 0)


BAD: dict[str, list[Any]] = {
    "needle": ["Somebody lives beside {1}."],
    "character_set": [[], "Yuki"],
    "questions": [{}, ["Who?"], {"onehop": 7}, {"onehop": "Who has been to {4}?"}],
    "tests": [{}, {"T1": {"input_args": [1, 2, 3]}}],
    "system_prompt": [7],
    "task_template": [
        "{haystack}",
        "{question}",
        *(f"{{haystack}} {{question}} {more}" for more in ("{", "{0}", "{haystack}")),
    ],
    "distractors": [{"onehop": "There was {2}."}],
}
WRONG = [7, [], *({**ENTRIES[0], key: value} for key, values in BAD.items() for value in values)]
for key in ("id", "needle", "questions", "character_set", "tests"):
    WRONG.append({name: value for name, value in ENTRIES[0].items() if name != key})


@pytest.mark.parametrize("entry", WRONG)
def test_what_is_no_needle_is_named(entry: Any, tmp_path: Path) -> None:
    made = NoLiMa(_write(tmp_path, [ENTRIES[1], entry]))
    with pytest.raises(
        ValueError, match=r"row 2 of .*needle_set.json is not a needle of NoLiMa; allowed: a JSON object"
    ):
        made.samples(1, 700, Words(), 0)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (SET, "needlesets/needle_set.json or data/needlesets/needle_set.json is missing in .*; give a folder with"),
        (f"{BOOKS}/a.txt", r"there is no book \(\*.txt\) in .*haystack/rand_shuffle; give a folder with"),
    ],
)
def test_what_is_missing_is_named(missing: str, named: str, tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / BOOKS / "b.txt").unlink()
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=named):
        NoLiMa(tmp_path).samples(1, 700, Words(), 0)
