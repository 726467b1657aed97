"""The number of threads: what is measured, when, and what models do with it. The times themselves are made up here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import llama_cpp
import pytest
from conftest import TOKENS, Tiny, run_python

import pypcd
from pypcd import engine
from pypcd.llama import machine as machine_module
from pypcd.llama import threads


class Machine:
    """A machine of `cores` cores on which a number of threads takes `times[number]`; it counts the measurements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cores, self.now, self.measured = 2, 1000.0, 0
        self.times: dict[int, float] = {1: 2.0, 2: 1.0}
        monkeypatch.setattr(machine_module, "n_cores", lambda: self.cores)
        monkeypatch.setattr(engine, "step_times", self.step_times)
        monkeypatch.setattr(threads.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(threads, "_measured", {})

    def step_times(self, numbers: Sequence[int], width: int, n_tokens: int, seconds: float) -> dict[int, float]:
        self.measured += n_tokens == 1
        assert list(numbers) == sorted(set(numbers)) and numbers[0] >= 1 and numbers[-1] <= self.cores
        return {n: self.times[n] for n in numbers}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# --- what is measured ---


@pytest.mark.parametrize(("width", "n_tokens"), [(1, 8), (2048, 1)])
def test_a_step_takes_time_with_every_number_of_threads(width: int, n_tokens: int) -> None:
    times = engine.step_times([1, 2], width, n_tokens, 0.0001)
    assert list(times) == [1, 2] and min(times.values()) > 0
    assert list(engine.step_times([engine.MOST_THREADS], 32, 1, 0.0001)) == [engine.MOST_THREADS]


def test_any_libllama_is_measured() -> None:
    """In a fresh process, since this one has pypcd's own."""
    code = "from pypcd.llama.threads import best_threads; from pypcd import engine; print(engine.is_native(), best_threads(64).why)"
    done = run_python(code, PYPCD_ENGINE="stock")
    wanted = "False measured: " if machine_module.n_cores() > 1 else "False one core"
    assert done.stdout.startswith(wanted), done.stderr


def test_where_nothing_can_be_measured_the_usual_number_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "step_times", lambda *_: {})
    assert threads.best_threads(64) == (2, 2, "the usual number")


def test_more_cores_than_ggml_has_room_for_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2000), raising=False)
    assert machine_module.n_cores() == engine.MOST_THREADS >= machine_module.default_threads()


# --- what is chosen ---


@pytest.mark.parametrize(
    ("cores", "times", "decode", "batch"),
    [
        (2, {1: 2.0, 2: 1.0}, 2, 2),  # idle
        (2, {1: 1.0, 2: 20.0}, 1, 1),  # busy
        (2, {1: 1.0, 2: 1.2}, 2, 2),  # not 20% faster
        (2, {1: 1.0, 2: 1.21}, 1, 1),
        (2, {1: 1.0, 2: 1274.0}, 1, 1),
        (16, {1: 9.0, 8: 1.0, 16: 0.9}, 8, 16),  # the usual: half of many cores, all of them for prompts
        (16, {1: 9.0, 8: 1.0, 16: 0.5}, 16, 16),
        (16, {1: 1.0, 8: 5.0, 16: 9.0}, 1, 1),
        (16, {1: 9.0, 8: 1.0, 16: 9.0}, 8, 8),
        (3, {1: 1.0, 3: 1.1}, 3, 3),
    ],
)
def test_another_number_than_the_usual_one_has_to_be_20_percent_faster(
    cores: int, times: dict[int, float], decode: int, batch: int, machine: Machine
) -> None:
    machine.cores, machine.times = cores, times
    best = threads.best_threads(64)
    assert best[:2] == (decode, batch) and best.why.startswith("measured: ")


def test_what_the_model_uses_stays_unless_another_is_faster(machine: Machine) -> None:
    machine.times = {1: 1.0, 2: 1.1}
    assert threads.best_threads(64, threads.Threads(1, 1, ""))[:2] == (1, 1)
    machine.now += 61
    assert threads.best_threads(64, threads.Threads(2, 1, ""))[:2] == (2, 1)
    machine.now, machine.times = machine.now + 61, {1: 1.3, 2: 1.0}
    assert threads.best_threads(64, threads.Threads(1, 1, ""))[:2] == (2, 2)


def test_a_measurement_counts_for_a_minute_on_these_cores_and_this_width(machine: Machine) -> None:
    for seconds, width, cores, measured in (
        (0, 64, 2, 1),
        (59, 64, 2, 1),
        (0, 128, 2, 2),
        (2, 64, 2, 3),  # 61 after the first
        (0, 64, 1, 3),  # one core: nothing to measure
        (0, 64, 2, 3),
    ):
        machine.now, machine.cores = machine.now + seconds, cores
        threads.best_threads(width)
        assert machine.measured == measured
    machine.cores, machine.times = 4, {1: 1.0, 2: 1.0, 4: 1.0}
    threads.best_threads(64)
    assert machine.measured == 4


def test_given_numbers_are_not_measured(machine: Machine) -> None:
    assert threads.choose(64, 3)[:2] == (3, 3)
    assert threads.choose(64, 3, 5)[:2] == (3, 5)
    assert threads.choose(0)[:2] == (2, 2)  # the work is elsewhere
    assert machine.measured == 0
    machine.times = {1: 1.0, 2: 9.0}
    assert threads.choose(64, None, 5)[:2] == (1, 5)


# --- what a model does ---


def in_force(llm: pypcd.Llama) -> tuple[int, int]:
    numbers = llama_cpp.llama_n_threads(llm.ctx), llama_cpp.llama_n_threads_batch(llm.ctx)
    assert numbers == (llm.n_threads, llm.n_threads_batch)
    return numbers


def test_a_model_measures_when_it_is_opened_and_at_a_prompt_after_a_minute(tiny: Tiny, machine: Machine) -> None:
    machine.times = {1: 1.0, 2: 20.0}
    with contextlib.closing(pypcd.Llama(tiny("llama"), n_ctx=256, n_gpu_layers=0)) as llm:
        assert in_force(llm) == (1, 1)
        machine.times = {1: 2.0, 2: 1.0}
        llm.eval(TOKENS[:20])
        assert in_force(llm) == (1, 1) and machine.measured == 1
        machine.now += 61
        llm.eval(TOKENS[20:21])  # a single token is not a prompt
        assert in_force(llm) == (1, 1) and machine.measured == 1
        llm.eval(TOKENS[21:40])
        assert in_force(llm) == (2, 2) and machine.measured == 2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"n_threads": 2}, (2, 2)),
        ({"n_threads": 2, "n_threads_batch": 1}, (2, 1)),
        ({"n_threads_batch": 2}, (1, 2)),
        ({"flash_attn": True}, (2, 2)),  # the usual number: there rows depend on it
    ],
)
def test_numbers_that_are_given_stay_and_so_does_the_usual_one_with_flash_attention(
    given: dict[str, int], wanted: tuple[int, int], tiny: Tiny, machine: Machine
) -> None:
    machine.times = {1: 1.0, 2: 20.0}
    with contextlib.closing(pypcd.Llama(tiny("llama"), n_ctx=256, n_gpu_layers=0, **given)) as llm:
        for _ in range(2):
            llm.eval(TOKENS[:20])
            assert in_force(llm) == wanted
            machine.now += 61
    assert (machine.measured > 0) == ("n_threads_batch" in given and "n_threads" not in given)


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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin processes")
def test_a_pinned_process_has_one_core_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "step_times", lambda *_: pytest.fail("measured"))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert threads.best_threads(64) == (1, 1, "one core")
    finally:
        os.sched_setaffinity(0, before)
