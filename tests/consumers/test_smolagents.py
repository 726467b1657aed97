"""docs/recipes.md's recipe for smolagents, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import ADDRESS, Folder, check_greedy, folder, needs, recipe, server, with_setting

from pypcd.server import Server

needs("smolagents", "smolagents")


def test_the_recipes_answer_is_llamas(folder: Folder, server: Server) -> None:
    text = recipe("smolagents").replace(ADDRESS, server.url)
    check_greedy(folder, lambda setting: folder.run(with_setting(text, setting)))
