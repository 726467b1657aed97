"""Measures on this machine what PCD costs, and checks that the engine works.

    bench(path, methods_for(["pcd", "pcd:paper:cache=shared"]), [512, 2048])     time and memory, next to plain decoding's
    placements(llm)                                                         which operations the CPU runs for PCD alone
    self_test(llm)                                                         identities that hold for any model

Knows nothing of tasks or answers.
"""

from pypcd.bench.measurement import DEFAULT_METHODS, Measurement, bench, methods_for
from pypcd.bench.placement import left_device, placements
from pypcd.bench.selftest import self_test

__all__ = [
    "DEFAULT_METHODS",
    "Measurement",
    "bench",
    "left_device",
    "methods_for",
    "placements",
    "self_test",
]
