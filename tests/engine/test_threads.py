"""The number of threads: what a model is opened with, and that rows do not depend on it."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import llama_cpp
import pytest
from conftest import TOKENS, Tiny

import pypcd
from pypcd import engine
from pypcd.llama import machine


def in_force(llm: pypcd.Llama) -> tuple[int, int]:
    return llama_cpp.llama_n_threads(llm.ctx), llama_cpp.llama_n_threads_batch(llm.ctx)


@pytest.mark.parametrize(
    ("cores", "given", "wanted"),
    [
        (3, {}, (3, 3)),
        (16, {}, (8, 16)),  # beyond four, half of them are mostly hyper-threads
        (16, {"n_threads": 2}, (2, 2)),
        (16, {"n_threads": 2, "n_threads_batch": 1}, (2, 1)),
        (16, {"n_threads_batch": 2}, (8, 2)),
    ],
)
def test_numbers_that_are_given_or_the_usual_ones_also_where_a_pickled_model_is_opened_again(
    cores: int, given: dict[str, int], wanted: tuple[int, int], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "n_cores", lambda: cores)
    with contextlib.closing(pypcd.Llama(tiny("llama"), n_ctx=256, n_gpu_layers=0, **given)) as llm:
        assert in_force(llm) == wanted
        text = pickle.dumps(llm)
    monkeypatch.setattr(machine, "n_cores", lambda: 1)
    with contextlib.closing(pickle.loads(text)) as llm:
        assert in_force(llm) == (given.get("n_threads", 1), given.get("n_threads_batch", given.get("n_threads", 1)))


@pytest.mark.parametrize(
    "pcd", [False, "evaluation=fused", "cache=separate", "window=20:perturbation=none:evaluation=fused"]
)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_without_flash_attention_rows_do_not_depend_on_the_number(arch: str, pcd: Any, tiny: Tiny) -> None:
    """So a run that is repeated, or continued, may have another one."""
    rows = []
    for n in (1, 2, 3):
        options = {"n_threads": n, "n_threads_batch": n, "n_gpu_layers": 0, "flash_attn": False}
        with contextlib.closing(pypcd.Llama(tiny(arch), pcd=pcd, n_ctx=512, **options)) as llm:
            llm.eval((TOKENS * 5)[:300])
            llm.eval(TOKENS[:1])
            rows.append(engine.row(llm).tolist())
    assert rows[0] == rows[1] == rows[2]
