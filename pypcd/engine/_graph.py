"""The graphs that llama.cpp computes, and the host's work around them: sizes, times, and a cache filled for measuring.

Knows nothing of settings: what it measures is whatever is in force in the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp

from pypcd.engine import _bindings
from pypcd.engine._calls import context
from pypcd.engine._handles import is_open
from pypcd.errors import PCDError, UnsupportedError

__all__ = ["Graph", "GraphStats", "Step", "fill_cells", "graph_stats", "timed_steps", "watch_graphs"]


@dataclasses.dataclass(frozen=True)
class GraphStats:
    """The graph that was computed last, and the time that computing has taken.

    Attributes:
        n_nodes: operations in it.
        n_splits: parts that run on one device each.
        bytes_in: its inputs; with a device that has memory of its own, what is copied to it.
        bytes_out: its logits and embeddings, which are copied back.
        n_computed: graphs computed in this context, since this or PCD was first asked for.
        t_graph_us: microseconds spent computing them, and waiting for them.
        t_own_ns: nanoseconds in PCD's own code while batches were decoded with PCD on, without those.
        n_tokens: of that graph: tokens and twins.
        n_twins: of these.
    """

    n_nodes: int
    n_splits: int
    bytes_in: int
    bytes_out: int
    n_computed: int
    t_graph_us: int
    t_own_ns: int
    n_tokens: int
    n_twins: int


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


@dataclasses.dataclass(frozen=True)
class Step:
    """One token, decoded.

    Attributes:
        host_us: microseconds in llama_decode, less computing graphs.
        own_us: of these, in PCD's own code.
        n_graphs: graphs computed for it.
        n_reused: of these, how many were not built anew.
    """

    host_us: float
    own_us: float
    n_graphs: int
    n_reused: int


def graph_stats(llm: llama_cpp.Llama) -> GraphStats:
    stats = _bindings.pcd_get_graph_stats(context(llm))
    return GraphStats(*(getattr(stats, field.name) for field in dataclasses.fields(GraphStats)))


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


def fill_cells(llm: llama_cpp.Llama, n: int) -> None:
    """Clear the memory and take n cells for sequence 0 without evaluating anything: their keys and values are zeros.

    Raises:
        UnsupportedError: this memory cannot, or has fewer cells.
        PCDError: the model is closed.
    """
    if not _bindings.pcd_fill_cells(context(llm), n):
        raise UnsupportedError(
            f"n is {n}; the cells of this context cannot be filled: it has {llm.n_ctx()}, or recurrent layers; "
            "use a model without those, or a larger n_ctx"
        )
    llm.n_tokens = n


def timed_steps(llm: llama_cpp.Llama, tokens: Sequence[int]) -> list[Step]:
    """Decode tokens one at a time behind what is in memory, each with its logits, and take them out again.

    Raises:
        PCDError: llama.cpp failed, or the model is closed.
    """
    ctx, n_past = context(llm), llm.n_tokens
    batch = llama_cpp.llama_batch_init(1, 0, 1)
    steps = []
    try:
        for i, token in enumerate(tokens):
            batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, token, n_past + i, True
            batch.n_seq_id[0], batch.seq_id[0][0] = 1, 0
            before, reused = graph_stats(llm), _n_reused(ctx)
            start = time.perf_counter()
            status = llama_cpp.llama_decode(ctx, batch)
            seconds = time.perf_counter() - start
            llama_cpp.llama_synchronize(ctx)
            if status != 0:
                raise PCDError(f"llama_decode returns {status} after {n_past + i} tokens")
            after = graph_stats(llm)
            steps.append(
                Step(
                    host_us=seconds * 1e6 - (after.t_graph_us - before.t_graph_us),
                    own_us=(after.t_own_ns - before.t_own_ns) / 1e3,
                    n_graphs=after.n_computed - before.n_computed,
                    n_reused=_n_reused(ctx) - reused,
                )
            )
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(ctx), 0, n_past, -1)
    return steps


def _n_reused(ctx: object) -> int:
    return int(llama_cpp.llama_perf_context(ctx).n_reused)
