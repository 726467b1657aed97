"""GraphWalks: questions on a directed graph, which the prompt shows as a list of edges.

The data set is OpenAI's (huggingface.co/datasets/openai/graphwalks). Its questions are asked here: the nodes at one distance
from a node (a breadth-first search), and the parents of a node. So are its edges between hexadecimal names, its lists of nodes
as answers and F1 over the nodes. The graphs and all sentences are ours, so that scores are not those of the data set.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Literal

from pypcd.evaluation.tasks.metrics import set_f1
from pypcd.evaluation.tasks.sample import Sample
from pypcd.evaluation.tasks.size import Sized
from pypcd.prompt import Prompt

__all__ = ["GRAPHWALKS", "GraphWalks"]

DIGITS = 10  # of a name
MOST_ANSWERS = 10
MOST_STEPS = 3
WIDEST = 4  # nodes at a distance that is not asked for
MOST_MORE = 4  # edges that change no distance
FEWEST_EDGES = (MOST_STEPS - 1) * WIDEST + MOST_ANSWERS + MOST_MORE

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
    "bfs": ("5f1c09ae73", ("b0426e9fd8", "74ea3519bc")),
    "parents": ("b0426e9fd8", ("1d97f4c0a6", "e83b6d2041")),
}
_BEGUN = "Final Answer: ["


@dataclasses.dataclass(frozen=True)
class _Core:
    """The part of a graph that decides the answer.

    Attributes:
        node: the node that the question is about.
        steps: how far away the nodes of the answer are.
        edges: each leads to a node of the answer, or on the way to one, or changes nothing.
        no_out, no_in: nodes with all edges from them, or to them, among these edges.
    """

    node: str
    steps: int
    answer: frozenset[str]
    edges: frozenset[Edge]
    no_out: frozenset[str]
    no_in: frozenset[str]


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
    smallest = FEWEST_EDGES

    def __post_init__(self) -> None:
        self.name = f"graphwalks-{self.kind}"

    def score(self, prediction: str, sample: Sample) -> float:
        """F1 of the nodes that stand before the closing bracket; a list without one ends with its line."""
        return set_f1(prediction.lstrip().split("\n")[0].split("]")[0], sample.answers)

    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        example_node, example_answer = _EXAMPLE_OF[self.kind]
        before = (
            f"{_INTRODUCTION}{_RULES[self.kind]}{_LISTED}Example graph:\n{_lines(_EXAMPLE)}\n\n"
            f"{self._question(example_node, 2)}{_BEGUN}{', '.join(example_answer)}]\n\nGraph:\n"
        )
        for i in range(n):
            rng = random.Random(f"{self.name} {seed} {i}")
            names = _names(random.Random(rng.random()))
            core = _search(rng, names) if self.kind == "bfs" else _parents(rng, names)
            edges = [*sorted(core.edges), *itertools.islice(_others(rng, core, names), size - len(core.edges))]
            rng.shuffle(edges)
            # in the order of the lines that show them
            answers = tuple(
                dict.fromkeys(node for edge in edges if edge in core.edges for node in edge if node in core.answer)
            )
            prompt = Prompt(
                before=before,
                segments=tuple(f"{a} -> {b}" for a, b in edges),
                joiner="\n",
                after=f"\n\n{self._question(core.node, core.steps)}",
                answer_prefix=_BEGUN,
            )
            extra = {"node": core.node, "steps": core.steps}
            yield Sample(i, prompt, answers, None, extra, gold=", ".join(answers), end="]")

    def _question(self, node: str, steps: int) -> str:
        text = _QUESTIONS[self.kind].format(node=node, steps=f"{steps} step{'s' * (steps > 1)}")
        return f"Question: {text}\n"


GRAPHWALKS = (GraphWalks("bfs"), GraphWalks("parents"))


def _lines(edges: tuple[Edge, ...]) -> str:
    return "\n".join(f"{a} -> {b}" for a, b in edges)


def _names(rng: random.Random) -> Iterator[str]:
    """Names without end, all different."""
    seen: set[str] = set()
    while True:
        name = f"{rng.getrandbits(4 * DIGITS):0{DIGITS}x}"
        if name not in seen:
            seen.add(name)
            yield name


def _search(rng: random.Random, names: Iterator[str]) -> _Core:
    """A node, and the nodes at each distance from it up to the one that is asked for."""
    steps = rng.randint(1, MOST_STEPS)
    sizes = (1, *(rng.randint(1, WIDEST) for _ in range(steps - 1)), rng.randint(1, MOST_ANSWERS))
    layers = [tuple(itertools.islice(names, size)) for size in sizes]
    edges = {(rng.choice(layer), node) for layer, following in itertools.pairwise(layers) for node in following}
    for _ in range(rng.randint(0, MOST_MORE)):
        at = rng.randrange(steps)
        edge = rng.choice(layers[at]), rng.choice([node for layer in layers[: at + 2] for node in layer])
        if edge[0] != edge[1]:
            edges.add(edge)
    inner = frozenset(node for layer in layers[:-1] for node in layer)
    return _Core(layers[0][0], steps, frozenset(layers[-1]), frozenset(edges), inner, frozenset())


def _parents(rng: random.Random, names: Iterator[str]) -> _Core:
    node = next(names)
    parents = frozenset(itertools.islice(names, rng.randint(1, MOST_ANSWERS)))
    return _Core(node, 1, parents, frozenset((parent, node) for parent in parents), frozenset(), frozenset((node,)))


def _others(rng: random.Random, core: _Core, names: Iterator[str]) -> Iterator[Edge]:
    """Edges without end that leave the answer as it is. Every second one, on average, leads to a new node or from one."""
    nodes = sorted({node for edge in core.edges for node in edge})
    seen = set(core.edges)
    while True:
        a, b = rng.choice(nodes), rng.choice(nodes)
        new = next(names) if rng.random() < 0.5 else None
        if new is not None:
            a, b = (new, b) if rng.random() < 0.5 else (a, new)
        if a == b or a in core.no_out or b in core.no_in or (a, b) in seen:
            continue
        if new is not None:
            nodes.append(new)
        seen.add((a, b))
        yield a, b
