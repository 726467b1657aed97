"""docs/recipes.md's recipe for LiteLLM, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import ADDRESS, Folder, check_greedy, folder, needs, recipe, server, with_setting

from pypcd.server import Server

needs("litellm", "litellm")


def test_the_recipes_answer_is_llamas(folder: Folder, server: Server) -> None:
    text = recipe("LiteLLM").replace(ADDRESS, server.url)
    check_greedy(folder, lambda setting: folder.run(with_setting(text, setting)))


def test_the_models_name_chooses_too(folder: Folder, server: Server) -> None:
    text = recipe("LiteLLM").replace(ADDRESS, server.url).replace(', extra_body={"pcd": "unsure"}', "")
    assert folder.run(text) == folder.wrong
    assert folder.run(text.replace("openai/model", "openai/model:pcd-cautious")) == folder.right
