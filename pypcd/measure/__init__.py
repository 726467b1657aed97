"""What is measured of a machine and of the library on it: what PCD costs, and that the engine works.

    bench(path, methods_for(["pcd", "pcd:cache=shared"]), [512, 2048])     time and memory beside plain decoding's
    self_test(llm)                                                         identities that hold on any model

Knows nothing of tasks or answers.
"""

from pypcd.measure._bench import Measurement, bench, default_methods, methods_for
from pypcd.measure._selftest import self_test

__all__ = ["Measurement", "bench", "default_methods", "methods_for", "self_test"]
