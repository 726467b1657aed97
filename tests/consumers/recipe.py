"""What the tests of docs/recipes.md share: a recipe as it stands on the page, a folder that it runs in, and what its answer has to be.

A recipe is run by another Python, as a user would, in a folder with `model.gguf` (the demo model) and `question.txt`. Two things in it are
replaced: the setting, since "unsure" leaves the demo model alone where it is sure, and a server's address. Knows nothing of any
one package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import pypcd
from pypcd.evaluation.tasks.kv import KV_SHORT
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server

PAGE = Path(__file__).parent.parent.parent / "docs" / "recipes.md"
ADDRESS = "http://127.0.0.1:8080"
ON = "cautious"
SECONDS = 300
N = 32  # tokens, as in the recipes
VALUE = r"[0-9a-f]{4}-[0-9a-f]{4}"

# what these packages would otherwise ask the internet for, or send there
QUIET = {
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "*",
    "no_proxy": "*",
}


def needs(module: str, consumer: str) -> None:
    """Skips the test that asks where this package is not installed. noxfile.py names those that it has installed: only they run then."""
    asked = os.environ.get("PYPCD_CONSUMERS", "").split(",")
    if asked != [""] and consumer not in asked:
        pytest.skip(f"{consumer} was not asked for")
    with contextlib.suppress(ModuleNotFoundError):  # of its parent
        if importlib.util.find_spec(module):
            return
    if consumer in asked:
        raise ModuleNotFoundError(f"{consumer} is installed, and has no module {module}")
    pytest.skip(f"{consumer} is not installed; scripts/test --consumers {consumer} installs it, and runs these tests")


def recipe(heading: str, language: str = "python", nth: int = 0) -> str:
    """The nth block of code below a heading of the page."""
    found = re.search(rf"(?ms)^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8"))
    assert found, heading
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", found[1])[nth]


def with_setting(text: str, setting: Any) -> str:
    """The same recipe with another setting than "unsure": in an argument, the environment or a model's name, where none is off."""
    forms = {
        '"unsure"': repr(setting),
        "PYPCD=unsure": f"PYPCD={setting or 'off'}",
        "pcd=unsure": f"pcd={setting or 'off'}",
        ":pcd-unsure": f":pcd-{setting}" if setting else "",
    }
    (form,) = (form for form in forms if form in text)
    assert text.count("unsure") == 1, text
    return text.replace(form, forms[form])


class Folder:
    """Where a recipe runs.

    Attributes:
        path: the folder.
        question: a prompt that the demo model answers wrongly, and rightly with PCD.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "model.gguf").symlink_to(DEMO_MODEL)
        sample = list(KV_SHORT.questions(40, 8, 0))[4]
        self.question, self.right, self.wrong = sample.prompt.begun.rstrip(), sample.answers[0], sample.extra["nearest"]
        (path / "question.txt").write_text(self.question, encoding="utf-8")

    def run(self, text: str) -> str:
        """What a Python program prints."""
        (self.path / "recipe.py").write_text(text, encoding="utf-8")
        done = self.command([sys.executable, "recipe.py"])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def command(self, words: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """A command, with the environment's own commands first."""
        first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, **QUIET, "HOME": str(self.path), "PATH": first, **environment}
        env = {name: value for name, value in env.items() if name != "PYPCD" or name in environment}
        return subprocess.run(
            words,
            cwd=self.path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def own(self, setting: Any) -> str:
        """pypcd.Llama's own greedy answer to the question."""
        with contextlib.closing(pypcd.Llama(self.path / "model.gguf", pcd=setting)) as llm:
            return llm(self.question, max_tokens=N, temperature=0)["choices"][0]["text"]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`pypcd serve model.gguf`, without PCD where a request does not ask for it."""
    from serving import ready

    with ready(model=Folder(tmp_path_factory.mktemp("served")).path / "model.gguf", pcd=False) as made:
        yield made


def check_greedy(folder: Folder, ask: Callable[[Any], str]) -> None:
    """Answers are those of pypcd.Llama: the wrong one without PCD, the right one with it.

    Args:
        ask: gives the answer under a setting.
    """
    assert (folder.own(False), folder.own(ON)) == (folder.wrong, folder.right), "this question shows nothing"
    assert ask(False) == folder.wrong
    assert ask(ON) == folder.right
