"""A draft model: with PCD off it works as in llama_cpp, with PCD on it is refused, however the two come together."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import F32, SMALL, TOKENS, Load, Tiny
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import pypcd

PROMPT = TOKENS[:20] * 3  # what is looked up stands there


def written(llm: llama_cpp.Llama, n: int = 40, **kwargs: Any) -> list[int]:
    return list(itertools.islice(llm.generate(PROMPT, temp=0.0, **kwargs), n))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_with_pcd_off_it_is_llama_cpps(arch: str, tiny: Tiny, load: Load) -> None:
    """The same tokens as in llama_cpp, and as without drafts."""
    path = str(tiny(arch))
    stock = llama_cpp.Llama(
        path, verbose=False, logits_all=True, draft_model=LlamaPromptLookupDecoding(4), **{**SMALL, **F32}
    )
    with contextlib.closing(load(Path(path), False, draft_model=LlamaPromptLookupDecoding(4))) as opened:
        drafted = pickle.loads(pickle.dumps(opened))
    assert written(drafted) == written(stock) == written(load(Path(path), False))
    assert drafted.last_answer.n_tokens == 40
    stock.close()
    drafted.close()


WAYS: dict[str, Callable[[pypcd.Llama], Any]] = {
    "at opening": lambda llm: pypcd.Llama(llm.model_path, pcd="window", draft_model=llm.draft_model).close(),
    "assigned": lambda llm: setattr(llm, "pcd", "window"),
    "for a call": lambda llm: llm("a", pcd="window"),
    "for a stream": lambda llm: next(llm.generate(PROMPT, pcd="window")),
    "asked before": lambda llm: llm.check_pcd("window"),
    "a sequence's": lambda llm: llm.set_sequence_pcd(0, "window"),
}


@pytest.mark.parametrize("way", WAYS)
def test_pcd_is_refused_and_stays_off(way: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny(), False, draft_model=LlamaPromptLookupDecoding(4))
    with pytest.raises(
        pypcd.UnsupportedError, match="there is a draft model.*; set draft_model to None, or leave PCD off"
    ):
        WAYS[way](llm)
    assert llm.pcd is None
    wanted = written(load(tiny(), False))
    assert written(llm) == wanted
    llm.draft_model = None
    WAYS[way](llm)
