"""What holds for every benchmark, asked of all of them; their names; the interface to a model's tokenizer.

What is particular to one is in a file of its own.
"""

from __future__ import annotations

import bz2
import json
import re

import pytest
from conftest import Load, Tiny
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import CHAT_TEMPLATE

from pypcd.decode import parse
from pypcd.evaluation import GROUPS, TASKS, ModelTokenizer, task
from pypcd.evaluation.tasks import parts_of
from pypcd.evaluation.tasks.public import PUBLIC
from pypcd.prompt import Prompt

NEEDLES = ["niah-single-1", "niah-multikey-2", "niah-multikey-3"]
WRITTEN = [name for name in TASKS if task(name).n_questions is not None]  # and not drawn for a length
KEPT = [name for name in WRITTEN if name != "kv-records" and not name.startswith("reading")]  # of sizes of their own
READING = GROUPS["reading"]
OURS = parts_of(("everyday", "everyday-behind", "reading", "chats"))

ARTICLES = json.loads(bz2.decompress((PUBLIC / "xquad.en.json.bz2").read_bytes()))["data"]
PARAGRAPHS = [paragraph["context"] for article in ARTICLES for paragraph in article["paragraphs"]]

# how many tokens of a prompt may stay unused: those of one part more, which no longer fits
PART = {
    "everyday": 90,
    "reading": 90,
    "chat": 50,
    "graphwalks": 80,
    "niah": 130,
    "kv": 130,
    "xquad": max(len(Words().encode(f"\n\n{text}")) for text in PARAGRAPHS),
}
PART |= {"vt": 60, "fwe": 60, "cwe": 150}  # a word more is several times in the list


def test_a_group_stands_for_its_tasks() -> None:
    assert set(parts_of(GROUPS)) <= set(TASKS) and parts_of(("kv", "graphwalks")) == ("kv", *GROUPS["graphwalks"])
    assert [len(names) for names in GROUPS.values()] == [8, 2, 12, 12, 6, 2]
    assert GROUPS["everyday-behind"] == tuple(f"{name}-behind" for name in GROUPS["everyday"])
    for name, remedy in (("everyday", "everyday-facts"), ("evryday", "did you mean 'everyday'")):
        with pytest.raises(ValueError, match=remedy):
            task(name)


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
    made = task(name)
    n = 1 if name.startswith(("everyday", "chat", "xquad")) else 2  # whose questions differ in size
    with pytest.raises(ValueError, match="n_tokens is 9; allowed: at least") as error:
        made.samples(n, 9, Words(), 0)
    needed = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert len(made.samples(n, needed, Words(), 0)) == n
    with pytest.raises(ValueError, match=f"allowed: at least {needed}"):
        made.samples(n, needed - 1, Words(), 0)
    for n, n_tokens, why in ((0, 500, "n is 0"), (1, -3, "n_tokens is -3")):
        with pytest.raises(ValueError, match=f"{why}; allowed: an integer of at least 1"):
            made.samples(n, n_tokens, Words(), 0)


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=3)
@given(n=st.integers(1, 4), n_tokens=st.integers(1400, 5000), seed=st.integers(0, 99), template=st.integers(0, 30))
def test_a_prompt_is_as_long_as_allowed(name: str, n: int, n_tokens: int, seed: int, template: int) -> None:
    """Each prompt; or, if all of a cell are of one size, the longest of them."""
    tokenizer, made = Words(template), task(name)
    sizes = [tokenizer.count(sample.prompt) + made.max_tokens for sample in made.samples(n, n_tokens, tokenizer, seed)]
    (part,) = (part for begin, part in PART.items() if name.startswith(begin))
    assert max(sizes) <= n_tokens < (min(sizes) if name in KEPT else max(sizes)) + part


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("kv-records", "reading-quote")])
@settings(max_examples=3)
@given(n_tokens=st.integers(450, 2500), other=st.integers(450, 2500), seed=st.integers(0, 99))
def test_a_question_is_the_same_at_every_length(name: str, n_tokens: int, other: int, seed: int) -> None:
    """kv-records asks for a key that is in the text; what reading-quote asks about a sentence depends on its neighbours."""
    n_tokens, other = (length + (450 if name == "xquad" else 0) for length in (n_tokens, other))
    for a, b in zip(*(task(name).samples(3, length, Words(), seed) for length in (n_tokens, other))):
        assert (a.answers, a.gold) == (b.answers, b.gold)
        assert a.prompt.after.rsplit("\n\n", 1)[-1] == b.prompt.after.rsplit("\n\n", 1)[-1]


@pytest.mark.parametrize("name", KEPT)
@settings(max_examples=2)
@given(n=st.integers(1, 5), more=st.integers(1, 7), seed=st.integers(0, 99))
def test_more_questions_leave_the_first_ones_as_they_are(name: str, n: int, more: int, seed: int) -> None:
    assert task(name).samples(n, 1000, Words(), seed) == task(name).samples(n + more, 1000, Words(), seed)[:n]


@pytest.mark.parametrize("name", WRITTEN)
def test_all_questions_can_be_asked_and_no_more(name: str) -> None:
    n = task(name).n_questions
    assert n is not None and n % 2 == 0
    if n <= 200:  # those of others are counted in test_public.py
        assert len({sample.prompt for sample in task(name).samples(n, 500, Words(), 0)}) == n
    with pytest.raises(ValueError, match=f"n is {n + 1}; allowed: 1 to {n}, the questions of {name}"):
        task(name).samples(n + 1, 3000, Words(), 0)


@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_scores_as_a_perfect_model_writes_it(name: str) -> None:
    made = task(name)
    for sample in made.samples(4, 2300, Words(), 5):
        for text in (sample.gold, sample.gold + sample.end, sample.gold.lstrip()):
            assert made.score(text, sample) == 1.0, text
        wrong = {"", "I do not know."}
        if name in OURS:
            (answer,) = sample.answers
            wrong |= {f"x{answer}", f"x\n{answer}", answer[1:]}
        for text in wrong:
            assert made.score(text, sample) == 0.0, text


@pytest.mark.parametrize("name", ["kv", "kv-short", *NEEDLES, *(name for name in READING if name != "reading-hops")])
@settings(max_examples=5)
@given(n=st.integers(1, 9), n_tokens=st.integers(900, 2500), seed=st.integers(0, 99))
def test_the_answer_stands_at_its_depth(name: str, n: int, n_tokens: int, seed: int) -> None:
    """And once, if it is drawn."""
    for sample in task(name).samples(n, n_tokens, Words(), seed):
        (answer,) = sample.answers
        assert sample.depth is not None and 0 <= sample.depth <= 1
        assert name in READING or sample.prompt.context.count(answer) == 1
        assert answer in sample.prompt.segments[round(sample.depth * (len(sample.prompt.segments) - 1))]


def test_a_models_tokenizer_counts_what_the_model_reads(tiny: Tiny, load: Load) -> None:
    llm, prompt = (
        load(tiny(chat_template=CHAT_TEMPLATE), False),
        Prompt("a ", ("b", "c"), ", ", " d", " e", (("f", "g"),)),
    )
    for chat in (False, True):
        answer = parse("greedy").generate(llm, prompt, max_tokens=1, chat=chat)
        assert ModelTokenizer(llm, chat=chat).count(prompt) == answer.n_prompt
