"""The plan that is the same for all models: what it holds, what a model cannot take, resuming, and research/models.py on a
real model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny

from pypcd.settings.config import PRESETS
from research import survey
from research.balance import CHATS, LONG, READING, RETRIEVAL, SHORT_PROMPTS, controlled, group_of
from research.survey import EvalPart, legs, survey_methods

SCRIPT = Path(__file__).parents[2] / "research/models.py"


def test_every_preset_is_asked_and_each_has_its_control() -> None:
    methods = survey_methods()
    presets = {f"pcd:{name}" for name in PRESETS}
    controls = {"control": {"pcd:paper", "pcd:window"}, "control:relative_top=0.1": {"pcd:window:relative_top=0.1"}}
    controls["control:beta=0.75:relative_top=0.3:min_context=300:min_first_entropy=2.25"] = {"pcd:unsure"}
    assert methods[0] == "greedy"
    assert set(methods[1:]) == {"pcd:window:relative_top=0.1", *presets, *controls, "replay", "recite"}
    assert {name: set(controlled(name, methods)) for name in controls} == controls
    assert controlled("pcd:window", methods) == controlled("control:beta=9", methods) == ()


@pytest.mark.parametrize(("n_ctx_train", "n_retrieval"), [(8192, 6), (1024, 2)])
def test_each_group_has_at_least_300_questions(tiny: Tiny, n_ctx_train: int, n_retrieval: int) -> None:
    plan, notes = legs(str(tiny(n_ctx_train=n_ctx_train)))
    asked: dict[Any, set[Any]] = {group: set() for group in (RETRIEVAL, READING, SHORT_PROMPTS, LONG, CHATS)}
    for leg in plan:
        assert leg.length <= n_ctx_train and leg.plan.lengths == (leg.length,)
        for task, length, index, method in leg.plan.everything():
            assert index % 2 == 1, "the second half only"
            if method == "control":
                group = group_of(task, length)
                is_everyday = group in (SHORT_PROMPTS, LONG)
                asked[group].add((task.removesuffix("-behind"), index) if is_everyday else (task, length, index))
    assert all(len(questions) >= 300 for questions in asked.values())
    assert sum(leg.part.startswith("retrieval") for leg in plan) == n_retrieval
    assert len(plan) + len(notes) == 13 and all(f"the model was trained for {n_ctx_train}" in note for note in notes)


def test_a_model_of_a_short_context_is_asked_what_it_can_take(tiny: Tiny) -> None:
    plan, notes = legs(str(tiny(n_ctx_train=512)))
    assert [(leg.part, leg.length) for leg in plan] == [("everyday-short", 300)]
    assert "retrieval-numbers at 600 tokens is left out: the model was trained for 512" in notes and len(notes) == 12


def test_less_can_be_asked(tiny: Tiny) -> None:
    model = str(tiny(n_ctx_train=8192))
    methods = ["replay", "pcd:unsure"]
    assert {leg.plan.methods for leg in legs(model, methods=methods)[0]} == {("greedy", "replay", "pcd:unsure")}
    plan, _ = legs(model, parts=("everyday-long", "everyday-short"), lengths=(1500,), n=4, chat=True)
    assert [(leg.part, leg.length, leg.plan.n, leg.plan.chat) for leg in plan] == [
        ("everyday-short", 300, 4, True),
        ("everyday-long", 1500, 4, True),
    ]
    # questions of a cell do not depend on what else is asked, so that a run can go on with other lengths
    (some, _), (everything, _) = legs(model, lengths=(600,), parts=("retrieval",)), legs(model)
    assert len(some) == 2 and {leg.plan for leg in some} < {leg.plan for leg in everything}
    with pytest.raises(ValueError, match="part is 'needles'; allowed: "):
        legs(model, parts=("needles",))


def test_the_script_on_a_real_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    parts = {
        "retrieval-pairs": EvalPart(("kv-short",), (200, 4000), 4, max_tokens=8),
        "everyday-short": EvalPart(("everyday-arithmetic", "everyday-json"), (300,), 4, max_tokens=8),
        "everyday-long": EvalPart(
            ("everyday-arithmetic", "everyday-arithmetic-behind"), (500,), 4, n_pool=2, max_tokens=8
        ),
    }
    monkeypatch.setattr(survey, "PARTS", parts)
    monkeypatch.setattr(survey, "survey_methods", lambda: ("greedy", "pcd:window", "control"))
    main = runpy.run_path(str(SCRIPT))["main"]
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    words = ["demo", "--threads=1", *places]

    main([*words, "--dry-run"])
    shown = capsys.readouterr()
    assert "| retrieval-pairs | 200 | 4 | 12 |" in shown.out and "| everyday-long | 500 | 4 | 12 |" in shown.out
    assert "retrieval-pairs at 4000 tokens" in shown.err and "2048" in shown.err
    assert not (tmp_path / "work").exists() and not (tmp_path / "out").exists()

    main(words)
    shown = capsys.readouterr()
    text = (tmp_path / "out/summary.md").read_text()
    assert shown.out == text and "| demo | `pcd:window` |" in text and "everyday-json at 300 tokens" in text
    assert "greedy gets 0.0% right" in text
    assert (tmp_path / "out/summary.png").read_bytes()[1:4] == b"PNG"
    kept = json.loads((tmp_path / "out/run.json").read_text())["demo"]
    assert kept["runs"]["everyday-long-500"]["n_pool"] == 2 and len(kept["left_out"]) == 2

    samples = tmp_path / "work/demo/everyday-long-500/samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:5]))  # as after Ctrl-C
    main(words)
    assert samples.read_text().count("\n") == len(lines) > 5
    assert (tmp_path / "out/summary.md").read_text() == text
    main([str(tmp_path / "work/demo"), "--half=second", "--out", str(tmp_path / "again")])  # its answers, as they are
    again = (tmp_path / "again/summary.md").read_text()  # without what the plan left out
    assert [line for line in again.split("\n") if line[:1] == "|"] == [
        line for line in text.split("\n") if line[:1] == "|"
    ]

    with pytest.raises(SystemExit, match="has no answers"):
        main([str(tmp_path / "out"), *places])
    with pytest.raises(SystemExit, match="everyday-long at 9000 tokens"):
        main([*words, "--length=9000", "--part=everyday-long"])
    with pytest.raises(SystemExit, match="--chat"):
        main([str(tiny()), "--chat", "--threads=1", *places])
    main(["demo", "--chat", "--dry-run", "--threads=1", *places])  # its answers without the template do not count
    assert "demo-chat\n\n" in (out := capsys.readouterr().out) and "| everyday-long | 500 | 4 | 12 |" in out
    with pytest.raises(SystemExit, match="demo"):
        main([*words, str(tmp_path / "work/demo")])
    with pytest.raises(SystemExit, match="--half first"):
        main([*words, "--half=first"])
    with pytest.raises(SystemExit, match="first half"):
        main([str(tmp_path / "work/demo"), "--half=first", *places])
