"""pypcd explain: what it prints, writes and draws, what it says of mistakes. The columns themselves are in test_explain.py."""

from __future__ import annotations

import json

import pytest
from rich.cells import cell_len
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

import pypcd
from pypcd.cli import _terminal, main
from pypcd.cli import explain as explain_command
from pypcd.evaluation import ModelTokenizer
from pypcd.evaluation.tasks.kv import KV_SHORT
from pypcd.explain.steps import Candidate, Step

SAMPLE = next(iter(KV_SHORT.questions(1, 8, seed=2)))


@pytest.fixture(autouse=True)
def plain_streams(monkeypatch):
    monkeypatch.setattr(_terminal, "setup", lambda: None)


def run(capsys, *args: str, status: int = 0) -> str:
    assert main(args) == status, capsys.readouterr().err
    return capsys.readouterr().out


def test_explain_in_text_json_and_html(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    prompt, page = tmp_path / "prompt.txt", tmp_path / "page.html"
    prompt.write_text(SAMPLE.prompt.text + "\n")
    options = ("explain", "demo", "--threads=1", "--max-tokens=8", f"--gold={SAMPLE.answers[0]}")
    text = run(capsys, *options, "-f", str(prompt), "--html", str(page))
    assert max(map(cell_len, text.splitlines())) <= 40
    assert "token 1  " in text and ">*" in text and '"(end)"' not in text
    record = json.loads(run(capsys, *options, "-p", SAMPLE.prompt.text, "--json"))
    assert record["text"].strip() == SAMPLE.answers[0] and record["gold"] == SAMPLE.answers[0]
    assert record["steps"][-1]["text"] == "(end)"
    assert text.count("token ") == len(record["steps"])
    written = page.read_text(encoding="utf-8")
    assert written.startswith("<!DOCTYPE html>") and SAMPLE.answers[0] in written


def test_explain_draws_the_token_that_plain_decoding_would_not_write(capsys, tmp_path, monkeypatch) -> None:
    _plots = pytest.importorskip("pypcd.evaluation.plots")
    pytest.importorskip("matplotlib")
    seen = {}
    monkeypatch.setattr(
        _plots,
        "decisive_token",
        lambda step, plain, pcd, read, **more: seen.update(step=step, texts=(plain, pcd), read=read, **more),
    )
    monkeypatch.setattr(_plots, "save", lambda figure, path: seen.update(path=path))
    capsys.readouterr()
    assert main(["demo", "215"]) == 0
    captured = capsys.readouterr()
    right = captured.err.split("right value is ")[1].split(",")[0]
    options = ("--threads=1", "--max-tokens=8", f"--gold={right}", "--picture", str(tmp_path / "a.png"))
    record = json.loads(run(capsys, "explain", "demo", "-p", captured.out, *options, "--json"))

    llm = pypcd.Llama("demo", n_threads=1)
    [plain, mine] = (
        llm(captured.out, max_tokens=8, temperature=0, pcd=pcd)["choices"][0]["text"].strip() for pcd in (False, True)
    )
    did = {**llm.last_answer.as_dict(), "pcd_skipped": 0}  # explain looks at each token twice
    assert {name: record[name] for name in did} == did and did["pcd_changed"]
    llm.close()
    assert plain != mine == right  # question 215 was chosen for it
    assert seen["texts"] == (plain, mine) and seen["is_right"] == (False, True)
    changed = [step for step in record["steps"] if step["is_changed"]]
    assert json.loads(json.dumps(seen["step"].as_dict())) == changed[0]
    preset = pypcd.PCDConfig.preset("unsure")  # what is on if one says no more than on
    assert seen["beta"] == preset.beta and seen["path"] == tmp_path / "a.png"
    read, first = seen["read"], changed[0]["index"]
    assert read.n_tokens == record["n_prompt"] + first
    assert read.seen == (range(preset.n_sink), range(read.n_tokens - preset.window, read.n_tokens))
    assert first == 0 and read.text == captured.out
    assert [(mark.writer, mark.text, mark.is_right) for mark in read.marks] == [
        ("PCD", right, True), ("plain", plain, False)
    ]  # fmt: skip
    [[here], [there]] = (mark.spans for mark in read.marks)
    assert here.start < there.start < read.n_tokens  # the last value of the prompt is the wrong one


def test_explain_draws_the_first_token_of_the_right_answer_that_is_changed(capsys, tmp_path, monkeypatch) -> None:
    plots = pytest.importorskip("pypcd.evaluation.plots")
    pytest.importorskip("matplotlib")
    seen = {}

    def step(index: int, before: float, is_gold: bool) -> Step:
        own, other = (
            Candidate(t, f'"{t}"', p, r, 0.1, p, 3 - r, t == 1, is_gold and t == 1)
            for t, p, r in ((1, before, 2), (2, 0.5, 1))
        )
        return Step(index, '"1"', (own, other), True, 1.5)

    steps = [step(0, 0.1, False), step(1, 0.2, True), step(2, 0.3, True)]
    monkeypatch.setattr(explain_command, "explain", lambda *args, **more: iter(steps))
    monkeypatch.setattr(plots, "decisive_token", lambda step, *args, **more: seen.update(step=step))
    monkeypatch.setattr(plots, "save", lambda *args: None)
    options = ("-p", "hello", "--threads=1", "--picture", str(tmp_path / "a.png"))
    run(capsys, "explain", "demo", *options)
    assert seen["step"] is steps[1]
    steps[1:] = []
    run(capsys, "explain", "demo", *options)
    assert seen["step"] is steps[0]


def test_explain_asks_the_question_of_a_task_with_its_right_answer(capsys) -> None:
    options = ("explain", "demo", "--threads=1", "--max-tokens=6", "--json")
    record = json.loads(run(capsys, *options, "--question=kv-short:240:7"))
    llm = pypcd.Llama("demo", n_threads=1)
    sample = KV_SHORT.samples(300, 240, ModelTokenizer(llm), 0)[7]
    llm.close()
    assert record["gold"] == sample.gold.strip()
    same = json.loads(run(capsys, *options, "-p", sample.prompt.text, f"--gold={sample.gold}"))
    assert (record["steps"], record["n_prompt"]) == (same["steps"], same["n_prompt"])
    assert json.loads(run(capsys, *options, "--question=kv-short:240:7", "--gold=x"))["gold"] == "x"


def test_explain_has_nothing_to_draw_where_plain_decoding_writes_the_same(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    options = ("--threads=1", "--max-tokens=2", "--picture", str(picture))
    assert main(["explain", "demo", "-p", SAMPLE.prompt.text, "--pcd", "beta=0", *options]) == 1
    assert "was not drawn" in capsys.readouterr().err
    assert not picture.exists()


def test_explain_through_the_chat_template(capsys, tmp_path) -> None:
    model = str(
        write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, chat_template=CHAT_TEMPLATE, n_ctx_train=2048, n_layer=2)
    )
    record = json.loads(run(capsys, "explain", model, "-p", "hi", "--chat", "--max-tokens=2", "--json"))
    plain = json.loads(run(capsys, "explain", model, "-p", "hi", "--max-tokens=2", "--json"))
    assert record["n_prompt"] > plain["n_prompt"] and len(plain["steps"]) == 2
    assert plain["pcd"] == pypcd.PCDConfig.preset("unsure").as_dict()


def test_explain_ends_with_what_pcd_changed_and_says_if_it_was_cut(capsys) -> None:
    question = ("explain", "demo", "--question=kv-short:1010:3", "--threads=1")
    for pcd in ("window", "paper"):
        for n in ("2", "30"):
            options = (*question, f"--pcd={pcd}", f"--max-tokens={n}")
            record = json.loads(run(capsys, *options, "--json"))
            *_, last = run(capsys, *options).splitlines()
            changed = [step["index"] + 1 for step in record["steps"] if step["is_changed"]]
            with pypcd.Llama("demo", n_threads=1, pcd=pcd) as llm:
                sample = KV_SHORT.samples(300, 1010, ModelTokenizer(llm), 0)[3]
                llm.create_completion(sample.prompt.text, max_tokens=int(n), temperature=0)
                assert [change.index + 1 for change in llm.last_answer.changes] == changed
            which = f": token{'s' * (len(changed) > 1)} {', '.join(map(str, changed))}" if changed else ""
            sentence = f"PCD ({pcd}) changed {len(changed)} of {len(record['steps'])} tokens"
            assert record["pcd_answer"] == sentence and record["pcd_changed"] == len(changed)
            assert last == sentence + which + (" | cut at 2 tokens, --max-tokens" if n == "2" else "")
            assert record["is_cut"] == (n == "2")


def test_explain_says_what_contrasts_an_answer_that_on_leaves_alone(capsys) -> None:
    assert main(["explain", "demo", "-p", "short", "--threads=1", "--max-tokens=2"]) == 0
    out, err = capsys.readouterr()
    assert "PCD (unsure) left this answer alone: the text has fewer than 300 tokens" in out
    assert "--pcd window:relative_top=0.1 contrasts every answer" in err
    assert main(["explain", "demo", "-p", "short", "--threads=1", "--max-tokens=2", "--pcd", "unsure"]) == 0
    assert "contrasts every answer" not in capsys.readouterr().err


def test_explains_legend_names_only_what_is_shown(capsys) -> None:
    options = ("explain", "demo", "-p", "short", "--threads=1", "--max-tokens=1", "--pcd")
    for more, gold, beta in ((("window",), False, False), (("window:adaptive=jsd", "--gold=x"), True, True)):
        legend = " ".join(run(capsys, *options, *more).partition("\n\n")[0].split())
        assert ("* leads" in legend, "beta:" in legend) == (gold, beta)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("-p", ""), "the prompt is empty"),
        (("-p", "x", "--pcd", "off"), "--pcd is off"),
        (("-p", "x", "-f", "y"), "-p and -f"),
        (("-p", "x", "--question", "kv-short:240:1"), "-p and --question"),
        (("--question", "kv-short"), "--question is 'kv-short'; allowed: a task"),
        (("--question", "kv-short:240,480:1"), "allowed: a task, a length and an index"),
        (("--question", "kv-short:240:300"), "integer from 0 to 299"),
        (("-f", "/none/such"), "/none/such: No such file"),
        (("-p", "x", "--gold", ""), "--gold is empty"),
        (("-p", "x", "--html", "/none/such/page.html"), "--html"),
        (("-p", "x", "--picture", "/none/such/a.png"), "--picture"),
        (("-p", "x", "--picture", "a.gif"), "'.gif'"),
        (("-p", "x " * 400, "--n-ctx", "256"), "give a larger --n-ctx"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(args, named, capsys) -> None:
    assert main(["explain", "demo", *args]) == (1 if "256" in args else 2)  # a prompt that does not fit is none
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pypcd: ") and named in err and err.count("\n") == 1


def test_a_model_that_cannot_run_pcd_is_refused(capsys, tmp_path) -> None:
    assert main(["explain", str(write_tiny_gguf(tmp_path / "base.gguf", "bloom")), "-p", "x", "--pcd=paper"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "cannot run here: the architecture 'bloom'" in err
