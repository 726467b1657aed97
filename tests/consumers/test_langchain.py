"""docs/recipes.md's recipe for LangChain, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import pytest
from recipe import ON, Folder, check_greedy, folder, needs, recipe, with_setting

needs("langchain_community", "langchain")

OWN = "n_ctx=0, n_batch=512, rope_freq_base=0, rope_freq_scale=0"
STOCK = f"""
from langchain_community.llms import LlamaCpp

llm = LlamaCpp(model_path="model.gguf", temperature=0, repeat_penalty=1, max_tokens=32, verbose=False, {OWN}, PCD)
print(llm.invoke(open("question.txt").read()))
"""


def test_the_recipes_answer_is_llamas(folder: Folder) -> None:
    check_greedy(folder, lambda setting: folder.run(with_setting(recipe("LangChain"), setting)))


def test_a_chat_and_a_stream_have_the_same_answer(folder: Folder) -> None:
    text = recipe("LangChain").replace("llms", "chat_models").replace("LlamaCpp", "ChatLlamaCpp")
    assert "ChatLlamaCpp" in text
    chat, stream = (
        text.replace(".read())", ".read()).content"),
        text.replace("llm.invoke(", '"".join(m.content for m in llm.stream('),
    )
    stream = stream.replace(".read())", ".read()))")
    for each in (chat, stream):
        check_greedy(folder, lambda setting, each=each: folder.run(with_setting(each, setting)))


def test_the_models_rope_is_the_files_and_langchains_own_numbers_change_it(folder: Folder) -> None:
    shown = "print(llm.client.context_params.rope_freq_base, llm.client.n_ctx(), llm.client.n_batch)"
    head, _, _ = with_setting(recipe("LangChain"), False).rpartition("\n" + "print(")
    assert folder.run(f"{head}\n{shown}") == "0.0 2048 512"
    bare = head.replace(", **own", "")
    assert folder.run(f"{bare}\n{shown}") == "10000.0 512 8"
    wrong = with_setting(recipe("LangChain"), False).replace(", **own", "")
    assert folder.run(wrong) != folder.own(False)  # the demo model's base is 500,000


@pytest.mark.parametrize("given", [f"model_kwargs={{'pcd': {ON!r}}}", f"pcd={ON!r}"])
def test_a_setting_given_to_langchain_is_dropped_by_the_stock_class_and_holds_with_install(
    folder: Folder, given: str
) -> None:
    text = STOCK.replace("PCD", given)
    assert folder.run("import pypcd\n" + text) == folder.wrong
    assert folder.run("import pypcd\n\npypcd.install(pcd=False)\n" + text) == folder.right


def test_the_environment_does_it_for_a_program_that_does_not_know_pypcd(folder: Folder) -> None:
    text = STOCK.replace("PCD", "")
    assert folder.run(text) == folder.wrong
    assert folder.run(text, PYPCD=ON) == folder.right


def test_sorted_imports_are_an_error_that_says_what_to_do(folder: Folder) -> None:
    """Ruff puts llama_cpp above pypcd, whose library cannot be replaced then."""
    line = "from langchain_community.llms import LlamaCpp\n"
    text = (
        "import pypcd\nimport llama_cpp\n" + line + recipe("LangChain").replace("import pypcd\n", "").replace(line, "")
    )
    text = folder.with_sorted_imports(text + "print(llama_cpp.__name__)\n")
    assert text.index("import llama_cpp") < text.index("import pypcd") < text.index("pypcd.install")
    said = folder.run(with_setting(text, ON), fails=True)
    assert "llama_cpp was imported before pypcd" in said and "import pypcd before llama_cpp" in said
