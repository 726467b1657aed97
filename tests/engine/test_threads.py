"""The number of threads, which follows what other programs leave; and what models do with it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest
from conftest import TOKENS, Tiny

import pypcd
from pypcd import engine
from pypcd.llama import machine, threads


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of so many cores, of which other programs use some."""
    given = SimpleNamespace(n=2, busy=0)
    monkeypatch.setattr(machine, "n_cores", lambda: given.n)
    monkeypatch.setattr(os, "cpu_count", lambda: given.n)
    monkeypatch.setattr(threads, "_busy", lambda: given.busy)
    return given


@pytest.mark.parametrize(
    ("n", "busy", "decode", "batch"),
    [
        (2, 0, 2, 2),
        (2, 1, 1, 1),
        (2, 14, 1, 1),
        (4, 1, 3, 3),
        (16, 0, 8, 16),  # the usual: half of many cores, all of them for prompts
        (16, 5, 8, 11),
        (16, 12, 4, 4),
    ],
)
def test_as_many_as_others_leave_and_no_more_than_usual(
    n: int, busy: int, decode: int, batch: int, cores: SimpleNamespace
) -> None:
    cores.n, cores.busy = n, busy
    assert threads.choose({"n_gpu_layers": 0})[:2] == (decode, batch)
    assert threads.choose({"n_gpu_layers": 0}, 3)[:2] == (3, 3)
    assert threads.choose({"n_gpu_layers": 0}, 3, 5)[:2] == (3, 5)
    assert threads.choose({"n_gpu_layers": 0}, None, 5)[:2] == (decode, 5)
    usual = machine.default_threads(), n  # where rows depend on it, or a GPU computes
    assert threads.choose({"n_gpu_layers": 0, "flash_attn": True})[:2] == usual
    assert threads.choose({"n_gpu_layers": -1, "rpc_servers": "there:1"})[:2] == usual


@pytest.mark.parametrize(
    ("looks", "busy"),
    [
        (["1/170"], 0),  # this one
        (["4/170", "3/170", "9/170"], 2),
        (["4/170", "1/170"], 0),  # the others ran for a moment
        (["0/0"], 0),  # a system that does not say
    ],
)
def test_what_runs_for_a_moment_is_not_counted(
    looks: list[str], busy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, looks = tmp_path / "loadavg", [*looks]
    monkeypatch.setattr(threads, "_STATE", state)
    monkeypatch.setattr(threads, "_own", lambda: 1)
    monkeypatch.setattr(threads.time, "sleep", lambda _: state.write_text(f"0.5 0.4 0.3 {(looks or ['x']).pop(0)} 7"))
    threads.time.sleep(0)
    assert threads._busy() == busy and not looks
    for content in ("", "no numbers", "1 2 3 x/y 5"):
        state.write_text(content)
        assert threads._busy() == 0
    state.unlink()
    assert threads._busy() == 0


def test_threads_of_its_own_that_spin_are_no_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, state in enumerate("RRSR"):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "stat").write_text(f"{i} (a) R (b) {state} 1 2 3")
    (tmp_path / "loadavg").write_text("0.5 0.4 0.3 5/900 7")
    monkeypatch.setattr(threads, "_OWN", tmp_path)
    monkeypatch.setattr(threads, "_STATE", tmp_path / "loadavg")
    assert threads._busy() == 2


def test_more_cores_than_ggml_has_room_for_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2000), raising=False)
    assert machine.n_cores() == engine.MOST_THREADS >= machine.default_threads()


@pytest.mark.parametrize(
    ("given", "busy", "idle"),
    [
        ({}, (1, 1), (2, 2)),
        ({"n_threads": 2}, (2, 2), (2, 2)),
        ({"n_threads_batch": 2}, (1, 2), (2, 2)),
        ({"flash_attn": True}, (2, 2), (2, 2)),
    ],
)
def test_a_model_looks_when_it_is_opened_and_at_a_prompt(
    given: dict[str, Any], busy: tuple[int, int], idle: tuple[int, int], tiny: Tiny, cores: SimpleNamespace
) -> None:
    cores.busy = 1
    with contextlib.closing(pypcd.Llama(tiny("llama"), n_ctx=256, n_gpu_layers=0, **given)) as llm:

        def in_force() -> tuple[int, int]:
            numbers = llama_cpp.llama_n_threads(llm.ctx), llama_cpp.llama_n_threads_batch(llm.ctx)
            assert numbers == (llm.n_threads, llm.n_threads_batch)
            return numbers

        assert in_force() == busy
        llm.eval(TOKENS[:20])
        cores.busy = 0
        llm.eval(TOKENS[20:21])  # a single token is not a prompt
        assert in_force() == busy
        llm.eval(TOKENS[21:40])
        assert in_force() == idle


@pytest.mark.parametrize(
    "pcd",
    [False, "paper:evaluation=fused", "paper:cache=separate", "paper:window=20:perturbation=none:evaluation=fused"],
)
def test_without_flash_attention_rows_do_not_depend_on_the_number(pcd: Any, tiny: Tiny) -> None:
    """So a run that is repeated, or continued, may have another one."""
    rows = []
    for n in (1, 2, 3):
        options = {"n_threads": n, "n_threads_batch": n, "n_gpu_layers": 0, "flash_attn": False}
        with contextlib.closing(pypcd.Llama(tiny("gemma3"), pcd=pcd, n_ctx=512, **options)) as llm:
            llm.eval(TOKENS[:90])
            llm.eval(TOKENS[:1])
            rows.append(engine.row(llm).tolist())
    assert rows[0] == rows[1] == rows[2]
