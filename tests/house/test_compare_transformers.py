"""scripts/compare_transformers: what its figures mean, its children, its environment, its errors. The run itself needs torch
and transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pypcd
from pypcd import method

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts/compare"
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")
if not FOLDER.exists():
    pytest.skip("the scripts lie in a checkout only", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import child
import environment
import figures
import run as run_module

PLAIN, PASSES, OURS, SHARED, REROTATED = (way.name for way in figures.WAYS)


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("compare_program", FOLDER / "__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- figures ---------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_over_rounds_beside_the_way_of_the_same_kind() -> None:
    steps = {
        PLAIN: [2.0, 4.0, 8.0],
        PASSES: [6.0] * 3,
        OURS: [1.0, 2.0, 2.0],
        SHARED: [1.0, 3.0, 2.0],
        REROTATED: [2.0] * 3,
    }
    prompts = {name: [times[0] * 100] * 3 for name, times in steps.items()}
    found = figures.figures(400, prompts, steps, {name: 2**20 * i for i, name in enumerate(steps)})
    by_way = {f.way: f for f in found}
    assert list(by_way) == [way.name for way in figures.WAYS]
    assert [by_way[name].of_plain for name in steps] == [1, 1.5, 1, 1, 1]
    assert [by_way[name].speedup for name in steps] == [1, 1, 2, 3, 3]
    assert [by_way[name].prompt_speedup for name in steps] == [1, 1, 2, 6, 3]
    assert by_way[SHARED].prompt_tokens_per_second == 4 and by_way[SHARED].tokens_per_second == 0.5
    lines = figures.cells(found)
    assert {len(line) for line in lines} == {len(figures.HEAD)}
    assert lines[3] == (SHARED, "4", "0.5", "1.00x", "6.00x", "3.00x", "3")


def rows_and_tokens(noise: float = 0.0, shift: float = 0.0) -> tuple[dict[str, Any], dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    first, second, off = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
    rows = {PLAIN: [first], PASSES: [first, second], OURS: [first + noise * off + shift]}
    rows[SHARED] = rows[REROTATED] = [first, second + noise * off + shift]
    return {name: np.stack(r) for name, r in rows.items()}, {name: [1, 2, 3] for name in rows}


def test_sides_agree_if_their_rows_differ_by_rounding_alone() -> None:
    rows, chosen = rows_and_tokens(0.1, shift=5.0)  # no probability depends on a shift of all logits
    found = figures.agreement(rows, {**chosen, OURS: [1, 2, 4]})
    assert found.agrees and found.plain == pytest.approx(0.01, rel=0.2) and found.effect == pytest.approx(2, rel=0.2)
    assert str(found).startswith("Both sides compute the same") and "2 of 3 plain and 3 contrasted" in str(found)


@pytest.mark.parametrize(("way", "i"), [(OURS, 0), (SHARED, 1)])
def test_one_row_that_is_off_is_enough_for_them_not_to_agree(way: str, i: int) -> None:
    rows, chosen = rows_and_tokens()
    assert figures.agreement(rows, chosen).agrees
    rows[way] = rows[way].copy()
    rows[way][i] += 0.6 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
    found = figures.agreement(rows, chosen)
    assert not found.agrees and str(found).startswith("The sides do not compute the same")


def test_the_second_row_may_be_off_by_a_share_of_what_over_rotation_does() -> None:
    rows, chosen = rows_and_tokens(0.3)  # 0.09, where L* and L differ by 2
    found = figures.agreement({**rows, OURS: rows[PLAIN]}, chosen)
    assert found.agrees and found.second > figures.LIMIT
    assert not figures.agreement(rows, chosen).agrees  # L may not
    rows[PASSES] = rows[SHARED] = np.stack([rows[PLAIN][0]] * 2)  # without any effect
    rows[SHARED] = rows[SHARED] + 0.3 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert not figures.agreement({**rows, OURS: rows[PLAIN]}, chosen).agrees


# -- a child ---------------------------------------------------------------------------------------------------------

ECHO = """
import sys
sys.path.insert(0, {folder!r})
from child import Side, serve

class Echo(Side):
    def __init__(self, n):
        print("noise of a library")
        self.seen = [n // 1]
    def read(self, tokens):
        self.seen = list(tokens)
        return self.step(tokens[-1])
    def step(self, token):
        self.seen.append(token)
        return token + 1
    def all(self):
        return self.seen
    def end(self):
        print("the last words", file=sys.stderr)
        sys.exit(7)

serve(Echo)
"""


def started(tmp_path: Path, n: object) -> run_module.Child:
    file = tmp_path / "echo.py"
    file.write_text(ECHO.format(folder=str(FOLDER)))
    return run_module.Child("echo", [sys.executable, str(file), json.dumps({"n": n})])


def test_a_child_answers_and_what_libraries_print_is_not_among_its_answers(tmp_path: Path) -> None:
    echo = started(tmp_path, 3)
    try:
        echo.wait()
        assert echo.ask("all") == [3]
        found = echo.ask("prompt", [1, 2])
        assert found["chosen"] == [3] and found["seconds"] >= 0
        found = echo.ask("decode", [7, 8, 9])
        assert found["chosen"] == [8, 9, 10] and found["seconds"] >= 0
        assert echo.ask("all") == [1, 2, 2, 7, 8, 9]
        assert echo.ask("continuation", [5], 3) == [6, 7, 8]
        assert 2**20 < echo.ask("peak_bytes") < 2**30
        with pytest.raises(environment.Failed, match="echo failed: .*list index"):
            echo.ask("prompt", [])
        assert echo.ask("all") == []  # it goes on
        with pytest.raises(environment.Failed, match="echo failed: its process ended with status 7 .*: the last words"):
            echo.ask("end")
    finally:
        echo.close()


def test_a_child_that_cannot_load_says_why(tmp_path: Path) -> None:
    echo = started(tmp_path, "x")
    try:
        with pytest.raises(environment.Failed, match="echo cannot load the model: unsupported operand"):
            echo.wait()
    finally:
        echo.close()


def test_time_for_a_token_is_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(child.Side):
        clock = 0.0

        def step(self, token: int) -> int:
            Slow.clock += token
            return token

    monkeypatch.setattr("child.time.perf_counter", lambda: Slow.clock)
    assert Slow().decode([100, 1, 2, 3])["seconds"] == 2


# -- the environment -------------------------------------------------------------------------------------------------

FAKE_PYTHON = """#!/bin/sh
echo "$@" >>{log}
case "$*" in
*+cpu*) {first} ;;
*install*) {second} ;;
*) echo '["1", "2", "3", "4"]' ;;
esac
"""
BAD = 'echo "Collecting torch"; echo "ERROR: No matching distribution found for torch==9+cpu"; exit 1'


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """find() with a fake pip in the environment; returns what was run."""
    log, folder = tmp_path / "log", tmp_path / "environment"
    monkeypatch.setattr(environment, "FOLDER", folder)
    monkeypatch.setattr(environment, "requirements", lambda: ["torch==9+cpu", "transformers==5"])
    run = subprocess.run

    def find(first: str = ":", second: str = ":") -> list[str]:
        def fake(command: list[str], **kwargs: Any) -> Any:
            if command[1:3] != ["-m", "venv"]:
                return run(command, **kwargs)
            (folder / "bin").mkdir(parents=True)
            (folder / "bin/python").write_text(FAKE_PYTHON.format(log=log, first=first, second=second))
            (folder / "bin/python").chmod(0o755)
            return None

        monkeypatch.setattr(environment.subprocess, "run", fake)
        python, versions = environment.find(None, lambda text: None)
        assert python == str(folder / "bin/python") and versions == dict(zip(environment.MODULES, "1234"))
        return log.read_text().splitlines()

    return find


needs_python = pytest.mark.skipif(sys.version_info < environment.OLDEST, reason="transformers' own limit")


@needs_python
def test_the_environment_is_made_once(made: Any) -> None:
    calls = made()
    assert [call.split()[0] for call in calls] == ["-m", "-c"] and calls[0].endswith(" torch==9+cpu transformers==5")
    assert [call.split()[0] for call in made()] == ["-m", "-c", "-c"]


@needs_python
def test_other_versions_make_it_anew(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    monkeypatch.setattr(environment, "requirements", lambda: ["torch==10"])
    assert made()[-2].endswith(" torch==10")


@needs_python
def test_torch_comes_with_cuda_where_the_index_has_no_other(made: Any, capfd: pytest.CaptureFixture[str]) -> None:
    first, second, _ = made(first=BAD)
    assert first.endswith(" torch==9+cpu transformers==5") and second.endswith(" torch==9 transformers==5")
    assert "taking the one with it" in capfd.readouterr().err


@needs_python
def test_an_installation_that_fails_is_one_sentence_and_not_taken_for_done(made: Any) -> None:
    for _ in range(2):
        with pytest.raises(environment.Failed) as error:
            made(first=BAD, second=BAD)
        text = str(error.value)
        assert "No matching distribution found for torch==9+cpu; it needs network" in text and "--python" in text
        assert "\n" not in text


def test_pips_last_error_is_the_cause() -> None:
    assert environment.cause(["ERROR: a", "x", "ERROR: b: c", "y"]) == "b: c"
    assert environment.cause(["x"]) == "it does not say why"


def test_linux_gets_torch_without_cuda() -> None:
    assert environment.requirements("linux")[0].endswith("+cpu")
    assert environment.requirements("darwin")[0] == environment.requirements("linux")[0].removesuffix("+cpu")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.gguf"], "there is no model file none.gguf"),
        (["demo", "--length", "3"], "--length has '3'; allowed: integers of at least 16"),
        (["demo", "--text", "/dev/null"], "/dev/null is empty"),
        (["demo", "--text", "/nowhere"], "No such file or directory: '/nowhere'"),
        (["demo", "--python", "/nowhere"], "--python is /nowhere, which does not run: No such file"),
        (["demo", "--python", "/bin/false"], "/bin/false lacks one of torch, transformers"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    program: Any,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["compare", *arguments])
    assert program.main() == 1
    out, err = capsys.readouterr()
    assert err.startswith("compare_transformers: ") and message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("option", ["--n-tokens=1", "--rounds=0", "--threads=0", "--dtype=int8"])
def test_options_out_of_range_are_refused(program: Any, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        program.parse(["demo", option])
    assert stop.value.code == 2
    assert "error: argument " + option.partition("=")[0] in capsys.readouterr().err


def test_the_help_fits_in_80_columns_and_the_default_text_is_long(
    program: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        program.parse(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert len(program._pages()) > 50_000


# -- with torch ------------------------------------------------------------------------------------------------------


def python_with_torch() -> str:
    found = all(importlib.util.find_spec(name) for name in environment.MODULES)
    python = Path(sys.executable) if found else environment.FOLDER / "bin/python"
    if not (found or (environment.FOLDER / "ready.json").is_file()):
        pytest.skip("there is no torch; scripts/compare_transformers installs it")
    return str(python)


def test_the_other_sides_formulas_are_the_papers() -> None:
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from theirs import contrasted, rho
row, second = (torch.tensor(r) for r in json.loads(sys.argv[2]))
print(json.dumps([rho(64, 0.2, 1e-4), rho(16, 0.5, 0.01), [contrasted(row, second, 2.5, n) for n in (1, 5, 999)]]))
"""
    rows = np.random.default_rng(3).normal(size=(2, 200)).astype(np.float32)
    done = subprocess.run(
        [python_with_torch(), "-c", code, str(FOLDER), json.dumps(rows.tolist())],
        text=True,
        capture_output=True,
        check=True,
    )
    first, other, tokens = json.loads(done.stdout)
    np.testing.assert_allclose(first, method.rho(64, alpha=0.2, base_ratio=1e-4), rtol=1e-12)
    np.testing.assert_allclose(other, method.rho(16, alpha=0.5, base_ratio=0.01), rtol=1e-12)
    wanted = [int(method.contrast(*rows, beta=2.5, gamma=min(n, 200)).argmax()) for n in (1, 5, 999)]
    assert tokens == wanted and len(set(tokens)) > 1


def test_both_sides_compute_the_same_on_the_demo_model(
    program: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["demo", "--length", "64", "--n-tokens", "4", "--rounds", "1", "--threads", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["compare", *arguments, "--python", python_with_torch()])
    assert program.main() == 0
    record = json.loads(capsys.readouterr().out)
    assert record["versions"]["pypcd"] == pypcd.__version__ and record["versions"]["torch"]
    (found,) = record["lengths"]
    assert found["agreement"]["plain"] < 1e-3 and found["agreement"]["second"] < 1e-3 < found["agreement"]["effect"]
    assert found["agreement"]["same_contrasted"] == found["agreement"]["n_tokens"] == 5
    assert [m["way"] for m in found["measurements"]] == [way.name for way in figures.WAYS]
    for measured in found["measurements"]:
        assert all(value > 0 for value in measured.values() if not isinstance(value, str))
