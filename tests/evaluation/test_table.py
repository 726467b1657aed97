"""Tables for a terminal against the Markdown they are made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd.cli import _text
from pypcd.cli._table import aligned, table

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
SUMMARIES = [EVIDENCE / name / "summary.md" for name in ("smollm2", "table1", "table2")]  # what `pypcd eval` prints


def test_a_table_by_hand() -> None:
    text = "## kv (accuracy)\n\n| tokens | method | score |\n| ---: | --- | ---: |\n| 100 | pcd:beta=1.5 | 75.0 |\n| 4096 | x |  |\n"
    wanted = "kv (accuracy)\n\ntokens  method        score\n------  ------------  -----\n   100  pcd:beta=1.5   75.0\n  4096  x\n"
    assert aligned(text, None) == aligned(text, 80) == wanted


def test_labels_break_and_parts_stand_below_one_another() -> None:
    head, rows = ["n", "method", "first", "second one"], [["1", "pcd:beta=1.5", "+1.0 [+0.0, +2.0]", "12"]]
    right = [True, False, False, True]
    assert table(head, rows, right, 2, 42).splitlines() == [
        "                                    second",
        "n  method        first                 one",
        "-  ------------  -----------------  ------",
        "1  pcd:beta=1.5  +1.0 [+0.0, +2.0]      12",
    ]
    narrow = table(head, rows, right, 2, 30).splitlines()
    assert narrow == [
        "n  method    first",
        "-  --------  -----------------",
        "1  pcd:      +1.0 [+0.0, +2.0]",
        "   beta=1.5",
        "",
        "             second",
        "n  method       one",
        "-  --------  ------",
        "1  pcd:          12",
        "   beta=1.5",
    ]


@pytest.mark.parametrize("summary", SUMMARIES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("width", [None, 80, 40])
def test_runs_of_the_evidence_fit_and_lose_nothing(summary: Path, width: int | None) -> None:
    markdown = summary.read_text(encoding="utf-8")
    shown = aligned(markdown, width)
    if width:
        assert max(map(_text.cells, shown.splitlines())) <= width
    tables = [line for line in markdown.splitlines() if line.startswith("| ")]
    figures = [cell.strip() for line in tables for cell in line.strip("|").split("|")]
    figures = [cell for cell in figures if re.fullmatch(r"[-+0-9.<]+( \[.*\])?( ~)?", cell) and cell != "---"]
    assert len(figures) > 100
    for figure in set(figures):
        assert shown.count(figure) >= figures.count(figure) if width is None else figure in shown
    if width is None:  # each row of the Markdown is a line
        for line in tables:
            cells = [re.escape(cell.strip()) for cell in line.strip("|").split("|") if cell.strip()]
            if not re.match(r"\| -", line):
                assert re.search(r"(?m)^ *" + " +".join(cells) + "$", shown), line


def test_lists_and_headings_are_kept() -> None:
    text = "# m\n\n## Refused\n\n- pcd: the architecture has no RoPE, and nothing that\n  could be turned\n- cad: no\n"
    assert aligned(text, 40) == (
        "m\n\nRefused\n\n- pcd: the architecture has no RoPE, and\n  nothing that could be turned\n- cad: no\n"
    )


cell = st.text("abc:=+ 漢é1", max_size=12).map(str.strip)


@given(st.lists(st.tuples(cell, cell, cell), min_size=1, max_size=4), st.integers(20, 60))
def test_no_line_is_wider_than_the_terminal_and_no_letter_is_lost(rows: list[tuple[str, str, str]], width: int) -> None:
    text = table(["what", "one", "two"], rows, [False, True, True], 1, width)
    assert max(map(_text.cells, text.splitlines())) <= max(width, 8 + 2 + 24)
    for row in rows:
        for letter in "abc漢é1:=+":
            assert text.count(letter) >= sum(value.count(letter) for value in row)
