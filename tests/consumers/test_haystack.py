"""docs/recipes.md's recipe for Haystack, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("haystack_integrations.components.generators.llama_cpp", "haystack")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("Haystack"), setting)))


def test_a_setting_for_one_run_goes_through(folder: Folder) -> None:
    text = with_setting(recipe("Haystack"), False).replace('"temperature": 0', '"temperature": 0, "pcd": "cautious"')
    assert folder.run(text) == folder.right
