"""Checks the oracle: its standard row against llama.cpp, its twins against stock operations of llama.cpp
(another base, other factors, a loaded state, a K-shift), its tables and contrast against worked numbers; and that the limits of the
tests, which are measured on every machine, still catch errors.

The engine runs without PCD in the first part, which is stock llama.cpp."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import arch_checks
import llama_cpp
import numpy as np
import pytest
from conftest import F32, TOKENS, Load, Tiny, close, native_row, reference, rounding, tolerance
from reference import contrast, rho
from test_engine import CONTEXT, SCALED
from tiny_gguf import ARCHS, ATTENTION_ARCHS, ROPE_ARCHS

from pypcd.settings.fields import Cache

CACHES = get_args(Cache)
LAST = len(TOKENS) - 1
MORE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"yarn": (4.0, 4096), "n_embd": 128}),
    ("gemma3", {"yarn": (4.0, 64)}),
    ("bloom", {"n_head": 6, "n_embd": 96}),
]
CASES = [*((arch, {}) for arch in ATTENTION_ARCHS), *SCALED.values(), *MORE]
CASE_IDS = ["-".join([arch, *kw]) for arch, kw in CASES]


def table(n_rot: int, base_ratio: float = 1e-4) -> np.ndarray:
    """The paper's table."""
    return rho(n_rot, alpha=0.2, base_ratio=base_ratio)


def engine(path: Path, **kwargs: Any) -> Any:
    common = {"verbose": False, "logits_all": True, "n_ctx": 512, "n_threads": 2, "n_gpu_layers": 0}
    return llama_cpp.Llama(str(path), **common, **F32, **kwargs)


def logits(llm: Any, tokens: list[int]) -> np.ndarray:
    """Evaluate `tokens` after those in the context; float64[len(tokens), n_vocab]."""
    start = llm.n_tokens
    llm.eval(tokens)
    return np.array(llm.scores[start : llm.n_tokens], dtype=np.float64)


# --- the models ---


@pytest.mark.parametrize("arch", ARCHS)
def test_every_tiny_model_loads_speaks_and_spreads_its_logits(arch: str, tiny: Tiny) -> None:
    llm = engine(tiny(arch))
    text = "Naïve tests, ✓ 123\n  of anything"
    tokens = llm.tokenize(text.encode())
    assert llm.detokenize(tokens).decode() == text
    rows = logits(llm, tokens)
    assert np.isfinite(rows).all()
    assert 1.0 < rows.std() < 3.0
    assert (llm.scores[: len(tokens)].argmax(axis=1) != llm.token_eos()).all()


# --- the standard row is llama.cpp's ---


@pytest.mark.parametrize(
    ("arch", "kwargs", "context"),
    [*((*case, {}) for case in CASES), *((arch, {}, CONTEXT) for arch in ("llama", "qwen2", "gemma2", "gemma3"))],
    ids=[*CASE_IDS, *(f"{arch}-context" for arch in ("llama", "qwen2", "gemma2", "gemma3"))],
)
def test_standard_row(arch: str, kwargs: dict[str, Any], context: dict[str, float], tiny: Tiny) -> None:
    """Also with a context's own base and scale. llama_cpp.Llama keeps a full cache for sliding layers by default; a short
    one must work as well."""
    path = tiny(arch, **kwargs)
    for options in ({}, {"swa_full": False, "n_batch": 32, "n_ubatch": 32}) if arch.startswith("gemma") else ({},):
        rows = logits(engine(path, **options, **context), TOKENS)
        close(reference(path, cpu_rounding=True, **context).standard(TOKENS), rows, rounding(path, **context))


@pytest.mark.parametrize("weight_type", ["F16", "Q8_0", "Q4_0"])
def test_standard_row_with_coarse_weights(weight_type: str, tiny: Tiny) -> None:
    """The weights are the same; the difference is how ggml rounds the activations that it multiplies them with."""
    path = tiny("llama", weight_type=weight_type)
    expected, rows = reference(path, cpu_rounding=True).standard(TOKENS), logits(engine(path), TOKENS)
    assert ((expected - rows) ** 2).mean() < 2e-3 * (expected**2).mean()


# --- the twins are llama.cpp's, put together by hand ---


def with_frequencies(tiny: Tiny, factor: Callable[[np.ndarray], np.ndarray]) -> Path:
    """The same llama with every frequency multiplied by factor(rho); 0 means no rotation."""
    with np.errstate(divide="ignore"):
        freqs = np.minimum(1.0 / factor(table(16)), 1e30)
    return tiny("llama", rope_freqs=freqs)


def test_separate_is_a_model_with_other_frequency_factors(tiny: Tiny) -> None:
    ref, other = reference(tiny("llama")), with_frequencies(tiny, lambda r: r)
    rows = logits(engine(other), TOKENS)
    for i in (0, 1, 17, LAST):
        close(ref.twin(TOKENS, i, rho=table, cache="separate"), rows[i], rounding(other))


@pytest.mark.parametrize(("arch", "kwargs"), [("qwen2", {}), ("llama", {"linear_scale": 2.0})], ids=["qwen2", "linear"])
def test_separate_without_transition_is_a_context_with_another_base(
    arch: str, kwargs: dict[str, Any], tiny: Tiny
) -> None:
    path = tiny(arch, **kwargs)
    over = reference(path).twin(TOKENS, LAST, rho=lambda n: rho(n, 0.2, 0.01, "none"), cache="separate")
    close(over, reference(path, rope_freq_base=100.0).standard(TOKENS)[-1], 1e-11)
    close(over, logits(engine(path, rope_freq_base=100.0), TOKENS)[-1], rounding(path, rope_freq_base=100.0))


def test_shared_is_the_standard_cache_loaded_into_the_other_model(tiny: Tiny) -> None:
    path = tiny("llama")
    llm, other = engine(path), engine(with_frequencies(tiny, lambda r: r))
    llm.eval(TOKENS[:-1])
    other.load_state(llm.save_state())
    close(reference(path).twin(TOKENS, LAST, rho=table, cache="shared"), logits(other, TOKENS[-1:])[0], rounding(path))


def test_rerotated_is_a_k_shift_by_the_difference_table(tiny: Tiny) -> None:
    """Stock operations only: a context that rotates by theta* - theta shifts each key by its own position
    (to 2n), one without rotation moves the position back to n, and the over-rotated model reads it."""
    path = tiny("llama")
    llm = engine(path)
    turn = engine(with_frequencies(tiny, lambda r: r - 1))
    still = engine(with_frequencies(tiny, lambda r: 0 * r))
    over = engine(with_frequencies(tiny, lambda r: r))

    def shift(target: Any, moves: list[tuple[int, int]]) -> None:
        memory = llama_cpp.llama_get_memory(target.ctx)
        for position, delta in moves:
            llama_cpp.llama_memory_seq_add(memory, 0, position, position + 1, delta)
        # the shift is done before the next decode: of a token after all others, which is dropped again
        target.n_tokens = llama_cpp.llama_memory_seq_pos_max(memory, 0) + 1
        target.eval([5])
        llama_cpp.llama_memory_seq_rm(memory, 0, target.n_tokens - 1, -1)
        target.n_tokens = LAST

    llm.eval(TOKENS[:-1])
    turn.load_state(llm.save_state())
    shift(turn, [(n, n) for n in reversed(range(LAST))])  # from the top down, so that no cell runs into another
    still.load_state(turn.save_state())
    shift(still, [(2 * n, -n) for n in range(LAST)])
    over.load_state(still.save_state())
    close(
        reference(path).twin(TOKENS, LAST, rho=table), logits(over, TOKENS[-1:])[0], 3 * rounding(path)
    )  # each key is rotated three times


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "bloom", "gpt2"])
def test_a_window_is_a_cache_with_the_middle_removed(arch: str, tiny: Tiny) -> None:
    path = tiny(arch)
    llm = engine(path)
    llm.eval(TOKENS[:-1])
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, 3, LAST - 10 + 1)
    row = reference(path, cpu_rounding=True).twin(TOKENS, LAST, window=10, n_sink=3)
    close(row, logits(llm, TOKENS[-1:])[0], rounding(path))


# --- exact identities ---


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("arch", "kwargs"), CASES, ids=CASE_IDS)
def test_a_twin_that_differs_in_nothing_is_the_standard_row(
    arch: str, kwargs: dict[str, Any], cache: str, tiny: Tiny
) -> None:
    ref = reference(tiny(arch, **kwargs))
    rows = ref.standard(TOKENS[:41])
    for i in (0, 40):  # sliding windows hide something at 40
        close(ref.twin(TOKENS, i, cache=cache), rows[i], 1e-12)
        close(ref.twin(TOKENS, i, cache=cache, window=i + 1, n_sink=0), rows[i], 1e-12)
        if arch in ROPE_ARCHS:
            close(ref.twin(TOKENS, i, rho=lambda n: rho(n, 0.0, 1e-4), cache=cache), rows[i], 1e-12)
            close(ref.twin(TOKENS, i, rho=lambda n: rho(n, 0.2, 1.0), cache=cache), rows[i], 1e-12)


@pytest.mark.parametrize("arch", ROPE_ARCHS)
def test_over_rotation_moves_the_logits_but_not_where_there_is_one_key(arch: str, tiny: Tiny) -> None:
    """A single position rotates its q and k by the same angle, and a softmax over one key is 1."""
    ref = reference(tiny(arch))
    rows = [ref.standard(TOKENS)[-1], *(ref.twin(TOKENS, LAST, rho=table, cache=cache) for cache in CACHES)]
    assert all(np.std(a - b) > 0.1 for a, b in itertools.combinations(rows, 2))
    close(ref.twin(TOKENS, 0, rho=table), ref.standard(TOKENS[:1])[0], 1e-12)
    close(ref.twin(TOKENS, 40, rho=table, window=1, n_sink=0), ref.standard(TOKENS[40:41])[0], 1e-12)


# --- worked by hand ---


def test_rho_by_hand() -> None:
    # d = 4: j = 1 has frequency 1 under any base, so rho = 1; j = 2 has x = 1, ratio 1e-4^(-1/2) = 100
    t = 2 - math.exp(0.2)
    np.testing.assert_allclose(rho(4, 0.2, 1e-4), [1.0, t + (1 - t) * 100.0], rtol=1e-14)
    np.testing.assert_allclose(rho(4, 0.2, 1e-4), [1.0, 22.918873], rtol=1e-7)
    np.testing.assert_allclose(rho(4, 0.2, 1e-4, "none"), [1.0, 100.0], rtol=1e-14)


def test_rho_gives_the_papers_frequencies() -> None:
    d, base, ratio, alpha = 128, 10000.0, 1e-4, 0.2
    theta = base ** (-2 * np.arange(d // 2) / d)
    theta_over = (ratio * base) ** (-2 * np.arange(d // 2) / d)
    t = 2 - np.exp(alpha * np.arange(1, d // 2 + 1) / (d // 2))
    np.testing.assert_allclose(rho(d, alpha, ratio) * theta, t * theta + (1 - t) * theta_over, rtol=1e-13)
    assert (rho(d, alpha, ratio) >= 1.0 - 1e-15).all()


def test_contrast_by_hand() -> None:
    standard, over = np.array([1.0, 3.0, 2.0, 0.0]), np.array([2.0, 2.0, 2.5, -9.0])
    inf = np.inf
    assert contrast(standard, over, beta=1.0, gamma=2).tolist() == [-inf, 4.0, 1.5, -inf]
    assert contrast(standard, over, beta=0.0, gamma=3).tolist() == [1.0, 3.0, 2.0, -inf]
    assert contrast(standard, over, beta=2.5, gamma=99).tolist() == [-1.5, 5.5, 0.75, 22.5]
    # exp(2 - 3) = 0.368 and exp(1 - 3) = 0.135 of the largest probability
    assert contrast(standard, over, beta=1.0, gamma=4, relative_top=0.3).tolist() == [-inf, 4.0, 1.5, -inf]
    assert contrast(standard, over, beta=1.0, gamma=4, relative_top=0.4).tolist() == [-inf, 4.0, -inf, -inf]
    assert contrast(standard, over, beta=1.0, gamma=1, relative_top=0.1).tolist() == [-inf, 4.0, -inf, -inf]
    # of equal logits the lower token id stays
    assert contrast(np.ones(4), np.zeros(4), beta=1.0, gamma=2).tolist() == [2.0, 2.0, -inf, -inf]


# --- the limits of the tests ---


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
