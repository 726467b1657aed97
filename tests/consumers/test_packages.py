"""docs/recipes.md's recipes, against the real packages: the answers are pypcd.Llama's, and what the page says of a package is so.

A package that is not installed is skipped; `scripts/test --consumers NAME` installs it. A recipe is run by another Python, as a user
would, in a folder with `model.gguf` (the demo model) and `question.txt`. Two things in it are replaced: the setting, since "unsure"
leaves the demo model alone where it is sure, and a server's address.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def recipe(heading: str, language: str = "python") -> str:
    """The first block of code below a heading of the page."""
    found = re.search(rf"(?ms)^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8"))
    assert found, heading
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", found[1])[0]


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

    def python(self, text: str) -> str:
        """What a Python program prints."""
        (self.path / "recipe.py").write_text(text, encoding="utf-8")
        return self.run(sys.executable, "recipe.py")

    def run(self, *words: str, **environment: str) -> str:
        """What a command prints, with the environment's own commands first."""
        first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, **QUIET, "HOME": str(self.path), "PATH": first, **environment}
        env = {name: value for name, value in env.items() if name != "PYPCD" or name in environment}
        given = {"cwd": self.path, "env": env, "stdin": subprocess.DEVNULL, "timeout": SECONDS}
        done = subprocess.run(words, **given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def own(self, setting: Any) -> str:
        """pypcd.Llama's own greedy answer to the question."""
        with pypcd.Llama(self.path / "model.gguf", pcd=setting) as llm:
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


MODULES = {  # what has to be there for a recipe; the last three ask a server
    "guidance": "guidance",
    "outlines": "outlines",
    "lm-format-enforcer": "lmformatenforcer",
    "LangChain": "langchain_community",
    "LlamaIndex": "llama_index.llms.llama_cpp",
    "Haystack": "haystack_integrations.components.generators.llama_cpp",
    "txtai": "txtai",
    "smolagents": "smolagents",
    "LiteLLM": "litellm",
    "DSPy": "dspy",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_recipes_answer_is_llamas(folder: Folder, name: str, request: pytest.FixtureRequest) -> None:
    needs(MODULES[name], "llama-index" if name == "LlamaIndex" else name.lower())  # its name in noxfile.py
    text = recipe(name)
    if ADDRESS in text:
        text = text.replace(ADDRESS, request.getfixturevalue("server").url)
    check_greedy(folder, lambda setting: folder.python(with_setting(text, setting)))


VALUE_OF = {
    "type": "object",
    "properties": {"value": {"type": "string", "pattern": f"^{VALUE}$"}},
    "required": ["value"],
}


def called(folder: Folder, setting: Any) -> str:
    """pypcd.Llama's own call of instructor's tool."""
    tool = {"type": "function", "function": {"name": "Answer", "parameters": VALUE_OF}}
    choice = {"type": "function", "function": {"name": "Answer"}}
    messages = [{"role": "user", "content": folder.question}]
    asked = {"tools": [tool], "tool_choice": choice, "max_tokens": 64, "temperature": 0, "pcd": setting}
    with pypcd.Llama(folder.path / "model.gguf") as llm:
        answer = llm.create_chat_completion(messages, **asked)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])["value"]


def test_instructors_answer_is_llamas_and_a_setting_of_the_model_alone_leaves_it_plain(folder: Folder) -> None:
    needs("instructor", "instructor")
    plain, contrasted = (folder.python(with_setting(recipe("instructor"), setting)) for setting in (False, ON))
    assert (plain, contrasted) == (called(folder, False), called(folder, ON))
    assert plain != contrasted
    text = with_setting(recipe("instructor"), ON).replace(f", pcd={ON!r}", "")
    said = folder.python(text.replace('"model.gguf"', f'"model.gguf", pcd={ON!r}'))
    assert said.splitlines()[-1] == plain and "PCD is off" not in said, "the warning is on stderr"


# -- llm --------------------------------------------------------------------------------------------------------------


def ran(folder: Folder, text: str, **environment: str) -> str:
    return folder.run("sh", "-e", "-c", text, LLM_USER_PATH=str(folder.path / "llm"), **environment)


def plugins(folder: Folder, setting: Any) -> str:
    """pypcd.Llama's answer, asked as llm's plugin asks: at a temperature, with its own form of a prompt."""
    path, messages = folder.path / "model.gguf", [{"role": "user", "content": folder.question}]
    with pypcd.Llama(path, pcd=setting, n_ctx=0, chat_format="chatml-function-calling") as llm:
        parts = [part["choices"][0]["delta"] for part in llm.create_chat_completion(messages=messages, stream=True)]
    return "".join(part.get("content") or "" for part in parts)


def test_the_environment_gives_llms_plugin_pcd(folder: Folder) -> None:
    needs("llm_gguf", "llm")
    answers = [ran(folder, with_setting(recipe("llm", "sh"), setting)) for setting in (False, ON)]
    assert answers == [plugins(folder, False), plugins(folder, ON)] and answers[0] != answers[1]


def test_llm_with_the_server_has_llamas_answer(folder: Folder, server: Server) -> None:
    needs("llm_gguf", "llm")
    (folder.path / "llm").mkdir()
    file = folder.path / "llm" / "extra-openai-models.yaml"

    def ask(setting: object) -> str:
        file.write_text(with_setting(recipe("llm", "yaml"), setting).replace(ADDRESS, server.url), encoding="utf-8")
        return ran(folder, 'llm -m mine -o temperature 0 "$(cat question.txt)"', OPENAI_API_KEY="none")

    check_greedy(folder, ask)
