"""docs/recipes.md's recipe for DSPy, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import ADDRESS, Folder, check_greedy, folder, needs, recipe, server, with_setting
from serving import ready

from pypcd.server import Server

needs("dspy", "dspy")


def test_the_recipes_answer_is_llamas(folder: Folder, server: Server) -> None:
    text = recipe("DSPy").replace(ADDRESS, server.url)
    check_greedy(folder, lambda setting: folder.run(with_setting(text, setting)))


def test_a_program_gets_the_answer_with_pcd(folder: Folder, server: Server) -> None:
    """dspy.Predict asks in a form of its own, in which this model answers with noise; the setting goes through all the same."""
    head, _, _ = recipe("DSPy").replace(ADDRESS, server.url).rpartition("print(")
    call = "lm.forward(messages=[{'role': 'user', 'content': open('question.txt').read()}]).choices[0].message.content"
    check_greedy(folder, lambda setting: folder.run(with_setting(f"{head}print({call})", setting)))


def test_an_answer_that_is_kept_does_not_see_the_servers_new_setting(folder: Folder) -> None:
    text = recipe("DSPy").replace("model:pcd-unsure", "model")
    with ready(folder.path / "model.gguf", pcd=False) as server:
        text, port = text.replace(ADDRESS, server.url), server.port
        assert folder.run(text) == folder.wrong
    with ready(folder.path / "model.gguf", pcd="cautious", port=port):
        assert folder.run(text) == folder.wrong
        assert folder.run(text.replace("max_tokens=32", "max_tokens=32, cache=False")) == folder.right
