"""noxfile.py: its table of consumers against docs/recipes.md, what a session runs, and what is skipped."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_the_ordinary_suite_skips_them_by_name() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; from test_packages import needs; needs('no_such_package', 'dspy')"
    folders = [str(ROOT / "tests" / "consumers"), str(ROOT / "tests" / "support")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert "dspy is not installed; scripts/test --consumers dspy installs it" in done.stderr


# -- sessions --------------------------------------------------------------------------------------------------------


def listed(*words: str) -> list[str]:
    """The sessions that nox chooses for the words behind `scripts/test --consumers`."""
    command = [sys.executable, "-m", "nox", "--noxfile", ROOT / "noxfile.py", "--list", "--tags"]
    command += words or ["consumers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return re.findall(r"(?m)^\* ([\w-]+)", done.stdout)


def test_words_choose_environments() -> None:
    assert listed() == ["quick", "agents", "lm-eval", "txtai"]
    assert listed("dspy", "lm-evaluation-harness") == ["agents", "lm-eval"]
