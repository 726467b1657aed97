"""A draft model: with PCD off it works as in llama_cpp, with PCD on it is refused, however the two come together."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import Any

import llama_cpp
import pytest
from conftest import F32, SMALL, TOKENS, Load, Tiny
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import pypcd

PROMPT = TOKENS[:20] * 3  # what is looked up stands there


def written(llm: llama_cpp.Llama) -> list[int]:
    return list(itertools.islice(llm.generate(PROMPT, temp=0.0), 40))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_with_pcd_off_it_is_llama_cpps(arch: str, tiny: Tiny, load: Load) -> None:
    """The same tokens as in llama_cpp, and as without drafts."""
    drafts: dict[str, Any] = {"draft_model": LlamaPromptLookupDecoding(4)}
    opened = load(tiny(arch), False, **drafts)
    stock = llama_cpp.Llama(str(tiny(arch)), verbose=False, logits_all=True, **drafts, **SMALL, **F32)
    with contextlib.closing(stock), contextlib.closing(pickle.loads(pickle.dumps(opened))) as drafted:
        assert written(drafted) == written(stock) == written(load(tiny(arch), False))
        assert drafted.last_answer.n_tokens == 40


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: pypcd.Llama(llm.model_path, pcd="window", draft_model=llm.draft_model).close(),
        lambda llm: setattr(llm, "pcd", "window"),
        lambda llm: llm("a", pcd="window"),
        lambda llm: next(llm.generate(PROMPT, pcd="window")),
        lambda llm: llm.check_pcd("window"),
    ],
)
def test_pcd_is_refused_and_stays_off(use: Any, tiny: Tiny, load: Load) -> None:
    llm = load(tiny(), False, draft_model=LlamaPromptLookupDecoding(4))
    with pytest.raises(
        pypcd.UnsupportedError, match="there is a draft model.*; set draft_model to None, or leave PCD off"
    ):
        use(llm)
    assert llm.pcd is None and written(llm) == written(load(tiny(), False))
    llm.draft_model = None
    use(llm)


def test_one_that_is_assigned_while_pcd_is_on_is_refused(tiny: Tiny, load: Load) -> None:
    llm = load(tiny(), "window")
    llm.draft_model = LlamaPromptLookupDecoding(4)
    with pytest.raises(pypcd.UnsupportedError, match="there is a draft model"):
        next(llm.generate(PROMPT))
    llm.pcd = False
    assert written(llm) == written(load(tiny(), False))
