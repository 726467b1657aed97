"""The generated questions, against InfiniteBench's published format."""

from __future__ import annotations

import hashlib
import json
import re

from pypcd._cli import demo
from pypcd._tasks import kv_retrieval


def test_the_prompt_is_infinitebenchs() -> None:
    sample = next(kv_retrieval(5, 20))
    match = re.fullmatch(
        r"Extract the value corresponding to the specified key in the JSON object below\.\n\n"
        r'JSON data:\n(\{.*\})\n\n\nKey: "(.*)"\nThe value associated with the specified key is: ',
        sample.prompt,
    )
    assert match
    pairs = json.loads(match.group(1))
    assert len(pairs) == 20
    assert pairs[match.group(2)] == sample.answer
    assert list(pairs.values())[-1] == sample.nearest
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) for text in [*pairs, *pairs.values()])


def test_the_answers_depth_sweeps_the_context() -> None:
    depths = [sample.depth for sample in kv_retrieval(10, 50)]
    assert depths == [i * 5 / 49 for i in range(10)]


def test_a_seed_gives_the_same_questions_and_another_seed_others() -> None:
    first, again, other = (list(kv_retrieval(3, 8, groups=(4, 4), seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert all(a.prompt != b.prompt for a, b in zip(first, other))


def test_the_demos_questions_are_those_of_its_published_figures() -> None:
    digest = hashlib.sha256()
    for n_pairs in demo.PAIRS:
        for n, seed in ((75, 0), (demo.N_POOL, 1)):
            for sample in kv_retrieval(n, n_pairs, groups=(4, 4), seed=seed):
                parts = (sample.prompt, sample.answer, sample.nearest, repr(sample.depth))
                digest.update("\0".join(parts).encode())
    assert digest.hexdigest() == "3bdb5f69313e07e4179b250f4f346058079900035b0870b430dfe26aabb42efa"
