"""scripts/recipes/search.py: its counts against real decoding, its parts, what a model cannot take, stopping and going on."""

from __future__ import annotations

import csv
import itertools
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny

from pypcd.decode import PCD
from pypcd.evaluation import Directory, Plan, evaluate, paired
from pypcd.lab.balance import LONG, RETRIEVAL, SHORT_PROMPTS
from pypcd.lab.formula import Formula
from pypcd.lab.recorded import _Recorder

SCRIPT = Path(__file__).parents[2] / "scripts/recipes/search.py"
ONE = {"n_threads": 1, "n_threads_batch": 1}
NARROW, WIDE, TURNED = "pcd:window:window=16", "pcd:window:window=64", "pcd:base_ratio=0.1"


class Search:
    """The script with few formulas and small parts.

    Attributes:
        names: its names, which a test may change.
    """

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, Any] = runpy.run_path(str(SCRIPT))["main"].__globals__
        self.names.update(BETAS=("1", "2.5"), CUTS=("0.1",), SURE=("", "entropy>=0.5"), GUARDS=("rank>1",))
        self.work, self.out = folder / "work", folder / "out"

    def parts(self, **parts: tuple[Any, ...]) -> None:
        self.names["SETS"] = {"windows": {}, "kv": {name: self.names["Part"](*part) for name, part in parts.items()}}

    def __call__(self, *words: object) -> None:
        self.names["main"]([*map(str, words), "--work", str(self.work), "--out", str(self.out)])

    @property
    def markdown(self) -> str:
        return (self.out / "summary.md").read_text()

    @property
    def rows(self) -> dict[str, dict[str, str]]:
        with (self.out / "summary.csv").open(newline="") as file:
            return {row.pop("formula"): row for row in csv.DictReader(file)}


@pytest.fixture
def search(tmp_path: Path) -> Search:
    return Search(tmp_path)


# -- what is found ---------------------------------------------------------------------------------------------------


def test_wins_and_losses_are_those_of_real_decoding(search: Search, tmp_path: Path) -> None:
    """A part has the rows of some views only: a group that it belongs to tells nothing of the others."""
    search.parts(
        near=(("kv-short",), 250, 16, None, (NARROW, WIDE, TURNED)),
        more=(("kv-short",), 350, 8, None, (NARROW, WIDE, TURNED)),
        far=(("kv-short",), 700, 16, None, (WIDE,)),
    )
    search.names["FAR"] = 400
    search("demo")
    found = {Formula.parse(name): row for name, row in search.rows.items()}
    assert len(found) == 2 * 2 + 2 * 3 + 2  # WIDE has a safeguard too, TURNED no floor of the entropy
    methods = {formula: PCD(formula.config).name for formula in found if formula.config}
    assert len(methods) == 2 * 2 + 2 * 2 + 2
    decoded: dict[Any, float] = {}
    for length, n in ((250, 16), (350, 8), (700, 16)):
        plan = Plan("demo", ("kv-short",), tuple(methods.values()), (length,), n=n, half="first")
        records = evaluate(plan, Directory(tmp_path / f"decoded{length}"), options=ONE).records
        decoded.update({(method, length, index): made["score"] for (_, _, index, method), made in records.items()})
    sides = {RETRIEVAL: (250, 350), search.names["FAR_RETRIEVAL"]: (700,)}
    for formula, method in methods.items():
        for group, lengths in sides.items():
            asked = [at for by, *at in decoded if by == "greedy" and at[0] in lengths]
            scores = [[decoded[(by, *at)] for at in asked] for by in (method, "greedy")]
            wins, losses = (sum(a > b for a, b in zip(*both)) for both in (scores, scores[::-1]))
            got = [found[formula][f"{group}: {what}"] for what in ("n", "wins", "losses")]
            is_known = group == RETRIEVAL or "window=64" in method
            assert got == ([str(len(asked)), str(wins), str(losses)] if is_known else [""] * 3), formula.name
    assert any(row["retrieval: wins"] > "0" for row in found.values())
    n_right = sum(score for (by, length, _), score in decoded.items() if by == "greedy" and length < 700)
    head = f"| formula | retrieval (greedy {100 * n_right / 12:.1f}, n = 12) | retrieval, over 2000 tokens (greedy "
    assert search.markdown.count(head) == 1 and "everyday" not in search.markdown
    assert "12 formulas." in search.markdown and "left out" not in search.markdown


def pairs(n: int, wins: int, losses: int) -> Any:
    """A comparison on n questions, of which greedy answers half right."""
    plain = [1.0] * (n // 2) + [0.0] * (n - n // 2)
    mine = [0.0] * losses + plain[losses : n - wins] + [1.0] * wins
    return paired(mine, plain)


def test_the_best_are_listed_by_what_there_is(search: Search) -> None:
    markdown, far = search.names["markdown"], search.names["FAR_RETRIEVAL"]
    rows = [
        ("a", {RETRIEVAL: pairs(20, 2, 1), LONG: pairs(10, 0, 1), SHORT_PROMPTS: pairs(10, 0, 0)}),
        ("b", {RETRIEVAL: pairs(20, 2, 0), far: pairs(8, 3, 0), LONG: pairs(10, 1, 1), SHORT_PROMPTS: pairs(10, 0, 1)}),
        ("c", {RETRIEVAL: pairs(20, 5, 0), LONG: pairs(10, 0, 2), SHORT_PROMPTS: pairs(10, 0, 0)}),
        ("d", {RETRIEVAL: pairs(20, 5, 0), LONG: pairs(10, 0, 2), SHORT_PROMPTS: pairs(10, 0, 0)}),  # as c
    ]
    text = markdown(rows)
    first, spared, best = text.split("\n\nNo loss in")[0], *re.split(r"No loss in|All, ", text)[1:]
    assert first.startswith("4 formulas. Points against greedy")
    assert (
        "| formula | retrieval (greedy 50.0, n = 20) | retrieval, over 2000 tokens (greedy 50.0, n = 8) | "
        "everyday, long (greedy 50.0, n = 10) | everyday, short (greedy 50.0, n = 10) |" in spared
    )
    assert re.findall(r"^\| `(\w)`", spared, re.MULTILINE) == ["b"] and re.findall(
        r"^\| `(\w)`", best, re.MULTILINE
    ) == ["c", "b", "a"]
    assert re.search(
        r"`a` \| \+5\.0 \[.*\] ~ \(2 / 1\) \|  \| -10\.0 .* \(0 / 1\) \| \+0\.0 .* \(0 / 0\) \|$", best, re.MULTILINE
    )
    # without retrieval, by the next group; without long everyday prompts, nothing is said of their loss
    everyday = [(name, {SHORT_PROMPTS: cells[SHORT_PROMPTS]}) for name, cells in rows]
    assert re.findall(r"^\| `(\w)`", markdown(everyday), re.MULTILINE) == ["a", "b"] and "No loss" not in markdown(
        everyday
    )


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_parts_are_chosen_by_their_names_or_their_sets() -> None:
    names = runpy.run_path(str(SCRIPT))["main"].__globals__
    sets, chosen = names["SETS"], names["chosen"]
    parts = [*itertools.chain(*sets.values())]
    assert len(parts) == len({*parts, *sets}) - len(sets), "each has a folder of its own"
    assert chosen(names["default"]("demo")) == [sets["kv"]]
    assert chosen(names["default"]("model.gguf")) == [sets["windows"], sets["turned"]]
    assert [[*found] for found in chosen(("short", "turned", "needles600"))] == [
        ["needles600", "short"],
        [*sets["turned"]],
    ]
    assert {part.group for part in sets["kv"].values()} == {RETRIEVAL}
    assert sets["windows"]["needles6000"].group == names["FAR_RETRIEVAL"] and sets["windows"]["shots1000"].group == LONG
    with pytest.raises(
        ValueError,
        match=r"part is 'needle600' \(did you mean 'needles600'\?\); allowed: windows, which is needles600, ",
    ):
        chosen(("short", "needle600"))
    with pytest.raises(ValueError, match="part has kv500 and others that are not of kv.*; give them in two runs"):
        chosen(("short", "kv500"))
    # every formula can be read, and none is judged twice
    texts = [
        text for view in (names["NARROW"], *names["WINDOWS"], *names["TURNED"]) for text in names["formulas"](view)
    ]
    assert len({Formula.parse(text) for text in texts}) == len(texts) > 4000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--part=kvs"], "search: part is 'kvs'"),
        (["nothing.gguf"], "search: there is no model file nothing.gguf"),
    ],
)
def test_mistakes_are_sentences(words: list[str], message: str, search: Search) -> None:
    with pytest.raises(SystemExit, match=message):
        search(*words)


def test_a_process_at_least(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search("demo", "--jobs=0")
    assert "--jobs: '0'; allowed: an integer of at least 1" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_rows_is_a_sentence(search: Search, tmp_path: Path) -> None:
    search.parts(a=(("kv-short",), 250, 2, None, (WIDE,)))
    search.work.write_text("a file")
    with pytest.raises(SystemExit, match="search: .*Not a directory|search: .*work"):
        search("demo")


def test_what_a_model_cannot_take_is_left_out_with_a_sentence(tiny: Tiny, search: Search) -> None:
    model = tiny("gpt2", n_ctx_train=512)  # without rotary positions
    part = (("everyday-arithmetic",), 500, 4, 4)
    search.parts(a=(*part, (TURNED, WIDE)), b=(*part[:1], 900, *part[2:], (WIDE,)))
    search(model, "--part=kv")
    assert search.rows and all("window=64" in name for name in search.rows)
    text = search.markdown
    assert "\n\n- b is left out: it has 900 tokens, the model was trained for 512\n" in text
    assert re.search(r"\n- `pcd:base_ratio=0.1` is refused: .*gpt2", text)
    again = search.rows
    search(model, "--part=kv")  # what was refused is refused again
    assert search.rows == again and search.markdown == text
    search.parts(b=(*part[:1], 900, *part[2:], (WIDE,)))
    with pytest.raises(SystemExit, match="search: there is nothing to judge formulas on: b is left out"):
        search(model, "--part=kv")
    search.parts(c=(*part, (TURNED,)))
    with pytest.raises(
        SystemExit, match="search: there is nothing to judge formulas on: `pcd:base_ratio=0.1` is refused"
    ):
        search(model, "--part=kv")


def test_stopped_it_goes_on_where_it_was(
    search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    search.parts(a=(("kv-short",), 250, 4, None, (WIDE,)), b=(("kv-short",), 350, 4, None, (NARROW, WIDE)))
    n_all = 2 * 2 + 2 * 3
    made: list[Any] = []
    answered = _Recorder._answered

    def stopping(self: Any, key: Any, *rest: Any) -> Any:
        if len(made) == stop_at:
            raise KeyboardInterrupt
        made.append(key)
        return answered(self, key, *rest)

    monkeypatch.setattr(_Recorder, "_answered", stopping)
    stop_at = -1
    search("demo")
    assert len(set(made)) == len(made) == n_all
    whole = search.markdown, search.rows
    capsys.readouterr()

    search.work, search.out = tmp_path / "again", tmp_path / "again-out"
    made.clear()
    for stop_at in (3, 7):
        with pytest.raises(SystemExit) as ended:
            search("demo")
        assert ended.value.code == 130 and "stopped; run the same command again to go on" in capsys.readouterr().err
        assert len(made) == stop_at and not search.out.exists()
    stop_at = -1
    search("demo")
    assert len(set(made)) == len(made) == n_all and (search.markdown, search.rows) == whole
