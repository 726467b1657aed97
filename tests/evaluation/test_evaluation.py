"""Runs: resumed after any kill they end the same; tables against records worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny

import pypcd
from pypcd import engine, machine, threads
from pypcd.decode import Session
from pypcd.evaluation import (
    Directory,
    Plan,
    Progress,
    csv_text,
    evaluate,
    executors,
    facts,
    markdown,
    run,
    run_options,
    task,
)
from pypcd.evaluation.gold import Gold
from pypcd.gguf import read_gguf
from pypcd.vocabulary import Vocabulary

Load = Callable[..., pypcd.Llama]

DEMO = Plan("demo", ("kv-short",), ("greedy", "pcd", "control"), (180, 280), n=4)
ONE = {"n_threads": 1, "n_threads_batch": 1}


def without_time(records: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {key: {k: v for k, v in record.items() if k != "seconds"} for key, record in records.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Directory, dict[Any, Any]]:
    directory = Directory(tmp_path_factory.mktemp("run") / "finished")
    return directory, evaluate(DEMO, directory, options=ONE).records


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_holds_every_sample_once(finished: tuple[Directory, dict[Any, Any]]) -> None:
    directory, records = finished
    assert sorted(records) == sorted(DEMO.everything())
    lines = directory.samples.read_text().splitlines()
    assert len(lines) == len(records) == 2 * 4 * 3
    record = records["kv-short", 280, 1, "greedy"]
    assert record["prediction"].strip() == record["answers"][0] if record["score"] else True
    assert record["n_prompt"] <= 280 and record["depth"] == pytest.approx(0.25, abs=0.1)
    run = json.loads((directory.path / "run.json").read_text())
    assert run["seed"] == 0 and len(run["model_sha256"]) == 64 and run["pypcd"] == pypcd.__version__


def test_a_part_of_a_run_is_that_part_of_the_whole(finished: tuple[Directory, dict[Any, Any]], tmp_path: Path) -> None:
    some = {("kv-short", 280, 1, "greedy"), ("kv-short", 280, 1, "pcd"), ("kv-short", 180, 3, "greedy")}
    directory, progress = Directory(tmp_path / "run"), Progress()
    outcome = evaluate(DEMO, directory, options=ONE, progress=progress, only=lambda key: key in some)
    whole = {key: record for key, record in finished[1].items() if key in some}
    assert set(outcome.records) == some and without_time(outcome.records) == without_time(whole)
    assert progress.n_answers == progress.n_answers_done == 3
    assert len(directory.samples.read_text().splitlines()) == 3


def test_a_finished_run_is_not_answered_again(finished: tuple[Directory, dict[Any, Any]]) -> None:
    directory, records = finished
    size, done = directory.samples.stat().st_size, Progress()
    again = evaluate(DEMO, directory, options=ONE, progress=done)
    assert directory.samples.stat().st_size == size and again.records == records
    assert done.n_answers_done == done.n_answers == len(list(DEMO.everything())) and done.n_asked == 0
    assert done.n_questions_done == done.n_questions == 2 * 4


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.55, 0.999])
def test_a_run_cut_anywhere_ends_the_same(
    cut: float, finished: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    directory, records = finished
    data = directory.samples.read_bytes()
    copy = Directory(tmp_path / "run")
    copy.path.mkdir()
    (copy.path / "run.json").write_bytes((directory.path / "run.json").read_bytes())
    copy.samples.write_bytes(data[: int(cut * len(data))])
    again = evaluate(DEMO, copy, options=ONE)
    assert without_time(again.records) == without_time(records)
    assert len(copy.samples.read_text().splitlines()) == len(records)
    assert markdown(DEMO, again.records, {"kv-short": "accuracy"}, {}) == markdown(
        DEMO, records, {"kv-short": "accuracy"}, {}
    )


def test_killed_at_random_points_a_run_ends_with_the_same_bytes(
    finished: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    _, records = finished
    out, rng = tmp_path / "run", random.Random(1)
    command = [sys.executable, "-m", "pypcd", "eval", "demo", "--task", "kv-short", "--method", "pcd,control"]
    command += ["--length", "180,280", "--n", "4", "--threads", "1", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    kills = 0
    while kills < 4:
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            before = time.monotonic()
            # wait for the first answers, then for any moment after
            while process.poll() is None and time.monotonic() - before < 60:
                if (out / "samples.jsonl").exists():
                    time.sleep(rng.uniform(0.0, 0.4))
                    break
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        kills += 1
    finally_done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    text = markdown(DEMO, records, {"kv-short": _metric()}, {})
    assert (out / "summary.md").read_text() == text == finally_done.stdout
    assert (out / "summary.csv").read_text() == csv_text(DEMO, records)
    assert len((out / "samples.jsonl").read_text().splitlines()) == len(records)


def _metric() -> str:
    return task("kv-short").metric


def test_processes_beside_each_other_answer_the_same(
    finished: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    beside = evaluate(DEMO, Directory(tmp_path / "run"), jobs=2, options=ONE)
    assert without_time(beside.records) == without_time(finished[1])


def test_an_error_in_a_process_comes_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_ctx"):
        evaluate(DEMO, Directory(tmp_path / "run"), jobs=2, options={**ONE, "n_ctx": -3})


def test_whatever_goes_wrong_in_a_process_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's text is sent, since not every exception can be pickled."""
    with pytest.raises(pypcd.ModelError, match="cannot load"):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF" + bytes(200))
        evaluate(dataclasses.replace(DEMO, model=str(broken)), Directory(tmp_path / "run"), jobs=2, options=ONE)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "pypcd", "eval", "demo", "--task", "kv-short", "--length", "250", "--n", "500"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYPCD_TEST_RUN": str(out)}
    with subprocess.Popen(
        [*command, "--threads", "1", "--jobs", "2", "--out", str(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not (out / "samples.jsonl").exists():
            time.sleep(0.05)
        assert len(_processes_of(out)) >= 3
        process.kill()
    deadline = time.monotonic() + 30
    while _processes_of(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _processes_of(out)


def _processes_of(out: Path) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(out).encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:  # ended meanwhile
            continue
    return found


def test_a_question_that_cannot_be_answered_does_not_end_the_run(tmp_path: Path) -> None:
    """A context of 256 tokens is too small for CAD's second prompt: cad fails on each question, greedy does not."""
    plan = Plan("demo", ("kv-short",), ("greedy", "cad"), (250,), n=2)
    directory = Directory(tmp_path / "run")
    outcome = evaluate(plan, directory, options={**ONE, "n_ctx": 256})
    errors = [record["error"] for key, record in outcome.records.items() if key[3] == "cad"]
    assert len(errors) == 2 and all("larger n_ctx" in error for error in errors)
    text = markdown(plan, outcome.records, {"kv-short": "accuracy"}, {})
    assert "## Not answered" in text and "- cad: 2, such as kv-short, 250 tokens, question 0" in text
    mended = evaluate(plan, directory, options=ONE)
    assert not any("error" in record for record in mended.records.values())


def test_a_directory_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    with directory.locked(), pytest.raises(ValueError, match="is in use by another evaluation"):
        evaluate(DEMO, directory, options=ONE)
    assert not list(directory.path.iterdir())


def test_a_kill_before_the_first_line_leaves_a_directory_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "run.json.new").write_text("{")
    assert Directory(tmp_path).open(DEMO, {}) == {}


def test_a_run_may_be_continued_with_more_methods_and_lengths(
    finished: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    small = Plan("demo", ("kv-short",), ("greedy",), (180,), n=4)
    directory = Directory(tmp_path / "run")
    evaluate(small, directory, options=ONE)
    assert without_time(evaluate(DEMO, directory, options=ONE).records) == without_time(finished[1])
    assert list(evaluate(small, directory, options=ONE).records) == list(small.everything())


def test_a_method_that_cannot_run_is_refused_with_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    plan = Plan(str(tiny("gpt2")), ("kv-short",), ("pcd", "pcd:window"), (400,), n=2, max_tokens=3)
    outcome = evaluate(plan, Directory(tmp_path / "run"), options={**ONE, "n_ctx": 1024})
    assert list(outcome.refused) == ["pcd"] and "gpt2" in outcome.refused["pcd"]
    assert {key[3] for key in outcome.records} == {"greedy", "pcd:window"}
    assert "- pcd: " + outcome.refused["pcd"] in markdown(plan, outcome.records, {"kv-short": "x"}, outcome.refused)


def test_a_method_that_wants_the_whole_prompt_at_once_gets_it(tmp_path: Path) -> None:
    plan = Plan("demo", ("kv-short",), ("ms-poe-outlier",), (800,), n=1)
    assert len(evaluate(plan, Directory(tmp_path / "run"), options=ONE).records) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 1}, "seed is 0 there and 1 here"), ({"n": 5}, "n is 4 there"), ({"chat": True}, "chat is False there")],
)
def test_another_run_is_not_mixed_in(
    changes: dict[str, Any], message: str, finished: tuple[Directory, dict[Any, Any]]
) -> None:
    before = finished[0].samples.read_bytes()
    with pytest.raises(ValueError, match=message):
        evaluate(dataclasses.replace(DEMO, **changes), finished[0], options=ONE)
    assert finished[0].samples.read_bytes() == before


def test_other_options_of_the_model_are_another_run(finished: tuple[Directory, dict[Any, Any]]) -> None:
    evaluate(DEMO, finished[0], options={**ONE, "n_threads": 2})  # rows do not depend on threads (test_threads.py)
    with pytest.raises(ValueError, match="options is .* there and .*'n_ubatch': 64"):
        evaluate(DEMO, finished[0], options={**ONE, "n_ubatch": 64})


@pytest.mark.parametrize(
    ("given", "jobs", "wanted"),
    [
        ({}, 1, (1, 1)),  # what is fastest now
        ({}, 2, (4, 4)),
        ({}, 16, (1, 1)),
        ({"n_threads": 3, "n_threads_batch": None}, 2, (3, 3)),
        ({"n_threads_batch": 2}, 1, (1, 2)),
        ({"flash_attn": True}, 1, (4, 8)),  # rows depend on it: nothing is measured
        ({"flash_attn": True, "n_threads": 2}, 1, (2, 2)),
    ],
)
def test_a_run_has_the_same_threads_all_along(
    given: dict[str, Any], jobs: int, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: 8)
    monkeypatch.setattr(machine, "has_gpu", lambda options=None: False)
    monkeypatch.setattr(threads, "_measured", {})
    monkeypatch.setattr(engine, "step_times", lambda numbers, *_: {n: float(n) for n in numbers})
    options = run_options(DEMO, given, jobs)
    assert (options["n_threads"], options["n_threads_batch"]) == wanted
    assert run_options(DEMO, options, jobs) == options
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


def test_the_model_of_a_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    choose = threads.choose
    monkeypatch.setattr(threads, "choose", lambda width, *numbers, **now: given.append(numbers) or choose(1, 1, 1))
    evaluate(dataclasses.replace(DEMO, n=1), Directory(tmp_path / "run"))
    assert given[0] == (None, None) and len(given) > 1 and set(given[1:]) == {(1, 1)}


def test_a_model_is_hashed_again_only_if_its_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, directory = tmp_path / "model.gguf", Directory(tmp_path / "run")
    shutil.copy(pypcd.gguf.DEMO_MODEL, model)
    plan = Plan(str(model), ("kv-short",), ("greedy",), (180,), n=1)
    hashed: list[str] = []
    file_sha256 = run.file_sha256
    monkeypatch.setattr(run, "file_sha256", lambda path, *rest: hashed.append(path) or file_sha256(path, *rest))
    evaluate(plan, directory, options=ONE)
    known = facts(plan, ONE, directory=directory)
    assert hashed == [str(model)] and known["model_sha256"] == file_sha256(str(model))
    evaluate(plan, directory, options=ONE)
    assert len(hashed) == 1 and facts(plan, ONE) == known and len(hashed) == 2

    before = os.stat(model)
    os.utime(model, ns=(0, before.st_mtime_ns + 1))
    evaluate(plan, directory, options=ONE)  # the same file, with another time
    assert len(hashed) == 3
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    with pytest.raises(ValueError, match="holds another run: model_sha256 is"):
        evaluate(plan, directory, options=ONE)


def test_other_questions_are_another_run(finished: tuple[Directory, dict[Any, Any]], tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    directory.path.mkdir()
    shutil.copy(finished[0].path / "run.json", directory.path)
    record = {**finished[1]["kv-short", 180, 0, "greedy"], "prompt_sha256": "0" * 16}
    directory.samples.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="another question 0 of kv-short at 180 tokens"):
        evaluate(DEMO, directory, options=ONE)


def test_other_rows_of_a_file_are_another_run(tmp_path: Path) -> None:
    row = {"context": "A bat is no bird.", "input": "Is a bat a bird?", "answers": ["no"]}
    file, other = tmp_path / "rows.jsonl", tmp_path / "moved.jsonl"
    file.write_text(json.dumps(row) + "\n")
    run = Directory(tmp_path / "run")
    for name in ("longbench-qasper", "longbench-hotpotqa"):
        plan = Plan("demo", (name,), ("greedy",), (1024,), n=1, data=str(file), max_tokens=2)
        evaluate(plan, run, options=ONE)
    assert len(set(json.loads((run.path / "run.json").read_text())["data_sha256"])) == 2
    file.rename(other)
    evaluate(dataclasses.replace(plan, data=str(other)), run, options=ONE)
    other.write_text(json.dumps({**row, "answers": ["yes"]}) + "\n")
    with pytest.raises(ValueError, match="longbench-hotpotqa"):
        evaluate(dataclasses.replace(plan, data=str(other)), run, options=ONE)


def test_a_task_from_a_file_has_as_many_questions_as_there_are(tmp_path: Path) -> None:
    """If a file has too few questions, the control's pool takes the asked ones, except the current one."""
    rows = [{"context": f"A bat is {k}.", "input": f"What is {k}?", "answers": [str(k)]} for k in range(3)]
    file = tmp_path / "qasper.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = Plan("demo", ("longbench-qasper", "kv-short"), ("control",), (1024,), n=5, data=str(file), max_tokens=2)
    outcome = evaluate(plan, Directory(tmp_path / "run"), options=ONE)
    assert len(outcome.records) == 2 * (3 + 5) and not any("error" in r for r in outcome.records.values())
    text = markdown(plan, outcome.records, {"longbench-qasper": "F1", "kv-short": "x"}, {})
    assert "## longbench-qasper (F1, 3 questions)" in text and "## kv-short (x)" in text


class Beside:
    """In multiprocessing's place: processes that answer their questions, and queues. What the last one says, it says and
    ends while its parent has just found nothing."""

    def __init__(self, says: list[Any]) -> None:
        self.said, self.last = says[:-1], says[-1:]
        self.alive = True
        self.exitcode = 0

    def Queue(self) -> Beside:
        return self

    def Process(self, **_: Any) -> Beside:
        return self

    def start(self) -> None: ...
    def put(self, item: Any) -> None: ...
    def terminate(self) -> None: ...
    def join(self) -> None: ...

    def is_alive(self) -> bool:
        return self.alive

    def get(self, timeout: float) -> Any:
        if self.said:
            return self.said.pop(0)
        self.said, self.last, self.alive = self.last, [], False
        raise queue.Empty


@pytest.mark.parametrize("ends", ["well", "early"])
def test_what_a_process_said_before_it_ended_counts(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [("refused", {}), ("answer", 1), ("done", None), ("refused", {}), ("answer", 2)]
    beside = Beside([*said, ("done", None)] if ends == "well" else said)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: beside)
    todo = {("kv-short", 180, i): ["greedy"] for i in range(2)}
    answers: Any = executors.ProcessPool(2).ask(lambda: None, todo, {})  # type: ignore[arg-type, return-value]
    assert next(answers) == 1 and next(answers) == 2
    if ends == "well":
        assert next(answers, None) is None
    else:
        with pytest.raises(pypcd.PCDError, match="status 0"):
            next(answers)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_length_that_is_too_short_is_known_before_anything_is_answered(jobs: int, tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    with pytest.raises(ValueError, match="n_tokens is 30; allowed: at least"):
        evaluate(dataclasses.replace(DEMO, lengths=(180, 30)), directory, options=ONE, jobs=jobs)
    assert not directory.samples.exists()


def test_a_plan_that_came_to_nothing_binds_nobody(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    with pytest.raises(ValueError, match="kv-short at length 30"):
        evaluate(dataclasses.replace(DEMO, lengths=(30,)), directory, options=ONE)
    plan = Plan("demo", ("kv-short",), ("greedy",), (180,), n=2)
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
    ("changes", "message"),
    [
        ({"tasks": ()}, "tasks is empty"),
        ({"n": 0}, "n is 0; allowed"),
        ({"seed": -1}, "seed is -1; allowed"),
    ],
)
def test_plans_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"model": "demo", "tasks": ("kv",), "methods": ("pcd",), "lengths": (100,), **changes})


def test_greedy_is_always_there() -> None:
    assert Plan("demo", ("kv",), ("pcd", "pcd"), (100,)).methods == ("greedy", "pcd")


# -- gold tokens -----------------------------------------------------------------------------------------------------


def test_gold_is_ranked_where_the_answer_leaves_it(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)  # a token for each byte
    vocabulary = Vocabulary(llm)

    def follow(answer: str, gold: str, above: int = 2) -> int | None:
        result = Gold(vocabulary, gold)
        tokens = llm.tokenize(answer.encode(), add_bos=False, special=False)
        for token in tokens:
            row = np.zeros(llm.n_vocab(), np.float32)
            row[token] = 5.0
            for other in range(300, 300 + above - 1):
                row[other] = 1.0
            result.look(token, row)
        return result.rank

    assert follow("abX", "abc") == 3  # the chosen token and one more are above
    assert follow("abc", "abc") == 1
    assert follow("abcd", "abc") == 1
    assert follow("ab", "abc") is None
    assert follow('": abc', "abc") == 1  # what the paper's authors skip
    assert follow("-abc", "abc") == 3


def test_gold_is_complete_with_what_ends_it(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)  # a token for each byte
    vocabulary, end = Vocabulary(llm), llm.token_eos()

    def follow(answer: str, ended: bool = False, **ends: str) -> int | None:
        result = Gold(vocabulary, " abc", **ends)
        for token in [*llm.tokenize(answer.encode(), add_bos=False, special=False), *[end] * ended]:
            row = np.zeros(llm.n_vocab(), np.float32)
            row[token] = 5.0
            result.look(token, row)
        return result.rank

    line = {"end": "\n\n", "stop": "\n"}
    assert follow("abc", **line) is None and follow("abc\n", **line) == 1 and follow("abc\n\n", **line) == 1
    assert follow("abc,", **line) == 2  # right so far, but it does not end
    assert follow("abc", ended=True, **line) == 1 and follow("ab", ended=True, **line) == 2
    lines = {"end": "\n\n", "stop": "\n\n"}
    assert follow("abc\n", ended=True, **lines) == 1 and follow("abc\n", ended=True, **line) == 1
    assert follow("abc\n", **lines) is None and follow("abc\nd", **lines) == 2 and follow("abc\n\n", **lines) == 1
    assert follow("abc,") == 1  # a task that does not say what ends an answer
