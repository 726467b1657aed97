"""RULER's tasks against their published templates; a small program finds the answers."""

from __future__ import annotations

import random
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import Pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.cli import tune
from pypcd.evaluation.tasks import ruler, task
from pypcd.evaluation.tasks.ruler import VT, VTAuthors
from pypcd.evaluation.tasks.sample import Sample

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NIAHS = ["niah-single-1", "niah-multikey-2", "niah-multikey-3"]
ALL = ["vt", "vt-authors", *NIAHS]

few = settings(max_examples=25)


def _variables(text: str, value: str) -> list[str]:
    """Run a text's assignments in order; the variables with a given value, in the order of assignment."""
    values: dict[str, str] = {}
    for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        values[name] = values[other] if other else number
    return [name for name in values if values[name] == value]


def _asked_value(sample: Sample) -> str:
    return re.findall(r"assigned the value (\d{5}) in the text above\.", sample.prompt.after)[-1]


@few
@given(st.integers(1, 4), st.integers(2000, 2600), st.integers(0, 99))
def test_the_chain_is_in_order_and_leads_to_the_references(n: int, n_tokens: int, seed: int) -> None:
    for name in ("vt", "vt-authors"):
        for sample in task(name).samples(n, n_tokens, Pieces(), seed):
            assert _variables(sample.prompt.context, _asked_value(sample)) == list(sample.answers)
            assert len(set(sample.answers)) == 5
            assert all(re.fullmatch("[A-Z]{5}", answer) for answer in sample.answers)
            # one after the other, each once on the left
            places = [sample.prompt.context.index(f"VAR {answer} = ") for answer in sample.answers]
            assert places == sorted(places)
            assert all(sample.prompt.context.count(f"VAR {answer} = ") == 1 for answer in sample.answers)


def _chain(sample: Sample) -> list[str]:
    """The lines that lead to the answers."""
    names = sample.answers
    return [f"VAR {names[0]} = {_asked_value(sample)}", *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:]))]


def test_variable_tracking_is_rulers() -> None:
    for sample in VT().samples(3, 1500, Pieces(), 0):
        prompt, value = sample.prompt, _asked_value(sample)
        assert [s for s in prompt.segments if s != NOISE] == _chain(sample)
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


def test_the_authors_variable_tracking_is_theirs() -> None:
    for sample in VTAuthors().samples(3, 2200, Pieces(), 0):
        prompt, value = sample.prompt, _asked_value(sample)
        assert [s for s in prompt.segments if s != NOISE + "\n"] == _chain(sample)
        assert prompt.text == (
            "\n\nMemorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + " ".join(prompt.segments)
            + f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"5 variables are assgined the value {value}, they are: "
            " Your response should consist solely of listing all the variables in the specified format, such as "
            "'AAA, BBB, CCC, DDD, EEE'; do not include any additional text in your response."
        )
        assert prompt.answer_prefix == ""


def test_the_authors_earlier_turn_is_theirs() -> None:
    n = f"{NOISE}\n "
    context = (
        f"{n}{n}{n}VAR ZUG = 97498 VAR NCQ = 47194 VAR GOC = VAR ZUG  {n}VAR VNF = VAR NCQ  VAR TVZ = VAR GOC  "
        f"{n}VAR JEY = VAR VNF  {n}VAR XXP = VAR JEY  {n}VAR NDR = VAR TVZ  {n}{n}VAR MCJ = VAR XXP  VAR YEN = VAR NDR  "
        f"{NOISE}\n"
    )
    question = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text."
        f"\\n\\n{context}\\n"
        "Question: Find all variables that are assigned the value 47194 in the text"
        " Answer: According to the chain(s) of variable assignment in the text above, "
        "5 variables are assgined the value 47194, they are: "
    )
    sample = VTAuthors().samples(1, 2200, Pieces(), 0)[0]
    assert sample.prompt.shots == ((question, "NCQ, VNF, JEY, XXP, MCJ"),)
    assert _variables(context, "47194") == ["NCQ", "VNF", "JEY", "XXP", "MCJ"]


@pytest.mark.parametrize(
    ("name", "what", "key", "value"),
    [
        ("niah-single-1", "number", r"\S+-\S.*", r"\d{7}"),
        ("niah-multikey-2", "number", r"\S+-\S.*", r"\d{7}"),
        (
            "niah-multikey-3",
            "uuid",
            r"[0-9a-f-]{36}",
            r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        ),
    ],
)
def test_needles_in_a_haystack_are_rulers(name: str, what: str, key: str, value: str) -> None:
    for sample in task(name).samples(3, 1200, Pieces(), 0):
        prompt, (answer,) = sample.prompt, sample.answers
        (query,) = re.findall(rf"\nWhat is the special magic {what} for (.*) mentioned in", prompt.after)
        assert re.fullmatch(key, query) and re.fullmatch(value, answer)
        assert prompt.text == (
            f"A special magic {what} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {what} afterwards.\n"
            + "\n".join(prompt.segments)
            + f"\nWhat is the special magic {what} for {query} mentioned in the provided text?"
        )
        assert prompt.answer_prefix == f" The special magic {what} for {query} mentioned in the provided text is"
        assert f"One of the special magic {what}s for {query} is: {answer}." in prompt.segments
        others = [s for s in prompt.segments if query not in s]
        assert len(others) == len(prompt.segments) - 1
        if name == "niah-single-1":
            assert set(others) == {NOISE}
        else:
            pairs = [re.fullmatch(rf"One of the special magic {what}s for ({key}) is: ({value})\.", s) for s in others]
            assert all(pairs) and len(set(others)) == len(others)


def test_names_are_distinct_and_none_is_the_keyword() -> None:
    for seed in range(100):
        assert len(set(ruler._names(random.Random(seed), 1))) == 5

    class Stubborn(random.Random):
        def choices(self, *args: Any, **kwargs: Any) -> list[str]:
            drawn = super().choices(*args, **kwargs)
            return list("VAR") if self.random() < 0.5 else drawn

    assert "VAR" not in ruler._names(Stubborn(0), 3)


def test_the_longest_answers_are_the_published_ones() -> None:
    assert [task(name).max_tokens for name in ALL] == [30, 300, 128, 128, 128]


@few
@given(st.sampled_from(ALL), st.integers(1, 4), st.integers(2000, 3000), st.integers(0, 99), st.integers(0, 30))
def test_a_cell_is_as_long_as_allowed(name: str, n: int, n_tokens: int, seed: int, template: int) -> None:
    tokenizer, made = Pieces(template), task(name)
    samples = made.samples(n, n_tokens, tokenizer, seed)
    assert [sample.index for sample in samples] == list(range(n))
    lengths = [tokenizer.count(sample.prompt) + made.max_tokens for sample in samples]
    assert max(lengths) <= n_tokens
    longest = max(samples[0].prompt.segments, key=lambda s: len(tokenizer.encode(s)))
    assert max(lengths) + 3 * len(tokenizer.encode(longest)) > n_tokens  # nearly full: other draws differ a little
    assert len({len(sample.prompt.segments) for sample in samples}) == 1


def test_scores_are_recall_and_f1() -> None:
    sample = VT().samples(1, 1500, Pieces(), 0)[0]
    a, b, c, d, e = sample.answers
    assert VT().score(f"{a} {b.lower()}, {c}", sample) == pytest.approx(3 / 5)
    assert VTAuthors().score(f"{a}, {b.lower()}, {c}, ZZZZZ", sample) == pytest.approx(2 * 0.75 * 0.6 / 1.35)
    needle = task("niah-multikey-3").samples(1, 900, Pieces(), 0)[0]
    assert task("niah-multikey-3").score(f" {needle.answers[0].upper()}.", needle) == 1.0
    assert task("niah-multikey-3").score(f"{d}{e}", needle) == 0.0


def test_tasks_of_eval_and_tune_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("jieba", "huggingface_hub", "matplotlib"):
        monkeypatch.setitem(sys.modules, extra, None)
    ruler._words.cache_clear()
    for name in ("kv", *tune.DEFAULT_TASKS.split(",")):
        assert task(name).samples(1, 2000, Pieces(), 0)
    pin = runpy.run_path(str(Path(__file__).parents[2] / "cmake" / "pin.py"))
    assert any(line.startswith("wonderwords") for line in pin["dynamic_metadata"]("dependencies"))
