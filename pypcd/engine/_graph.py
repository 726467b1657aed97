"""The graphs that llama.cpp computes, and the devices that run them.

Knows nothing of settings: what it measures is whatever is in force in the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import llama_cpp

from pypcd.engine import _bindings
from pypcd.engine._calls import context
from pypcd.engine._handles import is_open

__all__ = ["Graph", "watch_graphs"]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph that was computed, and where.

    Attributes:
        n_nodes: operations in it; views compute nothing and are none.
        n_splits: parts that run on one device each.
        devices: how many operations each device ran, by ggml's name of it.
        on_cpu: those that the CPU ran, as "OPERATION of name", and how often; names without the number of their layer.
    """

    n_nodes: int
    n_splits: int
    devices: Counter[str]
    on_cpu: Counter[str]


@contextlib.contextmanager
def watch_graphs(llm: llama_cpp.Llama) -> Iterator[list[Graph]]:
    """Collect the graphs that this context computes in the block, in their order: those that turn second keys too, but
    not llama.cpp's own small ones, which shift keys."""
    seen: list[Graph] = []

    def keep(nodes: Any, n: int, n_splits: int, data: Any) -> None:
        ran = [nodes[i] for i in range(n)]
        devices = Counter(node.device.decode() for node in ran)
        on_cpu = Counter(f"{node.op.decode()} of {_kind(node.name.decode())}" for node in ran if node.on_cpu)
        seen.append(Graph(n, n_splits, devices, on_cpu))

    callback = _bindings.graph_callback(keep)
    _bindings.pcd_watch_graphs(context(llm), callback, None)
    try:
        yield seen
    finally:
        if is_open(llm):  # else the model was closed inside
            _bindings.pcd_watch_graphs(context(llm), _bindings.graph_callback(), None)


def _kind(name: str) -> str:
    """A tensor's name without numbers: of its layer, or of its place in the graph where nobody named it."""
    return re.sub(r"[-_]?\d+", "", name)
