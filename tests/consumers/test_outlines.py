"""docs/recipes.md's recipe for outlines, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("outlines", "outlines")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("outlines"), setting)))


def test_the_answer_has_the_form_that_is_asked_for_or_there_is_an_error(folder: Folder) -> None:
    text = with_setting(recipe("outlines"), False).replace("[0-9a-f]{4}-[0-9a-f]{4}", "[g-z]{3}")
    constrained = folder.run(text)
    assert len(constrained) == 3 and constrained.isalpha()
    without = "import sys\n\nsys.modules['numba'] = None\n" + text
    assert "`numba` must be installed" in folder.run(without, fails=True)


def test_stock_llama_cpp_python_goes_on_without_the_constraint(folder: Folder) -> None:
    text = with_setting(recipe("outlines"), False).replace("[0-9a-f]{4}-[0-9a-f]{4}", "[g-z]{3}")
    text = text.replace("import pypcd", "import llama_cpp").replace("pypcd.Llama", "llama_cpp.Llama")
    stock = text.replace("pcd=False", "n_ctx=2048, verbose=False")
    without = "import sys\n\nsys.modules['numba'] = None\n" + stock
    assert folder.run(without) == folder.wrong
