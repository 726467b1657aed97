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


def question(tmp_path: Path) -> tuple[Path, str, str]:
    """A context, a question about it, and the right answer, for the demo model."""
    sample = next(iter(KV_SHORT.questions(1, 8)))
    text, key, rest = sample.prompt.begun.partition("Key: ")
    context = tmp_path / "context.txt"
    context.write_text(text)
    return context, key + rest, sample.answers[0]


# -- answer ----------------------------------------------------------------------------------------------------------


def test_answer_shows_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context, asked, right = question(tmp_path)
    command = ["answer", "demo", "-p", asked, "--context", str(context), "--threads", "1", "--max-tokens", "8"]
    assert main([*command, "--method", "greedy,pcd,beam:2,cad"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- {name} ---" for name in ("greedy", "pcd", "beam:2", "cad")
    ]
    assert right in out
    assert main(command) == 0
    assert re.findall("^--- (.*) ---$", capsys.readouterr().out, re.MULTILINE) == ["greedy", "replay"]
    assert main([*command, "--method", "pcd", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["method"] == "pcd" and record["n_tokens"] <= 8 and record["n_evaluated"] == record["n_prompt"]


def test_answer_goes_on_after_a_method_that_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context, asked, _ = question(tmp_path)
    command = ["answer", "demo", "-p", asked, "--context", str(context), "--threads", "1", "--max-tokens", "8"]
    assert main([*command, "--method", "control,greedy"]) == 1
    captured = capsys.readouterr()
    assert "control cannot run on this model: the control needs other prompts" in captured.err
    assert "--- greedy ---" in captured.out
    assert main(["answer", "demo", "-p", "hello", "--threads", "1", "--max-tokens", "2", "--method", "cad,greedy"]) == 1
    captured = capsys.readouterr()
    assert "cad: the prompt has no context to leave out; give it one (--context" in captured.err
    assert "--- greedy ---" in captured.out
    assert main(["answer", "demo", "-p", "hello", "--threads", "1", "--max-tokens", "2", "--method", "cad"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("pypcd: the prompt has no context")


def test_the_included_model_says_what_it_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "the model 'demo' looks values up in a JSON object"
    words = ["--threads", "1", "--max-tokens", "1"]
    for command in ("answer", "generate"):
        assert main([command, "demo", "-p", "What is the capital of France?", *words]) == 0
        assert capsys.readouterr().err.count(note) == 1, command
    context, asked, _ = question(tmp_path)
    assert main(["answer", "demo", "-p", asked, "--context", str(context), *words]) == 0
    assert note not in capsys.readouterr().err


# -- eval ------------------------------------------------------------------------------------------------------------


def test_eval_prints_and_keeps_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = tmp_path / "run"
    assert main([*DEMO, "--method", "pcd,pcd:window", "--out", str(out)]) == 0
    text, markdown = capsys.readouterr().out, (out / "summary.md").read_text()
    assert "| 250 | pcd:window |" in markdown and markdown.startswith("# demo\n")
    assert text == markdown  # in a file or a pipe
    monkeypatch.setenv("COLUMNS", "90")
    assert main([*DEMO, "--method", "pcd,pcd:window", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text == aligned(markdown, 90) and re.search(r"(?m)^   250  pcd:window  ", text)
    monkeypatch.setenv("COLUMNS", "50")
    assert main([*DEMO, "--method", "pcd,pcd:window", "--out", str(out)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 50
    assert (out / "summary.md").read_text() == markdown
    assert main([*DEMO, "--method", "pcd", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in record["rows"]] == ["greedy", "pcd"]
    assert record["plan"]["lengths"] == [250] and record["rows"][0]["n"] == 3


def test_a_quick_eval_asks_less_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_command, "QUICK_LENGTHS", (250,))
    monkeypatch.setattr(eval_command, "QUICK_N", 3)
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "demo", "--quick", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert "quick: 3 questions a cell, of which at least 6 must differ to show anything" in said
    assert re.search(r"(?m)^(Use|No method|greedy has)\b.*\.$", said.rstrip().splitlines()[-1])
    plan = json.loads((tmp_path / "eval-demo-quick" / "run.json").read_text())
    assert (plan["n"], plan["lengths"], tuple(plan["methods"])) == (3, [250], eval_command.QUICK_METHODS)
    assert (
        main(["eval", "demo", "--quick", "--n", "2", "--method", "pcd", "--threads", "1", "--out", "b", "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)["plan"]  # options given by name take precedence
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


def test_who_measures_an_instruct_model_without_its_template_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", chat_template=CHAT_TEMPLATE))
    words = ["--quick", "--task", "kv", "--length", "16"]  # too short, so nothing is asked
    for command, more, n in itertools.product(("eval", "tune"), ((), ("--chat",)), (model, "demo")):
        assert main([command, n, *words, *more, "--out", str(tmp_path / "run")]) == 2
        assert ("with --chat it is asked" in capsys.readouterr().err) == (n == model and not more)


def test_a_stopped_eval_shows_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval", "demo", "--task", "kv-short", "--length", "200", "--method", "pcd", "--threads", "1"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--n", "3"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "pcd" in line and "200" in line)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_command, "evaluate", stop)
    assert main([*words, "--n", "5"]) == 130
    out, said = capsys.readouterr()
    assert row in out and "so far: 3 of 5 questions" in said and "run the same command again" in said
    words[words.index("kv-short")] = "kv-short,kv"
    assert main([*words, "--n", "3"]) == 130
    out = capsys.readouterr().out
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


def test_a_question_can_be_had_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "77"]) == 0
    out, err = capsys.readouterr()
    wanted = list(KV_SHORT.questions(75, 40))[1]  # the second of the second length
    assert out == wanted.prompt.begun
    assert wanted.answers[0] in err
