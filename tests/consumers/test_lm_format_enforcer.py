"""docs/recipes.md's recipe for lm-format-enforcer, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("lmformatenforcer", "lm-format-enforcer")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("lm-format-enforcer"), setting)))


def test_the_answer_has_the_form_that_is_asked_for(folder: Folder) -> None:
    text = with_setting(recipe("lm-format-enforcer"), "cautious").replace("[0-9a-f]{4}-[0-9a-f]{4}", "[g-z]{3}")
    assert len(folder.run(text)) == 3
