"""docs/recipes.md's recipe for LlamaIndex, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

from recipe import Folder, check_greedy, folder, needs, recipe, with_setting

needs("llama_index.llms.llama_cpp", "llama-index")


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("LlamaIndex"), setting)))


def test_a_stream_has_the_same_answer(folder: Folder) -> None:
    text = (
        recipe("LlamaIndex").replace("llm.complete(", "list(llm.stream_complete(").replace(".read())", ".read()))[-1]")
    )
    check_greedy(folder, lambda setting: folder.run(with_setting(text, setting)))


def test_an_import_above_install_makes_no_difference(folder: Folder) -> None:
    line = "from llama_index.llms.llama_cpp import LlamaCPP\n"
    text = line + recipe("LlamaIndex").replace(line, "")
    check_greedy(folder, lambda setting: folder.run(with_setting(text, setting)))


def test_the_context_is_the_models_and_3900_by_default(folder: Folder) -> None:
    head, _, _ = with_setting(recipe("LlamaIndex"), False).rpartition("print(")
    shown = "print(llm.context_window, llm.generate_kwargs['temperature'])"
    assert folder.run(head + shown) == "2048 0"
    bare = head.replace("context_window=0, temperature=0, ", "")
    assert folder.run(bare + shown) == "4096 0.1"  # 3900, rounded up to a multiple of 256
