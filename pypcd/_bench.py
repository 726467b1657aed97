"""Times plain decoding and every way of PCD side by side: same process, same model, interleaved rounds.

Figures are medians over rounds of a mode's time divided by plain decoding's time in the same round, plain in its own
fastest setting (flash attention on or off, whichever was quicker). Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np

from pypcd import _llama
from pypcd._config import PCDConfig

__all__ = ["Measurement", "bench", "modes_for"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One mode at one context length.

    Attributes:
        mode: "plain" or a mode's name.
        n_past: tokens in the cache.
        flash_attn: the flash attention setting it ran with (each mode in its faster one).
        tokens_per_second: decoding one token at a time, median.
        ratio: time per token over plain's, median of rounds; 1 for plain.
        prefill_ratio: time of a fresh 512-token prompt over plain's.
        kv_bytes: keys and values of the context, second keys included.
    """

    mode: str
    n_past: int
    flash_attn: bool
    tokens_per_second: float
    ratio: float
    prefill_ratio: float
    kv_bytes: int


def modes_for(names: Sequence[str]) -> dict[str, PCDConfig | None]:
    """The named modes: plain, rerotated, shared, window, each PCD mode also with -alternate behind it."""
    known: dict[str, PCDConfig | None] = {"plain": None}
    for name, config in (("rerotated", PCDConfig()), ("shared", PCDConfig(cache="shared")), ("window", PCDConfig.windowed())):
        known[name] = config
        known[f"{name}-alternate"] = config.replace(evaluation="alternate")
        known[f"{name}-cautious"] = config.replace(evaluation="alternate", relative_top=0.1)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no mode {unknown[0]!r}; allowed: {', '.join(known)}")
    return {"plain": None, **{name: known[name] for name in names}}


def bench(
    model: str,
    modes: dict[str, PCDConfig | None],
    lengths: Sequence[int],
    *,
    n_tokens: int = 16,
    rounds: int = 5,
    flash_attn: Sequence[bool] = (False, True),
    progress: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> Iterator[Measurement]:
    """Measure every mode at every context length, shortest first.

    Args:
        model: a model path.
        modes: names and settings; "plain" is measured in any case.
        lengths: tokens in the cache when decoding starts.
        n_tokens: tokens decoded per round and mode.
        rounds: interleaved repetitions.
        flash_attn: settings to try; each mode is reported in its faster one.
        kwargs: passed on to pypcd.Llama.
    """
    rng = np.random.default_rng(0)
    n_ctx = max(lengths) + n_tokens + 8
    models = {}
    for fa in flash_attn:
        progress(f"loading (flash attention {'on' if fa else 'off'})")
        models[fa] = _llama.Llama(model, n_ctx=n_ctx, flash_attn=fa, **kwargs)
    tokens = rng.integers(3, next(iter(models.values())).n_vocab(), n_ctx).tolist()

    prefill = _prefill_ratios(models, modes, tokens[: min(512, min(lengths))], progress)
    plain_kv = {fa: llm_kv_bytes(llm) for fa, llm in models.items()}

    for n_past in sorted(lengths):
        times: dict[tuple[str, bool], list[float]] = {(name, fa): [] for name in modes for fa in models}
        for fa, llm in models.items():
            llm.pcd = None
            progress(f"filling the cache to {n_past} tokens")
            _rewind(llm, min(n_past, llm.n_tokens))
            llm.eval(tokens[llm.n_tokens : n_past])
        for i in range(rounds):
            for name, config in modes.items():
                for fa, llm in models.items():
                    progress(f"{n_past} tokens, round {i + 1} of {rounds}, {name}")
                    times[name, fa].append(_time_decode(llm, config, n_past, tokens, n_tokens))

        best_fa = {name: min(models, key=lambda fa: statistics.median(times[name, fa])) for name in modes}
        plain = times["plain", best_fa["plain"]]
        for name, config in modes.items():
            own = times[name, best_fa[name]]
            extra = models[best_fa[name]].pcd_stats().second_key_bytes if config and config.cache == "rerotated" and config.perturbation != "none" else 0
            yield Measurement(
                mode=name,
                n_past=n_past,
                flash_attn=best_fa[name],
                tokens_per_second=1 / statistics.median(own),
                ratio=statistics.median(a / b for a, b in zip(own, plain)),
                prefill_ratio=prefill[name, best_fa[name]],
                kv_bytes=plain_kv[best_fa[name]] + extra,
            )

    for llm in models.values():
        llm.close()


def llm_kv_bytes(llm: _llama.Llama) -> int:
    """Bytes of keys and values, as the model's metadata says they are laid out (f16)."""
    arch = llm.metadata.get("general.architecture", "")

    def number(key: str, default: int) -> int:
        return int(llm.metadata.get(f"{arch}.{key}", default))

    n_head = number("attention.head_count", 1)
    head = number("attention.key_length", number("embedding_length", 0) // n_head)
    value = number("attention.value_length", head)
    return llm.n_ctx() * number("block_count", 0) * number("attention.head_count_kv", n_head) * (head + value) * 2


def _rewind(llm: _llama.Llama, n_past: int) -> None:
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm._ctx.ctx), -1, n_past, -1)
    llm.n_tokens = n_past


def _time_decode(llm: _llama.Llama, config: PCDConfig | None, n_past: int, tokens: list[int], n_tokens: int) -> float:
    """Seconds per token, after one untimed token (graphs are built, second keys derived)."""
    llm.pcd = config
    _rewind(llm, n_past)
    llm.eval(tokens[n_past : n_past + 1])
    start = time.perf_counter()
    for token in tokens[n_past + 1 : n_past + 1 + n_tokens]:
        llm.eval([token])
        llm._ctx.get_logits_ith(-1)  # waits for the computation
    seconds = (time.perf_counter() - start) / n_tokens
    _rewind(llm, n_past)
    return seconds


def _prefill_ratios(
    models: dict[bool, _llama.Llama], modes: dict[str, PCDConfig | None], prompt: list[int], progress: Callable[[str], None]
) -> dict[tuple[str, bool], float]:
    result = {}
    for fa, llm in models.items():
        times: dict[str, list[float]] = {name: [] for name in modes}
        for i in range(4):
            for name, config in modes.items():
                progress(f"prompt of {len(prompt)} tokens, round {i + 1} of 4, {name}")
                llm.pcd = config
                _rewind(llm, 0)
                start = time.perf_counter()
                llm.eval(prompt)
                llm._ctx.get_logits_ith(-1)
                if i > 0:  # the first round warms up
                    times[name].append(time.perf_counter() - start)
        for name in modes:
            result[name, fa] = statistics.median(a / b for a, b in zip(times[name], times["plain"]))
        llm.pcd = None
        _rewind(llm, 0)
    return result
