"""noxfile.py: its table of consumers against docs/recipes.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import module_at

nox = pytest.importorskip("nox")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"


@pytest.fixture(scope="module")
def noxfile() -> Any:
    return module_at(ROOT / "noxfile.py")


def test_each_consumer_has_its_recipe_and_its_tests_and_no_recipe_is_without(noxfile: Any) -> None:
    consumers = [name for _, packages in noxfile.CONSUMERS.values() for name in packages]
    headings = re.findall(r"(?m)^### (.*)$", PAGE.read_text(encoding="utf-8"))
    told, tried = (sorted(re.sub(r"\W", "", name).lower() for name in names) for names in (headings, consumers))
    assert told == tried
    tests = (ROOT / "tests/consumers/test_packages.py").read_text(encoding="utf-8").lower()
    assert all(f'"{name}"' in tests or name in noxfile.MORE_TESTS for name in consumers)
    assert all((ROOT / test).is_file() for tests in noxfile.MORE_TESTS.values() for test in tests)


def test_each_version_is_pinned(noxfile: Any) -> None:
    for _, packages in noxfile.CONSUMERS.values():
        for requirements in packages.values():
            assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", text) for text in requirements)
