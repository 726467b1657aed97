"""Which operations leave the device: with a model on a GPU, or on others' machines, what ggml's scheduler puts on the CPU.

A device that cannot run an operation has it run by the CPU, and its numbers are copied there and back. That gives the right
result slowly, and nothing says so. llama.cpp itself looks up a token's embedding on the CPU; what counts is what PCD adds to
that, so each way to run PCD is set beside plain decoding. Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import engine
from pypcd.llama import Llama
from pypcd.settings.config import PCDConfig

__all__ = ["OFF", "Placement", "left_device", "placements"]

OFF = "off"  # plain decoding in the same context
MODES: dict[str, dict[str, Any]] = {
    "rerotated": {},
    "shared": {"cache": "shared"},
    "separate": {"cache": "separate"},
    "window": {"perturbation": "none", "window": 8},
}
WAYS: dict[str, dict[str, Any]] = {
    f"{name}, {evaluation}": {**mode, "evaluation": evaluation}
    for name, mode in MODES.items()
    for evaluation in ("fused", "alternate")
}
N_PROMPT, N_STEPS = 40, 2


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a prompt and two steps ran.

    Attributes:
        way: "off", or a cache mode and an evaluation.
        n_nodes: operations in the largest graph.
        n_splits: the most parts of a graph that run on one device each.
        n_on_cpu: the most operations of a graph that the CPU ran.
        left: of those, what plain decoding does not have: "OPERATION of name", and how often in a graph.
    """

    way: str
    n_nodes: int
    n_splits: int
    n_on_cpu: int
    left: dict[str, int]


def on_device(graphs: Sequence[engine.Graph]) -> bool:
    """Whether anything but the CPU ran anything of them."""
    return any(sum(graph.on_cpu.values()) < graph.n_nodes for graph in graphs)


def left_device(graphs: Sequence[engine.Graph], plain: Sequence[engine.Graph]) -> dict[str, int]:
    """The operations that the CPU ran in a graph, more than in any graph of plain decoding: the most of each."""
    usual = _most(plain)
    return dict(_most(graphs) - usual)


def _most(graphs: Sequence[engine.Graph]) -> Counter[str]:
    found: Counter[str] = Counter()
    for graph in graphs:
        found |= graph.on_cpu
    return found


def placements(llm: Llama) -> Iterator[Placement]:
    """Run each way that this model can, plain decoding first; nothing if everything runs on the CPU. PCD is off at the end."""
    tokens = np.random.default_rng(0).integers(0, llm.n_vocab(), N_PROMPT + N_STEPS).tolist()
    plain: Sequence[engine.Graph] = ()
    try:
        for way, setting in {OFF: None, **WAYS}.items():
            config = None if setting is None else PCDConfig(**setting)
            if config and engine.pcd_refusal(llm, config):
                continue
            llm.reset()
            llm.pcd = config
            with engine.watch_graphs(llm) as graphs:
                for part in (tokens[:N_PROMPT], *([token] for token in tokens[N_PROMPT:])):
                    llm.eval(part)
            plain = plain or graphs
            if not on_device(plain):
                return
            yield Placement(
                way=way,
                n_nodes=max(graph.n_nodes for graph in graphs),
                n_splits=max(graph.n_splits for graph in graphs),
                n_on_cpu=max(sum(graph.on_cpu.values()) for graph in graphs),
                left=left_device(graphs, plain),
            )
    finally:
        llm.pcd = False
