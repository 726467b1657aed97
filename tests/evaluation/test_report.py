"""Tables against records worked out by hand."""

from __future__ import annotations

import pytest
from runs import made_up

from pypcd.evaluation import GROUPS, Plan, advice, by_depth, markdown, rows


def test_tables_against_hand_worked_records() -> None:
    plan = Plan("m.gguf", ("kv",), ("greedy", "pcd"), (100,), n=20)
    records = made_up(plan, lambda method, i: float(i % 2 == 0 or (method == "pcd" and i % 4 == 1)))
    greedy, pcd = rows(plan, records)
    assert (greedy.paired.score, pcd.paired.score) == (50.0, 75.0)
    assert (pcd.paired.wins, pcd.paired.losses, pcd.paired.difference) == (5, 0, 25.0)
    assert pcd.paired.p == pytest.approx(2 / 2**5)
    text = markdown(plan, records, {})
    assert "| 100 | pcd | 75.0 | +25.0 [+10.0, +45.0] ~ | 0.062 | 5 / 0 | 0 of 10, 0.0 |" in text
    bands = by_depth(plan, records, "kv", 100)
    assert [p.score for p in bands["greedy"]] == [50.0] * 5 and [p.n for p in bands["pcd"]] == [4] * 5


def test_a_group_is_counted_over_all_of_its_questions() -> None:
    plan = Plan("m.gguf", ("everyday", "kv"), ("greedy", "pcd"), (100,), n=4)
    parts = GROUPS["everyday"]
    records = {
        key: {"score": float(key[0] in parts[:3] or key[3] == "greedy"), "n_tokens": 4, "depth": None}
        for key in plan.everything()
    }
    greedy, pcd = (row for row in rows(plan, records) if row.task == "everyday")
    assert (greedy.paired.n, greedy.paired.score, pcd.paired.n, pcd.paired.score) == (48, 100.0, 48, 25.0)
    assert (pcd.paired.wins, pcd.paired.losses, pcd.paired.difference) == (0, 36, -75.0)
    text = markdown(plan, records, {})
    assert text.index("## everyday (accuracy, its 12 tasks together)") < text.index("## everyday-facts (accuracy)")
    assert "| 100 | pcd | 25.0 | -75.0 [" in text and "| 0 / 36 | 36 of 48, 75.0 |" in text
    some = Plan("m.gguf", parts[1:], ("greedy", "pcd"), (100,), n=4)
    assert "everyday" not in {row.task for row in rows(some, records)}


def test_a_half_is_said_and_counted() -> None:
    plan = Plan("m.gguf", ("kv",), ("greedy", "pcd"), (100,), n=5, half="first")
    records = made_up(plan, lambda method, i: float(method == "pcd"))
    assert [row.paired.n for row in rows(plan, records)] == [3, 3]
    text = markdown(plan, records, {})
    assert "3 questions a cell, the first half of 5, seed 0" in text and "## kv (accuracy)\n" in text


@pytest.mark.parametrize(
    ("plain", "pcd", "beam", "said"),
    [  # how many of 20 are right, the first ones; below 0: all but so many
        (18, 20, 0, "greedy has 90% right, so there is little to gain here"),
        (8, 14, 12, "Use pcd for questions like these: 6 answers more are right with it, and 0 fewer."),
        # p = 0.0625
        (8, 13, 6, "pcd is ahead of greedy, which may be chance: 5 answers more are right with it, and 0 fewer. Ask"),
        (8, 2, 8, "No method shows a gain over greedy"),
        (8, 14, -4, "Use pcd for questions like these"),  # the other one gains more, but spoils as well
    ],
)
def test_the_advice_by_hand(plain: int, pcd: int, beam: int, said: str) -> None:
    plan = Plan("m.gguf", ("kv", "vt"), ("greedy", "pcd", "beam"), (100,), n=10)
    right = {"greedy": plain, "pcd": pcd, "beam": beam}

    def score(method: str, i: int) -> float:
        return float(i >= -right[method] if right[method] < 0 else i < right[method])

    records = {key: {"score": score(key[3], 2 * key[2] + (key[0] == "vt")), "depth": None} for key in plan.everything()}
    assert advice(plan, records).startswith(said)
    with_one = {key: record for key, record in records.items() if key[3] != "beam"}
    assert advice(plan, with_one).startswith(said), "a method that is refused has no answers"
    assert advice(plan, {}).startswith("No method shows a gain")
