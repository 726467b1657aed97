"""Temporary."""

from __future__ import annotations

import dataclasses
import random

from pypcd._prompt import Prompt
from pypcd.evaluation._sample import Sample

TASKS = ("kv", "kv-short")


@dataclasses.dataclass(frozen=True)
class KV:
    name: str
    groups: tuple[int, ...]
    metric: str = "accuracy"
    max_tokens: int = 12

    def samples(self, n, n_tokens, count, seed):
        n_pairs = max(4, (n_tokens - 60) // 11)
        rng = random.Random(f"kv {seed} {n_pairs} {self.groups}")
        ident = lambda: "-".join(f"{rng.getrandbits(4 * k):0{k}x}" for k in self.groups)
        out = []
        for i in range(n):
            pairs = {}
            while len(pairs) < n_pairs:
                pairs[ident()] = ident()
            keys = list(pairs)
            at = i * n_pairs // n
            out.append(
                Sample(
                    i,
                    Prompt(
                        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{",
                        tuple(f'"{k}": "{v}"' for k, v in pairs.items()),
                        ", ",
                        f'}}\n\n\nKey: "{keys[at]}"\nThe value associated with the specified key is: ',
                    ),
                    (pairs[keys[at]],),
                    at / max(n_pairs - 1, 1),
                )
            )
        return out

    def score(self, prediction, sample):
        return float(sample.answers[0] in prediction.split())


def task(name, *, data=None):
    return {"kv": KV("kv", (8, 4, 4, 4, 12)), "kv-short": KV("kv-short", (4, 4))}[name]
