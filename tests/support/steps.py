"""Single decode steps, with what the library counts of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import llama_cpp

import pypcd
from pypcd.engine import _bindings


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


def graph_stats(llm: pypcd.Llama) -> GraphStats:
    stats = _bindings.pcd_get_graph_stats(llm.ctx)
    return GraphStats(*(getattr(stats, field.name) for field in dataclasses.fields(GraphStats)))


def fill_cells(llm: pypcd.Llama, n: int) -> None:
    """Clear the memory and take n cells for sequence 0 without evaluating anything: their keys and values are zeros."""
    assert _bindings.pcd_fill_cells(llm.ctx, n)
    llm.n_tokens = n


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


def timed_steps(llm: pypcd.Llama, tokens: Sequence[int]) -> list[Step]:
    """Decode tokens one at a time behind what is in memory, each with its logits, and take them out again."""
    ctx, n_past = llm.ctx, llm.n_tokens
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
            assert status == 0, n_past + i
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
