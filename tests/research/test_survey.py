"""The plan that is the same for all models: what it holds, what a model cannot take, resuming, the estimate of its time, and
research/models.py on a real model."""

from __future__ import annotations

import csv
import json
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import Tiny
from fake_tokenizer import Words
from runs import ONE

import pypcd
from pypcd.errors import ModelError
from pypcd.evaluation import GROUPS, Plan, Progress
from pypcd.settings.config import PRESETS, Preset
from research import survey
from research.balance import CHATS, LONG, READING, RETRIEVAL, SHORT_PROMPTS, balance, controlled, group_of, read_run
from research.speed import Estimate, Speed, Timing, estimate, time_answers
from research.survey import EvalPart, fitting, legs, missing, names_of, run_survey, survey_methods, survey_options

SCRIPT = Path(__file__).parents[2] / "research/models.py"


# -- the plan --------------------------------------------------------------------------------------------------------


def test_every_preset_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    presets = {f"pcd:{name}" for name in PRESETS} - {"pcd:blog"}
    controls = {"control": {"pcd:paper", "pcd:window"}, "control:relative_top=0.1": {"pcd:window:relative_top=0.1"}}
    controls["control:beta=0.75:relative_top=0.3:min_context=300:min_first_entropy=2.25"] = {"pcd:unsure"}
    assert set(survey_methods()) == {
        "greedy",
        "pcd:window:relative_top=0.1",
        *presets,
        *controls,
        "replay",
        "recite",
    }
    assert survey_methods()[0] == "greedy"
    assert {name: set(controlled(name, survey_methods())) for name in controls} == controls
    assert controlled("pcd:window", survey_methods()) == controlled("control:beta=9", survey_methods()) == ()
    monkeypatch.setitem(PRESETS, "new", Preset({"perturbation": "none", "window": 64, "relative_top": 0.1}, "the cut"))  # type: ignore[arg-type]
    assert "pcd:new" in survey_methods() and "pcd:window:relative_top=0.1" not in survey_methods()


@pytest.mark.parametrize(("n_ctx_train", "n_retrieval"), [(8192, 6), (2048, 4), (1024, 2)])
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
    assert {leg.part for leg in legs(model, parts=("everyday",))[0]} == {"everyday-short", "everyday-long"}
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


def test_models_are_named_by_their_files(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    assert names_of([str(model), "demo"]) == {model.stem: str(model), "demo": "demo"}
    with pytest.raises(ValueError, match="demo"):
        names_of(["demo", str(pypcd.gguf.DEMO_MODEL)])
    (tmp_path / "a.gguf").write_text("none")
    with pytest.raises(ModelError, match=r"a\.gguf"):
        names_of([str(tmp_path / "a.gguf")])
    with pytest.raises(FileNotFoundError, match=r"b\.gguf"):
        names_of(["demo", str(tmp_path / "b.gguf")])


class Braced(Words):
    """It needs many more tokens for a brace."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text) + [1] * (30 * text.count("{"))


def test_a_task_that_does_not_fit_is_left_out_where_it_does_not(tiny: Tiny) -> None:
    plan, _ = legs(str(tiny(n_ctx_train=2048)), n=4)
    everything, none = fitting(plan, Words())
    assert everything == plan and none == []
    found, notes = fitting(plan, Braced())
    tasks = {leg.part: leg.plan.tasks for leg in found}
    short, long = tasks["everyday-short"], tasks["everyday-long"]
    assert set(short) < set(GROUPS["everyday"]) and "everyday-schema" not in short
    assert set(long) == set(GROUPS["everyday"] + GROUPS["everyday-behind"])
    assert any(note.startswith("everyday-schema at 300 tokens") and "n_tokens is 300" in note for note in notes)
    assert len(notes) == len(GROUPS["everyday"]) - len(short)
    assert [(leg.part, leg.length) for leg in found] == [(leg.part, leg.length) for leg in plan]


# -- asking ----------------------------------------------------------------------------------------------------------


class StandIn:
    """Answers at once: the setting with a window is right where greedy is wrong. Stops at a question, as Ctrl-C does."""

    stop_at: tuple[str, int] | None = None
    asked: ClassVar[list[Any]] = []

    def __init__(self, plan: Plan, options: Mapping[str, Any]) -> None:
        self.refused = {"pcd:paper": "it has no rotary positions"}

    def answer(self, task: str, length: int, index: int, methods: list[str]) -> Any:
        for method in methods:
            if (task, index) == self.stop_at:
                raise KeyboardInterrupt
            self.asked.append((task, length, index, method))
            if method in self.refused:
                yield (task, length, index, method), None
                continue
            score = float(("window" in method) == (index % 4 == 1))
            record = {"task": task, "length": length, "index": index, "method": method, "score": score}
            yield (task, length, index, method), {**record, "prompt_sha256": f"{task}{index}", "seconds": 0.0}

    def close(self) -> None:
        pass


def test_a_stopped_survey_goes_on_where_it_was(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = str(tiny(n_ctx_train=1024)), tmp_path / "m"
    plan, _ = legs(model, n=4)
    options = survey_options(plan, ONE)
    assert options["n_ctx"] >= 1000

    def go_on(stop_at: tuple[str, int] | None) -> Progress:
        monkeypatch.setattr(StandIn, "stop_at", stop_at)
        monkeypatch.setattr(StandIn, "asked", [])
        progress = Progress()
        refused = run_survey(plan, folder, options=options, model_facts={"a": 1}, progress=progress, worker=StandIn)  # type: ignore[arg-type]
        assert refused == {"pcd:paper": "it has no rotary positions"}
        return progress

    n_all = sum(len(list(leg.plan.everything())) for leg in plan)
    for stop_at in (("niah-multikey-3", 1), ("everyday-json", 3)):
        with pytest.raises(KeyboardInterrupt):
            go_on(stop_at)
    left = sum(len(missing(leg, folder)) for leg in plan)
    assert 0 < left < n_all
    progress = go_on(None)
    assert len(StandIn.asked) == left == progress.n_asked
    assert progress.n_answers_done == progress.n_answers
    run = read_run(folder, "m")
    done = [key for leg in plan for key in leg.plan.everything() if key[3] != "pcd:paper"]
    assert sorted(run.records) == sorted(done)
    by_method = {row.method: row for row in balance(run)}
    assert "pcd:paper" not in by_method and by_method["control"].groups[RETRIEVAL].difference == 0
    window = by_method["pcd:window"].groups[SHORT_PROMPTS]
    assert window.wins == window.losses == 12
    # other lengths and parts come on top, each in a directory of its own
    more, _ = legs(model, n=4, lengths=(700,), parts=("retrieval",))
    run_survey(more, folder, options=survey_options(more, ONE), model_facts={"a": 1}, worker=StandIn)  # type: ignore[arg-type]
    assert {key[1] for key in read_run(folder).records} == {300, 600, 700, 1000}


# -- the estimate ----------------------------------------------------------------------------------------------------

METHODS = ("greedy", "pcd", "control")
NEAR = Timing("everyday-json", 300, 100, 1.0, {"greedy": (10, 0.5), "pcd": (20, 2.0), "control": (10, 1.0)})
NEAR_2 = Timing("everyday-sort", 300, 100, 3.0, {"greedy": (2, 0.1), "pcd": (4, 0.4), "control": (2, 0.2)})
AWAY = Timing("kv-short", 2100, 2100, 84.0, {"greedy": (16, 1.6), "pcd": (16, 4.8), "control": (16, 3.2)})
SPEED = Speed([NEAR, NEAR_2, AWAY])


def test_speed_between_two_lengths_worked_out_by_hand() -> None:
    # a prompt's token: 4 s / 200 = 0.02 s at 100, 84 / 2100 = 0.04 s at 2100; halfway 0.03 s
    assert SPEED.read(100) == pytest.approx(2.0) and SPEED.read(1100) == pytest.approx(33.0)
    assert SPEED.read(2100) == pytest.approx(84.0) and SPEED.read(4200) == pytest.approx(168.0)
    # a step of greedy: 0.6 / 12 = 0.05 s, 0.1 s; of PCD: 2.4 / 24 = 0.1 s, 0.3 s
    assert SPEED.step("greedy", 1100) == pytest.approx(0.075) and SPEED.step("pcd", 1100) == pytest.approx(0.2)
    assert SPEED.step("refused", 1100) == 0
    assert SPEED.n_prompt("everyday-json", 300) == 100 and SPEED.n_prompt("everyday-json", 1000) == 1000
    assert SPEED.n_tokens("everyday-json-behind", "pcd", 48) == 20
    assert SPEED.n_tokens("everyday-json-behind", "pcd", 15) == 15
    assert SPEED.n_tokens("everyday-facts", "pcd", 48) == 12  # as everyday questions on average
    assert SPEED.n_tokens("niah-multikey-2", "pcd", 40) == 40  # not timed: as long as it may be


def test_a_methods_time_is_a_multiple_of_greedys() -> None:
    # prompts of 1, 3 and 84 s; answers of greedy 0.5, 0.1 and 1.6 s, of PCD 2.0, 0.4 and 4.8 s
    assert SPEED.ratio("greedy") == 1 and SPEED.ratio("pcd") == pytest.approx((88 + 7.2) / (88 + 2.2))
    assert SPEED.ratio("refused") is None and Speed([]).ratio("pcd") is None


def test_an_estimate_worked_out_by_hand() -> None:
    plan = Plan("m", ("everyday-json",), METHODS, (300,), n=6, half="second", n_pool=4)
    e = estimate(plan, plan.everything(), SPEED)
    # three questions: prompts of 100 tokens; answers of 10, 20 and 10 tokens at 0.05, 0.1 and 0.1 s
    assert (e.n_questions, e.n_answers) == (3, 9)
    assert e.prompts == pytest.approx(3 * 2.0) and e.answers == pytest.approx(3 * (0.5 + 2.0 + 1.0))
    assert e.control == pytest.approx(4 * (2.0 + 0.5) + 2.0)  # four others, and its own prompt again
    assert e.seconds == pytest.approx(6.0 + 10.5 + 12.0)
    two = estimate(plan, plan.everything(), SPEED, jobs=2)
    assert two.seconds == pytest.approx(3.0 + 5.25 + 12.0)  # each process makes what the control needs
    some = [key for key in plan.everything() if key[2] == 1 and key[3] == "pcd"]
    assert estimate(plan, some, SPEED) == Estimate(1, 1, pytest.approx(2.0), pytest.approx(2.0), 0.0)
    assert estimate(plan, [], SPEED) == Estimate() and estimate(plan, [], Speed([])) == Estimate()
    assert (e + two).n_questions == 6 and (e + two).seconds == pytest.approx(e.seconds + two.seconds)


def test_answers_are_timed_at_the_ends(load: Callable[..., pypcd.Llama]) -> None:
    llm = load(pypcd.gguf.DEMO_MODEL, False, n_ctx=700)
    plans = [
        Plan("demo", ("everyday-sort", "everyday-facts", "everyday-sort-behind"), METHODS, (300,), max_tokens=4),
        Plan("demo", ("kv-short",), METHODS, (400,), max_tokens=4),
        Plan("demo", ("kv-short", "everyday-sort"), METHODS, (500,), max_tokens=4),
    ]
    timings = list(time_answers(llm, plans))
    assert [(t.task, t.length) for t in timings] == [("everyday-sort", 300), ("everyday-facts", 300), ("kv-short", 500)]
    for t in timings:
        assert t.n_prompt <= t.length and t.read >= 0
        assert set(t.answers) == set(METHODS) and all(n <= 4 and s > 0 for n, s in t.answers.values())
    assert timings[-1].read > 0
    # an edit changes what the cache holds: each is timed from an empty one, and the prompt's time is taken off
    (edited,) = time_answers(
        llm, [Plan("demo", ("kv-short",), ("replay", "pcd:window", "recite:4"), (400,), max_tokens=4)]
    )
    assert list(edited.answers) == ["greedy", "replay", "pcd:window", "recite:4"]
    # a method that the model cannot run takes no time
    refused = [
        Plan("demo", ("kv-short",), ("greedy", "pcd:cache=separate:window=8:perturbation=noise", "rephrase"), (300,))
    ]
    assert all(s > 0 for t in time_answers(llm, refused) for _, s in t.answers.values())


# -- the script ------------------------------------------------------------------------------------------------------


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
    assert re.search(
        r"greedy's time, on the questions that were timed:\npcd:window \d+\.\d\d, control \d+\.\d\d\n", shown.out
    )
    assert "demo: 10 questions, 30 answers" in shown.out and "| everyday-long | 500 | 4 |" in shown.out
    assert "retrieval-pairs at 4000 tokens" in shown.err and "2048" in shown.err
    assert not (tmp_path / "work").exists() and not (tmp_path / "out").exists()

    main(words)
    shown = capsys.readouterr()
    assert "| retrieval-pairs | 200 |" in shown.err
    text = (tmp_path / "out/summary.md").read_text()
    assert shown.out == text and "| demo | `pcd:window` |" in text and "everyday-json at 300 tokens" in text
    assert "greedy gets 0.0% right" in text
    assert (tmp_path / "out/summary.png").read_bytes()[1:4] == b"PNG"
    with (tmp_path / "out/summary.csv").open() as file:
        rows = {(row["method"], row["group"]): row for row in csv.DictReader(file)}
    assert rows["control", RETRIEVAL]["n"] == "4" and len(rows) == 9
    kept = json.loads((tmp_path / "out/run.json").read_text())["demo"]
    assert kept["runs"]["everyday-long-500"]["n_pool"] == 2 and len(kept["left_out"]) == 2

    before = (tmp_path / "out/summary.csv").read_bytes()
    main(words)  # nothing is left to ask
    assert (tmp_path / "out/summary.csv").read_bytes() == before
    main([str(tmp_path / "work/demo"), "--half=second", "--out", str(tmp_path / "again")])  # its answers, as they are
    assert (tmp_path / "again/summary.csv").read_bytes() == before

    with pytest.raises(SystemExit, match="has no answers"):
        main([str(tmp_path / "out"), *places])
    with pytest.raises(SystemExit, match="everyday-long at 9000 tokens"):
        main([*words, "--length=9000", "--part=everyday-long"])
    with pytest.raises(SystemExit, match="--chat"):
        main([str(tiny()), "--chat", "--threads=1", *places])
    main(["demo", "--chat", "--dry-run", "--threads=1", *places])  # its answers without the template do not count
    assert "demo-chat: 10 questions, 30 answers" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="demo"):
        main([*words, str(tmp_path / "work/demo")])
    with pytest.raises(SystemExit, match="--half first"):
        main([*words, "--half=first"])
    with pytest.raises(SystemExit, match="first half"):
        main([str(tmp_path / "work/demo"), "--half=first", *places])
