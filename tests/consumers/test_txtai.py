"""docs/recipes.md's recipe for txtai, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("txtai", "txtai")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("txtai"), setting)))


def test_a_keyword_that_llama_does_not_have_is_a_warning(folder: Folder) -> None:
    text = with_setting(recipe("txtai"), "cautious").replace('"model.gguf"', '"model.gguf", gpu=False')
    assert folder.run(text) == folder.right
    strict = "import warnings\n\nwarnings.filterwarnings('error', message='Llama has no argument')\n" + text
    assert "Llama has no argument 'gpu'" in folder.run(strict, fails=True)
