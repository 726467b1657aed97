"""Gain against loss: groups and pooling against records worked out by hand, tables, the picture, damaged folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pypcd.evaluation import GROUPS, Directory, Plan, paired
from research.balance import LONG, RETRIEVAL, SHORT_PROMPTS, GainLoss, Run, balance, balance_markdown, read_run

METHODS = ("greedy", "pcd:cautious", "control")


def scored(scores: dict[tuple[str, int, int], tuple[float, ...]], methods: tuple[str, ...] = METHODS) -> dict[Any, Any]:
    """Records from the scores of each question, one for each method."""
    return {
        (*key, method): {"task": key[0], "length": key[1], "index": key[2], "method": method, "score": score}
        for key, values in scores.items()
        for method, score in zip(methods, values)
    }


def run_of(scores: dict[tuple[str, int, int], tuple[float, ...]], name: str = "m") -> Run:
    return Run(name, METHODS, scored(scores))


def test_a_group_is_pooled_over_its_questions() -> None:
    run = run_of(
        {
            ("kv-short", 600, 1): (0, 1, 0),
            ("kv-short", 600, 2): (1, 0, 0),  # of the first half
            ("kv-short", 2000, 1): (1, 1, 1),  # another question than at 600
            ("niah-multikey-2", 600, 1): (0, 1, 1),
            ("niah-multikey-2", 600, 3): (1, 0, 1),
            ("longbench-qasper", 600, 1): (0, 1, 1),  # of no group
            ("everyday-json", 300, 1): (1, 1, 0),
            ("everyday-json", 1000, 1): (1, 0, 1),
            ("everyday-json", 4000, 1): (1, 1, 1),
            ("everyday-json-behind", 1000, 1): (0, 1, 1),
            ("everyday-json-behind", 4000, 1): (1, 1, 0),
            ("everyday-json", 1000, 3): (1, 0, 0),
        }
    )
    greedy, cautious, control = balance(run)
    assert (greedy.method, cautious.method, control.method) == METHODS
    p = cautious.groups[RETRIEVAL]
    assert (p.n, p.score, p.difference, p.wins, p.losses) == (4, 75.0, 25.0, 2, 1)
    assert p == paired([1, 1, 1, 0], [0, 1, 0, 1])  # in the order of task, length and number
    assert (cautious.groups[SHORT_PROMPTS].n, control.groups[SHORT_PROMPTS].losses) == (1, 1)
    # question 1 in four forms: greedy 3/4, cautious 3/4, control 3/4; question 3 in one: 1, 0, 0
    assert cautious.groups[LONG] == paired([0.75, 0.0], [0.75, 1.0])
    assert (cautious.groups[LONG].n, cautious.groups[LONG].wins, cautious.groups[LONG].losses) == (2, 0, 1)
    assert greedy.groups[LONG].score == 87.5
    first = balance(run, "first")
    assert [row.groups.keys() for row in first] == [{RETRIEVAL}] * 3 and first[1].groups[RETRIEVAL].losses == 1
    assert balance(run, None)[1].groups[RETRIEVAL].n == 5


def with_losses(short: int, long: int, n: int = 400, plain: float = 1.0) -> GainLoss:
    """A setting that loses so many of n questions, at each length."""
    scores = {}
    for length, losses in ((300, short), (1000, long)):
        for i in range(n):
            right = float(i < plain * n)
            scores["everyday-json", length, 2 * i + 1] = (right, right if i >= losses else 0.0, 0.0)
    return balance(run_of(scores))[1]


def test_what_is_spoilt_is_counted_where_no_text_is_asked_about() -> None:
    scores = {
        ("everyday-json", 300, 1): (1, 0, 1),
        ("everyday-json", 1000, 1): (1, 1, 1),
        ("everyday-json-behind", 1000, 1): (1, 0.5, 1),
        ("everyday-sort", 300, 1): (0, 1, 0),
        ("chat-known", 1000, 1): (1, 0, 1),
        ("chat-known", 1000, 2): (1, 0, 1),  # of the first half
        ("reading-prose", 600, 1): (1, 0, 1),
        ("niah-multikey-2", 600, 1): (1, 0, 1),
    }
    greedy, cautious, control = balance(run_of(scores))
    assert (greedy.right, greedy.spoilt) == (4, 0) == (control.right, control.spoilt)
    assert (cautious.right, cautious.spoilt) == (4, 3)


def test_a_loss_is_none_shown_or_not_told() -> None:
    assert with_losses(0, 0).loss == "none"
    assert with_losses(2, 2).loss == "none"  # -0.5 [-1.25, 0]
    assert with_losses(3, 0).loss == "not told"  # -0.75 [-1.75, 0], which a score test does not confirm
    assert with_losses(0, 0, n=100).loss == "not told"  # no answer differs, but there are few
    assert with_losses(5, 0).loss == "not told"  # -1.25 [-2.5, -0.25], p = 0.0625
    assert with_losses(0, 5).loss == "not told"
    assert with_losses(0, 6).loss == "shown"  # p = 0.03
    assert with_losses(6, 0).loss == "shown"
    assert with_losses(0, 0, plain=0.1).loss == "not told"  # greedy gets 10% right: there is little to lose
    assert with_losses(30, 0, plain=0.1).loss == "shown"
    chats = {("chat-known", 1000, 2 * i + 1): (1.0, float(i >= 9), 0.0) for i in range(300)}
    spared = {("everyday-json", n, 2 * i + 1): (1.0, 1.0, 0.0) for n in (300, 1000) for i in range(400)}
    assert balance(run_of(spared))[1].loss == "none" and balance(run_of(spared | chats))[1].loss == "shown"
    assert balance(run_of(chats))[1].loss == "shown", "a loss that is shown in chats alone is one"
    only_short = balance(run_of({("everyday-json", 300, 1): (1, 1, 1)}))[1]
    assert only_short.loss == "not asked"


def test_tables() -> None:
    scores = {("kv-short", 600, 2 * i + 1): (float(i < 5), float(i < 9), 0.0) for i in range(10)}
    scores |= {(task, 300, 1): (float(task == "everyday-json"), 1.0, 0.0) for task in GROUPS["everyday"]}
    text = balance_markdown([run_of(scores), run_of({("vt", 600, 1): (1, 1, 1)}, "other")])
    assert "| model | method | retrieval | everyday, short | spoilt | loss |" in text, (
        "groups that nobody was asked have no column"
    )
    assert "| m | greedy | 50.0 of 10 | 8.3 of 12 |  |  |" in text
    assert (
        "| m | `pcd:cautious` | +40.0 [+10.0, +70.0] ~, 4 / 0 | +91.7 [" in text
        and "| 0 of 1, 0.0% | not asked |" in text
    )
    assert "11 / 0 | 0 of 1, 0.0% |" in text and "0 / 1 | 1 of 1, 100.0% |" in text
    assert "kv-short, 50% at 600 tokens (greedy)" in text and "12 questions, of which greedy gets 8.3%" in text
    assert "| other | greedy | 100.0 of 1 |  |  |  |" in text and "of the second half" in text
    names = ("greedy", "pcd:window", "control", "control:1")
    shown = balance_markdown([Run("m", names, scored({("vt", 600, 1): (1, 1, 0, 0)}, names))])
    assert "| m | `control`, of `pcd:window` | -100.0 [" in shown and "| m | `control:1` | -100.0 [" in shown


def add(folder: Path, task: str = "kv-short", *, length: int = 600, n: int = 2, **facts: Any) -> Directory:
    """A run in which every question is answered: greedy and the control are right."""
    plan = Plan("x.gguf", (task,), METHODS, (length,), n=n, half=facts.pop("half", None), chat=facts.pop("chat", False))
    directory = Directory(folder)
    directory.open(plan, {"weights": "1", **facts})
    for answer in scored({key[:3]: (1.0, 0.0, 1.0) for key in plan.everything()}).values():
        directory.append(answer)
    return directory


def test_a_folder_is_read_with_all_runs_in_it(tmp_path: Path) -> None:
    for name, task, length in (("a", "kv-short", 600), ("b", "everyday", 300)):
        directory = add(tmp_path / "m" / name, task, length=length, n=4, half="second")
        with directory.samples.open("a") as file:
            file.write('{"task": "kv-sh')  # as it is while the run goes on
    before = directory.samples.read_bytes()
    run = read_run(tmp_path / "m")
    assert run.name == "m" and run.methods == METHODS and set(run.facts) == {"a", "b"}
    assert directory.samples.read_bytes() == before, "a run that still goes on must not be touched"
    rows = balance(run)
    assert [(row.groups[RETRIEVAL].n, row.groups[SHORT_PROMPTS].n) for row in rows] == [(2, 24)] * 3
    assert read_run(tmp_path / "m" / "b", "named").name == "named"


def test_a_folder_without_answers_is_an_error(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"tasks": [], "methods": [], "lengths": []}
    Directory(tmp_path / "rows").open(Plan("x.gguf", ("kv-short",), METHODS, (600,), n=2), {"rows": {"k": 64}})
    for name, file, text, named in (
        ("none", "notes.txt", "", "has no answers"),
        ("one", "samples.jsonl", json.dumps({"task": "kv"}) + "\n", "has no run.json"),
        ("one", "run.json", json.dumps(empty), "samples.jsonl, line 1"),
        ("rows", "samples.jsonl", "", "recorded rows"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
        with pytest.raises(ValueError, match=named):
            read_run(tmp_path / name)


def test_answers_that_do_not_belong_together_are_an_error(tmp_path: Path) -> None:
    add(tmp_path / "right/a")
    add(tmp_path / "right/b", "vt")
    assert len(read_run(tmp_path / "right").records) == 12
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "again": ({"task": "kv-short"}, "twice.*again.b"),
        "other": ({"task": "vt", "weights": "2"}, "other has .* model"),
        "chat": ({"task": "vt", "chat": True}, "chat has .* prompts"),
    }
    for name, (more, named) in cases.items():
        add(tmp_path / name / "a")
        add(tmp_path / name / "b", **more)
        with pytest.raises(ValueError, match=named):
            read_run(tmp_path / name)
