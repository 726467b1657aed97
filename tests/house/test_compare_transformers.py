"""scripts/compare_transformers: what its figures mean, whether both sides compute the same, its errors. The run itself needs torch
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


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"compare_{name.strip('_')}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


program, side = module("__main__"), module("side")
PLAIN, PASSES, OURS, SHARED, REROTATED = program.WAYS


# -- figures ---------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_over_rounds_beside_the_way_of_the_same_kind() -> None:
    steps = {
        PLAIN: [2.0, 4.0, 8.0],
        PASSES: [6.0] * 3,
        OURS: [1.0, 2.0, 2.0],
        SHARED: [1.0, 3.0, 2.0],
        REROTATED: [2.0] * 3,
    }
    rounds = {
        name: [{"prompt": times[0] * 100, "step": time, "peak_bytes": 2**20 * i} for time in times]
        for i, (name, times) in enumerate(steps.items())
    }
    found = program.figures(400, rounds)
    by_way = {f["way"]: f for f in found}
    assert list(by_way) == list(program.WAYS)
    assert [by_way[name]["of_plain"] for name in steps] == [1, 1.5, 1, 1, 1]
    assert [by_way[name]["speedup"] for name in steps] == [1, 1, 2, 3, 3]
    assert [by_way[name]["prompt_speedup"] for name in steps] == [1, 1, 2, 6, 3]
    assert by_way[SHARED]["prompt_tokens_per_second"] == 4 and by_way[SHARED]["tokens_per_second"] == 0.5


def rows_and_tokens(noise: float = 0.0, shift: float = 0.0) -> tuple[dict[str, Any], dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    first, second, off = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
    rows = {PLAIN: [first], PASSES: [first, second], OURS: [first + noise * off + shift]}
    rows[SHARED] = rows[REROTATED] = [first, second + noise * off + shift]
    return {name: np.stack(r) for name, r in rows.items()}, {name: [1, 2, 3] for name in rows}


def test_sides_agree_if_their_rows_differ_by_rounding_alone() -> None:
    rows, chosen = rows_and_tokens(0.1, shift=5.0)  # no probability depends on a shift of all logits
    found = program.agreement(rows, {**chosen, OURS: [1, 2, 4]})
    assert found.agrees and found.plain == pytest.approx(0.01, rel=0.2) and found.effect == pytest.approx(2, rel=0.2)
    assert str(found).startswith("Both sides compute the same") and "2 of 3 plain and 3 contrasted" in str(found)


@pytest.mark.parametrize(("way", "i"), [(OURS, 0), (SHARED, 1)])
def test_one_row_that_is_off_is_enough_for_them_not_to_agree(way: str, i: int) -> None:
    rows, chosen = rows_and_tokens()
    assert program.agreement(rows, chosen).agrees
    rows[way] = rows[way].copy()
    rows[way][i] += 0.6 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
    found = program.agreement(rows, chosen)
    assert not found.agrees and str(found).startswith("The sides do not compute the same")


def test_the_second_row_may_be_off_by_a_share_of_what_over_rotation_does() -> None:
    rows, chosen = rows_and_tokens(0.3)  # 0.09, where L* and L differ by 2
    found = program.agreement({**rows, OURS: rows[PLAIN]}, chosen)
    assert found.agrees and found.second > program.LIMIT
    assert not program.agreement(rows, chosen).agrees  # L may not
    rows[PASSES] = rows[SHARED] = np.stack([rows[PLAIN][0]] * 2)  # without any effect
    rows[SHARED] = rows[SHARED] + 0.3 * np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert not program.agreement({**rows, OURS: rows[PLAIN]}, chosen).agrees


# -- a side ----------------------------------------------------------------------------------------------------------


class Counting:
    """A side whose clock goes on by the token."""

    clock = 0.0

    def read(self, tokens: list[int]) -> int:
        self.rows = [np.array([tokens[-1]])]
        Counting.clock += len(tokens)
        return 0

    def step(self, token: int) -> int:
        Counting.clock += token
        return token + 1


def test_time_for_a_token_is_without_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(side.time, "perf_counter", lambda: Counting.clock)
    found = side.measure(Counting(), list(range(40)), [100, 1, 2, 3], str(tmp_path / "rows.npy"))
    assert (found["prompt"], found["step"], found["chosen"]) == (40, 2, [101, 2, 3, 4])
    assert np.load(tmp_path / "rows.npy").tolist() == [[39]] and 2**20 < found["peak_bytes"]


def test_a_side_that_cannot_run_says_why() -> None:
    args = program.parse(
        ["demo", "--length", "64", "--n-tokens", "2", "--rounds", "1", "--threads", "1", "--python", sys.executable]
    )
    wanted = "transformers ended with status 1 and said last: ModuleNotFoundError: No module named 'torch'"
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is there")
    with pytest.raises(program.Failed, match=wanted):
        program.compare(args, str(pypcd.Llama("demo", vocab_only=True).model_path), b"some text", 64)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.gguf"], "none.gguf"),
        (["demo", "--length", "3"], "--length has '3'"),
        (["demo", "--text", "/dev/null"], "/dev/null is empty"),
        (["demo", "--python", "/nowhere"], "'/nowhere'"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["compare", *arguments])
    assert program.main() == 1
    out, err = capsys.readouterr()
    said = err.splitlines()[-1]
    assert said.startswith("compare_transformers: ") and message in said and not out


# -- with torch ------------------------------------------------------------------------------------------------------


def python_with_torch() -> str:
    python = ROOT / ".nox/transformers/bin/python"
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        python = Path(sys.executable)
    if not python.exists():
        pytest.skip("there is no torch; scripts/compare_transformers installs it")
    return str(python)


def test_the_other_sides_formulas_are_the_papers() -> None:
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from side import contrasted, rho
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["demo", "--length", "64", "--n-tokens", "4", "--rounds", "1", "--threads", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["compare", *arguments, "--python", python_with_torch()])
    assert program.main() == 0
    record = json.loads(capsys.readouterr().out)
    (found,) = record["lengths"]
    assert found["agreement"]["plain"] < 1e-3 and found["agreement"]["second"] < 1e-3 < found["agreement"]["effect"]
    assert found["agreement"]["same"][1] == found["agreement"]["n_tokens"] == 5
    assert [m["way"] for m in found["measurements"]] == list(program.WAYS)
    for measured in found["measurements"]:
        assert all(value > 0 for value in measured.values() if not isinstance(value, str))
