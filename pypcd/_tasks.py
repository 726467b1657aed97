"""Questions with known answers, made from a seed. Knows nothing of models."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

__all__ = ["Sample", "kv_retrieval"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        prompt: what the model reads.
        answer: what it should write.
        nearest: the value that stands last before the question: what a pull towards the near would give.
        depth: where the answer stands in the context, 0 at its start to 1 at its end.
    """

    prompt: str
    answer: str
    nearest: str
    depth: float


def kv_retrieval(
    n_samples: int, n_pairs: int, *, groups: tuple[int, ...] = (8, 4, 4, 4, 12), seed: int = 0
) -> Iterator[Sample]:
    """InfiniteBench's Retrieve.KV with its official prompt; the answer's depth sweeps the context evenly.

    Args:
        n_pairs: key-value pairs in the JSON object.
        groups: hexadecimal digits in each dash-separated group of a key or value; the default is a UUID's shape.
    """
    rng = random.Random(f"kv {seed} {n_pairs} {groups}")

    def identifier() -> str:
        return "-".join(f"{rng.getrandbits(4 * n):0{n}x}" for n in groups)

    for i in range(n_samples):
        pairs: dict[str, str] = {}
        while len(pairs) < n_pairs:
            pairs[identifier()] = identifier()
        keys = list(pairs)
        at = i * n_pairs // n_samples
        data = ", ".join(f'"{key}": "{value}"' for key, value in pairs.items())
        prompt = (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f"JSON data:\n{{{data}}}\n\n\n"
            f'Key: "{keys[at]}"\nThe value associated with the specified key is: '
        )
        yield Sample(prompt, pairs[keys[at]], pairs[keys[-1]], at / max(n_pairs - 1, 1))
