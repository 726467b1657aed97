"""Gate 0: with PCD off every logit equals stock llama.cpp's, bit for bit; and settings without effect change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import EVALUATIONS
from conftest import F32, SMALL, TOKENS, Tiny, greedy, run_python
from tiny_gguf import ARCHS, ATTENTION_ARCHS, ROPE_ARCHS

import pypcd
from pypcd import engine

STOCK = """
import itertools, json, os, sys
import llama_cpp, numpy as np
lib = llama_cpp.llama_cpp._lib
assert os.path.samefile(os.path.dirname(lib._name), os.path.join(os.path.dirname(llama_cpp.__file__), "lib")), lib._name
assert not hasattr(lib, "llama_pcd_version")
out, *cases = json.load(open(sys.argv[1]))
for i, (path, kwargs, tokens) in enumerate(cases):
    llm = llama_cpp.Llama(path, verbose=False, logits_all=True, **kwargs)
    llm.eval(tokens)
    rows = llm.scores[: len(tokens)].copy()
    np.savez(f"{out}/{i}.npz", rows=rows, greedy=list(itertools.islice(llm.generate(tokens[:40], temp=0.0), 20)))
    llm.close()
"""
GATE0: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in ARCHS},
    "llama-f32": ("llama", F32),
    "qwen3-flash": ("qwen3", {"flash_attn": True}),
    "gemma3-short": ("gemma3", {"swa_full": False, "n_ubatch": 32}),
    "llama-q8_0-keys": ("llama", {"type_k": llama_cpp.GGML_TYPE_Q8_0, "n_embd": 256}),
    **{f"{arch}-{kind}": (arch, {"weight_type": kind}) for arch in ("llama", "gemma3") for kind in ("Q4_0", "Q8_0")},
}
AMX = engine.configure_amx()
if AMX.exists and not AMX.on:  # the stock library crashes on quantised weights, and cannot leave AMX out
    GATE0 = {name: case for name, case in GATE0.items() if "weight_type" not in case[1]}


def stock_rows(folder: Path, cases: list[tuple[Path, dict[str, Any]]]) -> list[Any]:
    """All rows of TOKENS, and greedy tokens, of models with such arguments; the stock library has a process of its own."""
    file = folder / "cases.json"
    file.write_text(json.dumps([str(folder), *((str(path), kwargs, TOKENS) for path, kwargs in cases)]))
    done = run_python(STOCK, file, timeout=1200)
    assert done.returncode == 0, done.stderr
    return [np.load(folder / f"{i}.npz") for i in range(len(cases))]


@pytest.fixture(scope="module")
def stock(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """name -> (path, arguments, rows, greedy tokens) of the stock library."""
    cases = []
    for arch, kwargs in GATE0.values():
        kwargs = {**SMALL, **kwargs}
        model = {name: kwargs.pop(name) for name in ("n_embd", "weight_type") if name in kwargs}
        cases.append((tiny(arch, **model), kwargs))
    found = stock_rows(tmp_path_factory.mktemp("stock"), cases)
    return {name: (*case, r["rows"], r["greedy"].tolist()) for name, case, r in zip(GATE0, cases, found)}


@pytest.mark.parametrize("kind", ["native", "stock"])
@pytest.mark.parametrize("name", GATE0)
def test_with_pcd_off_every_logit_is_stock_llama_cpps_bit_for_bit(name: str, kind: str, stock: dict[str, Any]) -> None:
    """Before it was on for the first time, and afterwards."""
    path, kwargs, rows, tokens = stock[name]
    llm, arch = pypcd.Llama(path, engine=kind, logits_all=True, **kwargs), GATE0[name][0]
    has_twins = arch in ATTENTION_ARCHS and (kind == "native" or kwargs.get("swa_full", True))
    over_rotated = "paper:cache=shared" if (kind, name) == ("stock", "llama-q8_0-keys") else "paper"
    for was_on in (False, True) if has_twins else (False,):
        if was_on:
            llm.pcd = over_rotated if arch in ROPE_ARCHS else "window:window=8"
            assert greedy(llm) != tokens or arch not in ROPE_ARCHS
            llm.pcd = False
        llm.reset()
        llm.eval(TOKENS)
        assert np.array_equal(llm.scores[: len(TOKENS)], rows)
        assert greedy(llm) == tokens


@pytest.mark.parametrize(
    "setting", [{"beta": 0}, {"gamma": 1}, {"relative_top": 1}, {"beta": 0, "window": 9, "cache": "shared"}], ids=str
)
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_beta_0_or_a_single_token_in_play_is_stock_greedy_decoding(
    setting: dict[str, Any], evaluation: str, stock: dict[str, Any]
) -> None:
    for name in ("llama", "qwen3", "llama-f32"):
        path, kwargs, _, tokens = stock[name]
        llm = pypcd.Llama(path, pcd=pypcd.PCDConfig(**setting, evaluation=evaluation), **kwargs)
        assert greedy(llm) == tokens
