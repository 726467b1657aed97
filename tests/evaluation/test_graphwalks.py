"""GraphWalks: answers worked out again from the prompt's text by products of matrices; lengths and scores."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fake_tokenizer import Words
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd.evaluation.tasks.graphwalks import GRAPHWALKS, GraphWalks
from pypcd.evaluation.tasks.sample import Sample
from pypcd.prompt import Prompt

NAME = "[0-9a-f]{10}"

few = settings(max_examples=25)
kinds = st.sampled_from(GRAPHWALKS)
seeds = st.integers(0, 999)


def edges_of(text: str) -> list[tuple[str, str]]:
    return re.findall(rf"^({NAME}) -> ({NAME})$", text, re.MULTILINE)


def worked_out(text: str, question: str) -> set[str]:
    """The answer to a question about the edges that stand in a text."""
    edges = edges_of(text)
    names = sorted({name for edge in edges for name in edge})
    place = {name: i for i, name in enumerate(names)}
    steps = np.zeros((len(names), len(names)), dtype=np.int64)
    for a, b in edges:
        steps[place[a], place[b]] = 1
    (node,) = re.findall(NAME, question)
    at = place[node]
    if "parents" in question:
        return {names[i] for i in range(len(names)) if steps[i, at]}
    (n_steps,) = map(int, re.findall(r"exactly (\d) steps? away", question))
    ways = [
        np.linalg.matrix_power(steps, k)[at] for k in range(n_steps + 1)
    ]  # how many walks of each length lead where
    return {name for i, name in enumerate(names) if ways[-1][i] and not any(way[i] for way in ways[:-1])}


@few
@given(kinds, st.integers(1100, 5000), seeds)
def test_the_answer_follows_from_the_edges(made: GraphWalks, n_tokens: int, seed: int) -> None:
    """All of which differ, and lead to another node."""
    samples = made.samples(4, n_tokens, Words(), seed)
    for sample in samples:
        right = worked_out(sample.prompt.context, sample.prompt.after)
        assert set(sample.answers) == right and len(sample.answers) == len(right)
        assert 1 <= len(right) <= 10 and sample.extra["node"] not in right
        assert sample.extra["node"] in sample.prompt.after
        edges = edges_of(sample.prompt.context)
        assert len(edges) == len(set(edges)) == len(sample.prompt.segments) == len(samples[0].prompt.segments)
        assert all(a != b for a, b in edges)
        assert len(Words().encode(f"{', '.join(sample.answers)}]")) <= made.max_tokens


@few
@given(kinds, seeds)
def test_the_worked_example_is_right_and_has_the_form_of_an_answer(made: GraphWalks, seed: int) -> None:
    (sample,) = made.samples(1, 1100, Words(), seed)
    example, _, graph = sample.prompt.before.partition("\n\nGraph:\n")
    assert graph == ""
    edges, question = example.split("\n\nQuestion: ")
    assert question.count(sample.prompt.answer_prefix) == 1
    asked, answer = question.split(sample.prompt.answer_prefix)
    assert set(answer.rstrip("]").split(", ")) == worked_out(edges, asked) != set()
    assert answer.endswith("]") and sample.prompt.answer_prefix == "Final Answer: ["
    assert re.sub(NAME, "", sample.gold + sample.end) == ", " * (len(sample.answers) - 1) + "]"
    assert made.stop == sample.end


@few
@given(kinds, st.integers(1100, 2000), st.integers(2100, 5000), seeds)
def test_a_longer_graph_has_the_same_question_and_more_edges(
    made: GraphWalks, short: int, long: int, seed: int
) -> None:
    for a, b in zip(made.samples(3, short, Words(), seed), made.samples(3, long, Words(), seed)):
        assert (a.prompt.before, a.prompt.after, set(a.answers)) == (b.prompt.before, b.prompt.after, set(b.answers))
        assert set(a.prompt.segments) < set(b.prompt.segments)


@pytest.mark.parametrize(
    ("prediction", "f1"),
    [
        ("a1, b2, c3, d4", 1.0),
        ("d4,c3 , b2,a1", 1.0),  # any order, any spaces
        (" a1, b2, c3, d4], since b2 follows", 1.0),  # only the list counts
        ("\na1, b2, c3, d4", 1.0),
        ("a1, b2, c3, d4\n\nQuestion: e5", 1.0),
        ("a1, a1, b2, c3, d4, d4", 1.0),  # a set
        ("a1, b2, c3, d4,", 1.0),  # cut, or an empty item
        ("a1, b2", 2 / 3),  # precision 1, recall 1/2
        ("a1, b2, e5, f6", 1 / 2),
        ("a1, e5, f6, g7", 1 / 4),
        ("A1, b2, c3, d4", 3 / 4),  # the case matters
        ("a1 b2 c3 d4", 0.0),  # no list
        ("a1b2, c", 0.0),
        ("], a1, b2, c3, d4", 0.0),
        ("", 0.0),
    ],
)
@pytest.mark.parametrize("made", GRAPHWALKS, ids=lambda made: made.name)
def test_a_list_is_scored_by_f1_of_its_nodes(made: GraphWalks, prediction: str, f1: float) -> None:
    assert made.score(prediction, Sample(0, Prompt(), ("a1", "b2", "c3", "d4"))) == pytest.approx(f1)
