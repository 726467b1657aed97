"""RULER's tasks against their published templates; a small program finds the answers."""

from __future__ import annotations

import collections
import itertools
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
from fake_tokenizer import Pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.cli import tune
from pypcd.evaluation.tasks import GROUPS, ruler, task
from pypcd.evaluation.tasks.ruler import VT
from pypcd.evaluation.tasks.sample import Sample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

few = settings(max_examples=25)


def _variables(text: str, value: str) -> list[str]:
    """Run a text's assignments in order; the variables with a given value, in the order of assignment."""
    values: dict[str, str] = {}
    for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        values[name] = values[other] if other else number
    return [name for name in values if values[name] == value]


def _asked_value(sample: Sample) -> str:
    return re.findall(r"assigned the value (\d{5}) in the text above\.", sample.prompt.after)[-1]


def _chain(sample: Sample) -> list[str]:
    """The lines that lead to the answers."""
    names = sample.answers
    return [f"VAR {names[0]} = {_asked_value(sample)}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]


def test_variable_tracking_is_rulers() -> None:
    for sample in VT().samples(3, 1500, Pieces(), 0):
        prompt, value = sample.prompt, _asked_value(sample)
        assert [s for s in prompt.segments if s != NOISE] == _chain(sample)
        assert _variables(prompt.context, value) == list(sample.answers) and len(set(sample.answers)) == 5
        assert all(re.fullmatch("[A-Z]{5}", answer) for answer in sample.answers)
        question = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + "\n".join(prompt.segments)
            + f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        )
        assert prompt.text.endswith("\n\n" + question)
        assert prompt.answer_prefix == (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"5 variables are assigned the value {value}, they are: "
        )
        assert not prompt.shots

        example = re.fullmatch(
            r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n"
            r"(?P<context>.*)\n"
            r"Question: Find all variables that are assigned the value (?P<value>\d{5}) in the text above\."
            r" Answer: According to the chain\(s\) of variable assignment in the text above, "
            r"5 variables are assigned the value (?P=value), they are:  (?P<answer>.*)\n\n",
            prompt.text[: -len(question)],
            re.DOTALL,
        )
        assert example
        assert example["value"] != value
        assert _variables(example["context"], example["value"]) == example["answer"].split(" ")
        assert re.fullmatch("[A-Z]{3}( [A-Z]{3}){4}", example["answer"])
        assert {line for line in example["context"].split("\n") if not line.startswith("VAR")} == {NOISE}


def test_the_example_is_as_long_as_500_tokens_allow_and_keeps_its_places() -> None:
    tokenizer = Pieces()
    samples = VT().samples(4, 2000, tokenizer, 3)
    examples = [re.split(r"  [A-Z ]{19}\n\n", sample.prompt.before)[0] for sample in samples]
    assert len(set(examples)) == 4
    assert len({re.sub(r"VAR \w+|\d{5}", "", example) for example in examples}) == 1
    for example in examples:
        lengths = [
            len(tokenizer.encode(text + " ")) for text in (example, example.replace(NOISE, f"{NOISE}\n{NOISE}", 1))
        ]
        assert lengths[0] <= 500 < lengths[1]
    other = VT().samples(1, 2000, tokenizer, 4)[0].prompt.before
    assert re.sub(r"VAR \w+|\d{5}", "", other)[:900] != re.sub(r"VAR \w+|\d{5}", "", examples[0])[:900]


UUID4 = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLES = {  # what is hidden, as its question names it, and the forms of keys and values
    "niah-single-1": ("number", ".+-.+", r"\d{7}"),
    "niah-multikey-2": ("number", ".+-.+", r"\d{7}"),
    "niah-multikey-3": ("uuid", UUID4, UUID4),
    "niah-multivalue": ("numbers", ".+-.+", r"\d{7}"),
    "niah-multiquery": ("numbers", ".+-.+", r"\d{7}"),
}


@few
@pytest.mark.parametrize("name", NEEDLES)
@given(st.integers(1, 4), st.integers(900, 1600), st.integers(0, 99))
def test_needles_in_a_haystack_are_rulers(name: str, n: int, n_tokens: int, seed: int) -> None:
    """The values that a reader of the text finds for the keys of the question are the answers, key by key."""
    what, key, value = NEEDLES[name]
    a, are, are_all, n_answers = ("Some", "are", "are all", 4) if what == "numbers" else ("A", "is", "is", 1)
    for sample in task(name).samples(n, n_tokens, Pieces(), seed):
        prompt, answers = sample.prompt, sample.answers
        (query,) = re.findall(rf"\nWhat {are_all} the special magic {what} for (.*) mentioned in", prompt.after)
        assert prompt.text == (
            f"{a} special magic {what} {are} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {what} afterwards.\n"
            + "\n".join(prompt.segments)
            + f"\nWhat {are_all} the special magic {what} for {query} mentioned in the provided text?"
        )
        assert prompt.answer_prefix == f" The special magic {what} for {query} mentioned in the provided text {are}"
        keys = re.split(", and |, ", query) if name == "niah-multiquery" else [query]
        assert len(set(keys)) == len(keys) == (n_answers if name == "niah-multiquery" else 1)
        kind = what.removesuffix("s")
        found = re.findall(
            rf"^One of the special magic {kind}s for ({key}) is: ({value})\.$", prompt.context, re.MULTILINE
        )
        assert answers == tuple(text for asked in keys for other, text in found if other == asked)
        assert len(answers) == n_answers and len({text for _, text in found}) == len(found)
        others = [segment for segment in prompt.segments if not segment.startswith("One of")]
        if name.startswith("niah-multikey"):
            assert not others and len({other for other, _ in found}) == len(found) == len(prompt.segments)
        else:
            assert others == [NOISE] * (len(prompt.segments) - n_answers) and prompt.segments[-1] == NOISE
        if n_answers > 1:
            assert sample.depth is None and sample.gold == " {}, {}, {}, and {}".format(*answers)


def test_a_questions_keys_are_in_another_order_than_their_needles() -> None:
    places = set()
    for sample in task("niah-multiquery").samples(40, 900, Pieces(), 0):
        places.add(tuple(sorted(range(4), key=[sample.prompt.context.index(a) for a in sample.answers].__getitem__)))
    assert len(places) > 12  # of 24 orders


def _counted(listed: str) -> collections.Counter[str]:
    """How often a numbered list has each word; its numbers count up from 1."""
    entries = re.findall(r"(\d+)\. (\D+)(?: |$)", listed)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    assert " ".join(f"{number}. {word}" for number, word in entries) == listed
    return collections.Counter(word for _, word in entries)


@few
@given(st.integers(1, 3), st.sampled_from([1400, 2000, 4095, 4096, 5000]), st.integers(0, 99))
def test_common_words_are_those_that_stand_most_often(n: int, n_tokens: int, seed: int) -> None:
    often, seldom, example_often, example_seldom = (6, 1, 3, 1) if n_tokens < 4096 else (30, 3, 10, 3)
    for sample in task("cwe").samples(n, n_tokens, Pieces(), seed):
        counts = _counted(sample.prompt.context)
        assert {word for word, _ in counts.most_common(10)} == set(sample.answers) and len(sample.answers) == 10
        assert set(counts.values()) == {often, seldom} and list(counts.values()).count(often) == 10
        assert [s for s in sample.prompt.segments[:60] if not s.endswith(sample.answers)]  # they are mixed

        template = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n{}\n"
            "Question: What are the 10 most common words in the above list?"
        )
        prefix = " Answer: The top 10 words that appear most often in the list are:"
        question = template.format(sample.prompt.context)
        assert sample.prompt.answer_prefix == prefix and not sample.prompt.shots
        assert sample.prompt.text.endswith(question)
        example = sample.prompt.text[: -len(question)]
        first, second = (re.escape(part) for part in template.split("{}"))
        parts = re.fullmatch(f"{first}(.*){second}{re.escape(prefix)} (.*)\n", example)
        assert parts
        shown, answer = (_counted(part) for part in parts.groups())
        assert {word for word, _ in shown.most_common(10)} == set(answer) and len(answer) == 10
        assert set(shown.values()) == {example_often, example_seldom}
        assert len(shown) == (20 if n_tokens < 4096 else 40)
        assert _counted(sample.gold[1:]) == collections.Counter(sample.answers)


def test_more_words_than_there_are_have_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"adjective": ["old", "new"], "noun": [*map(str.upper, "abcdefghijklmnopqrstuvwxyz")], "verb": ["go"]}
    monkeypatch.setattr(ruler, "_words", lambda *kinds: [word for kind in kinds for word in known[kind]])
    all_words = {word for words in known.values() for word in words}
    for n_words in (len(all_words), len(all_words) + 1):
        listed, common = ruler._word_list(random.Random(0), n_words, 30, 3)
        assert len(set(listed)) == n_words and len(listed) == 30 * 10 + 3 * (n_words - 10)
        assert set(common) < set(listed)
        assert set(listed) == all_words or all(re.fullmatch("(old|new)-[A-Z]", word) for word in listed)


@few
@given(st.integers(1, 3), st.integers(600, 5000), st.integers(0, 99))
def test_frequent_words_are_those_that_stand_most_often(n: int, n_tokens: int, seed: int) -> None:
    for sample in task("fwe").samples(n, n_tokens, Pieces(), seed):
        prompt = sample.prompt
        assert prompt.text == (
            "Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words. {prompt.context}\n"
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?"
        )
        assert prompt.answer_prefix == (
            " Answer: According to the coded text above, the three most frequently appeared words are:"
        )
        words = prompt.context.split(" ")
        (dots, n_dots), *ranked = collections.Counter(words).most_common()
        assert dots == "..." and n_dots > ranked[0][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        assert tuple(word for word, _ in ranked[:3]) == sample.answers  # the most frequent first
        assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
        assert words != sorted(words, key=words.index)  # they are mixed


def test_frequencies_follow_the_zeta_distribution() -> None:
    (sample,) = task("fwe").samples(1, 20_000, Pieces(), 0)
    counts = [count for _, count in collections.Counter(sample.prompt.segments).most_common()]
    for k, count in enumerate(counts[:4], 1):  # 1 / k^2, with pi^2 / 6 of 1.67
        assert count / sum(counts) == pytest.approx(0.6 / k**2, rel=0.05)
    assert len(counts) < (20_000 - 50) // 50 and counts[-1] == 1


def test_no_number_of_coded_words_makes_the_fourth_rank_a_tie() -> None:
    for n_words in range(ruler.FEWEST_CODED, 2000):
        (sample,) = ruler.FWE().questions(1, n_words, n_ranks=5 + n_words % 10)
        counts = sorted(collections.Counter(sample.prompt.segments).values(), reverse=True)
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]
    (sample,) = ruler.FWE().questions(1, 42)
    assert sorted(collections.Counter(sample.prompt.segments).values(), reverse=True)[3:] == [1, 1]


def test_the_longest_answers_are_the_published_ones() -> None:
    assert [task(name).max_tokens for name in GROUPS["ruler"]] == [*[128] * 5, 30, 120, 50]


def test_tasks_of_eval_and_tune_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("huggingface_hub", "matplotlib"):
        monkeypatch.setitem(sys.modules, extra, None)
    ruler._words.cache_clear()
    for name in ("kv", *tune.DEFAULT_TASKS.split(",")):
        assert task(name).samples(1, 2000, Pieces(), 0)
    pin = runpy.run_path(str(Path(__file__).parents[2] / "cmake" / "pin.py"))
    assert any(line.startswith("wonderwords") for line in pin["dynamic_metadata"]("dependencies"))
