"""docs/recipes.md's recipe for outlines, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("outlines", "outlines")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("outlines"), setting)))


def test_without_numba_the_answer_is_not_constrained(folder: Folder) -> None:
    text = with_setting(recipe("outlines"), False).replace("[0-9a-f]{4}-[0-9a-f]{4}", "[g-z]{3}")
    constrained = folder.run(text)
    assert len(constrained) == 3 and constrained.isalpha()
    without = "import sys\n\nsys.modules['numba'] = None\n" + text
    assert folder.run(without) == folder.own(False) != constrained
