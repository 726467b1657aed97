"""The command tune as a user calls it: its tables, verdicts, files and advice."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import pypcd
from pypcd.cli import _options, main
from pypcd.cli import tune as command
from pypcd.decode import PCD
from pypcd.evaluation import Paired, Plan, paired
from pypcd.lab.tune import ALL, Tuned, Weighed

SETTING = pypcd.PCDConfig.windowed().replace(beta=5.0, adaptive="jsd", relative_top=0.3, min_context=512)
NAME, TYPED = PCD(SETTING).name, _options.describe_pcd(SETTING)
OTHER = PCD(pypcd.PCDConfig.windowed()).name


def pairs(wins: int, losses: int, n: int) -> Paired:
    return paired([1.0] * wins + [0.0] * (n - wins), [0.0] * wins + [1.0] * losses + [0.0] * (n - wins - losses))


def tuned(gain: Paired, everyday: Paired | None, *, best: bool = True, plain_everyday: float | None = 76.0) -> Tuned:
    """A result on two tasks of long retrieval and two forms of everyday questions."""
    weighed = Weighed(pairs(60, 10, 200), everyday and pairs(3, 2, 576))
    return Tuned(
        SETTING if best else None,
        weighed,
        {("kv", 1024): pairs(4, 1, 50), ("vt", 1024): pairs(5, 1, 50), ALL: gain} if best else {},
        {("everyday", 300): pairs(0, 0, 192), ("everyday-behind", 1024): pairs(1, 2, 192), ALL: everyday}
        if everyday and best
        else {},
        {NAME: weighed, OTHER: Weighed(pairs(80, 1, 200), everyday and pairs(1, 40, 576))},
        {"pcd": "this model has no rotary positions"},
        gain.n,
        plain_everyday,
    )


def called(result: Tuned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """tune with that result, in an empty folder. Returns what it asked for, and the profile."""
    asked: dict[str, Any] = {}

    def made(plan: Plan, directory: Path, **how: Any) -> Tuned:
        asked.update(plan=plan, **how)
        directory.mkdir()
        for method, weighed in result.tried.items():
            how["tell"](method, weighed)
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "tune", made)
    assert main(["tune", "demo", "--threads", "1", *arguments]) == 0
    name = "demo-quick" if "--quick" in arguments else "demo"
    return {**asked, "profile": json.loads((tmp_path / f"{name}.pcd.json").read_text())}


def flat(text: str) -> str:
    return " ".join(text.split())


HELPS, SPARES = pairs(60, 10, 100), pairs(3, 4, 576)


@pytest.mark.parametrize(
    ("result", "verdict", "text"),
    [
        (tuned(HELPS, SPARES), "on", "use it: pypcd.Llama(..., pcd='demo.pcd.json'), or --pcd demo.pcd.json."),
        (tuned(HELPS, None, plain_everyday=None), "on", "is not known: none were asked (--everyday)."),
        (
            tuned(HELPS, None, plain_everyday=7.0),
            "on",
            "this model gets 7% of them right without PCD, and with fewer than",
        ),
        (
            tuned(HELPS, pairs(2, 20, 576)),
            "off",
            "leave PCD off on prompts like these: it costs everyday questions (demo",
        ),
        (
            tuned(HELPS, pairs(10, 20, 1000)),
            "off",
            "these: a loss of 2 points on everyday questions is not excluded (demo",
        ),
        (
            tuned(HELPS, pairs(4, 5, 144)),
            "unknown",
            "about 1227 are needed: --everyday 273. Until then leave PCD off (demo",
        ),
        (tuned(pairs(3, 2, 600), SPARES), "off", "leave PCD off on prompts like these (demo.pcd.json says so too)"),
        (
            tuned(pairs(3, 2, 30), SPARES),
            "unknown",
            "30 questions to judge by are too few. The best setting and greedy disag",
        ),
    ],
)
def test_the_verdict_is_printed_and_kept(
    result: Tuned,
    verdict: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = called(result, monkeypatch, tmp_path, "--everyday", "32")
    captured = capsys.readouterr()
    assert text in flat(captured.out) and f"{TYPED} was the best of 2 settings" in captured.out
    profile = found["profile"]
    assert profile["evidence"]["verdict"] == verdict == result.verdict
    assert profile["pcd"] == (SETTING.as_dict() if verdict == "on" else None)
    assert [cell["task"] for cell in profile["evidence"]["gain"]] == ["kv", "vt", None]
    assert len(profile["evidence"]["everyday"]) == (3 if result.everyday else 0)


def test_both_figures_are_in_the_table_and_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called(tuned(HELPS, SPARES), monkeypatch, tmp_path, "--everyday", "32")
    captured = capsys.readouterr()
    lines = [line.split("  ") for line in captured.out.splitlines() if " / " in line and line[:1] == " "]
    rows = [[word.strip() for word in line if word.strip()] for line in lines]
    assert [row[:2] for row in rows] == [
        ["1024", "kv"],
        ["1024", "vt"],
        ["all long questions", "10.0"],
        ["300", "everyday"],
        ["1024", "everyday, behind text"],
        ["all everyday questions", "0.7"],
    ]
    assert rows[2][2:4] == ["60.0", "+50.0 [+37.0, +63.0]"] and rows[5][-1] == "3 / 4"
    said = captured.err.splitlines()
    assert said[0] == "after 200 long questions and 576 everyday questions, in points over greedy:"
    assert said[1].startswith("  long +25.0 [") and said[1].endswith(f"everyday +0.2 [-0.5, +1.0] ~  {TYPED}")
    assert "pcd was not tried: this model has no rotary positions" in flat(captured.err)
    with (tmp_path / "tune-demo" / "tried.csv").open() as file:
        tried = list(csv.DictReader(file))
    assert [row["method"] for row in tried] == [NAME, OTHER] and tried[1]["everyday_difference"] == "-6.77"


def test_where_gains_cost_everyday_questions_the_highest_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = called(tuned(HELPS, SPARES, best=False), monkeypatch, tmp_path, "--everyday", "32")
    out = flat(capsys.readouterr().out)
    assert (
        "none of 2 settings gained on long prompts without a loss on everyday questions, after all 200 long questions to "
        "choose by; the highest gain was" in out
    )
    assert "window: long +39.5 [" in out and "everyday -6.8 [" in out
    assert found["profile"]["pcd"] is None


def test_settings_that_were_given_up_may_have_been_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a quarter of the questions; the ones that went on lost what they had gained."""
    behind, ahead = Weighed(pairs(9, 10, 200), None), Weighed(pairs(3, 1, 50), None)
    result = tuned(HELPS, None, best=False, plain_everyday=None)
    result = dataclasses.replace(result, chosen_by=behind, tried={NAME: behind, OTHER: ahead})
    called(result, monkeypatch, tmp_path, "--quick")
    assert "none of 2 settings was ahead of greedy after all 200 questions to choose by" in flat(
        capsys.readouterr().out
    )


def test_what_is_asked_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = tuned(HELPS, SPARES)
    demo = called(result, monkeypatch, tmp_path)
    assert demo["plan"].lengths == (500, 1500)
    assert demo["plan"].tasks == ("kv-short",) and demo["everyday"] == 0 and not demo["quick"]  # it reads nothing else
    monkeypatch.setattr(command, "resolve_model", lambda name: pypcd.gguf.resolve_model("demo"))
    monkeypatch.setattr(command, "run_options", lambda *args: {})
    monkeypatch.setattr(command, "facts", lambda *args: {})
    for arguments, n, everyday, lengths in (([], 100, 32, (1024, 4096)), (["--quick"], 40, 8, (1024,))):
        (tmp_path / "x").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "x")
        asked: dict[str, Any] = {}

        def made(plan: Plan, directory: Path, *, asked: dict[str, Any] = asked, **how: Any) -> Tuned:
            asked.update(plan=plan, **how)
            directory.mkdir()
            return result

        monkeypatch.setattr(command, "tune", made)
        assert main(["tune", "some.gguf", *arguments]) == 0
        assert asked["plan"].tasks == ("kv", "niah-multikey-2", "vt") and asked["plan"].lengths == lengths
        assert (asked["plan"].n, asked["everyday"], asked["quick"]) == (n, everyday, bool(arguments))


# -- real runs -------------------------------------------------------------------------------------------------------


def test_tune_writes_a_profile_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "demo.pcd.json"
    arguments = ["tune", "demo", "--quick", "--length", "250", "--n", "6", "--threads", "1"]
    assert main([*arguments, "--profile", str(profile), "--out", str(tmp_path / "run")]) == 0
    text = flat(capsys.readouterr().out)
    record = json.loads(profile.read_text())
    # three questions of six show nothing, whatever came out
    assert record["pcd"] is None and record["evidence"]["verdict"] == "unknown"
    assert "no recommendation: 3 questions to judge by are too few" in text and "leave PCD off" in text
    assert f"about {record['evidence']['n_needed']} questions are needed" in text
    assert pypcd.PCDConfig.from_profile(str(profile)) is None
    assert len((tmp_path / "run" / "tried.csv").read_text().splitlines()) == 1 + record["evidence"]["n_tried"]
    assert len(record["evidence"]["views"]) == 4  # a window of 128 would see most of the prompt


def test_tune_says_before_it_asks_that_so_few_questions_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "demo", "--quick", "--length", "180,250", "--n", "4", "--threads", "1", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["n_judged"] == 4 and record["pcd"] is None and record["n_everyday"] == 0
    assert captured.err.startswith(
        "pypcd: 4 questions to judge by, but fewer than 6 cannot show a difference: nothing will"
    )
    assert "--n 6, or more" in captured.err.splitlines()[0]
    assert {path.name for path in tmp_path.iterdir()} == {"tune-demo-quick", "demo-quick.pcd.json"}
    # a run with other questions needs another folder, and says so
    assert main(["tune", "demo", "--quick", "--length", "180", "--n", "12", "--threads", "1"]) == 1
    assert "n is 4 there and 12 here" in flat(capsys.readouterr().err)
