"""The benchmarks by name, and the interface to a model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Tiny
from fake_tokenizer import Pieces

import pypcd
from pypcd.evaluation import TASKS, task
from pypcd.evaluation.tokenizer import ModelTokenizer
from pypcd.prompt import Prompt, prompt_tokens

KINDS = ("facts", "json", "schema", "tools", "copy", "sort")
KINDS += ("arithmetic", "spelling", "formats", "classify", "code", "brackets")
NAMES = (
    "kv",
    "kv-authors",
    "kv-short",
    "vt",
    "vt-authors",
    "niah-single-1",
    "niah-multikey-2",
    "niah-multikey-3",
    *(f"everyday-{kind}{way}" for way in ("", "-behind") for kind in KINDS),
    *(f"constrained-{kind}{way}" for way in ("", "-shown") for kind in KINDS[1:4]),
    "constrained-needle",
    "constrained-needle-shown",
    "constrained-kv",
    "longbench-narrativeqa",
    "longbench-qasper",
    "longbench-multifieldqa_en",
    "longbench-multifieldqa_zh",
    "longbench-hotpotqa",
    "longbench-2wikimqa",
    "longbench-musique",
)


def test_every_task_has_its_name() -> None:
    assert TASKS == NAMES
    for name in TASKS:
        made = task(name)
        assert made.name == name
        assert made.metric in ("accuracy", "recall", "F1", "values")
        assert made.max_tokens >= 8


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("longbench-")])
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


def test_a_misspelt_task_is_corrected() -> None:
    with pytest.raises(
        ValueError, match=r"there is no task 'kv_authors' \(did you mean 'kv-authors'\?\); there are: kv, "
    ):
        task("kv_authors")


def test_data_is_for_tasks_that_read_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data is 'somewhere', but kv generates its questions; leave data out"):
        task("kv", data="somewhere")
    with pytest.raises(FileNotFoundError, match="there is no"):
        task("longbench-qasper", data=tmp_path / "none")


@pytest.fixture(scope="module")
def llm() -> pypcd.Llama:
    return pypcd.Llama("demo", n_ctx=1024, n_threads=1, n_threads_batch=1)


def test_the_demo_models_questions_fit(llm: pypcd.Llama) -> None:
    tokenizer = ModelTokenizer(llm)
    kv = task("kv-short")
    samples = kv.samples(5, 400, tokenizer, 0)
    lengths = [len(llm.tokenize(sample.prompt.text.encode(), special=False)) + kv.max_tokens for sample in samples]
    assert max(lengths) <= 400 < max(lengths) + 2 * 14  # a pair of the demo takes 14 tokens


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
    tokens = tokenizer.encode("a漢")  # the tiny models' tokenizers fall back to bytes
    assert tokenizer.decode(tokens[:-1]) == "a\ufffd"
