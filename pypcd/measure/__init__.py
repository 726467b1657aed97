"""Measures on this machine what PCD costs, and checks that the engine works.

    bench(path, methods_for(["pcd", "pcd:cache=shared"]), [512, 2048])     time and memory, next to plain decoding's
    bench(…, sequences=[1, 4, 16])                                         the same for several texts in one batch
    self_test(llm)                                                         identities that hold for any model

Knows nothing of tasks or answers.
"""

from pypcd.measure._bench import SEQUENCES, Measurement, bench, default_methods, methods_for
from pypcd.measure._selftest import self_test

__all__ = ["SEQUENCES", "Measurement", "bench", "default_methods", "methods_for", "self_test"]
