"""The work that PCD adds around the computation: nodes and parts of a graph, how often it is used again, bytes copied, and
microseconds of the host's own time for each token.

The cache is filled without evaluating anything, so any number of cells takes seconds. Host time is the time in llama_decode
less the time of computing graphs, which the library counts; and of that, it counts the time in PCD's own code. Two figures say
what PCD adds. The time in its own code has nothing else in it. The difference to the same context with PCD off, in the same
rounds, also has what llama.cpp does more because a batch has a second token; but llama.cpp's own walk over all cells varies with
what the computation leaves in the CPU's caches, by more than PCD's whole work. Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import engine, llama
from pypcd.bench.placement import OFF, is_whole, left_device, on_device
from pypcd.config import PCDConfig
from pypcd.decode import setting_of

__all__ = ["GRAPH_METHODS", "GraphCost", "graph_costs"]

GRAPH_METHODS = ("pcd", "pcd:cache=shared", "pcd:cache=separate", "pcd:window")
WARM_UP = 2  # untimed steps: second keys are derived, the graph is built


@dataclasses.dataclass(frozen=True)
class GraphCost:
    """One method with one number of used cells.

    Attributes:
        method: "off" or "pcd:...".
        n_cells: used cells, and tokens before the first step.
        n_tokens: tokens in the last graph of a step, which is what the next two and the bytes are of: 1, or 0 where the
            twin was evaluated by itself.
        n_twins: twins in it.
        n_nodes: operations in it.
        n_splits: its parts that run on one device each.
        reused: share of graphs that were used again, of the timed steps.
        host_us: microseconds of a step outside of computing graphs, median.
        own_us: of these, in PCD's own code, median.
        added_us: host_us less that of "off"; None for "off".
        bytes_in: inputs of the graph, copied to a device with memory of its own.
        bytes_out: logits, copied back.
        left: operations of a step that the CPU ran, more than with "off", although the whole model is on other devices:
            "OPERATION of name", and how often; None where it is not, and so nothing can have left them.
    """

    method: str
    n_cells: int
    n_tokens: int
    n_twins: int
    n_nodes: int
    n_splits: int
    reused: float
    host_us: float
    own_us: float
    added_us: float | None
    bytes_in: int
    bytes_out: int
    left: dict[str, int] | None


def graph_costs(
    model: str,
    methods: Sequence[str],
    cells: Sequence[int],
    *,
    n_tokens: int = 16,
    rounds: int = 5,
    flash_attn: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> Iterator[GraphCost]:
    """Measure methods, "off" first, with each number of used cells, the smallest first.

    Args:
        model: a model path.
        methods: "pcd:..." with any setting.
        cells: used cells before the first step.
        n_tokens: timed steps in a round.
        rounds: interleaved repetitions.
        flash_attn: for all of them.
        kwargs: passed to pypcd.Llama.

    Raises:
        ValueError: a method is not PCD.
        UnsupportedError: the model cannot run a setting, or its memory cannot be filled.
    """
    configs: dict[str, PCDConfig | None] = {OFF: None, **{name: setting_of(name) for name in methods}}
    n_ctx = max(cells) + WARM_UP + n_tokens + 64
    llm = llama.Llama(model, n_ctx=n_ctx, flash_attn=flash_attn, **kwargs)
    try:
        tokens = np.random.default_rng(0).integers(3, llm.n_vocab(), WARM_UP + n_tokens).tolist()
        for n in sorted(cells):
            steps: dict[str, list[engine.Step]] = {name: [] for name in configs}
            graphs: dict[str, engine.GraphStats] = {}
            for i in range(rounds):
                for name, config in configs.items():
                    progress(f"{n} cells, round {i + 1} of {rounds}, {name}")
                    llm.pcd = config and config.repeatable()
                    engine.fill_cells(llm, n)
                    steps[name] += engine.timed_steps(llm, tokens)[WARM_UP:]
                    graphs[name] = engine.graph_stats(llm)
            ran = dict(_watched(llm, configs, n, tokens[:1])) if is_whole(llm) else {}
            host = {name: statistics.median(step.host_us for step in done) for name, done in steps.items()}
            for name, done in steps.items():
                yield GraphCost(
                    method=name,
                    n_cells=n,
                    n_tokens=graphs[name].n_tokens - graphs[name].n_twins,
                    n_twins=graphs[name].n_twins,
                    n_nodes=graphs[name].n_nodes,
                    n_splits=graphs[name].n_splits,
                    reused=sum(step.n_reused for step in done) / sum(step.n_graphs for step in done),
                    host_us=host[name],
                    own_us=statistics.median(step.own_us for step in done),
                    added_us=None if name == OFF else host[name] - host[OFF],
                    bytes_in=graphs[name].bytes_in,
                    bytes_out=graphs[name].bytes_out,
                    left=left_device(ran[name], ran[OFF]) if on_device(ran.get(OFF, ())) else None,
                )
    finally:
        llm.close()


def _watched(
    llm: llama.Llama, configs: dict[str, PCDConfig | None], n: int, tokens: Sequence[int]
) -> Iterator[tuple[str, list[engine.Graph]]]:
    """The graphs of steps, apart from the timed ones: to be told of them takes time."""
    for name, config in configs.items():
        llm.pcd = config and config.repeatable()
        engine.fill_cells(llm, n)
        with engine.watch_graphs(llm) as graphs:
            engine.timed_steps(llm, tokens)
        yield name, graphs
