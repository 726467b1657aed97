"""Tables for a terminal against the Markdown they are made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pypcd.cli._table import aligned, table

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
SUMMARIES = [EVIDENCE / name / "summary.md" for name in ("smollm2", "table1", "table2")]  # what `pypcd eval` prints


def test_a_table_by_hand() -> None:
    text = "## kv (accuracy)\n\n| tokens | method | score |\n| ---: | --- | ---: |\n| 100 | pcd:paper:beta=1.5 | 75.0 |\n| 4096 | x |  |\n"
    assert [line.split() for line in aligned(text, 80).splitlines()] == [
        ["kv", "(accuracy)"],
        [],
        ["tokens", "method", "score"],
        ["-" * 7, "-" * 19, "-" * 5],
        ["100", "pcd:paper:beta=1.5", "75.0"],
        ["4096", "x"],
    ]
    assert "\n   100  pcd:paper:beta=1.5   75.0\n" in aligned(text, 80), "numbers stand below one another"
    assert aligned(text, None) == text, "a pipe gets what a file has"


def test_what_does_not_fit_has_its_heads_broken_between_words_and_then_a_list_for_each_row() -> None:
    head, rows = ["n", "method", "first", "second one"], [["1", "pcd with beta=1.5", "+1.0 [+0.0, +2.0]", "12"]]
    right = [True, False, False, True]
    text = table(head, rows, right, 50)
    assert "1  pcd with beta=1.5  +1.0 [+0.0, +2.0]      12" in text and max(map(len, text.splitlines())) <= 50
    for too_narrow in (46, 30):  # no figure is broken, though one letter less would do
        assert table(head, rows, right, too_narrow).splitlines() == [
            "n           1",
            "method      pcd with beta=1.5",
            "first       +1.0 [+0.0, +2.0]",
            "second one  12",
        ]


@pytest.mark.parametrize("summary", SUMMARIES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("width", [80, 40])
def test_runs_of_the_evidence_fit_and_lose_nothing(summary: Path, width: int) -> None:
    markdown = summary.read_text(encoding="utf-8")
    shown = aligned(markdown, width)
    assert max(map(cell_len, shown.splitlines())) <= width
    tables = [line for line in markdown.splitlines() if line.startswith("| ")]
    figures = [cell.strip() for line in tables for cell in line.strip("|").split("|")]
    figures = [cell for cell in figures if re.fullmatch(r"[-+0-9.<]+( \[.*\])?( ~)?", cell) and cell != "---"]
    assert len(figures) > 100
    for figure in set(figures):
        assert shown.count(figure) >= figures.count(figure), "none is cut or broken"


def test_lists_and_headings_are_kept() -> None:
    text = "# m\n\n## Refused\n\n- pcd: the architecture has no RoPE, and nothing that\n  could be turned\n- cad: no\n"
    assert aligned(text, 40) == (
        "m\n\nRefused\n\n- pcd: the architecture has no RoPE, and\n  nothing that could be turned\n- cad: no\n"
    )


cell = st.text("abc:=+ 漢é1", max_size=12).map(str.strip)


@given(st.lists(st.tuples(cell, cell, cell), min_size=1, max_size=4), st.integers(20, 60))
def test_no_line_is_wider_than_the_terminal_and_no_letter_is_lost(rows: list[tuple[str, str, str]], width: int) -> None:
    text = table(["what", "one", "two"], rows, [False, True, True], width)
    assert max(map(cell_len, text.splitlines())) <= width
    for row in rows:
        for letter in "abc漢é1:=+":
            assert text.count(letter) >= sum(value.count(letter) for value in row)
