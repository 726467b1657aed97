"""PCD still works on every architecture of llama.cpp that docs/lab/architectures.json lists as working; the same checks.

PYPCD_ARCH_MODELS names the folder of models that scripts/recipes/arch_models makes.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import arch_checks
import pytest

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs/lab/architectures.json").read_text())
EXPECTED: dict[str, dict[str, Any]] = {model["file"]: model["readings"] for model in FOUND["models"]}
WORSE_FIRST = ["crashed", "wrong", "refused", "supported"]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The models of all selected tests, two at a time."""
    folder = os.environ.get("PYPCD_ARCH_MODELS")
    if not folder:
        pytest.skip("PYPCD_ARCH_MODELS does not name the folder of models that scripts/recipes/arch_models makes")
    paths = {path.name: path for path in Path(folder).glob("*.gguf")}
    assert set(paths) == set(EXPECTED), (
        f"PYPCD_ARCH_MODELS={folder} holds other models than docs/lab/architectures.json"
    )
    items = [item for item in request.session.items if "running" in getattr(item, "fixturenames", ())]
    selected = [item.callspec.params["file"] for item in items]
    pool = ThreadPoolExecutor(2)
    yield {file: pool.submit(arch_checks.run, paths[file], list(EXPECTED[file])) for file in selected}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("file", EXPECTED)
def test_no_architecture_works_less_than_the_table_says(file: str, running: dict[str, Future[dict[str, Any]]]) -> None:
    got = running[file].result()
    assert "error" not in got["stock"]
    for name, expected in EXPECTED[file].items():
        reading = got["readings"][name]
        assert WORSE_FIRST.index(reading["status"]) >= WORSE_FIRST.index(expected["status"]), (name, reading)
        if reading["status"] == "supported":
            assert ("oracle" in reading) >= ("oracle" in expected), (name, reading)
        assert reading["status"] != "refused" or reading["sentence"]


def test_the_table_is_made_of_the_numbers_and_has_all_readings() -> None:
    matrix = runpy.run_path(str(ROOT / "scripts/recipes/arch_matrix.py"))
    assert (ROOT / "docs/lab/architectures.md").read_text() == matrix["render"](FOUND)
    assert matrix["pin"]() == FOUND["pin"]
    assert all(list(readings) == list(arch_checks.READINGS) for readings in EXPECTED.values())
