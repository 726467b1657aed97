"""The limits of the tests are measured on every machine; this tests that they still catch errors."""

from __future__ import annotations

import arch_checks
import llama_cpp
import numpy as np
import pytest
from batches import CACHES
from conftest import TOKENS, Load, Tiny, native_row, reference, rounding, tolerance
from reference import rho
from tiny_gguf import ROPE_ARCHS

LAST = len(TOKENS) - 1


def table(n_rot: int, base_ratio: float = 1e-4) -> np.ndarray:
    return rho(n_rot, alpha=0.2, base_ratio=base_ratio)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("arch", ROPE_ARCHS)
def test_a_base_that_is_one_percent_off_is_beyond_every_limit(arch: str, cache: str, tiny: Tiny) -> None:
    """With flash attention and a float16 cache, where numbers have three digits, three percent are caught."""
    path = tiny(arch)
    ref = reference(path)
    row, near, far = (
        ref.twin(TOKENS, LAST, rho=lambda n, off=off: table(n, 1e-4 * off), cache=cache) for off in (1.0, 1.01, 1.03)
    )
    for limit in (tolerance(path), rounding(path)):
        assert limit < apart(row, near) / 5
    for flash_attn in (False, True):
        assert tolerance(path, f16=True, flash_attn=flash_attn) < apart(row, far)


@pytest.mark.parametrize("arch", ROPE_ARCHS)
def test_one_wrong_key_of_120_is_beyond_every_limit(arch: str, tiny: Tiny) -> None:
    """A cell in the middle of the text with its neighbour's keys."""
    path = tiny(arch)
    ref = reference(path)
    over, memory = table(ref.n_rot), ref._evaluate(TOKENS[:LAST])[1]
    row = ref._evaluate(TOKENS[LAST:], over, memory, over)[0][0]
    wrong = [(np.concatenate([k[:50], k[51:52], k[51:]]), v) for k, v in memory]
    other = ref._evaluate(TOKENS[LAST:], over, wrong, over)[0][0]
    for limit in (tolerance(path), rounding(path)):
        assert limit < apart(row, other) / 3


def test_a_key_that_stock_turned_to_another_position_is_beyond_rounding(tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    stock, moved = load(path, False), load(path, False)
    for llm in (stock, moved):
        llm.eval(TOKENS[:50])
    memory = llama_cpp.llama_get_memory(moved.ctx)
    llama_cpp.llama_memory_seq_add(memory, 0, 20, 21, 1)
    for llm in (stock, moved):
        llm.eval(TOKENS[50:51])
    assert apart(native_row(stock), native_row(moved)) > 5 * rounding(path)


# --- those of arch_checks ---


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> arch_checks.Model:
    return arch_checks.Model(tiny("llama"))


@pytest.mark.parametrize("reading", arch_checks.READINGS)
def test_the_checks_of_an_architecture_pass_and_notice_a_wrong_oracle(
    reading: str, model: arch_checks.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = arch_checks.check(model, reading, arch_checks.TWINS_AT)
    assert got["status"] == "supported" and "oracle" in got
    if reading == "window":
        monkeypatch.setattr(arch_checks, "WINDOW", {"perturbation": "none", "window": 13})
    else:
        monkeypatch.setattr(arch_checks, "RATIO", arch_checks.RATIO * 1.01)
    wrong = arch_checks.check(model, reading, arch_checks.TWINS_AT)
    assert wrong["status"] == "wrong" and wrong["wrong"] == ["oracle"]
