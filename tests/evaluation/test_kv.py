"""Retrieve.KV against what InfiniteBench and PCD's authors published, and the sizes of its prompts."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypcd.evaluation.tasks.kv import KV, KV_OFFICIAL, KV_SHORT


def _asked(text: str) -> tuple[str, str]:
    """The JSON object and the key of a prompt."""
    match = re.search(r'JSON data:\n(\{.*\})\n\n\nKey: "(.*)"\nThe value associated', text)
    assert match
    return match.group(1), match.group(2)


OFFICIAL = "Extract the value corresponding to the specified key in the JSON object below."
UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SHORT = "[0-9a-f]{4}-[0-9a-f]{4}"  # what the demo model reads


@pytest.mark.parametrize(("kv", "form"), [(KV_OFFICIAL, UUID4), (KV_SHORT, SHORT)])
def test_the_prompt_is_infinitebenchs(kv: KV, form: str) -> None:
    assert KV_OFFICIAL.max_tokens == 50
    for sample in kv.questions(3, 20):
        context, key = _asked(sample.prompt.begun)
        assert sample.prompt.begun == (
            f'{OFFICIAL}\n\nJSON data:\n{context}\n\n\nKey: "{key}"\nThe value associated with the specified key is: '
        )
        assert sample.prompt.answer_prefix.startswith("The value") and not sample.prompt.shots
        pairs = json.loads(context)
        assert len(pairs) == 20 and all(re.fullmatch(form, text) for text in [*pairs, *pairs.values()])
        assert sample.answers == (pairs[key],)
        assert list(pairs.values())[-1] == sample.extra["nearest"]


@given(st.integers(1, 40), st.integers(2, 60))
def test_the_depth_sweeps_a_cell_evenly(n: int, n_pairs: int) -> None:
    places = [round((sample.depth or 0.0) * (n_pairs - 1)) for sample in KV_SHORT.questions(n, n_pairs)]
    assert places == [min(int(i * n_pairs / n), n_pairs) for i in range(n)]
    assert places[0] == 0 and places[-1] >= (n - 1) * n_pairs / n - 1
