"""Everyday questions: answers that can be worked out, lengths, halves, scores, and runs of them."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Tiny
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ONE, lines, without_time

import pypcd
from pypcd.evaluation import GROUPS, TASKS, Directory, Plan, evaluate, task
from pypcd.evaluation.tasks import parts_of
from pypcd.evaluation.tasks.everyday import EVERYDAY, SHORT, Everyday, kind_of
from pypcd.evaluation.tasks.frozen import in_order, rows
from pypcd.evaluation.tasks.sample import Sample
from pypcd.evaluation.tasks.size import largest
from pypcd.prompt import Prompt, prompt_tokens

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
SHOTS = {made.kind.name: made for made in EVERYDAY if made.way == "shots"}
BEHIND = {made.kind.name: made for made in EVERYDAY if made.way == "behind"}
NAMES = list(SHOTS)


few = settings(max_examples=20)


def short(name: str, n: int, seed: int = 0) -> list[Sample]:
    return SHOTS[name].samples(n, SHORT, Words(), seed)


def pairs_of(sample: Sample) -> list[tuple[str, str]]:
    """Every question of a prompt with its answer: the examples and the question itself."""
    return [*((q, a.strip()) for q, a in sample.prompt.shots), (sample.prompt.after, sample.answers[0])]


# -- the answers, worked out again -----------------------------------------------------------------------------------


def copy(question: str, answer: str) -> bool:
    return question in (f"List: {answer}\nCopy:", f"List:\n{answer}\nCopy:\n")


def sort(question: str, answer: str) -> bool:
    items, how = re.fullmatch(r"(.+) (sorted|from A to Z):", question).groups()  # type: ignore[union-attr]
    given = items.split(", ")
    return answer.split(", ") == sorted(given, key=int if how == "sorted" else str) and len(set(given)) == len(given)


def arithmetic(question: str, answer: str) -> bool:
    a, sign, b = re.fullmatch(r"(\d+) ([+*]) (\d+) =", question).groups()  # type: ignore[union-attr]
    return {"+": operator.add, "*": operator.mul}[sign](int(a), int(b)) == int(answer)


def spelling(question: str, answer: str) -> bool:
    word, how = re.fullmatch(r"(?:First letter of )?(\w+)(.*):", question).groups()  # type: ignore[union-attr]
    if question.startswith("First"):
        return len(answer) == 1 and word.startswith(answer)
    changed = {
        " in capital letters": answer.isupper(),
        " in small letters": answer.islower() and word.isupper(),
        " with a capital": answer[0].isupper() and answer[1:].islower(),
    }
    return changed[how] and word.casefold() == answer.casefold()


def brackets(question: str, answer: str) -> bool:
    given = re.fullmatch(r"Open: (.+)\nClosed:", question).group(1)  # type: ignore[union-attr]
    waiting: list[str] = []
    for letter in given:
        if waiting and letter == waiting[-1]:
            waiting.pop()
        elif letter in "([{":
            waiting.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter == '"':
            waiting.append(letter)
    ast.parse(answer)
    return bool(waiting) and answer == given + "".join(waiting[::-1])


def as_json(question: str, answer: str) -> bool:
    text = re.fullmatch(r"Text: (.+)\nJSON:\n", question).group(1)  # type: ignore[union-attr]
    values = json.loads(answer).values()
    numbers = [value for value in values if isinstance(value, int)]
    return all(str(value) in text for value in values) and numbers == [int(n) for n in re.findall(r"\d+", text)]


ORACLES: dict[str, Callable[[str, str], bool]] = {
    "json": as_json,
    "copy": copy,
    "sort": sort,
    "arithmetic": arithmetic,
    "spelling": spelling,
    "brackets": brackets,
}


@pytest.mark.parametrize("name", ORACLES)
def test_every_answer_follows_from_its_question(name: str) -> None:
    for sample in SHOTS[name].samples(100, 700, Words(), 5):
        for question, answer in pairs_of(sample):
            assert ORACLES[name](question, answer), (question, answer)


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("json", "Text: Ida, who is 30, lives in Rome.\nJSON:\n", '{"name": "Ida", "age": 31, "city": "Rome"}'),
        ("sort", "786, 7 sorted:", "786, 7"),
        ("arithmetic", "8 * 8 =", "16"),
        ("spelling", "bowl with a capital:", "BOWL"),
        ("brackets", 'Open: print(3, "a\nClosed:', 'print(3, "a)"'),
    ],
)
def test_a_wrong_answer_would_be_seen(name: str, question: str, answer: str) -> None:
    try:
        assert not ORACLES[name](question, answer)
    except SyntaxError:  # of a line of code
        assert name == "brackets"


# -- questions -------------------------------------------------------------------------------------------------------


def test_there_are_ten_kinds_and_more_each_in_two_ways() -> None:
    assert len(NAMES) == 12 and set(NAMES) == set(BEHIND)
    for name in NAMES:
        assert task(f"everyday-{name}") == SHOTS[name] and task(f"everyday-{name}-behind") == BEHIND[name]
        assert kind_of(f"everyday-{name}") == kind_of(f"everyday-{name}-behind") == name
    assert {kind_of(other) for other in (*TASKS, *GROUPS, "everyday-nothing")} == {None, *NAMES}


@few
@given(st.sampled_from(EVERYDAY), st.integers(1, 6), st.integers(300, 900), st.integers(0, 99))
def test_more_questions_leave_the_first_ones_as_they_are(made: Everyday, n: int, n_tokens: int, seed: int) -> None:
    assert made.samples(n, n_tokens, Words(), seed) == made.samples(n + 7, n_tokens, Words(), seed)[:n]


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_questions_are_different(name: str) -> None:
    for made in (SHOTS[name], BEHIND[name]):
        assert made.n_questions == 100
        assert len({sample.prompt for sample in made.samples(100, SHORT, Words(), 0)}) == 100
    with pytest.raises(ValueError, match=f"n is 101; allowed: 1 to 100, the questions of everyday-{name}"):
        short(name, 101)


@few
@given(st.integers(1, 40), st.integers(0, 99))
def test_a_seed_leaves_a_question_in_its_half(n: int, seed: int) -> None:
    order = in_order(range(n), seed)
    assert sorted(order) == list(range(n)) and all(at % 2 == number % 2 for number, at in enumerate(order))
    assert in_order(range(n), 0) == list(range(n)) and order == in_order(range(n), seed)


@pytest.mark.parametrize("name", NAMES)
def test_no_question_of_one_half_is_asked_or_shown_in_the_other(name: str) -> None:
    halves: tuple[set[str], set[str]] = (set(), set())
    for seed in range(3):
        for sample in SHOTS[name].samples(100, 2500 if seed == 2 else 500, Words(), seed):
            halves[sample.index % 2].update(question for question, _ in pairs_of(sample))
    assert min(map(len, halves)) > 50 and not halves[0] & halves[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_question_is_the_same_at_every_length_and_in_both_ways(name: str) -> None:
    of = [
        made.samples(5, n_tokens, Words(), 3) for made in (SHOTS[name], BEHIND[name]) for n_tokens in (SHORT, 700, 900)
    ]
    for same in zip(*of):
        assert len({(sample.prompt.after, sample.answers, sample.gold, sample.end) for sample in same}) == 1
        n = min(len(sample.prompt.shots) for sample in same)
        near = {sample.prompt.shots[1 - n :] for sample in same}  # the first one is set off from the unrelated text
        assert len(near) == 1 and n > 1


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_never_the_question_and_repeats_only_if_it_must(name: str) -> None:
    for sample in SHOTS[name].samples(20, 1000, Words(), 1):
        examples = [question for question, _ in sample.prompt.shots]
        assert sample.prompt.after not in examples
        assert len(set(examples[-8:])) == len(examples[-8:])


@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_shows_all_examples_before_one_is_shown_again(name: str) -> None:
    """Beyond its own examples a question has those of others of its kind and half."""
    n_own = len(next(row["examples"] for row in rows("everyday") if row["kind"] == name))
    (sample,) = SHOTS[name].samples(1, 20_000, Words(), 0)
    nearest_first = sample.prompt.shots[::-1]
    own, more = nearest_first[:n_own], nearest_first[n_own:]
    n_more = len({*more} - {*own})
    assert (n_more > 100 or name == "facts") and len({*more[:n_more]} - {*own}) == n_more


def test_classification_shows_every_label_first() -> None:
    for sample in short("classify", 100):
        shown = {answer for _, answer in pairs_of(sample)[:-1]}
        assert sample.answers[0] in shown


# -- lengths ---------------------------------------------------------------------------------------------------------


@few
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(301, 3000), st.integers(0, 99), st.integers(0, 30))
def test_long_prompts_are_as_long_as_allowed(name: str, n: int, n_tokens: int, seed: int, template: int) -> None:
    tokenizer = Words(template)
    for made in (SHOTS[name], BEHIND[name]):
        for sample in made.samples(n, n_tokens, tokenizer, seed):
            length = tokenizer.count(sample.prompt) + made.max_tokens
            longest = max(len(tokenizer.encode(f"{q}{a}")) for q, a in sample.prompt.shots[1:])
            more = longest + 40 if made.way == "shots" else 80  # one example or sentence more may be the longest of all
            assert length <= n_tokens < length + more


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(0, 60),
    st.integers(0, 2),
    st.integers(1, 150),
    st.none() | st.integers(2, 30),
)
def test_the_largest_size_is_found_from_any_guess(
    lengths: list[int], near: int, smallest: int, n_tokens: int, most: int | None
) -> None:
    """Against trying every size; a size's prompt has one letter and as many more as its parts have."""

    def make(size: int) -> Sample:
        return Sample(0, Prompt(after="漢" + "".join("漢" * lengths[i % len(lengths)] for i in range(size))), ("",))

    class Letters(Words):
        pattern = "."

    sizes = [
        size
        for size in range(smallest, 1 + (200 if most is None else most))
        if Letters().count(make(size).prompt) + 3 <= n_tokens
    ]
    if not sizes:
        with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}; allowed: at least"):
            largest(make, smallest, n_tokens, 3, Letters(), near=near, most=most)
    else:
        assert largest(make, smallest, n_tokens, 3, Letters(), near=near, most=most) == max(sizes)


@few
@given(st.sampled_from(NAMES), st.integers(260, SHORT), st.integers(0, 99))
def test_short_prompts_have_few_examples(name: str, n_tokens: int, seed: int) -> None:
    for sample in SHOTS[name].samples(4, n_tokens, Words(), seed):
        assert 2 <= len(sample.prompt.shots) <= SHOTS[name].kind.n_examples
        assert 20 <= Words().count(sample.prompt) <= n_tokens - SHOTS[name].max_tokens  # empty lines are not counted


@pytest.mark.parametrize("name", NAMES)
def test_unrelated_text_stands_before_the_examples_and_answers_nothing(name: str) -> None:
    full, bare = SHOTS[name].samples(5, 900, Words(), 0), short(name, 5)
    for sample, other, plain in zip(BEHIND[name].samples(5, 900, Words(), 0), full, bare):
        text, question = sample.prompt.context, sample.prompt.shots[0][0].removeprefix("\n\n")
        assert sample.prompt.whole.startswith(f"{text}\n\n{question}{sample.prompt.shots[0][1]}\n\n")
        assert question in [q for q, _ in other.prompt.shots][-len(sample.prompt.shots) :]
        assert len(text) > 500 and plain.prompt.after == sample.prompt.after
        assert not re.search(r"[\d{}\[\]:]", text)
        paragraphs = text.split("\n\n")
        assert all(re.fullmatch(r"([A-Z][^.]+\. ?)+", paragraph) for paragraph in paragraphs)
        assert len(set(paragraphs)) == len(paragraphs)


# -- scores and the gold answer --------------------------------------------------------------------------------------


@few
@given(st.sampled_from(EVERYDAY), st.integers(0, 99))
def test_the_right_answer_scores_and_near_misses_do_not(made: Everyday, seed: int) -> None:
    for sample in made.samples(3, 400, Words(), seed):
        (answer,) = sample.answers
        for chat in (False, True):
            assert made.score(sample.written(chat=chat), sample) == 1.0
        question, its_answer = sample.prompt.shots[-1]
        going_on = f"{sample.gold}\n\n{question}{its_answer}"
        assert made.score(going_on, sample) == 1.0
        assert made.score(f"\n {answer} \n", sample) == 1.0
        near = {answer[:-1], f"{answer}.", f"{answer} {answer}", answer.swapcase(), "", f"x{answer}", f"x\n{answer}"}
        for wrong in near - {answer}:  # digits have no case
            assert made.score(wrong, sample) == 0.0, wrong


def test_lines_are_all_needed_and_no_more() -> None:
    made = SHOTS["copy"]
    sample = next(s for s in short("copy", 20) if "\n" in s.answers[0])
    lines = sample.answers[0].split("\n")
    assert made.score("\n".join(f" {line} " for line in lines), sample) == 1.0
    for wrong in (lines[:-1], [*lines, "9. hat"], lines[::-1]):
        assert made.score("\n".join(wrong), sample) == 0.0


def test_the_gold_answer_continues_the_prompt_as_the_examples_do() -> None:
    """What a perfect model writes: text by text the prompt, the answer and its end read like one more example."""
    for made in EVERYDAY:
        for sample in made.samples(4, 500, Words(), 0):
            *_, (question, answer) = sample.prompt.shots
            assert sample.written().endswith("\n\n") and made.stop in sample.end
            assert question.endswith("\n") == (answer == answer.lstrip()) == (sample.gold == sample.gold.lstrip())
            assert sample.written(chat=True) == sample.answers[0]


def test_every_task_says_its_gold_answer() -> None:
    """A task whose beginning of the answer goes into the prompt continues it, through a chat template too."""
    for name in ("kv", "vt", "niah-single-1"):
        (sample,) = task(name).samples(1, 1500, Words(), 0)
        text = sample.written()
        assert text.split() == list(sample.answers) and task(name).score(text, sample) == 1.0
        assert sample.written(chat=True) == text
    assert text.startswith(" ")


def test_a_turn_of_a_conversation_has_no_space_before_its_answer(tiny: Tiny) -> None:
    llm = pypcd.Llama(tiny("llama", chat_template=TEMPLATE), n_ctx=1024, n_threads=1, n_threads_batch=1)
    (sample,) = SHOTS["arithmetic"].samples(1, 400, Words(), 0)
    tokens = prompt_tokens(llm, sample.prompt, chat=True)
    turns = "".join(f"<user>{q}<assistant>{a.strip()}" for q, a in sample.prompt.shots)
    assert tokens == llm.tokenize(
        f"{turns}<user>{sample.prompt.after}<assistant>".encode(), add_bos=False, special=True
    )
    (sample,) = BEHIND["arithmetic"].samples(1, 400, Words(), 0)
    assert sample.prompt.segments
    tokens = prompt_tokens(llm, sample.prompt, chat=True)
    turns = "".join(f"<user>{q}<assistant>{a.strip()}" for q, a in sample.prompt.shots)
    text = turns.replace("<user>", f"<user>{sample.prompt.context}", 1) + f"<user>{sample.prompt.after}<assistant>"
    assert tokens == llm.tokenize(text.encode(), add_bos=False, special=True)


# -- groups and runs -------------------------------------------------------------------------------------------------


def test_a_group_stands_for_its_tasks() -> None:
    assert list(GROUPS["everyday"]) == [f"everyday-{name}" for name in NAMES]
    assert GROUPS["constrained-shown"] == tuple(f"{name}-shown" for name in GROUPS["constrained"])
    assert parts_of(("kv", "everyday-behind")) == ("kv", *(f"everyday-{name}-behind" for name in NAMES))
    plan = Plan("demo", ("everyday-json", "everyday"), ("greedy",), (300,))
    assert sorted(plan.tasks) == sorted(GROUPS["everyday"])
    for name, remedy in (("everyday", "everyday-facts"), ("evryday", "did you mean 'everyday'")):
        with pytest.raises(ValueError, match=remedy):
            task(name)


def test_halves_make_a_whole_run(tmp_path: Path) -> None:
    tasks = ("everyday-facts", "everyday-classify-behind")
    first, second, both = (
        Plan("demo", tasks, ("greedy",), (700,), n=5, max_tokens=3, half=half) for half in ("first", "second", None)
    )
    whole = evaluate(both, Directory(tmp_path / "whole"), options=ONE).records
    run = Directory(tmp_path / "halves")
    assert {key[2] for key in evaluate(first, run, options=ONE).records} == {0, 2, 4} and len(lines(run)) == 6
    assert {key[2] for key in evaluate(second, run, options=ONE).records} == {1, 3}
    size = run.samples.stat().st_size
    assert without_time(evaluate(both, run, options=ONE).records) == without_time(whole)
    assert run.samples.stat().st_size == size  # nothing was asked again
    assert "half" not in json.loads((run.path / "run.json").read_text())
    assert any(record["n_tokens"] < 3 or "\n" not in record["prediction"].strip() for record in whole.values())


def test_the_same_question_after_other_examples_is_another_one(tmp_path: Path) -> None:
    plan = Plan("demo", ("everyday-arithmetic",), ("greedy",), (400, 500), n=1, max_tokens=1)
    records = evaluate(plan, Directory(tmp_path / "run"), options=ONE).records
    assert len({record["prompt_sha256"] for record in records.values()}) == 2
