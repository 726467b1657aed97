"""Measures on this machine what PCD costs, and checks that the engine works.

    bench(path, methods_for(["pcd", "pcd:cache=shared"]), [512, 2048])     time and memory, next to plain decoding's
    bench(…, sequences=[1, 4, 16])                                         the same for several texts in one batch
    graph_costs(path, GRAPH_METHODS, [1024, 32768])                         the host's work, next to plain decoding's
    placements(llm)                                                         which operations the CPU runs, next to plain decoding
    self_test(llm)                                                         identities that hold for any model

Knows nothing of tasks or answers.
"""

from pypcd.bench.graph import GRAPH_METHODS, GraphCost, graph_costs
from pypcd.bench.measurement import SEQUENCES, Measurement, all_methods, bench, default_methods, methods_for
from pypcd.bench.placement import Placement, left_device, placements
from pypcd.bench.selftest import self_test

__all__ = [
    "GRAPH_METHODS",
    "SEQUENCES",
    "GraphCost",
    "Measurement",
    "Placement",
    "all_methods",
    "bench",
    "default_methods",
    "graph_costs",
    "left_device",
    "methods_for",
    "placements",
    "self_test",
]
