"""research.explain: columns are the model's rows, marks are at the right answer's tokens; what it prints, and says of mistakes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from commands import record
from conftest import contrasted, rounding_of
from reference import softmax
from rich.cells import cell_len
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

import pypcd
from pypcd.cli import _text
from pypcd.decode import Session
from pypcd.evaluation import ModelTokenizer
from pypcd.evaluation.tasks.kv import KV_SHORT
from research.explain import Candidate, Step, explain, table
from research.vocabulary import Vocabulary, shown

SAMPLE = next(iter(KV_SHORT.questions(1, 8, seed=2)))


@pytest.fixture(scope="module")
def vocabulary(demo) -> Vocabulary:
    return Vocabulary(demo)


@pytest.fixture(scope="module")
def prompt(demo) -> list[int]:
    return demo.tokenize(SAMPLE.prompt.begun.encode(), special=False)


@pytest.mark.parametrize("setting", [pypcd.PCDConfig(), pypcd.PCDConfig(beta=1.0, gamma=3, cache="shared")])
def test_columns_are_the_rows_of_a_fresh_evaluation(demo, vocabulary, prompt, setting) -> None:
    steps = list(explain(Session(demo), prompt, setting, vocabulary, n_tokens=4, gold=SAMPLE.answers[0]))
    written = list(prompt)
    for i, step in enumerate(steps):
        limit = rounding_of(demo, written)
        # a logit may be off by the limit, and so may those that it is normalised with
        near, contrasted_near = (float(np.expm1(2 * by)) for by in (limit, contrasted(limit, setting.beta)))
        demo.pcd = setting
        demo.eval(written)
        rows = demo.pcd_logits()
        demo.pcd = None
        before, over, after = softmax(np.array([rows.standard, rows.local, rows.contrasted], np.float64))
        assert step.index == i and len(step.candidates) >= 3
        for c in step.candidates:
            assert c.before == pytest.approx(before[c.token], rel=near)
            assert c.local == pytest.approx(over[c.token], rel=near)
            assert c.after == pytest.approx(after[c.token], rel=contrasted_near)
            assert (c.rank_after is None) == (not np.isfinite(rows.contrasted[c.token])) == (c.after == 0)
            assert c.text == vocabulary.shown(c.token)
        for row, attribute in ((rows.standard, "rank_before"), (rows.contrasted, "rank_after")):
            top = {int(t) for t in np.argsort(-row, kind="stable")[:3]}
            listed = {c.token: getattr(c, attribute) for c in step.candidates}
            assert top <= set(listed) and listed[int(row.argmax())] == 1
        [chosen] = [c for c in step.candidates if c.is_chosen]
        assert chosen.token == rows.contrasted.argmax() and step.chosen == chosen
        assert step.plain.token == rows.standard.argmax() and step.is_changed == (chosen.rank_before != 1)
        ranks = [c.rank_after or 10**6 for c in step.candidates]
        assert ranks == sorted(ranks)
        written.append(chosen.token)


def test_the_right_answers_tokens_are_marked_and_always_listed(demo, vocabulary, prompt) -> None:
    steps = list(
        explain(Session(demo), prompt, pypcd.PCDConfig(), vocabulary, n_tokens=8, n_top=1, gold=SAMPLE.answers[0])
    )
    written = ""
    for step in steps:
        rest = SAMPLE.answers[0][len(written) :]
        follows = SAMPLE.answers[0].startswith(written) and rest
        assert any(c.is_gold for c in step.candidates) == bool(follows)
        for c in step.candidates:
            piece = vocabulary.text(c.token).decode("utf-8", "replace")
            if c.is_gold:
                assert rest.startswith(piece.lstrip(' "') if not written else piece)
            if c.is_chosen:
                chosen = piece
        written = (written + chosen).lstrip()
    assert written == SAMPLE.answers[0]  # with PCD the demo model is right here


@pytest.mark.parametrize("evaluation", ["fused", "alternate"])
@pytest.mark.parametrize(
    ("n_more", "fields", "is_contrasted"),
    [
        (2, {}, [False, False, True, True]),
        (0, {"min_first_entropy": 100}, [False] * 3),
        (0, {"relative_top": 1.0}, [False] * 3),  # one token alone is plausible
    ],
)
def test_a_step_without_a_contrast_has_no_strength(
    demo, vocabulary, prompt, evaluation, n_more, fields, is_contrasted
) -> None:
    setting = pypcd.PCDConfig(evaluation=evaluation, min_context=len(prompt) + n_more, **fields)
    steps = list(explain(Session(demo), prompt, setting, vocabulary, n_tokens=len(is_contrasted)))
    assert [step.beta is not None for step in steps] == is_contrasted
    for step, is_on in zip(steps, is_contrasted):
        assert is_on or not step.is_changed
        assert ("no contrast" in table(step, 80)) == (not is_on)
        if not is_on and not setting.relative_top:
            assert all(c.after == c.before for c in step.candidates)


HOSTILE = b"</code><script>alert(1)</script>\x1b[2J\xff\xe2\x80\xae" + "漢".encode() * 9


def candidate(text: bytes, **changes) -> Candidate:
    values = {"token": 7, "text": shown(text), "before": 0.25, "rank_before": 1, "local": 0.5, "after": 0.125,
              "rank_after": 2, "is_chosen": False, "is_gold": False}  # fmt: skip
    return Candidate(**{**values, **changes})


STEP = Step(
    0,
    (
        candidate(HOSTILE, is_chosen=True, is_gold=True, rank_before=2, rank_after=1),
        candidate(b"ab", local=None, rank_after=None, after=0.0),
    ),
    1.5,
)


@pytest.mark.parametrize("columns", [36, 80, 200])
def test_tables_fit_their_terminal_and_cannot_drive_it(columns: int) -> None:
    text = table(STEP, columns)
    assert all(cell_len(line) <= columns for line in text.split("\n"))
    assert _text.clean(text) == text and "\x1b" not in text
    assert "25.0%" in text and "12.5%" in text


def test_a_table_has_the_marks_the_columns_and_what_plain_decoding_writes() -> None:
    *lines, head, _, first, second = table(STEP, 200).split("\n")
    title = " ".join(lines)
    assert title.endswith('plain: "ab"')
    assert head.split() == ["token", "L", "L*", "PCD", "rank"]
    assert first.startswith(">* ") and first.split()[-6:] == ["25.0%", "50.0%", "12.5%", "2", "->", "1"]
    assert second.split() == ['"ab"', "25.0%", "-", "-", "1", "->", "-"]


@pytest.fixture
def run(research):
    return functools.partial(research, "explain")


def test_text_and_json(run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    gold = f"--gold={SAMPLE.answers[0]}"
    options = ("demo", "--threads=1", "--max-tokens=8", "-p", SAMPLE.prompt.begun)
    text, _ = run(*options, gold)
    assert max(map(cell_len, text.splitlines())) <= 40
    assert "token 1  " in text and ">*" in text and "leads to the right answer" in " ".join(text.split())
    found = record(run, *options, gold)
    assert found["text"].strip() == SAMPLE.answers[0] and found["gold"] == SAMPLE.answers[0]
    assert found["steps"][-1]["text"] == "(end)"
    assert text.count("token ") == 2 * len(found["steps"])  # in the title and in the head
    assert "leads to" not in run(*options)[0]


def test_the_question_of_a_task_is_asked_with_its_right_answer(run) -> None:
    options = ("demo", "--threads=1", "--max-tokens=6")
    found = record(run, *options, "--question=kv-short:240:7")
    with pypcd.Llama("demo", n_threads=1) as llm:
        sample = KV_SHORT.samples(300, 240, ModelTokenizer(llm), 0)[7]
    assert found["gold"] == sample.gold.strip()
    same = record(run, *options, "-p", sample.prompt.begun, f"--gold={sample.gold}")
    assert (found["steps"], found["n_prompt"]) == (same["steps"], same["n_prompt"])
    assert record(run, *options, "--question=kv-short:240:7", "--gold=x")["gold"] == "x"


def test_with_and_without_the_chat_template(run, tmp_path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, chat_template=CHAT_TEMPLATE, n_ctx_train=2048, n_layer=2)
    options = (str(path), "--max-tokens=2", "-p")
    chat, plain = record(run, *options, "hi", "--chat"), record(run, *options, "hi")
    assert chat["n_prompt"] > plain["n_prompt"] and len(plain["steps"]) == 2
    assert plain["pcd"] == pypcd.PCDConfig.preset("unsure").as_dict()
    assert record(run, *options, "hi</s>")["n_prompt"] == plain["n_prompt"] + 1  # as in generate


@pytest.mark.parametrize(("pcd", "n"), [("window", 2), ("paper", 30)])
def test_it_ends_with_what_pcd_changed_and_says_if_it_was_cut(run, pcd: str, n: int) -> None:
    options = ("demo", "--question=kv-short:530:1", "--threads=1", f"--pcd={pcd}", f"--max-tokens={n}")
    found = record(run, *options)
    *_, last = run(*options)[0].splitlines()
    changed = [step["index"] + 1 for step in found["steps"] if step["is_changed"]]
    with pypcd.Llama("demo", n_threads=1, pcd=pcd) as llm:
        sample = KV_SHORT.samples(300, 530, ModelTokenizer(llm), 0)[1]
        llm.create_completion(sample.prompt.begun, max_tokens=n, temperature=0)
        did = {**llm.last_answer.as_dict(), "pcd_skipped": 0}  # explain looks at each token twice
        assert {name: found[name] for name in did} == did
        assert [change.index + 1 for change in llm.last_answer.changes] == changed
    sentence = f"PCD ({pcd}) changed {len(changed)} of {len(found['steps'])} tokens"
    assert changed == [2] and found["pcd_answer"] == sentence and found["is_cut"] == (n == 2)
    assert last == f"{sentence}: token 2" + " | cut at 2 tokens, --max-tokens" * (n == 2)


def test_it_says_what_contrasts_an_answer_that_on_leaves_alone(run) -> None:
    options = ("demo", "-p", "short", "--threads=1", "--max-tokens=2")
    out, err = run(*options)
    assert "PCD (unsure) left this answer alone: the text has fewer than 300 tokens" in out
    assert "--pcd window:relative_top=0.1 contrasts every answer" in err
    assert "contrasts every answer" not in run(*options, "--pcd", "unsure")[1]


@pytest.mark.parametrize(
    ("options", "message", "status"),
    [
        (["-p", ""], "the prompt is empty", 2),
        (["-p", "x", "--pcd", "off"], "--pcd is off", 2),
        (["--question", "kv-short"], "--question is 'kv-short'; allowed: a task", 2),
        (["--question", "kv-short:240,480:1"], "allowed: a task, a length and an index", 2),
        (["--question", "kv-short:240:300"], "integer from 0 to 299", 2),
        (["-p", "x", "--gold", ""], "gold is empty", 2),
        (["-p", "ba " * 900, "--n-ctx", "256"], "give a larger --n-ctx", 1),
    ],
)
def test_what_the_user_can_mend_is_said(run, options: list[str], message: str, status: int) -> None:
    out, err = run("demo", *options, status=status)
    assert out == "" and message in err
