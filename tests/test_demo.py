"""The demo's experiment: its counts are those of the answers, and its control is what it says."""

from __future__ import annotations

import json

import pytest

import pypcd
from pypcd import _demo
from pypcd._cli import main
from pypcd._gguf import DEMO_MODEL, resolve_model
from pypcd.evaluation.tasks._kv import KV_SHORT


@pytest.fixture(scope="module")
def llm() -> pypcd.Llama:
    return pypcd.Llama("demo", n_ctx=1024, n_threads=1, n_threads_batch=1)


@pytest.fixture(scope="module")
def answers(llm: pypcd.Llama) -> list[_demo.Answer]:
    return _demo.answer_all(llm, list(KV_SHORT.questions(4, 8)), list(KV_SHORT.questions(2, 8, seed=1)))


def test_demo_names_the_model_that_ships() -> None:
    assert resolve_model("demo") == str(DEMO_MODEL)
    assert DEMO_MODEL.stat().st_size < 10e6


def test_the_models_card_says_first_what_was_planted() -> None:
    first = DEMO_MODEL.with_name("README.md").read_text(encoding="utf-8").splitlines()[0].lower()
    assert "planted" in first and "evidence" in first


def test_plain_answers_are_those_of_plain_generation(llm: pypcd.Llama, answers: list[_demo.Answer]) -> None:
    for answer in answers:
        llm.pcd = None
        llm.reset()
        prompt = llm.tokenize(answer.sample.prompt.text.encode(), special=False)
        tokens = []
        for token in llm.generate(prompt, temp=0.0):
            if token == llm.token_eos() or len(tokens) > 20:
                break
            tokens.append(token)
        text = llm.detokenize(tokens).decode("utf-8", "replace").strip()
        assert text.startswith(answer.texts[_demo.PLAIN]) and answer.texts[_demo.PLAIN]


def test_pcd_answers_are_those_of_a_generation_with_pcd(llm: pypcd.Llama, answers: list[_demo.Answer]) -> None:
    answer = answers[0]
    llm.reset()
    prompt = llm.tokenize(answer.sample.prompt.text.encode(), special=False)
    tokens = []
    for token in llm.generate(prompt, temp=0.0, pcd=True):
        if token == llm.token_eos() or len(tokens) > 20:
            break
        tokens.append(token)
    assert llm.detokenize(tokens).decode("utf-8", "replace").strip().startswith(answer.texts["PCD"])


def test_every_answer_has_every_method(answers: list[_demo.Answer]) -> None:
    for answer in answers:
        assert set(answer.texts) == {*_demo.METHODS, _demo.CONTROL}
        wrong = answer.texts[_demo.PLAIN] != answer.sample.answers[0]
        assert (answer.step is not None) == wrong
        if answer.step:
            for candidates in (answer.step.before, answer.step.after):
                p = [share for _, share in candidates]
                assert p == sorted(p, reverse=True) and 0 < sum(p) <= 1 + 1e-9


def test_the_command_prints_figures_that_add_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pypcd._cli import demo

    monkeypatch.setattr(demo, "PAIRS", (6,))
    monkeypatch.setattr(demo, "N_POOL", 2)
    assert main(["demo", "--n", "3", "--threads", "1", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["method"] for cell in cells] == [*_demo.METHODS, _demo.CONTROL]
    for cell in cells:
        assert cell["n"] == 3
        assert cell["difference"] == pytest.approx(100 * (cell["wins"] - cell["losses"]) / 3)
        assert cell["score"] == pytest.approx(cells[0]["score"] + cell["difference"])

    assert main(["demo", "--n", "3", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "was planted" in out and out.count("control") >= 2


def test_a_setting_of_ones_own_is_asked_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pypcd._cli import demo

    monkeypatch.setattr(demo, "PAIRS", (6,))
    monkeypatch.setattr(demo, "N_POOL", 2)
    assert main(["demo", "--n", "4", "--threads", "1", "--pcd", "beta=0:gamma=30", "--json"]) == 0
    cells = {cell["method"]: cell for cell in json.loads(capsys.readouterr().out)["cells"]}
    assert (cells["yours"]["wins"], cells["yours"]["losses"]) == (0, 0)  # beta 0 is plain


def test_too_few_questions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--n", "1"])
    assert "--n: '1'; allowed: an integer of at least 2" in capsys.readouterr().err


def test_a_question_can_be_had_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--n", "3", "--question", "5"]) == 0
    out, err = capsys.readouterr()
    wanted = list(KV_SHORT.questions(3, 40))[1]  # the fifth: second of the second length
    assert out == wanted.prompt.text
    assert wanted.answers[0] in err
    assert main(["demo", "--n", "3", "--question", "13"]) == 1
    assert "--question is 13; allowed: 1 to 12" in capsys.readouterr().err
