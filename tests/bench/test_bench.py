"""The benchmark measures what it says. How fast PCD is, is not tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from conftest import Tiny

import pypcd
from pypcd import PCDConfig, engine
from pypcd.bench import DEFAULT_METHODS, Measurement, bench, measurement, methods_for
from pypcd.cli.bench import _costs

QUICK = ["--n-tokens", "2", "--rounds", "1", "--threads", "1"]


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("llama")


def measure(model: Path, methods: dict[str, PCDConfig | None], *lengths: int, **more: Any) -> list[Measurement]:
    how = {"n_tokens": 2, "rounds": 2, "n_threads": 1, "n_threads_batch": 1, **more}
    return list(bench(str(model), methods, lengths or (16,), **how))


def test_every_method_is_measured_at_every_length_plain_first(model: Path) -> None:
    names = ("greedy", "pcd", "pcd:paper:cache=shared:evaluation=alternate")
    rows = measure(model, methods_for(names), 64, 16)
    assert [(row.n_past, row.method) for row in rows] == [(n, name) for n in (16, 64) for name in names]
    for row in rows:
        assert row.tokens_per_second > 0 and row.ratio > 0 and row.prefill_ratio > 0
        assert (row.ratio == row.prefill_ratio == 1) == (row.method == "greedy")
        assert row.twins == (0 if row.method == "greedy" else 1)
        greedy = next(one for one in rows if one.n_past == row.n_past)
        assert row.tokens_per_second * row.ratio == pytest.approx(greedy.tokens_per_second)  # they agree


# -- what is timed ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["llama", "mamba"])
def llm(request: pytest.FixtureRequest, tiny: Tiny) -> pypcd.Llama:
    """Of the second the state is recurrent: it cannot go back."""
    return pypcd.Llama(tiny(request.param), n_ctx=512, n_threads=1, n_threads_batch=1)


def continued(llm: pypcd.Llama, text: list[int], n: int) -> list[int]:
    tokens: list[int] = []
    llm.reset()
    for _ in range(n):
        llm.eval(text if not tokens else tokens[-1:])
        tokens.append(int(engine.row(llm).argmax()))
    return tokens


def test_a_text_is_continued_as_by_eval_whatever_was_there_before(llm: pypcd.Llama) -> None:
    first, longer, other = [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 50, 51], [5, 6, 20, 21]
    wanted = [continued(llm, tokens, 6) for tokens in (first, longer, other, first)]
    context = measurement._Context(llm)
    for tokens, of_text in zip((first, longer, other, first), wanted):
        context.fill(tokens)
        assert context.continuation(6) == of_text
        context.time(None, list(range(1, 9)))
        llm.eval(of_text[:1])
        assert int(engine.row(llm).argmax()) == of_text[1], "the cache is left unchanged"
        context.read(None, longer)


def test_the_first_steps_are_not_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = measurement._Context(pypcd.Llama(model, n_ctx=512, n_threads=1, n_threads_batch=1))
    context.fill([5, 6, 7])
    seconds = iter([9.0] * 6 + [1.0, 2.0, 6.0])
    monkeypatch.setattr(context, "_seconds", lambda tokens: next(seconds))
    assert context.time(None, [10, 11, 12, 13, 14, 15, 16, 17, 18])[0] == 3


def test_prompts_have_the_tokens_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(measurement._Context, "read", lambda self, config, tokens: read.append(len(tokens)) or 1.0)
    for n_prefill, of_each in ((60, 60), (100, 64)):  # the shortest length at most
        read.clear()
        measure(model, {"greedy": None}, 64, 80, n_prefill=n_prefill)
        assert read == [of_each] * 3


# -- memory, texts, errors -------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_cache_and_half_again_for_second_keys(model: Path) -> None:
    names = ["pcd", "pcd:window", "pcd:paper:window=20"]
    rows = {row.method: row for row in measure(model, methods_for(names))}
    assert rows["greedy"].kv_bytes == 256 * 3 * 2 * 16 * 2 * 2  # cells, layers, KV heads of 16, K and V of f16
    assert rows["pcd:window"].kv_bytes == rows["greedy"].kv_bytes
    assert (
        rows["pcd"].kv_bytes
        == rows["pcd:paper:window=20"].kv_bytes
        == pytest.approx(1.5 * rows["greedy"].kv_bytes, rel=0.01)
    )


def test_a_cut_saves_twins_and_an_answer_that_is_contrasted_is_what_is_timed(model: Path) -> None:
    sure = PCDConfig(evaluation="alternate", relative_top=1.0)  # only the most probable token is plausible
    rows = measure(model, {**methods_for(["pcd:paper:min_first_entropy=100:evaluation=fused"]), "sure": sure})
    assert [row.twins for row in rows] == [0, 1, 0]


def test_methods_are_settings() -> None:
    assert methods_for(["pcd:cautious"]) == {"greedy": None, "pcd:cautious": PCDConfig.preset("cautious")}
    for name, remedy in (("beam", "'beam'"), ("two-rows", "allowed: greedy, pcd;"), ("pcd:betta=1", "'beta'")):
        with pytest.raises(ValueError, match=remedy):
            methods_for([name])


def test_what_is_under_way_is_told(model: Path) -> None:
    said: list[str] = []
    measure(model, methods_for(DEFAULT_METHODS), 100, 300, progress=said.append)
    assert [text for text in said if "filling" in text] == [f"filling the cache, {n} tokens" for n in (100, 300)]
    assert any("round 2 of 2, pcd:unsure" in text for text in said)


def row(method: str, n_past: int, ratio: float = 1.25, prompt: float = 1.0) -> Measurement:
    return Measurement(method, "native", n_past, 10.0, ratio, 1.0, prompt, 0)


def test_a_stopped_bench_shows_what_it_has(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def stopped(*_: object, **how: object) -> Iterator[Measurement]:
        yield from (row("greedy", 512), row("pcd:window", 512), row("greedy", 2048))
        raise KeyboardInterrupt

    monkeypatch.setattr("pypcd.cli.bench.bench", stopped)
    out, _ = run("bench", "demo", "--threads=1", status=130)
    assert "512 tokens" in out and "2048 tokens" in out and "pcd:window" in out
    assert "costs less than 2% on a prompt and 25% on a token" in out


def test_each_settings_cost_is_said_in_a_sentence() -> None:
    rows = [row("greedy", 512, 1.0), row("pcd:unsure", 512, 1.104, 1.031), row("pcd", 512, 2.2, 0.97)]
    unsure = (
        "unsure costs 3% on a prompt and 10% on a token. That is an answer that it contrasts; any other costs nothing."
    )
    assert _costs(rows) == [unsure, "paper costs less than 2% on a prompt and 120% on a token."]
    several = [row("pcd:window", 512, 1.5), row("pcd:window", 2048, 1.01)]
    assert _costs(several) == [
        "window costs less than 2% on a prompt, 50% on a token after 512 and less than 2% on a token after 2048."
    ]


def test_the_table_is_readable_in_80_columns(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    methods = "pcd:unsure,pcd:paper:cache=shared,pcd:paper:evaluation=alternate:relative_top=0.1"
    lines = run("bench", model, "--length=16", "--method", methods, *QUICK)[0].splitlines()
    assert max(map(len, lines)) <= 80 and "16 tokens" in lines
    (greedy,) = (line.split() for line in lines if line.startswith("greedy"))
    assert greedy[2] == "1.00x"


@pytest.mark.parametrize(
    ("arch", "options", "measured", "said"),
    [
        ("llama", ["--method", "pcd:window", "--engine", "native"], "pcd:window", ""),
        ("llama", ["--method", "pcd:paper:cache=separate", "--engine", "stock"], "pcd:paper:cache=separate", ""),
        (
            "llama",
            ["--method", "pcd:paper:cache=separate"],
            None,
            "runs in the stock engine alone: pypcd bench --engine stock",
        ),
        (
            "bloom",
            ["--method", "pcd,pcd:window"],
            "pcd:window",
            "cannot run pcd; 'pypcd info MODEL' says why",
        ),  # no RoPE
    ],
)
def test_it_runs_in_the_engine_that_is_named_what_can_run_there(
    arch: str, options: list[str], measured: str | None, said: str, tiny: Tiny, run: Run
) -> None:
    out, err = run("bench", tiny(arch), "--length=16", "--json", *QUICK, *options)
    rows = json.loads(out)["measurements"]
    assert [row["method"] for row in rows] == ["greedy", *filter(None, [measured])]
    assert {row["engine"] for row in rows} == {"stock" if "stock" in options else "native"}
    assert said in err and bool(said) == ("pypcd: " in err)


def test_a_ratio_is_the_median_of_rounds_beside_greedys(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: steps take 2, 9 and 3 times as long as greedy's in their rounds, prompts 3 times."""
    steps, prompts = iter([1.0, 2.0, 2.0, 18.0, 4.0, 12.0]), iter([1.0, 3.0] * 3)
    monkeypatch.setattr(measurement._Context, "time", lambda *_: (next(steps), 1.0, 0))
    monkeypatch.setattr(measurement._Context, "read", lambda *_: next(prompts))
    greedy, window = measure(model, methods_for(["pcd:window"]), rounds=3)
    assert (greedy.ratio, window.ratio, window.prefill_ratio) == (1, 3, 3)
    assert (greedy.tokens_per_second, window.tokens_per_second) == (1 / 2, 1 / 6)
