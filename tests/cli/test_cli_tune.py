"""The command tune as a user calls it: its tables, verdicts, files and advice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run, record
from runs import pairs
from tiny_gguf import write_tiny_gguf

import pypcd
from pypcd.cli import tune as command
from pypcd.evaluation import Paired, Plan
from pypcd.evaluation.tune import ALL, FEW_SETTINGS, SETTINGS, Tried, Tuned

SETTING, OTHER = "window:relative_top=0.3", "window:relative_top=0.1"


def tuned(gain: Paired, everyday: Paired | None, *, best: bool = True, plain_everyday: float | None = 76.0) -> Tuned:
    """A result on two tasks of long questions and two forms of everyday questions."""
    losing = everyday and pairs(1, 40, 576)
    tried = Tried(pairs(60, 10, 200), everyday and (pairs(3, 2, 576) if best else losing))
    cells = {("everyday", 300): pairs(0, 0, 192), ("everyday-behind", 1024): pairs(1, 2, 192), ALL: everyday}
    return Tuned(
        best=SETTING if best else None,
        tried={SETTING: tried, OTHER: Tried(pairs(80, 1, 200), losing)},
        refused={"cautious": "this model has no rotary positions"},
        gain={("kv", 1024): pairs(4, 1, 50), ("vt", 1024): pairs(5, 1, 50), ALL: gain} if best else {},
        everyday=cells if everyday and best else {},  # type: ignore[arg-type]
        n_judged=gain.n,
        plain_everyday=plain_everyday,
        replay={("kv", 1024): pairs(30, 1, 50), ALL: pairs(50, 2, 100)},
    )


@pytest.fixture
def called(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`pypcd tune` with a result, in an empty folder: what it asked for, the profile, and what it wrote (out, err)."""

    def called(result: Tuned, *arguments: str, model: str = "demo") -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def made(plan: Plan, directory: Path, **how: Any) -> Tuned:
            asked.update(plan=plan, **how)
            return result

        monkeypatch.setattr(command, "tune", made)
        out, err = run("tune", model, "--threads=1", *arguments)
        (profile,) = tmp_path.glob("*.pcd.json")
        return {**asked, "profile": json.loads(profile.read_text()), "out": out, "err": err}

    monkeypatch.chdir(tmp_path)
    return called


def flat(text: str) -> str:
    return " ".join(text.split())


HELPS, SPARES = pairs(60, 10, 100), pairs(3, 4, 576)


@pytest.mark.parametrize(
    ("result", "verdict", "words"),
    [
        (tuned(HELPS, SPARES), "on", ["--pcd demo.pcd.json", "pcd='demo.pcd.json'"]),
        (tuned(HELPS, None, plain_everyday=None), "on", ["--pcd demo.pcd.json", "not known", "none were asked"]),
        (tuned(HELPS, None, plain_everyday=7.0), "on", ["--pcd demo.pcd.json", "not known", "7%", "20%"]),
        (tuned(HELPS, pairs(2, 20, 576)), "off", ["it loses everyday questions"]),
        (
            tuned(HELPS, pairs(10, 20, 1000)),
            "off",
            ["it spoils 2.0% of the everyday questions that were right, and 1% are allowed"],
        ),
        (tuned(pairs(3, 2, 600), SPARES), "off", ["a gain of 10 points is excluded, and none is shown"]),
        (tuned(pairs(3, 2, 600), SPARES, best=False), "off", ["every setting that gains loses everyday questions"]),
        (tuned(HELPS, pairs(0, 1, 144)), "unknown", ["144 do not exclude a loss of 2 points", "--everyday 64"]),
        (tuned(pairs(3, 2, 30), SPARES), "unknown", ["30 do not exclude a gain of 10 points", "--n 200"]),
    ],
)
def test_the_verdict_is_printed_and_kept(result: Tuned, verdict: str, words: list[str], called: Any) -> None:
    found = called(result, "--everyday=32", "--length=1024")
    profile, last = found["profile"], flat(found["out"].split("\n\n")[-1])
    assert all(word in last for word in words) and ("leave pcd off" in last.lower()) == (verdict != "on")
    evidence = profile["evidence"]
    assert re.search(
        r"Beside it, on the long questions of the second half: replay \+48.0 \[.*\], 50 / 2\. It repeats", last
    )
    assert [cell["task"] for cell in evidence["replay"]] == ["kv", None]
    assert evidence["verdict"] == verdict == result.verdict and evidence["best"] == result.best
    assert profile["pcd"] == (pypcd.PCDConfig.resolve(SETTING).as_dict() if verdict == "on" else None)
    assert [cell["task"] for cell in evidence["gain"]] == (["kv", "vt", None] if result.best else [])
    assert len(evidence["everyday"]) == (3 if result.everyday else 0)
    assert list(evidence["tried"]) == [SETTING, OTHER] and list(evidence["refused"]) == ["cautious"]
    assert evidence["tried"][OTHER]["gain"]["wins"] == 80
    assert (evidence["tried"][OTHER]["everyday"] or {}).get("losses", 40) == 40


def test_all_settings_and_the_best_ones_cells_are_in_tables(called: Any) -> None:
    found = called(tuned(HELPS, SPARES), "--everyday=32")
    lines = [[word.strip() for word in line.split("  ") if word.strip()] for line in found["out"].splitlines()]
    tried = [line for line in lines if line[:1] in ([SETTING], [OTHER])]
    assert [line[1][:5] for line in tried] == ["+25.0", "+39.5"] and [line[2][:4] for line in tried] == ["+0.2", "-6.8"]
    rows = [line for line in lines if len(line) > 2 and " of " in line[-1]]
    assert [row[:2] for row in rows] == [
        ["1024", "kv"],
        ["1024", "vt"],
        ["all long questions", "40.0"],
        ["300", "everyday"],
        ["1024", "everyday, behind text"],
        ["all everyday questions", "99.5"],
    ]
    assert rows[2][2:4] == ["90.0", "+50.0 [+37.0, +63.0]"] and rows[5][-2:] == ["3 / 4", "4 of 573"]
    assert "cautious" in found["err"] and "this model has no rotary positions" in flat(found["err"])


@pytest.mark.parametrize(
    ("model", "arguments", "wanted"),  # tasks, n, everyday, lengths, settings
    [
        ("demo", [], (("kv-short",), 100, 0, (500, 1500), SETTINGS)),  # it reads nothing else
        ("some.gguf", [], (("xquad", "kv-records"), 100, 32, (1024, 4096), SETTINGS)),
        ("some.gguf", ["--quick"], (("xquad", "kv-records"), 12, 4, (1024,), FEW_SETTINGS)),
    ],
)
def test_what_is_asked_by_default(
    model: str, arguments: list[str], wanted: Any, called: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tiny_gguf(tmp_path / "some.gguf")
    monkeypatch.setattr(command, "run_options", lambda *args: {})
    monkeypatch.setattr(command, "facts", lambda *args: {})
    asked = called(tuned(HELPS, SPARES), *arguments, model=model)
    plan = asked["plan"]
    assert (plan.tasks, plan.n, asked["everyday"], plan.lengths, asked["settings"]) == wanted
    assert asked["long_everyday"] == (arguments == [])


def test_a_quick_run_says_how_little_it_tells(called: Any) -> None:
    result = tuned(pairs(3, 2, 18), pairs(0, 0, 28))
    last = flat(called(result, "--quick", "--everyday=4")["out"].split("\n\n")[-1])
    assert "18 long questions judge, of which at least 6 must differ" in last and "costs less than 2 points" in last
    assert "quick" not in called(result, "--everyday=4", "--profile=demo-quick.pcd.json")["out"]


# -- real runs -------------------------------------------------------------------------------------------------------


def test_tune_writes_a_profile_that_loads_and_goes_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "demo", "--quick", "--length", "180,250", "--n", "6", "--threads", "1"]
    evidence = record(run, *arguments)
    # six questions to judge by neither show a gain nor exclude one of 10 points
    assert evidence["pcd"] is None and evidence["verdict"] == "unknown" and evidence["n_judged"] == 6
    assert evidence["n_everyday"] == 0 and list(evidence["tried"]) == list(FEW_SETTINGS)
    assert pypcd.PCDConfig.resolve("demo-quick.pcd.json") is None
    assert {path.name for path in tmp_path.iterdir()} == {"tune-demo-quick", "demo-quick.pcd.json"}

    written = [tmp_path / "demo-quick.pcd.json", tmp_path / "tune-demo-quick/long/samples.jsonl"]
    before = [path.read_bytes() for path in written]
    shown = flat(run(*arguments)[0])
    assert "6 do not exclude a gain of 10 points" in shown and "Leave PCD off" in shown
    assert [path.read_bytes() for path in written] == before
    # a run with other questions needs another folder
    assert "n is 6 there and 12 here" in run(*arguments, "--n=12", status=2)[1]
