"""The benchmarks by name, and the interface to a model's tokenizer."""

from __future__ import annotations

import re

import pytest
from conftest import Tiny
from fake_tokenizer import Pieces, Words
from hypothesis import given, settings
from hypothesis import strategies as st

import pypcd
from pypcd.evaluation import TASKS, task
from pypcd.evaluation.tokenizer import ModelTokenizer
from pypcd.prompt import Prompt, prompt_tokens

NEEDLES = ["niah-single-1", "niah-multikey-2", "niah-multikey-3"]


def test_every_task_has_its_name() -> None:
    assert len(set(TASKS)) == len(TASKS)
    for name in TASKS:
        made = task(name)
        assert made.name == name
        assert made.metric in ("accuracy", "recall", "F1", "values", "ratio")
        assert made.max_tokens >= 8


@pytest.mark.parametrize("name", TASKS)
def test_tasks_of_one_text_say_so(name: str) -> None:
    made = task(name)
    for sample in made.samples(3, 4000, Pieces(), 0):
        (answer, *others) = sample.answers
        one = (
            not others
            and not sample.grammar
            and {made.score(answer, sample), made.score(answer[:-1], sample)} <= {0.0, 1.0}
        )
        assert (one and made.metric != "F1" and made.score(answer, sample) == 1.0) == made.one_text


# -- what holds for every task ----------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=3)
@given(n=st.integers(2, 4), n_tokens=st.integers(2300, 2700), seed=st.integers(0, 9), more=st.integers(1, 9))
def test_a_seed_gives_the_same_questions_and_another_seed_others(
    name: str, n: int, n_tokens: int, seed: int, more: int
) -> None:
    first, again, other = (task(name).samples(n, n_tokens, Words(), s) for s in (seed, seed, seed + more))
    assert first == again and [sample.index for sample in first] == list(range(n))
    assert len({sample.prompt for sample in first}) == n and first != other
    if task(name).n_questions is None:  # else other seeds ask the same questions in another order
        assert not {sample.prompt for sample in first} & {sample.prompt for sample in other}


@pytest.mark.parametrize("name", TASKS)
def test_too_few_tokens_are_refused_with_how_many_are_needed(name: str) -> None:
    made, n = (
        task(name),
        1 if name.startswith(("everyday", "constrained", "chat", "xquad")) else 2,
    )  # whose questions differ in size
    with pytest.raises(ValueError, match="n_tokens is 9; allowed: at least") as error:
        made.samples(n, 9, Words(), 0)
    needed = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert len(made.samples(n, needed, Words(), 0)) == n
    with pytest.raises(ValueError, match=f"allowed: at least {needed}"):
        made.samples(n, needed - 1, Words(), 0)


@settings(max_examples=40)
@given(st.sampled_from(["kv", "kv-short", *NEEDLES]), st.integers(1, 9), st.integers(900, 1800), st.integers(0, 99))
def test_the_answer_stands_in_its_context_once_and_at_its_depth(name: str, n: int, n_tokens: int, seed: int) -> None:
    for sample in task(name).samples(n, n_tokens, Words(), seed):
        (answer,) = sample.answers
        assert sample.prompt.context.count(answer) == 1 and sample.depth is not None and 0 <= sample.depth <= 1
        assert answer in sample.prompt.segments[round(sample.depth * (len(sample.prompt.segments) - 1))]


# -- names ---------------------------------------------------------------------------------------------------------------


def test_a_misspelt_task_is_corrected() -> None:
    with pytest.raises(ValueError, match="did you mean 'kv-authors'"):
        task("kv_authors")


@pytest.fixture(scope="module")
def llm() -> pypcd.Llama:
    return pypcd.Llama("demo", n_ctx=1024, n_threads=1, n_threads_batch=1)


def test_a_models_tokenizer_counts_what_the_model_reads(llm: pypcd.Llama) -> None:
    prompt = Prompt("a ", ("b", "c"), ", ", " d", " e", (("f", "g"),))
    for chat in (False, True):
        assert ModelTokenizer(llm, chat=chat).count(prompt) == len(prompt_tokens(llm, prompt, chat=chat))


@pytest.mark.parametrize("model", ["demo", "tiny"])
@pytest.mark.parametrize("text", ["", 'Key: "ab12-cd34"', "  two spaces\n", "漢字 é", "x y " * 3000])
def test_a_models_tokenizer_decodes_what_it_encodes(llm: pypcd.Llama, tiny: Tiny, model: str, text: str) -> None:
    llm = llm if model == "demo" else pypcd.Llama(tiny(), n_ctx=64, n_threads=1)
    tokenizer = ModelTokenizer(llm)
    tokens = tokenizer.encode(text)
    assert tokens == llm.tokenize(text.encode(), special=False)
    assert tokenizer.decode(tokens) == text


def test_a_cut_within_a_letter_is_a_replacement_character(tiny: Tiny) -> None:
    tokenizer = ModelTokenizer(pypcd.Llama(tiny(), n_ctx=64, n_threads=1))
    assert tokenizer.decode(tokenizer.encode("a漢")[:-1]) == "a\ufffd"  # the tiny models' tokenizers fall back to bytes
