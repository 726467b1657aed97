"""Questions on a Dask cluster: the same tables as in one process, whatever is lost on the way."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import within
from runs import DEMO, ONE, Records, finished, lines, python_path, tables

import pypcd
from pypcd.cli import main
from pypcd.evaluation import Cluster, Directory, Plan, Progress, evaluate, executors, facts, run, run_options
from pypcd.gguf import DEMO_MODEL
from pypcd.llama import machine

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def expected(finished: tuple[Directory, Records]) -> Records:
    """The records of one process."""
    return finished[1]


@contextlib.contextmanager
def ran(where: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program of its own, while the block lasts."""
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *words], env=python_path(), cwd=where, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


WORKER = ["--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--no-nanny"]


@contextlib.contextmanager
def scheduling(where: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scheduler as docs/evaluate.md starts it: its address, and its process. Not in this one: if the machine is busy, Dask may wait for a
    scheduler there without an end."""
    file = where / "scheduler.json"
    words = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    with ran(where, "-m", "distributed.cli.dask_scheduler", *words) as process:
        assert within(lambda: file.exists() and file.read_text().rstrip().endswith("}"), 60)  # all of it
        yield json.loads(file.read_text())["address"], process


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with scheduling(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of two workers that is somebody else's: it is there before a run and after it."""
    where = tmp_path_factory.mktemp("cluster")
    with scheduling(where) as (address, _):
        words = "-m", "distributed.cli.dask_worker", address, *WORKER
        with ran(where, *words), ran(where, *words):
            yield address


@pytest.fixture
def cluster(two: str) -> Iterator[Cluster]:
    with Cluster(two) as cluster:
        cluster._client.wait_for_workers(2, timeout=60)
        yield cluster


def test_a_run_goes_on_elsewhere(cluster: Cluster, expected: Records, tmp_path: Path) -> None:
    """Begun in this process, it ends on the cluster, and the other way round."""
    directory = Directory(tmp_path / "run")
    for jobs, n in ((1, 8), (cluster, 16), (1, 24)):
        keys = list(DEMO.everything())[:n]
        evaluate(DEMO, directory, jobs=jobs, options=ONE, only=keys.__contains__)
    made = evaluate(DEMO, directory, jobs=cluster, options=ONE).records
    assert tables(DEMO, made) == tables(DEMO, expected) and len(lines(directory)) == len(expected)


def is_open() -> bool:
    return executors._open is not None


def test_threads_are_a_share_of_the_cores(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {"tcp://10.0.0.1:1": 8, "tcp://10.0.0.1:2": 8, "tcp://10.0.0.2:1": 6}
    monkeypatch.setattr(cluster, "everywhere", lambda call: cores)
    assert run_options(DEMO, {}, cluster)["n_threads"] == 4
    assert run_options(DEMO, {"n_threads": 3}, cluster)["n_threads"] == 3


def test_a_lost_scheduler_keeps_what_was_answered(scheduler: Any, expected: Records, tmp_path: Path) -> None:
    directory, (address, process) = Directory(tmp_path / "run"), scheduler

    def lose(progress: Any) -> None:
        if progress.n_answers_done == 6:
            process.kill()

    with (
        ran(tmp_path, "-m", "distributed.cli.dask_worker", address, *WORKER),
        Cluster(address) as cluster,
        pytest.raises(pypcd.PCDError, match="Dask scheduler at .* was lost"),
    ):
        cluster._client.wait_for_workers(1, timeout=60)
        evaluate(DEMO, directory, jobs=cluster, options=ONE, progress=Progress(lose))
    assert len(lines(directory)) >= 6
    made = evaluate(DEMO, directory, options=ONE).records
    assert tables(DEMO, made) == tables(DEMO, expected) and len(lines(directory)) == len(expected)


def test_ctrl_c_leaves_the_workers_of_others_without_a_model(cluster: Cluster, tmp_path: Path) -> None:
    def interrupt(progress: Any) -> None:
        if progress.n_answers_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(DEMO, Directory(tmp_path / "run"), jobs=cluster, options=ONE, progress=Progress(interrupt))
    assert within(lambda: not any(cluster._client.run(is_open).values()), 30)


def test_what_is_no_scheduler_is_told_of() -> None:
    """Nothing is left to be collected later, which may be while another client starts: both would wait without an end."""
    gc.collect()
    gc.disable()
    try:
        for address in ("nowhere", "127.0.0.1:1", ""):
            with pytest.raises(pypcd.PCDError, match=f"no Dask scheduler answers at {address}"):
                Cluster(address)
        assert not any(type(one) is distributed.Client for one in gc.get_objects())
    finally:
        gc.enable()


def test_a_cluster_without_workers_says_how_to_start_some(scheduler: Any, tmp_path: Path) -> None:
    said = "has no workers; start some: dask worker tcp://"
    with Cluster(scheduler[0]) as cluster, pytest.raises(pypcd.PCDError, match=said):
        evaluate(DEMO, Directory(tmp_path / "run"), jobs=cluster, options=ONE)


def test_what_a_worker_cannot_do_is_its_error(cluster: Cluster, tmp_path: Path) -> None:
    directory = Directory(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{platform.node()}: kv-short at length 30: n_tokens is 30"):
        evaluate(dataclasses.replace(DEMO, lengths=(180, 30)), directory, options=ONE, jobs=cluster)
    assert not directory.samples.exists()


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["eval", "demo", "--n", "1", "--cluster", "127.0.0.1:1"]) == 1
    assert "pip install distributed" in capsys.readouterr().err


def test_a_worker_without_the_model_is_named(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, everywhere = tmp_path / "model.gguf", cluster.everywhere
    model.write_bytes(DEMO_MODEL.read_bytes())
    # it is there when this process looks for it
    monkeypatch.setattr(cluster, "everywhere", lambda call: model.unlink(missing_ok=True) or everywhere(call))
    with pytest.raises(FileNotFoundError, match="there is no model file") as error:
        evaluate(dataclasses.replace(DEMO, model=str(model)), Directory(tmp_path / "run"), jobs=cluster, options=ONE)
    assert any(str(error.value).startswith(f"{worker}: ") for worker in cluster._client.nthreads())


@pytest.mark.parametrize("name", ["weights", "model_bytes", "devices", "pypcd", "llama_cpp_python"])
def test_a_worker_that_differs_from_the_run_is_named(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**facts(DEMO, ONE, cluster), name: "another"}
    monkeypatch.setattr(run, "facts", lambda *_: known)
    with pytest.raises(pypcd.PCDError, match=f"{platform.node()}: {name} is .* there, but 'another' in the run"):
        evaluate(DEMO, Directory(tmp_path / "run"), jobs=cluster, options=ONE)
    assert not (tmp_path / "run" / "samples.jsonl").exists()


OWN = machine.devices


def set_devices(found: list[dict[str, Any]] | None) -> None:
    """None: as they are."""
    machine.devices = OWN if found is None else lambda: found


def test_the_devices_of_a_run_are_those_of_its_workers(cluster: Cluster, tmp_path: Path) -> None:
    """This process may have others."""
    cluster._client.run(set_devices, [{"description": "abacus", "is_gpu": False}])
    try:
        outcome = evaluate(dataclasses.replace(DEMO, n=1), Directory(tmp_path / "run"), jobs=cluster, options=ONE)
    finally:
        cluster._client.run(set_devices, None)
    assert len(outcome.records) == 2 * 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["devices"] == ["abacus"]
    assert "abacus" not in facts(DEMO, ONE)["devices"]


def test_a_worker_without_pypcd_is_named(scheduler: Any, tmp_path: Path) -> None:
    """Nor has it another module of ours; the scheduler only passes bytes on."""
    code = "import sys; sys.modules['pypcd'] = None; from distributed.cli.dask_worker import main; main()"
    with ran(tmp_path, "-c", code, scheduler[0], *WORKER), Cluster(scheduler[0]) as cluster:
        cluster._client.wait_for_workers(1, timeout=60)
        with pytest.raises(pypcd.PCDError, match="it has no pypcd"):
            evaluate(DEMO, Directory(tmp_path / "run"), jobs=cluster, options=ONE)
