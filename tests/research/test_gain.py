"""What repeating passages gains, against plain decoding: figures by hand from answers that were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pypcd.errors import InputError
from research import gain


def answers(path, plain, both):
    rows = [
        {"finder": name, "id": str(index), "tokens": 1000 + index, "right": right}
        for name, own in (("plain", plain), ("both", both))
        for index, right in enumerate(own)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"finder": "both", "id"')  # stopped in a line
    return path


def test_the_table_is_of_questions_answered_both_ways(tmp_path, research) -> None:
    file = answers(tmp_path / "a.jsonl", [1, 0, 0, 1, 1], [1, 1, 1, 0])  # the last was not answered with passages
    words = [f"A model, facts={file}", f"Another, facts={answers(tmp_path / 'b.jsonl', [0] * 9, [1] * 9)}"]
    first, second = (line.split(" | ") for line in research("gain", *words)[0].splitlines()[2:])
    assert first[:6] == ["| A model", "facts", "1002", "4", "50.0", "75.0"] and first[6].startswith("+25.0 [")
    assert first[7:] == ["2 / 1", "1 of 2 |"]
    assert second[4:] == ["0.0", "100.0", "+100.0 [+100.0, +100.0]", "9 / 0", "0 of 0 |"]


def test_the_counts_of_the_published_table_give_all_of_it(research) -> None:
    page = Path(__file__).parents[2] / "docs" / "evidence" / "gain.md"
    published = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert research("gain", str(page))[0].splitlines() == published


def test_a_picture_has_each_point_at_its_place(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(gain.plots, "save", lambda figure, path: drawn.append(figure))
    spelled = [("A", "facts", [1, 0, 0, 0], [1, 1, 0, 0]), ("B", "keys", [0] * 9, [1] * 9)]
    points = [
        gain.point_of(f"{model}, {kind}={answers(tmp_path / model, plain, both)}")
        for model, kind, plain, both in spelled
    ]
    gain.draw(points, tmp_path / "gain.png")
    (axes,) = drawn[0].axes
    places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_markersize() == 6]
    assert places == [(25, 25), (0, 100)]
    filled = [line.get_markerfacecolor() != "white" for line in axes.lines if line.get_markersize() == 6]
    assert filled == [False, True] and [text.get_text() for text in axes.texts] == ["1.0k", "1.0k"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["A", "B", "facts", "keys"]


def test_a_page_without_a_table(tmp_path) -> None:
    (tmp_path / "a.md").write_text("| model |\n|---|\n| A |\n")
    with pytest.raises(InputError, match="has no table"):
        gain.points_of_page(tmp_path / "a.md")


@pytest.mark.parametrize(("spelling", "named"), [("a.jsonl", "MODEL, QUESTIONS=FILE"), ("A, b={}", "no question")])
def test_mistakes(tmp_path, spelling, named) -> None:
    file = answers(tmp_path / "a.jsonl", [1], [])
    with pytest.raises(InputError, match=named):
        gain.point_of(spelling.format(file))
