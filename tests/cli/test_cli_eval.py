"""The commands answer and eval as a user calls them; their mistakes are in test_cli_start.py."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Run, record
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

import pypcd
import research.methods  # noqa: F401  whose names are a run's too
from pypcd import decode
from pypcd.cli import demo, main
from pypcd.cli import eval as eval_command
from pypcd.cli._table import aligned
from pypcd.evaluation import GROUPS, TASKS, ModelTokenizer, Plan, Sample, task
from pypcd.evaluation.tasks.kv import KV_SHORT

DEMO = ["eval", "demo", "--task", "kv-short", "--length", "250", "--n", "3", "--threads", "1"]


@pytest.fixture
def asked(tmp_path: Path) -> tuple[list[str], str]:
    """The words of a command that answers a question about a context, and the right answer."""
    sample = next(iter(KV_SHORT.questions(1, 8)))
    text, key, rest = sample.prompt.begun.partition("Key: ")
    (tmp_path / "context.txt").write_text(text)
    words = ["answer", "demo", "-p", key + rest, "--context", str(tmp_path / "context.txt"), "--threads=1"]
    return [*words, "--max-tokens=8"], sample.answers[0]


# -- answer ----------------------------------------------------------------------------------------------------------


def test_answer_shows_each_method(asked: tuple[list[str], str], run: Run) -> None:
    command, right = asked
    out, err = run(*command, "--method=greedy,pcd,beam:2,cad")
    assert re.findall("^--- (.*) ---$", out, re.MULTILINE) == ["greedy", "pcd", "beam:2", "cad"]
    assert right in out and "the model 'demo' looks values up" not in err
    assert re.findall("^--- (.*) ---$", run(*command)[0], re.MULTILINE) == ["greedy", "replay"]
    found = record(run, *command, "--method=pcd")
    assert found["method"] == "pcd" and found["n_tokens"] <= 8 and found["n_evaluated"] == found["n_prompt"]


def test_answer_goes_on_after_a_method_that_cannot_run(asked: tuple[list[str], str], run: Run) -> None:
    out, err = run(*asked[0], "--method=control,greedy", status=1)
    assert "control cannot run on this model: the control needs other prompts" in err and "--- greedy ---" in out
    words = ["answer", "demo", "-p", "hello", "--threads=1", "--max-tokens=2"]
    out, err = run(*words, "--method=cad,greedy", status=1)
    assert "cad: the prompt has no context to leave out; give it one (--context" in err and "--- greedy ---" in out
    _, err = run(*words, "--method=cad", status=2)
    assert err.splitlines()[-1].startswith("pypcd: the prompt has no context")


@pytest.mark.parametrize("command", ["answer", "generate", "chat"])
def test_the_included_model_says_what_it_is_for(command: str, run: Run) -> None:
    _, err = run(command, "demo", "-p", "What is the capital of France?", "--threads=1", "--max-tokens=1")
    assert err.count("the model 'demo' looks values up in a JSON object") == 1


# -- eval ------------------------------------------------------------------------------------------------------------


def test_eval_prints_and_keeps_its_tables(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = tmp_path / "run"
    command = [*DEMO, "--method=pcd,pcd:window", "--out", out]
    text, markdown = run(*command)[0], (out / "summary.md").read_text()
    assert "| 250 | pcd:window |" in markdown and markdown.startswith("# demo\n")
    assert text == markdown  # in a file or a pipe
    monkeypatch.setenv("COLUMNS", "90")
    text, _ = run(*command)
    assert text == aligned(markdown, 90) and re.search(r"(?m)^   250  pcd:window  ", text)
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, run(*command)[0].splitlines())) <= 50
    assert (out / "summary.md").read_text() == markdown
    found = record(run, *DEMO, "--method=pcd", "--out", out)
    assert [row["method"] for row in found["rows"]] == ["greedy", "pcd"]
    assert found["plan"]["lengths"] == [250] and found["rows"][0]["n"] == 3


def test_a_quick_eval_asks_less_and_says_so(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_command, "QUICK_LENGTHS", (250,))
    monkeypatch.setattr(eval_command, "QUICK_N", 3)
    monkeypatch.chdir(tmp_path)
    quick = ["eval", "demo", "--quick", "--threads=1"]
    said, _ = run(*quick)
    assert "quick: 3 questions of each task and length, of which at least 6 must differ to show anything" in said
    assert re.search(r"(?m)^(Use|No method|greedy has)\b.*\.$", said.rstrip().splitlines()[-1])
    plan = json.loads((tmp_path / "eval-demo-quick" / "run.json").read_text())
    assert (plan["n"], plan["lengths"], tuple(plan["methods"])) == (3, [250], eval_command.QUICK_METHODS)
    plan = record(run, *quick, "--n=2", "--method=pcd", "--out=b")["plan"]  # options given by name take precedence
    assert (plan["n"], plan["lengths"], plan["methods"]) == (2, [250], ["greedy", "pcd"])


def planned(*args: str) -> Plan:
    parser = argparse.ArgumentParser()
    eval_command.add_arguments(parser)
    return eval_command.plan_of(parser.parse_args([*args] if args[0] == "demo" else ["model.gguf", *args]))


@pytest.mark.parametrize(
    ("args", "n", "lengths", "n_methods"),
    [
        ("--task kv", 300, (1024, 2048, 4096), 5),
        ("--quick", 12, (1200,), 4),
        ("--task kv --quick --half second", 24, (1200,), 4),
        ("--task everyday", 25, (300, 1024), 5),
        ("--task everyday,everyday-behind", 25, (300, 1024), 5),
        ("--task everyday --quick", 2, (1200,), 4),
        ("--task everyday --quick --length 300 --n 7", 7, (300,), 4),
        ("--task everyday-json", 300, (300, 1024), 5),
        ("--task everyday-json --quick", 24, (1200,), 4),
        ("--task everyday-json,kv", 300, (1024, 2048, 4096), 5),
        ("--task kv,everyday --n 40", 40, (1024, 2048, 4096), 5),
        ("demo", 75, (240, 530, 1010, 1490), 5),
    ],
)
def test_how_much_is_asked_by_default(args: str, n: int, lengths: tuple[int, ...], n_methods: int) -> None:
    plan = planned(*args.split())
    assert (plan.n, plan.lengths, len(plan.methods)) == (n, lengths, n_methods)
    assert plan.half == ("second" if "second" in args else None)
    if args == "--task everyday,everyday-behind":
        assert plan.tasks == GROUPS["everyday"] + GROUPS["everyday-behind"]


def test_the_list_cuts_no_name_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--list"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert set(TASKS) | set(decode.names()) <= words


def test_who_measures_an_instruct_model_without_its_template_is_told(tmp_path: Path, run: Run) -> None:
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", chat_template=CHAT_TEMPLATE))
    words = ["--quick", "--task=kv", "--length=16", "--out", tmp_path / "run"]  # too short, so nothing is asked
    for command, more, n in itertools.product(("eval", "tune"), ((), ("--chat",)), (model, "demo")):
        _, err = run(command, n, *words, *more, status=2)
        assert ("with --chat it is asked" in err) == (n == model and not more)


def test_a_stopped_eval_shows_what_is_done(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["eval", "demo", "--length=200", "--method=pcd", "--threads=1", "--out", tmp_path / "run"]
    (row,) = (line for line in run(*words, "--n=3")[0].splitlines() if "pcd" in line and "200" in line)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_command, "evaluate", stop)
    out, said = run(*words, "--n=5", status=130)
    assert row in out and "so far: 3 of 5 questions" in said and "run the same command again" in said
    out, _ = run(*words, "--task=kv-short,kv", "--n=3", status=130)
    assert row in out and re.findall("^#+ (kv[a-z-]*)", out, re.MULTILINE) == ["kv-short"], "no table without answers"


# -- the demo: its questions are those of its published figures ----------------------------------------------------------


PAIRS = (16, 40, 80, 120)


def digest(samples: list[Sample]) -> bytes:
    parts = ((s.prompt.begun, s.answers[0], s.extra["nearest"], repr(s.depth)) for s in samples)
    return "".join("\0".join(part) for part in parts).encode()


def test_the_questions_are_those_of_the_published_figures() -> None:
    tokenizer = ModelTokenizer(pypcd.Llama("demo", n_ctx=2048, n_threads=1, n_threads_batch=1))
    whole = hashlib.sha256()
    for length, n_pairs in zip(demo.LENGTHS, PAIRS):
        for n, seed in ((demo.N, 0), (12, 1)):  # and those that the control takes its prior from
            samples = task("kv-short").samples(n, length, tokenizer, seed)
            assert samples == list(KV_SHORT.questions(n, n_pairs, seed))
            whole.update(digest(samples))
    assert whole.hexdigest() == "3bdb5f69313e07e4179b250f4f346058079900035b0870b430dfe26aabb42efa"


def test_a_question_can_be_had_by_its_number(run: Run) -> None:
    out, err = run("demo", 77)
    wanted = list(KV_SHORT.questions(75, 40))[1]  # the second of the second length
    assert out == wanted.prompt.begun
    assert wanted.answers[0] in err
