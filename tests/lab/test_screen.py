"""Screening: formulas worked out by hand and against the method's own; recorded rows and verdicts against real decoding."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import F32, rounding_of
from hypothesis import given
from hypothesis import strategies as st
from runs import ONE as ONE_THREAD
from runs import cut_copy, lines, without_time

import pypcd
from pypcd.decode import PCD, Session, setting_of
from pypcd.evaluation import Directory, Plan, Sample, evaluate, task
from pypcd.evaluation.tasks.kv import KV
from pypcd.lab.formula import Formula, Rows
from pypcd.lab.recorded import _Gold, compared, record, unpacked, view_of
from pypcd.lab.screen import Screen, agreement, score
from pypcd.method import contrast
from pypcd.prompt import Prompt, prompt_tokens

Load = Callable[..., pypcd.Llama]
WINDOW = pypcd.PCDConfig(perturbation="none", window=16)
VIEW = PCD(WINDOW).name
VIEWS = (VIEW, "pcd", "pcd:cache=shared", "pcd:cache=separate")
ONE = {**ONE_THREAD, **F32}  # a cache that rounds nothing
DEMO = Plan("demo", ("kv-short",), VIEWS, (200, 450), n=6)
K = 40


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - np.logaddexp.reduce(row)


def rows_of(first: Any, second: Any, k: int | None = None, **values: float) -> Rows:
    """One step."""
    first, second = np.asarray(first, float), np.asarray(second, float)
    ids = np.argsort(-first, kind="stable")[:k]
    values = {**compared(first, second), **values}
    named = {name: np.array([value]) for name, value in values.items()}
    seen = ids % 2 == 0  # the prompt has the even tokens
    return Rows(ids[None], log_softmax(first)[ids][None], log_softmax(second)[ids][None], seen[None], named)


def chosen(formula: Formula, first: Any, second: Any, **values: float) -> int:
    rows = rows_of(first, second, **values)
    return int(rows.ids[0, formula.choose(rows)[0]])


def by(**fields: Any) -> Formula:
    return Formula(WINDOW, **{"gamma": 3, **fields})


# -- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "token"),
    [
        (Formula(None), 0),
        (by(beta="0"), 0),
        (by(beta="1"), 1),  # contrasted: 2*3-3 = 3, 2*2.5-1 = 4, 2*0-(-4) = 4 and so 1, the lower id, before 2
        (by(beta="1.1"), 2),  # 3, 4.15, 4.4
        (by(beta="1.1", gamma=2), 1),
        (by(beta="1.1", relative_top="0.1"), 1),  # token 2 has e^-3 = 0.05 of the best one's probability
        (by(beta="1.1", relative_top="0.04"), 2),
        (by(beta="1.1", relative_top="0.7"), 0),  # token 1 has 0.61 of it
        (by(beta="1.1", where="rank>1"), 0),  # both rows have token 0 first
        (by(beta="1.1", where="rank==1"), 2),
        (by(beta="1/0*(jsd>2)"), 0),  # dividing by zero decides nothing
        (by(beta="1.1", where="seen"), 2),
        (by(beta="1.1", where="not seen"), 1),
        (by(beta="1.1*(s>-2)"), 0),  # L* gives tokens 1 and 2 less than e^-2, so they stay as they are
    ],
)
def test_a_step_worked_out_by_hand(formula: Formula, token: int) -> None:
    assert chosen(formula, [3.0, 2.5, 0.0], [3.0, 1.0, -4.0]) == token


few = st.integers(-4, 4).map(float)  # ties are the rule
many = st.integers(-20_000, 20_000).map(lambda n: n / 1000)  # apart by more than rounding


@given(
    st.lists(st.tuples(few, few), min_size=1, max_size=30) | st.lists(st.tuples(many, many), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.5, 1.0, 2.5, 40.0]),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.09, 0.3, 0.95]),
    st.floats(-30, 30, width=32),
)
def test_a_strength_that_is_a_number_is_the_methods_contrast(
    pairs: list[tuple[float, float]], beta: float, gamma: int, cut: float, constant: float
) -> None:
    """Also with a constant added to a row; what a larger best logit decides is beyond rounding."""
    first, second = np.array(pairs).T
    rows = rows_of(first + constant, second - 2 * constant)
    formula = by(beta=str(beta), gamma=min(gamma, len(first)), relative_top=str(cut))
    exact = contrast(first, second, beta=beta, gamma=gamma, relative_top=cut)
    got = rows.ids[0, formula.choose(rows)[0]]
    assert exact[got] >= exact.max() - 1e-7
    assert constant or got == (exact >= exact.max() - 1e-10).argmax()  # of equal ones, the lowest id
    if beta == 0:
        assert first[got] == first.max()


@given(st.lists(many, min_size=2, max_size=30), st.floats(0, 100), st.floats(-5, 5))
def test_rows_that_agree_leave_plain_decoding(row: list[float], strength: float, constant: float) -> None:
    assert compared(row, np.array(row) + constant)["jsd"] < 1e-6
    best = max(row)
    for formula in (
        by(beta=f"{strength}*jsd"),
        by(beta=f"{strength}", where="jsd>0.1"),
        by(beta=f"{strength}*jsd_kept"),
    ):
        assert row[chosen(formula, row, np.array(row) + constant)] >= best - 1e-4


def test_rows_compared_by_hand() -> None:
    p, q = np.array([1 / 2, 1 / 4, 1 / 4]), np.array([1 / 8, 3 / 4, 1 / 8])
    m = (p + q) / 2
    divergence = (p @ np.log2(p / m) + q @ np.log2(q / m)) / 2
    got = compared(np.log(p) + 7, np.log(q) - 3)
    assert got["jsd"] == pytest.approx(divergence, abs=1e-9) and 0.1 < divergence < 0.5
    assert got["entropy"] == pytest.approx(1.5, abs=1e-9) and got["lse"] == pytest.approx(7)
    assert got["entropy_s"] == pytest.approx(0.75 * math.log2(4 / 3) + 2 * 3 / 8, abs=1e-9)
    assert got["lse_s"] == pytest.approx(-3) and got["top_s"] == pytest.approx(3 / 4)
    assert (got["rank"], got["rank_back"]) == (2, 2)
    assert compared([0.0, -100.0], [-100.0, 0.0])["jsd"] == pytest.approx(1)


def test_masked_tokens_say_nothing() -> None:
    first, second = [2.0, 1.0, -np.inf], [2.0, -np.inf, 5.0]
    got = compared(first, second)
    assert all(map(math.isfinite, got.values())) and got["rank_back"] == 3
    rows = rows_of([2.0, 1.0], [2.0, -1e300])
    assert by(beta="50").choose(rows) == 1
    rows = Rows(rows.ids, rows.l, np.array([[-0.4, -np.inf]]), rows.seen, rows.values)
    assert by(beta="50").choose(rows) == 0  # token 1 keeps its logit, and token 0 gains


def test_the_divergence_of_the_plausible_tokens() -> None:
    """The third token is not: the first two have 0.6 and 0.4 of what is left to them under L, 0.9 and 0.1 under L*."""
    first, second = np.log([0.48, 0.32, 0.2]), np.log([0.72, 0.08, 0.2])
    p, q = np.array([0.6, 0.4]), np.array([0.9, 0.1])
    m = (p + q) / 2
    want = (p @ np.log2(p / m) + q @ np.log2(q / m)) / 2
    for factor, token in ((0.99, 1), (1.01, 0)):
        assert chosen(by(beta="3", gamma=2, where=f"jsd_kept>{factor * want}"), first, second) == token


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beta": "5*jds"}, "did you mean 'jsd'"),
        ({"beta": "5*"}, "beta"),
        ({"beta": ""}, "beta"),
        ({"beta": "jsd.real"}, "Attribute"),
        ({"beta": "(lambda: 1)()"}, "calls"),
        ({"beta": "open(jsd)"}, "'open'"),
        ({"beta": "'a'*9"}, "numbers"),
        ({"where": "True"}, "numbers"),
        ({"relative_top": "l"}, "'l'"),
        ({"relative_top": "jsd_kept"}, "'jsd_kept'"),
        ({"gamma": 0}, "gamma is 0"),
    ],
)
def test_what_is_no_formula(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        by(**fields)


@pytest.mark.parametrize(
    "text",
    [
        "greedy",
        "pcd",
        "pcd:perturbation=none:window=64:beta=5*jsd:relative_top=0.1+0.4*jsd:where=context>=512 and rank>1",
        "pcd:cache=shared:gamma=10:beta=min(4,1/entropy)",
        "pcd:beta=1.5:relative_top=0.1",
    ],
)
def test_a_formula_is_written_as_it_is_read(text: str) -> None:
    formula = Formula.parse(text)
    assert Formula.parse(formula.name) == formula
    assert set(formula.name.split(":")) == set(text.split(":"))


def test_an_adaptive_setting_is_a_formula_too() -> None:
    config = WINDOW.replace(adaptive="jsd", beta=5, relative_top=0.1, min_context=512)
    formula = Formula.of(config)
    assert (formula.beta, formula.where, formula.view) == ("5*jsd", "context>=512", WINDOW) and formula.config == config
    assert dataclasses.replace(formula, beta="5 * jsd", where="context >= 512").config == config
    floors = config.replace(min_entropy=2.5)
    assert Formula.of(floors).where == "context>=512 and entropy>=2.5" and Formula.of(floors).config == floors
    assert dataclasses.replace(formula, where="entropy >= 2.5 and context>=512").config == floors
    assert Formula.parse(PCD(config).name) == Formula.parse(formula.name) == formula
    with pytest.raises(ValueError, match="where=rank>1"):
        Formula.parse(f"{PCD(config).name}:where=rank>1")


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        ("context>=9 and entropy>=2", {"min_context": 9, "min_entropy": 2}),
        ("entropy>=.5", {"min_entropy": 0.5}),
        ("first>=0 and context>=9", {"min_context": 9}),
        ("first>=1. and context-step>=9", {"min_context": 9, "min_first_entropy": 1.0}),
        ("first>=0 and context-step>=9", None),
        ("first>=1 and context>=9", None),
    ],
)
def test_floors_are_formulas(where: str, fields: dict[str, Any] | None) -> None:
    config = fields and WINDOW.replace(beta=1, **fields)
    assert Formula(WINDOW, "1", 30, "0", where).config == config
    if config:
        assert Formula.of(config).config == config and Formula.parse(Formula.of(config).name) == Formula.of(config)


def test_settings_and_formulas() -> None:
    assert Formula.parse("pcd:cautious").config == pypcd.PCDConfig.preset("cautious")
    assert Formula.parse("greedy").config is None and Formula.parse("pcd:beta=entropy").config is None
    assert all(Formula.parse(f"pcd:where={text}").config is None for text in ("jsd>0.3", "context>=jsd", "5"))
    for where in ("context>=9 and context>=5", "entropy>=2 or context>=9", "context>=9 and rank>1", "context>=1.5"):
        assert Formula.parse(f"pcd:where={where}").config is None
    assert view_of(pypcd.PCDConfig(window=8, beta=1, gamma=9, relative_top=0.5, evaluation="fused")) == pypcd.PCDConfig(
        window=8
    )
    cases = {"beam:4": "'beam:4'", "pcd:windw=64": "windw", "pcd:beta=-1": "beta is -1", "greedy:where=jsd": "adaptive"}
    for text, named in cases.items():
        with pytest.raises((ValueError, TypeError), match=named):
            Formula.parse(text)


# -- right answers ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """A task whose answer is the first line."""

    stop: str = "\n"
    metric: str = "accuracy"
    name: str = "line"

    def score(self, prediction: str, sample: Sample) -> float:
        return float(prediction.strip().split(self.stop)[0].strip() == sample.answers[0])


def gold(name: str, answer: str) -> _Gold:
    made: Any = Line() if name == "line" else task(name)
    return _Gold(made, Sample(0, Prompt(after="?"), (answer,)))


@pytest.mark.parametrize(
    ("name", "answer", "before", "added", "where"),
    [
        ("kv-short", "8044-44b2", "", '"', "open"),  # a sign may come first
        ("kv-short", "8044-44b2", "80", "44-", "open"),  # other tokens, the same text
        ("kv-short", "8044-44b2", "80", "45", None),
        ("kv-short", "8044-44b2", "x", "8044", None),  # not followed any further
        ("kv-short", "8044-44b2", "8044-44b2", '"', "right"),
        ("kv-short", "8044-44b2", "8044-44b2", "a", None),  # another word
        ("kv-short", "8044-44b2", "8044-44b2", None, "right"),
        ("kv-short", "8044-44b2", "8044-44b", None, None),
        ("niah-multikey-2", "123", "12", "3.", "right"),
        ("niah-multikey-2", "123", "123", "4", "right"),  # its metric looks for the digits anywhere
        ("line", "Paris", "", "\n", "open"),
        ("line", "Paris", " Paris", "\n", "right"),
        ("line", "Paris", "\nParis", "\n", "right"),
        ("line", "Paris", "\n", "Paris", "open"),  # the line break before it does not end it
        ("line", "Paris", " Paris", " ", "open"),
        ("line", "Paris", " Paris", " is", None),
        ("line", "Paris", " Paris", None, "right"),
        ("line", "Paris", " Par", "", None),  # a control token
        ("line", '{"a"', "", '{"', "open"),
        ("line", "é", "", "\udcc3", "open"),  # half of a character
    ],
)
def test_where_a_token_leads(name: str, answer: str, before: str, added: str | None, where: str | None) -> None:
    token = None if added is None else added.encode("utf-8", "surrogateescape")
    assert gold(name, answer).judge(before.encode(), token) == where


def test_spellings_begin_as_the_model_does() -> None:
    texts = [*gold("niah-multikey-2", "123").texts([b": 456", b"is", b":"])]
    assert texts == [b" 123", b"123", b": 123", b":123"]
    assert [*gold("line", '{"a"').texts([b'\n{"'])] == [
        b' {"a"',
        b' {"a"\n',
        b'{"a"',
        b'{"a"\n',
        b'\n{"a"',
        b'\n{"a"\n',
    ]
    assert [*gold("kv-short", "80-44").texts([b"x"])] == [b" 80-44", b"80-44"]


@pytest.mark.parametrize(
    ("name", "answer", "written", "n"),
    [
        ("niah-multikey-2", "12", ["is", " 1", "2", ".", "\n"], 3),  # the row behind "2" is the last that matters
        ("niah-multikey-2", "12", ["1", "3"], 0),
        ("line", "12", [" 12", "\n", "3"], 1),  # the row behind 12 tells whether the line ends
        ("line", "12", [" 12"], 1),  # the model's own end
        ("line", "12", [" 12", "3"], 0),
    ],
)
def test_how_far_an_answer_is_read(name: str, answer: str, written: list[str], n: int) -> None:
    assert gold(name, answer).n_read([part.encode() for part in written]) == n


def test_a_task_without_one_right_text_is_refused(tmp_path: Path) -> None:
    plan = Plan("demo", ("vt",), VIEWS[:1], (1500,), n=1)
    with pytest.raises(ValueError, match="task is 'vt'.*allowed: "):
        record(plan, Directory(tmp_path / "run"), options=ONE)


# -- verdicts --------------------------------------------------------------------------------------------------------


def packed(values: Any, kind: str) -> str:
    import base64

    return base64.b64encode(np.asarray(values, f"<{kind}").tobytes()).decode()


def records_by_hand() -> dict[Any, dict[str, Any]]:
    """Three questions of two steps with tokens 0 to 2; L prefers token 0, L* finds token 1 less likely than L does.

    The right answers are: token 0 and then 0; token 1 and then 0; token 1 and then 0, where 1 may spell on elsewhere."""
    first, second = [[2.0, 1.5, 0.0]] * 2, [[2.0, 0.0, 0.0]] * 2
    made: dict[Any, dict[str, Any]] = {}
    for index, edges in enumerate(
        [
            [[0, 0, 1], [1, 0, "right"]],
            [[0, 1, 1], [1, 1, "right"]],
            [[0, 1, "open"], [0, 2, 1], [1, 0, "right"]],
        ]
    ):
        n = 2
        lse = [float(np.logaddexp.reduce(row)) for row in first]
        made["t", 9, index, "greedy"] = {
            "steps": [0, 1],
            "edges": edges,
            "ids": packed([[0, 1, 2]] * n, "i4"),
            "logits": packed(first, "f4"),
            "lse": lse,
            "n_prompt": 10 * (index + 1),
            "words": [False, True],
            "seen": packed([[1, 0, 1]] * n, "u1"),
        }
        scalars = [compared(a, b) for a, b in zip(first, second)]
        made["t", 9, index, VIEW] = {
            "logits": packed(first, "f4"),
            "logits_s": packed(second, "f4"),
            **{name: [s[name] for s in scalars] for name in scalars[0]},
        }
    return made


def test_verdicts_worked_out_by_hand() -> None:
    """Contrasted with strength 1 the rows are 2, 3, 0: token 1, everywhere."""
    screen = Screen(records_by_hand())
    assert screen.cells == [("t", 9)] and screen.k == 3

    def follow(formula: Formula) -> tuple[list[bool], list[bool]]:
        right, is_open = screen.follow(formula)
        return right.tolist(), is_open.tolist()

    assert follow(Formula(None)) == follow(by(beta="0")) == ([True, False, False], [False] * 3)
    assert follow(by(beta="1")) == ([False, True, False], [False, False, True])
    assert follow(by(beta="1", where="context>=20")) == ([True, True, False], [False, False, True])
    assert follow(by(beta="1", where="step==1"))[0] == [False] * 3  # token 0, then 1
    for gate in ("first_word", "most"):  # only the second token is a word
        assert follow(by(beta="1", where=f"{gate}>0")) == follow(by(beta="1", where="step==1"))
    assert follow(by(beta="1", where="seen")) == follow(Formula(None))  # the prompt has tokens 0 and 2
    (scored,) = score(screen, [by(beta="1")])
    result = scored.cells["t", 9]
    assert (result.n, result.wins, result.losses, result.score) == (3, 1, 1, pytest.approx(100 / 3))
    assert scored.n_open == {("t", 9): 1, (None, None): 1}


def test_what_cannot_be_judged_is_an_error() -> None:
    records = records_by_hand()
    broken = {**records, ("t", 9, 1, VIEW): {"error": "out of memory"}}
    for some, formula, error, named in (
        (records, Formula.parse("pcd:gamma=3"), ValueError, "pcd for question 0 of t at 9 tokens"),
        (records, by(gamma=4), ValueError, "gamma is 4"),
        ({}, by(gamma=3), ValueError, "no records"),
        (broken, by(gamma=3), pypcd.PCDError, "question 1 of t at 9 tokens: out of memory"),
    ):
        with pytest.raises(error, match=named):
            Screen(some).follow(formula)


# -- with a model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Directory, dict[Any, Any]]:
    directory = Directory(tmp_path_factory.mktemp("rows") / "run")
    return directory, record(DEMO, directory, k=K, options=ONE).records


def check_best(ids: np.ndarray, row: np.ndarray, near: float) -> None:
    """These are the row's best tokens, the best one first; logits that differ by no more than `near` may change places."""
    values = row[ids]
    assert len(set(ids.tolist())) == len(ids)
    assert (np.diff(values) <= near).all(), "another order"
    assert np.delete(row, ids).max() <= values.min() + near, "a better token is left out"


def test_recorded_rows_are_those_of_real_decoding(recorded: tuple[Directory, dict[Any, Any]], load: Load) -> None:
    """Step by step, one token at a time, along the right answer."""
    _, records = recorded
    llm = load("demo", False, n_ctx=512, n_batch=512)
    session = Session(llm)
    (sample, *_) = task("kv-short").samples(6, 450, pypcd.evaluation.ModelTokenizer(llm), 0)
    prompt = prompt_tokens(llm, sample.prompt)
    plain = records["kv-short", 450, 0, "greedy"]
    n = len(plain["steps"])
    ids = unpacked(plain["ids"], "i4", n)
    assert plain["steps"] == [0, 1, 2, 3, 4, 5] and plain["n_prompt"] == len(prompt)
    path = [token for _, token, what in plain["edges"] if what not in ("open", "right")]
    assert llm.detokenize(path).decode() == sample.answers[0]
    limits = [rounding_of(llm, [*prompt, *path[:step]]) for step in range(n)]  # of each row
    for name in VIEWS:
        made = records["kv-short", 450, 0, name]
        for step, (token, limit) in enumerate(zip([None, *path], limits)):
            session.start(prompt, setting_of(name)) if token is None else session.step({0: token})
            rows = llm.pcd_logits(0)
            check_best(ids[step], rows.standard, 2 * limit)  # each of two logits may be off by it
            twin = rows.local
            assert twin is not None
            for logits in (plain["logits"], made["logits"]):
                np.testing.assert_allclose(unpacked(logits, "f4", n)[step], rows.standard[ids[step]], atol=limit)
            np.testing.assert_allclose(unpacked(made["logits_s"], "f4", n)[step], twin[ids[step]], atol=2 * limit)
            wanted = compared(rows.standard, twin)
            for scalar in ("lse", "entropy", "lse_s", "entropy_s", "top_s", "jsd"):
                assert made[scalar][step] == pytest.approx(wanted[scalar], abs=2 * limit), scalar


def test_the_prompt_is_the_same_for_all_views_and_greedys_record_is_an_evaluations(
    recorded: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    plain = evaluate(dataclasses.replace(DEMO, methods=("greedy",)), Directory(tmp_path / "eval"), options=ONE).records
    for key, answer in without_time(plain).items():
        assert {name: recorded[1][key][name] for name in answer} == answer


def test_verdicts_are_those_of_real_decoding(recorded: tuple[Directory, dict[Any, Any]], tmp_path: Path) -> None:
    formulas = [Formula(None)]
    for view in VIEWS:
        formulas += [Formula.parse(f"{view}:{rest}") for rest in ("beta=0", "beta=1", "beta=2.5:relative_top=0.1")]
    found = agreement(Screen(recorded[1]), formulas, DEMO, Directory(tmp_path / "check"), options=ONE)
    assert [a.n for a in found] == [12] * len(formulas)
    assert [a.n_same for a in found] == [12] * len(formulas)
    assert all(not (a.screened_only or a.decoded_only or a.n_open) for a in found)
    rights = {tuple(Screen(recorded[1]).follow(f)[0]) for f in formulas}
    assert len(rights) > 2, "the formulas must differ, or this test shows nothing"


def test_answers_of_one_token_agree_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = KV("kv-one", max_tokens=4, groups=(2,))
    monkeypatch.setattr("pypcd.evaluation.run.task_named", lambda name, data=None: short)
    plan = Plan("demo", ("kv-one",), (VIEW,), (150,), n=16)
    screen = Screen(record(plan, Directory(tmp_path / "rows"), options=ONE).records)
    assert {len(llm["steps"]) for key, llm in screen._records.items() if key[3] == "greedy"} == {2}
    formulas = [Formula.parse(f"{VIEW}:beta={beta}:relative_top={cut}") for beta in (0, 1, 4) for cut in (0, 0.2)]
    found = agreement(screen, [Formula(None), *formulas], plan, Directory(tmp_path / "check"), options=ONE)
    assert all(a.n_same == a.n == 16 and a.n_open == 0 for a in found)


def test_only_settings_can_be_decoded(recorded: tuple[Directory, dict[Any, Any]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="beta=entropy.* is no setting of the engine"):
        agreement(Screen(recorded[1]), [by(beta="entropy")], DEMO, Directory(tmp_path / "x"), options=ONE)
    assert not (tmp_path / "x").exists()


# -- on disk ---------------------------------------------------------------------------------------------------------


def on_disk(directory: Directory) -> list[str]:
    """The records, but for the time they took."""
    return sorted(json.dumps({**made, "seconds": 0}) for made in lines(directory))


@pytest.mark.parametrize("share", [0.2, 0.98])
def test_a_recording_cut_anywhere_ends_the_same(
    share: float, recorded: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    copy = cut_copy(recorded[0], tmp_path / "run", share)
    record(DEMO, copy, k=K, options=ONE)
    assert on_disk(copy) == on_disk(recorded[0])


def test_views_may_be_added_and_processes_stand_beside_each_other(
    recorded: tuple[Directory, dict[Any, Any]], tmp_path: Path
) -> None:
    directory = Directory(tmp_path / "run")
    record(dataclasses.replace(DEMO, methods=(VIEWS[2],)), directory, k=K, options=ONE)
    record(dataclasses.replace(DEMO, methods=(*VIEWS, f"{VIEW}:beta=1")), directory, k=K, options=ONE, jobs=2)
    assert on_disk(directory) == on_disk(recorded[0])


def test_rows_and_answers_are_different_runs(recorded: tuple[Directory, dict[Any, Any]], tmp_path: Path) -> None:
    small, directory = dataclasses.replace(DEMO, lengths=(200,), n=1), Directory(tmp_path / "run")
    evaluate(small, directory, options=ONE)
    for made, there, here in (
        (lambda: evaluate(DEMO, recorded[0], options=ONE), "{'k': 40}", "None"),
        (lambda: record(DEMO, recorded[0], k=8, options=ONE), "{'k': 40}", "{'k': 8}"),
        (lambda: record(small, directory, options=ONE), "'not known'", ""),
    ):
        with pytest.raises(ValueError, match=f"rows is {there} there and {here}"):
            made()


# -- the script ------------------------------------------------------------------------------------------------------


Script = Callable[..., None]


@pytest.fixture
def screen_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Runs the script with some arguments, in this process."""
    script = Path(__file__).parents[2] / "scripts/recipes/screen.py"

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments, "--out", str(tmp_path / "out")])
        runpy.run_path(str(script), run_name="__main__")

    return run


def test_the_script_lists_every_formula(tmp_path: Path, screen_py: Script, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "formulas"
    file.write_text("pcd:window=16:perturbation=none:beta=5*jsd\n\n")
    arguments = ["demo", "--task=kv-short", "--length=200", "--n=4", "--check=2", "--half=second", "greedy"]
    screen_py(*arguments, "--formulas", str(file))
    shown = capsys.readouterr().out
    assert "| pcd:perturbation=none:window=16:beta=5*jsd |" in shown
    assert "| 1 of 1 | 0 | 0 | 0 | greedy |" in shown and shown.count("| greedy |") == 2


KV200 = ("--task=kv-short", "--length=200", "--n=1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "pcd:window:beta=5*", *KV200], "5*"),
        (["demo", "pcd:window:beta=min(jsd)", *KV200], "min(jsd)"),  # an expression that does not work
        (["demo", "greedy", *KV200], "formula"),
        (["demo", "--formulas", "{missing}", *KV200], "{missing}"),
        (["demo", "--formulas", "{binary}", *KV200], "{binary}"),
        (["{missing}", "pcd:window", *KV200], "{missing}"),
        (["{binary}", "pcd:window", *KV200], "{binary}"),
        (["demo", "pcd:window", "--task=kv-shirt", "--length=200"], "kv-shirt"),
        (["demo", "pcd:window", "--task=kv-short", "--length=2x"], "--length"),
    ],
)
def test_what_the_script_cannot_use_is_said_in_a_line(
    arguments: list[str], said: str, tmp_path: Path, screen_py: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"missing": str(tmp_path / "missing"), "binary": str(tmp_path / "binary")}
    Path(places["binary"]).write_bytes(bytes(range(256)))
    with pytest.raises(SystemExit) as stopped:
        screen_py(*(argument.format(**places) for argument in arguments))
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("screen: ") and said.format(**places) in line
