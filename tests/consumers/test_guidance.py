"""docs/recipes.md's recipe for guidance, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import importlib.metadata

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("guidance", "guidance")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("guidance"), setting)))


def test_its_extra_wants_another_llama_cpp_python() -> None:
    wanted = [line for line in importlib.metadata.requires("guidance") or [] if line.startswith("llama-cpp-python")]
    (wanted,) = (line for line in wanted if "llamacpp" in line)
    assert importlib.metadata.version("llama-cpp-python") not in wanted


def test_a_space_at_the_end_of_a_prompt_is_taken_back_and_begins_another_word(folder: Folder) -> None:
    text = with_setting(recipe("guidance"), False).replace("regex=", "max_tokens=32) #")
    assert folder.run(text) == folder.wrong
    assert not folder.run(text.replace(".read()", '.read() + " "')).startswith(folder.wrong)
