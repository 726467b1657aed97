"""The pieces of a text, by hand."""

from __future__ import annotations

import json
import re
import textwrap
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd.find.segments import LONGEST, pieces

SENTENCES = [
    f"The lamp of room {n} burns with {n * n} drops of oil, and its keeper sleeps until noon." for n in range(100, 140)
]
CHINESE = [f"赵先生住在第{n}号房间，他每天喝{n * n}杯茶。" for n in range(100, 140)]
THAI = "ตะเกียงของห้องหมายเลขหนึ่งร้อยไหม้ตลอดคืน และผู้ดูแลหลับจนถึงเที่ยง " * 60
LINES = [f"{uuid.UUID(int=n)}: {uuid.UUID(int=n * n)}" for n in range(40)]

MIXED = st.text(
    st.one_of(st.sampled_from(" \n\t\r.,;!?'\"“”()[]{}-#|1a你。ก่\u3000\u200d\u2028\xa0\ud800"), st.characters())
)


@given(st.one_of(MIXED, st.builds(lambda text, n: text * n, MIXED, st.integers(1, 2000))))
def test_the_pieces_joined_are_the_text(text: str) -> None:
    found = pieces(text)
    assert "".join(found) == text
    assert all(piece.strip() for piece in found) or found == (text,)
    assert all(len(piece.strip()) <= LONGEST + 400 for piece in found), "a paragraph's own, and its headings"
    assert not any(piece[0].isspace() for piece in found[1:])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ()),
        (" \n", (" \n",)),
        ("One.\n\n\nTwo.\n", ("One.\n\n\n", "Two.\n")),
        ("One.\r\n \r\nTwo.", ("One.\r\n \r\n", "Two.")),
        ("\n\nOne.", ("\n\nOne.",)),
        ("a\nb\n\nc.", ("a\nb\n\n", "c.")),
        (
            "# Toll\n\nSeven crowns.\n\n## Who pays?\n\nAll.",
            ("# Toll\n\nSeven crowns.\n\n", "## Who pays?\n\nAll."),
        ),
        ("Report\n\n1. Toll\n\nSeven crowns.\n\n2. End", ("Report\n\n1. Toll\n\nSeven crowns.\n\n", "2. End")),
        ("rye\n\noil\n\nsalt\n\nfish\n\nBuy it.", ("rye\n\n", "oil\n\n", "salt\n\n", "fish\n\n", "Buy it.")),
        ("- rye\n\nBuy it.", ("- rye\n\n", "Buy it.")),
        ("To buy:\n\n- rye\n- oil\n", ("To buy:\n\n- rye\n- oil\n",)),
    ],
)
def test_paragraphs_with_their_headings(text: str, wanted: tuple[str, ...]) -> None:
    assert pieces(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        " ".join(SENTENCES),
        "".join(CHINESE),
        textwrap.fill(" ".join(SENTENCES), 72),
        textwrap.fill("".join(CHINESE), 30),
        "\n".join(SENTENCES),
        f"He said: “Stop. {' '.join(SENTENCES)} That is all.” He left.",
        " ".join(SENTENCES).replace(" noon", " hour B\u2028").replace(". ", ".\xa0"),
        "1. Lamps\n\n" + " ".join(SENTENCES),
    ],
)
def test_a_long_paragraph_is_cut_behind_sentences_into_parts_of_some_length(text: str) -> None:
    found = pieces(text)
    assert len(found) > 3 and all(re.search(r"[.。]\s*$", piece) for piece in found)
    sizes = [len(piece) * (3 if "。" in piece else 1) for piece in found]
    assert min(sizes) > 400 and max(sizes) < 800


def test_abbreviations_and_ordinal_numbers_end_no_piece() -> None:
    text = " ".join(
        f"Dr. A. Vell kam z. B. am {n}. Oktober an Bord und blieb dort bis zum {n + 3}. November." for n in range(1, 20)
    )
    for begin in range(0, 90, 5):
        found = pieces(text[begin:])
        assert len(found) > 1 and all(re.search(r"November\.\s*$", piece) for piece in found)


@pytest.mark.parametrize(
    "lines",
    [
        [json.dumps({"name": f"lamp {n}", "oil": n * n, "note": None}) for n in range(40)],
        [f"{n},Lisbon,{n * n},x" for n in range(10, 110)],
        [f"lamp {n};Lisbon;{n * n}" for n in range(10, 110)],
        [f"lamp {n}    burns    {n * n}" for n in range(10, 110)],
        ["| lamp | oil |", "|---|---|", *(f"| {n} | {n * n} |" for n in range(200))],
        [f"- {sentence}" for sentence in SENTENCES],
        [f"{n}. {textwrap.fill(sentence, 60, subsequent_indent='   ')}" for n, sentence in enumerate(SENTENCES)],
        [f"2024-05-01 12:00:{n:02} started" for n in range(60)],
        ["JSON data:", *(f'{" {"[n == 0]}"{line[:36]}": "{line[38:]}"{",}"[n == 39]}' for n, line in enumerate(LINES))],
    ],
)
def test_records_stand_for_themselves(lines: list[str]) -> None:
    assert [piece.strip() for piece in pieces("\n".join(lines))] == [line.strip() for line in lines]


def test_a_record_of_several_lines_is_one_piece() -> None:
    objects = [{"name": f"lamp {n}", "oil": {"drops": n * n}, "tags": ["a", "b"]} for n in range(40)]
    found = pieces(json.dumps(objects, indent=2))
    assert [json.loads(piece.strip().rstrip(",]")) if piece.strip()[0] == "{" else None for piece in found][
        1:
    ] == objects


def test_what_has_no_sentences_is_cut_by_length_behind_a_separator() -> None:
    data = json.dumps([{"name": f"lamp {n}", "oil": n * n} for n in range(100)], separators=(",", ":"))
    for text, end in (
        (data, r"\},$"),
        (THAI, r" $"),
        ("lamp " * 999, r" $"),
        ("a" * 5000, "a$"),
        ("xx" + "e\u0301\u0323" * 5000, "\u0323$"),
    ):
        found = pieces(text.strip())
        assert len(found) > 3 and all(re.search(end, piece) for piece in found[:-1])
        assert min(map(len, found)) * 4 > max(map(len, found)), "none is a mere rest"


def test_code_is_cut_at_lines() -> None:
    text = "\n".join(f"{'    ' * (n % 3)}total = total_of(lamps[{n}], oil={n * n})" for n in range(60))
    found = pieces(text)
    assert 3 < len(found) < 10 and all(re.search(r"\)\n *$", piece) for piece in found[:-1])
