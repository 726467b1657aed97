"""Runs: resumed after any kill they end the same; tables against records worked out by hand."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import Tiny
from processes import within
from runs import (
    DEMO,
    ONE,
    Records,
    command,
    cut_copy,
    finished,
    lines,
    processes_of,
    python_path,
    tables,
    without_time,
)

import pypcd
import research.methods
from pypcd import engine
from pypcd.decode import Session
from pypcd.evaluation import (
    Directory,
    ModelTokenizer,
    Plan,
    Progress,
    evaluate,
    facts,
    markdown,
    run,
    run_options,
    task,
    tasks,
)
from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer
from pypcd.gguf import DEMO_MODEL, read_gguf
from pypcd.llama import machine, threads
from pypcd.prompt import Prompt


def test_a_run_says_what_made_it(finished: tuple[Directory, Records]) -> None:
    run = json.loads((finished[0].path / "run.json").read_text())
    assert run["seed"] == 0 and len(run["weights"]) == 16 and run["pypcd"] == pypcd.__version__


@pytest.mark.parametrize("share", [0.0, 0.3, 0.55, 0.999, 1.0])
def test_a_run_cut_anywhere_ends_the_same(share: float, finished: tuple[Directory, Records], tmp_path: Path) -> None:
    directory, records = finished
    assert sorted(records) == sorted(DEMO.everything())
    copy = cut_copy(directory, tmp_path / "run", share)
    assert without_time(evaluate(DEMO, copy, options=ONE).records) == without_time(records)
    assert len(lines(copy)) == len(records)


def test_an_error_in_a_process_comes_back(tmp_path: Path) -> None:
    """By its text, since not every exception can be pickled."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(200))
    for model, n_ctx, error, named in (("demo", -3, ValueError, "n_ctx"), (str(broken), 512, pypcd.ModelError, "load")):
        plan, options = dataclasses.replace(DEMO, model=model), {**ONE, "n_ctx": n_ctx}
        with pytest.raises(error, match=named):
            evaluate(plan, Directory(tmp_path / "run"), jobs=2, options=options)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Records]:
    """For commands that are stopped: they must not be through before that."""
    plan = dataclasses.replace(DEMO, n=40)
    return plan, evaluate(plan, Directory(tmp_path_factory.mktemp("run") / "longer"), options=ONE).records


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_command_leaves_no_process_behind_and_goes_on(
    how: signal.Signals, longer: tuple[Plan, Records], tmp_path: Path
) -> None:
    (plan, expected), out, mark = longer, tmp_path / "run", str(tmp_path)
    samples = out / "samples.jsonl"
    words, env = command(out, "--jobs=2", n=plan.n), python_path(PYPCD_TEST_RUN=mark)
    process = subprocess.Popen(
        words,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  in the background Ctrl-C is ignored
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # Ctrl-C comes while both workers still import, and reaches them too
        begun = samples.exists if how == signal.SIGKILL else lambda: len(processes_of(mark, "_multiarray")) == 3
        assert within(lambda: begun() or process.poll() is not None, 120)
        assert process.poll() is None and len(processes_of(mark)) >= 3
        os.killpg(process.pid, how) if how == signal.SIGINT else process.kill()
        said = process.communicate(timeout=60)[1]
        assert within(lambda: not processes_of(mark), 60), said
    finally:
        process.kill()
    if how == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in said
    assert not samples.exists() or len(samples.read_text().splitlines()) < len(expected)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert (out / "summary.md").read_text() == done.stdout
    assert done.stdout == tables(plan, expected)
    assert len(lines(Directory(out))) == len(expected)


def test_a_question_that_cannot_be_answered_does_not_end_the_run(tmp_path: Path) -> None:
    """A context of 256 tokens is too small for CAD's second prompt: cad fails on each question, greedy does not."""
    plan = Plan("demo", ("kv-short",), ("greedy", "cad"), (250,), n=2)
    directory = Directory(tmp_path / "run")
    outcome = evaluate(plan, directory, options={**ONE, "n_ctx": 256})
    errors = [record["error"] for key, record in outcome.records.items() if key[3] == "cad"]
    assert len(errors) == 2 and all("larger n_ctx" in error for error in errors)
    text = markdown(plan, outcome.records, {})
    assert "## Not answered" in text and "- cad: 2, such as kv-short, 250 tokens, question 0" in text
    mended = evaluate(plan, directory, options=ONE)
    assert not any("error" in record for record in mended.records.values())


def test_a_directory_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    with directory.locked(), pytest.raises(ValueError, match="is in use by another evaluation"):
        evaluate(DEMO, directory, options=ONE)
    assert not list(directory.path.iterdir())


def test_a_run_may_be_continued_with_more_methods_and_lengths(
    finished: tuple[Directory, Records], tmp_path: Path
) -> None:
    small = Plan("demo", ("kv-short",), ("greedy",), (180,), n=4)
    directory = Directory(tmp_path / "run")
    evaluate(small, directory, options=ONE)
    assert without_time(evaluate(DEMO, directory, options=ONE).records) == without_time(finished[1])
    assert list(evaluate(small, directory, options=ONE).records) == list(small.everything())


@pytest.mark.parametrize(
    ("arch", "sizes", "refused", "why"),
    [("gpt2", {}, "pcd", "gpt2"), ("llama", {"n_head": 8}, "greedy+kv:q8_0", "allowed for heads of 8 values")],
)
def test_a_method_that_cannot_run_is_refused_with_a_sentence(
    arch: str, sizes: dict[str, int], refused: str, why: str, tiny: Tiny, tmp_path: Path
) -> None:
    plan = Plan(str(tiny(arch, **sizes)), ("kv-short",), (refused, "pcd:window"), (400,), n=2, max_tokens=3)
    outcome = evaluate(plan, Directory(tmp_path / "run"), options={**ONE, "n_ctx": 1024})
    assert list(outcome.refused) == [refused] and why in outcome.refused[refused]
    assert {key[3] for key in outcome.records} == {"greedy", "pcd:window"}
    assert f"- {refused}: {outcome.refused[refused]}" in markdown(plan, outcome.records, outcome.refused)


def test_types_of_the_cache_and_settings_of_the_other_engine_are_methods_beside_the_usual_ones(tmp_path: Path) -> None:
    """They answer as a model does that is opened for them alone: llama_cpp's with those types, pypcd's on its other engine."""
    methods = ("greedy+kv:q4_0", "greedy+kv:q4_0:q8_0", "pcd:window+kv:f16:q8_0", "pcd:window", "greedy+kv:f16")
    methods += ("pcd:paper:cache=separate", "pcd:paper:type_k_over=f16")
    plan = Plan("demo", ("kv-short",), methods, (300,), n=3, max_tokens=12)
    outcome = evaluate(plan, Directory(tmp_path / "run"), options={**ONE, "n_ctx": 512})
    assert outcome.refused == {} and len(outcome.records) == 24
    answers = {
        method: [outcome.records["kv-short", 300, i, method]["prediction"] for i in range(3)] for method in plan.methods
    }
    assert answers["greedy"] == answers["greedy+kv:f16"]
    stock = functools.partial(llama_cpp.Llama, str(DEMO_MODEL), n_ctx=512, verbose=False, **ONE)
    for method, opened in (
        ("greedy+kv:q4_0", stock(type_k=2)),
        ("greedy+kv:q4_0:q8_0", stock(type_k=2, type_v=8, flash_attn=True)),
        (methods[-2], pypcd.Llama("demo", pcd="paper:cache=separate", engine="stock", n_ctx=512, **ONE)),
    ):
        with contextlib.closing(opened) as llm:
            for i, sample in enumerate(task("kv-short").samples(3, 300, ModelTokenizer(llm), 0)):
                wanted = llm(sample.prompt.begun, max_tokens=12, temperature=0.0)["choices"][0]["text"]
                assert answers[method][i] == wanted


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"seed": 1}, {}, "seed is 0 there and 1 here"),
        ({"n": 5}, {}, "n is 4"),
        ({"chat": True}, {}, "chat is False"),
        ({}, {"n_ubatch": 64}, "options is .* there and .*'n_ubatch': 64"),
    ],
)
def test_another_run_is_not_mixed_in(
    changes: dict[str, Any], options: dict[str, Any], named: str, finished: tuple[Directory, Records]
) -> None:
    before = finished[0].samples.read_bytes()
    evaluate(DEMO, finished[0], options={**ONE, "n_threads": 2})  # rows do not depend on threads (test_threads.py)
    with pytest.raises(ValueError, match=named):
        evaluate(dataclasses.replace(DEMO, **changes), finished[0], options={**ONE, **options})
    assert finished[0].samples.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "jobs", "wanted"),
    [
        ({}, 1, (1, 1)),  # what other programs leave
        ({}, 2, (4, 4)),
        ({}, 16, (1, 1)),
        ({"n_threads": 3, "n_threads_batch": None}, 2, (3, 3)),
        ({"n_threads_batch": 2}, 1, (1, 2)),
        ({"flash_attn": True}, 1, (4, 8)),  # rows depend on it: the usual numbers
        ({"flash_attn": True, "n_threads": 2}, 1, (2, 2)),
    ],
)
def test_a_run_has_the_same_threads_all_along(
    given: dict[str, Any], jobs: int, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: 8)
    monkeypatch.setattr(machine, "has_gpu", lambda options=None: False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_busy", lambda: 7)
    options = run_options(DEMO, given, jobs)
    assert (options["n_threads"], options["n_threads_batch"]) == wanted
    assert run_options(DEMO, options, jobs) == options
    quantised = dataclasses.replace(DEMO, methods=("greedy", "kv:q8_0:q8_0"))  # which takes flash attention
    assert given or run_options(quantised, given, 1)["n_threads"] == 4
    known = {name: options[name] for name in ("n_threads", "n_threads_batch")}
    assert facts(DEMO, options)["options"] == ({"flash_attn": True, **known} if "flash_attn" in given else {})


@pytest.mark.parametrize(
    ("options", "matter"),
    [({}, False), ({"n_gpu_layers": -1}, False), ({"n_gpu_layers": 0}, False), ({"n_gpu_layers": 8}, True)],
)
def test_layers_beside_a_gpu_depend_on_threads(
    options: dict[str, Any], matter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention is on there by default."""
    monkeypatch.setattr(machine, "has_gpu", lambda options=None: True)
    assert ("n_threads" in facts(DEMO, options)["options"]) == matter


def test_the_model_of_a_run_takes_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    choose = threads.choose
    monkeypatch.setattr(threads, "choose", lambda options, *numbers: given.append(numbers) or choose({}, 1, 1))
    evaluate(dataclasses.replace(DEMO, n=1), Directory(tmp_path / "run"))
    assert given[0] == (None, None) and len(given) > 1 and set(given[1:]) == {(1, 1)}


def test_weights_tell_a_run_and_not_the_path_or_the_time_of_their_file(tmp_path: Path) -> None:
    model, directory = tmp_path / "model.gguf", Directory(tmp_path / "run")
    plan = Plan("demo", ("kv-short",), ("greedy",), (180,), n=1)
    evaluate(plan, directory, options=ONE)
    model.write_bytes(DEMO_MODEL.read_bytes())
    copied = dataclasses.replace(plan, model=str(model))
    evaluate(copied, directory, options=ONE)
    model.write_bytes(DEMO_MODEL.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="holds another run: weights is"):
        evaluate(copied, directory, options=ONE)


def test_other_questions_are_another_run(finished: tuple[Directory, Records], tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    directory.path.mkdir()
    shutil.copy(finished[0].path / "run.json", directory.path)
    record = {**finished[1]["kv-short", 180, 0, "greedy"], "prompt_sha256": "0" * 16}
    directory.samples.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="another question 0 of kv-short at 180 tokens"):
        evaluate(DEMO, directory, options=ONE)


class Few(Task):
    """A task with three questions."""

    name, metric, max_tokens, n_questions = "few", "F1", 2, 3

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        order = [0, 1, 2] if seed == 0 else [1, 2, 0]
        return [
            Sample(i, Prompt("A ", (f"bat is {k}.",), " ", f" What is {k}?"), (str(k),))
            for i, k in enumerate(order[:n])
        ]

    def score(self, prediction: str, sample: Sample) -> float:
        return float(sample.answers[0] in prediction)


def test_a_task_has_as_many_questions_as_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a task has too few questions, the control's pool takes the asked ones, except the current one."""
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._TASKS))
    tasks.register(Few())
    plan = Plan("demo", ("few", "kv-short"), ("control",), (1024,), n=5, max_tokens=2)
    outcome = evaluate(plan, Directory(tmp_path / "run"), options=ONE)
    assert len(outcome.records) == 2 * (3 + 5) and not any("error" in r for r in outcome.records.values())
    text = markdown(plan, outcome.records, {})
    assert "## few (F1, 3 questions)" in text and "## kv-short (accuracy)" in text


class Killed(run.Worker):
    """Its process is killed at a question, as by a system that is short of memory."""

    def _record(self, key: Any, sample: Any, method: Any) -> dict[str, Any]:
        if key[:3] == ("kv-short", 280, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._record(key, sample, method)


def test_a_process_that_is_killed_ends_the_run_and_the_same_command_goes_on(
    finished: tuple[Directory, Records], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(pypcd.PCDError, match="of the evaluation ended early"):
        patch.setattr(run, "Worker", Killed)
        evaluate(DEMO, directory, jobs=2, options=ONE)
    assert 0 < len(directory.records()) < len(finished[1])
    made = evaluate(DEMO, directory, jobs=2, options=ONE).records
    assert without_time(made) == without_time(finished[1])


@pytest.mark.parametrize(
    ("changes", "jobs", "named"),
    [
        ({"lengths": (180, 30)}, 1, "kv-short at length 30: n_tokens is 30"),
        ({"lengths": (180, 30)}, 2, "kv-short at length 30: n_tokens is 30"),
        ({"tasks": ("kv-short", "vt")}, 1, "vt at length 180: n_tokens is 180"),  # where the other one fits
    ],
)
def test_a_length_that_is_too_short_is_known_before_anything_is_answered(
    changes: dict[str, Any], jobs: int, named: str, tmp_path: Path
) -> None:
    directory = Directory(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{named}; allowed: at least"):
        evaluate(dataclasses.replace(DEMO, **changes), directory, options=ONE, jobs=jobs)
    assert not directory.samples.exists()
    plan = Plan("demo", ("kv-short",), ("greedy",), (180,), n=2)  # another run, which the refused one does not bind
    assert len(evaluate(plan, directory, options=ONE).records) == 2


def test_a_micro_batch_that_takes_too_much_memory_refuses_one_method_only(tmp_path: Path, monkeypatch: Any) -> None:
    class Small(pypcd.Llama):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("n_ubatch", 0) > 512:
                raise pypcd.ModelError("attempted to allocate 160704.73 MB")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("pypcd.evaluation.run.Llama", Small)
    plan = Plan("demo", ("kv-short",), ("ms-poe-outlier", "pcd"), (600,), n=1)
    outcome = evaluate(plan, Directory(tmp_path / "run"), options=ONE)
    assert {key[3] for key in outcome.records} == {"greedy", "pcd"}
    assert "in one micro-batch, here of" in outcome.refused["ms-poe-outlier"]
    assert "160704.73 MB" in outcome.refused["ms-poe-outlier"]


def test_a_longrope_model_has_one_table_in_a_run(tmp_path: Path, tiny: Tiny) -> None:
    model = str(tiny("llama", longrope=1024))
    assert read_gguf(model).rope_factors(64) == "short" and read_gguf(model).rope_factors(10**6) == "long"
    assert read_gguf(tiny("llama")).rope_factors(10**6) is None
    plan, directory = Plan(model, ("kv-short",), ("greedy",), (300,), n=1, max_tokens=2), Directory(tmp_path / "run")
    evaluate(plan, directory, options=ONE)
    with pytest.raises(ValueError, match="rope_factors is 'short' there and 'long' here"):
        evaluate(dataclasses.replace(plan, lengths=(300, 4000)), directory, options=ONE)


def test_the_pool_of_a_cell_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    start = Session.start
    monkeypatch.setattr(Session, "start", lambda *args, **kwargs: begun.append(args) or start(*args, **kwargs))
    plan = Plan("demo", ("kv-short",), ("greedy", "control", "control:relative_top=0.1"), (180,), n=4, n_pool=5)
    evaluate(plan, Directory(tmp_path / "run"), options=ONE)
    assert len(begun) == 4 * 3 + 5


def test_what_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not a run"):
        Directory(tmp_path).open(DEMO, {})
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="run.json"):
        Directory(tmp_path).open(DEMO, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "samples.jsonl").write_text('{"task": 1}\n')
    (tmp_path / "other" / "run.json").write_text(json.dumps({**vars(DEMO)}))
    with pytest.raises(ValueError, match="samples.jsonl, line 1"):
        Directory(tmp_path / "other").open(DEMO, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"tasks": ()}, "tasks"), ({"n": 0}, "n is 0"), ({"seed": -1}, "seed"), ({"half": "third"}, "'first', 'second'")],
)
def test_plans_are_checked_and_have_greedy(changes: dict[str, Any], named: str) -> None:
    fields: dict[str, Any] = {"model": "demo", "tasks": ("kv",), "methods": ("pcd", "pcd"), "lengths": (100,)}
    assert Plan(**fields).methods == ("greedy", "pcd")
    with pytest.raises(ValueError, match=named):
        Plan(**{**fields, **changes})
