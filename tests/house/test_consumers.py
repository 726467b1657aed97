"""noxfile.py: its table of consumers against docs/recipes.md, what a session runs, and what is skipped."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

nox = pytest.importorskip("nox")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
NAMED = {"webuis": ["text-generation-webui", "Open WebUI"]}  # where a page says something else than the table


@pytest.fixture(scope="module")
def noxfile() -> Any:
    spec = importlib.util.spec_from_file_location("the_noxfile", ROOT / "noxfile.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headings() -> list[str]:
    return re.findall(r"(?m)^### (.*)$", PAGE.read_text(encoding="utf-8"))


def test_each_consumer_has_its_recipe_and_its_tests_and_no_recipe_is_without(noxfile: Any) -> None:
    consumers = [name for _, packages in noxfile.CONSUMERS.values() for name in packages]
    found = [name for consumer in consumers for name in NAMED.get(consumer, [consumer])]
    assert sorted(re.sub(r"\W", "", name).lower() for name in found) == sorted(
        re.sub(r"\W", "", heading).lower() for heading in headings()
    )
    tests = (ROOT / "tests/consumers/test_packages.py").read_text(encoding="utf-8").lower()
    assert all(f'"{name}"' in tests or name == "webuis" for name in consumers)
    assert all((ROOT / test).is_file() for tests in noxfile.MORE_TESTS.values() for test in tests)


def test_each_version_is_pinned(noxfile: Any) -> None:
    for _, packages in noxfile.CONSUMERS.values():
        for requirements in packages.values():
            assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", text) for text in requirements)


def test_the_ordinary_suite_skips_them_by_name() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import recipe; recipe.needs('no_such_package', 'dspy')"
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


class Session:
    """What nox gives to a session."""

    def __init__(self, *posargs: str, fails: bool = False) -> None:
        self.posargs, self.fails = list(posargs), fails
        self.installed: list[tuple[str, ...]] = []
        self.ran: list[tuple[str, ...]] = []

    def install(self, *words: str) -> None:
        self.installed.append(words)
        if self.fails:
            raise nox.command.CommandFailed

    def run(self, *words: str, env: dict[str, str]) -> None:
        self.ran.append((*words, env["PYPCD_CONSUMERS"]))

    def skip(self, why: str) -> None:
        raise nox.sessions._SessionSkip(why)

    def error(self, why: str) -> None:
        raise nox.sessions._SessionQuit(why)


@pytest.fixture
def quick(noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / ".cache/wheel").mkdir(parents=True)
    (tmp_path / ".cache/wheel/llama_pcd-0.1.0-py3-none-any.whl").touch()
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    return nox.registry.get()["quick"]


@pytest.mark.skipif(sys.version_info < (3, 10), reason="a session of its own kind")
def test_a_session_runs_what_was_asked_for_beside_all_its_packages(quick: Any) -> None:
    for words, n in (((), 6), (("quick", "txtai"), 6), (("outlines", "dspy"), 1)):
        session = Session(*words)
        quick.func(session)
        (command,) = session.ran
        assert command[:2] == ("pytest", "tests/consumers") and len(command[2].split(",")) == n
        assert "guidance==0.3.1" in session.installed[-1] and "outlines[llamacpp]==1.3.3" in session.installed[-1]
    assert command[2] == "outlines"


@pytest.mark.skipif(sys.version_info < (3, 10), reason="a session of its own kind")
def test_what_cannot_be_installed_is_skipped_and_a_missing_wheel_is_an_error(quick: Any, tmp_path: Path) -> None:
    with pytest.raises(nox.sessions._SessionSkip, match="pip cannot install its packages"):
        quick.func(Session(fails=True))
    next((tmp_path / ".cache/wheel").iterdir()).unlink()
    with pytest.raises(
        nox.sessions._SessionQuit, match=r"no wheel of pypcd in \.cache/wheel; scripts/install makes one"
    ):
        quick.func(Session())
