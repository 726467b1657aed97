"""GraphWalks: questions on a directed graph, which the prompt shows as a list of edges.

The data set is OpenAI's (huggingface.co/datasets/openai/graphwalks). Its questions are asked here: the nodes at one distance
from a node (a breadth-first search), and the parents of a node. So are its edges between hexadecimal names, its lists of nodes
as answers and F1 over the nodes. The graphs and all sentences are ours, so that scores are not those of the data set.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Literal

from pypcd.evaluation.tasks.metrics import set_f1
from pypcd.evaluation.tasks.sample import Sample
from pypcd.evaluation.tasks.size import Sized
from pypcd.prompt import Prompt

__all__ = ["GRAPHWALKS", "GraphWalks"]

MOST_ANSWERS = 10
MOST_STEPS = 3
WIDEST = 4  # nodes at a distance that is not asked for
MOST_MORE = 4  # edges that change no distance

Edge = tuple[str, str]

_INTRODUCTION = (
    "The lines below are the edges of a directed graph. The line `a -> b` is an edge from node a to node b.\n"
)
_LISTED = " Answer with a list of nodes in square brackets, in any order.\n\n"
_RULES = {
    "bfs": "Find all nodes that are a given number of steps away from a node. A step follows an edge in its direction. "
    "A node that can also be reached in fewer steps does not count.",
    "parents": "Find all parents of a node. A parent is a node with an edge that leads to it.",
}
_QUESTIONS = {
    "bfs": "Which nodes are exactly {steps} away from node {node}?",
    "parents": "Which nodes are the parents of node {node}?",
}
_EXAMPLE = (
    ("5f1c09ae73", "e83b6d2041"),
    ("1d97f4c0a6", "b0426e9fd8"),
    ("5f1c09ae73", "1d97f4c0a6"),
    ("e83b6d2041", "b0426e9fd8"),
    ("b0426e9fd8", "e83b6d2041"),
    ("1d97f4c0a6", "74ea3519bc"),
)
_EXAMPLE_OF = {  # the node, and the answer
    "bfs": ("5f1c09ae73", "b0426e9fd8, 74ea3519bc"),
    "parents": ("b0426e9fd8", "1d97f4c0a6, e83b6d2041"),
}
_BEGUN = "Final Answer: ["


@dataclasses.dataclass(eq=False)
class GraphWalks(Sized):
    """A kind of questions about graphs, behind one worked example. One to ten nodes are the answer.

    A longer context has more nodes and edges, none of which changes the answer. Question i is the same at every length; the
    order of the edges is another one.
    """

    kind: Literal["bfs", "parents"]
    max_tokens: int = 160

    metric = "F1"
    stop = "]"
    smallest = (MOST_STEPS - 1) * WIDEST + MOST_ANSWERS + MOST_MORE

    def __post_init__(self) -> None:
        self.name = f"graphwalks-{self.kind}"

    def score(self, prediction: str, sample: Sample) -> float:
        """F1 of the nodes that stand before the closing bracket; a list without one ends with its line."""
        return set_f1(prediction.lstrip().split("\n")[0].split("]")[0], sample.answers)

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        example_node, example_answer = _EXAMPLE_OF[self.kind]
        before = (
            f"{_INTRODUCTION}{_RULES[self.kind]}{_LISTED}Example graph:\n{chr(10).join(_lines(_EXAMPLE))}\n\n"
            f"{self._question(example_node, 2)}{_BEGUN}{example_answer}]\n\nGraph:\n"
        )
        for i in range(n):
            rng = random.Random(f"{self.name} {seed} {i}")
            # the parents of a node are one step away from it if all edges are turned round
            steps = rng.randint(1, MOST_STEPS) if self.kind == "bfs" else 1
            node, right, edges = _searched(rng, steps, size)
            if self.kind == "parents":
                edges = [(b, a) for a, b in edges]
            # in the order of the lines that show them
            answers = tuple(dict.fromkeys(name for edge in edges for name in edge if name in right))
            after = f"\n\n{self._question(node, steps)}"
            prompt = Prompt(before, _lines(edges), "\n", after, answer_prefix=_BEGUN)
            extra = {"node": node, "steps": steps}
            yield Sample(i, prompt, answers, None, extra, gold=", ".join(answers), end="]")

    def _question(self, node: str, steps: int) -> str:
        text = _QUESTIONS[self.kind].format(node=node, steps=f"{steps} step{'s' * (steps > 1)}")
        return f"Question: {text}\n"


GRAPHWALKS = (GraphWalks("bfs"), GraphWalks("parents"))


def _lines(edges: Iterable[Edge]) -> tuple[str, ...]:
    return tuple(f"{a} -> {b}" for a, b in edges)


def _searched(rng: random.Random, steps: int, size: int) -> tuple[str, set[str], list[Edge]]:
    """A node, those that are so many steps away from it, and this number of edges, in any order."""
    sizes = (1, *(rng.randint(1, WIDEST) for _ in range(steps - 1)), rng.randint(1, MOST_ANSWERS))
    layers = [[_name(rng) for _ in range(n)] for n in sizes]  # by their distance
    edges = {(rng.choice(layer), node): None for layer, following in itertools.pairwise(layers) for node in following}
    for _ in range(rng.randint(0, MOST_MORE)):
        at = rng.randrange(steps)
        a, b = rng.choice(layers[at]), rng.choice([node for layer in layers[: at + 2] for node in layer])
        if a != b:
            edges[a, b] = None
    inner = {node for layer in layers[:-1] for node in layer}  # an edge more from one of them may change the answer
    nodes = [node for layer in layers for node in layer]
    while len(edges) < size:
        a, b = rng.choice(nodes), rng.choice(nodes)
        if rng.random() < 0.5:  # one of its ends is a new node
            nodes.append(_name(rng))
            a, b = (nodes[-1], b) if rng.random() < 0.5 else (a, nodes[-1])
        if a != b and a not in inner:
            edges[a, b] = None
    order = list(edges)
    rng.shuffle(order)
    return layers[0][0], set(layers[-1]), order


def _name(rng: random.Random) -> str:
    return f"{rng.getrandbits(40):010x}"
