"""Times plain decoding and every way of PCD side by side: same model, same tokens, interleaved rounds.

Figures are medians over rounds of a mode's time divided by plain decoding's time in the same round; plain and every
mode each in their own faster setting of flash attention. Knows nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import _engine, _llama, _machine, _timing
from pypcd._config import PCDConfig
from pypcd._errors import PCDError

__all__ = ["Measurement", "bench", "modes_for"]

PLAIN = "plain"
TWO_ROWS = "two-rows"  # plain steps of two tokens: what a second row costs here, whoever asks for it
STOCK = "stock"  # llama_cpp.Llama with llama-cpp-python's own library, in another process


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One mode at one context length.

    Attributes:
        mode: "plain", "two-rows", "stock" or a PCD mode's name.
        n_past: tokens in the cache.
        flash_attn: the flash attention setting it ran with, its faster one.
        tokens_per_second: decoding one token at a time, median; two-rows: steps.
        ratio: time per token over plain's, median of rounds; 1 for plain.
        twins: twins evaluated per token.
        prefill_ratio: time of a fresh prompt over plain's; None where it was not measured.
        kv_bytes: keys and values of the context, second ones included.
    """

    mode: str
    n_past: int
    flash_attn: bool
    tokens_per_second: float
    ratio: float
    twins: float
    prefill_ratio: float | None
    kv_bytes: int


def default_modes() -> list[str]:
    """What is worth knowing; without the stock library where that would crash (its AMX kernels cannot be turned off)."""
    modes = [STOCK, TWO_ROWS, "rerotated", "shared", "separate", "window", "rerotated-alternate", "rerotated-cautious"]
    return [mode for mode in modes if mode != STOCK or not _machine.has_amx()]


def modes_for(names: Sequence[str]) -> dict[str, PCDConfig | None]:
    """The named modes: plain, two-rows, stock, rerotated, shared, separate, window, noise.

    A PCD mode also with one of these behind it: -alternate (one evaluation after the other), -cautious (the same with
    relative_top=0.1), -q8_0 or -q4_0 (second keys of this type), -w4096 (the twin sees the last 4096 positions).
    """
    known: dict[str, PCDConfig | None] = {PLAIN: None, TWO_ROWS: None, STOCK: None}
    for name, config in (
        ("rerotated", PCDConfig()),
        ("shared", PCDConfig(cache="shared")),
        ("separate", PCDConfig(cache="separate")),
        ("window", PCDConfig.windowed()),
        ("noise", PCDConfig.blog()),
    ):
        known[name] = config
        known[f"{name}-alternate"] = config.replace(evaluation="alternate")
        known[f"{name}-cautious"] = config.replace(evaluation="alternate", relative_top=0.1)
        if config.window is None:
            known[f"{name}-w4096"] = config.replace(window=4096)
        if name in ("rerotated", "separate"):
            known[f"{name}-q8_0"] = config.replace(type_k_over="q8_0")
            known[f"{name}-q4_0"] = config.replace(type_k_over="q4_0")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no mode {unknown[0]!r}; allowed: {', '.join(known)}")
    return {PLAIN: None, **{name: known[name] for name in names}}


def _keeps_second(config: PCDConfig | None) -> bool:
    """Whether a mode keeps second keys."""
    if config is None or config.cache == "shared":
        return False
    return config.cache == "separate" or config.perturbation == "over-rotation"


def _second(config: PCDConfig | None) -> tuple[str, str | None]:
    """What a mode keeps beside the cache. Modes that keep different things get contexts of their own: switching back
    and forth would make it anew each time. What keeps nothing is at home in any."""
    if config is None or not _keeps_second(config):
        return ("rerotated", None)
    return (config.cache, config.type_k_over)


def bench(
    model: str,
    modes: dict[str, PCDConfig | None],
    lengths: Sequence[int],
    *,
    text: str = "",
    n_tokens: int = 16,
    rounds: int = 5,
    n_prefill: int = 512,
    flash_attn: Sequence[bool] = (False, True),
    progress: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> Iterator[Measurement]:
    """Measure every mode that the model can run at every context length, shortest first.

    Args:
        model: a model path.
        modes: names and settings; "plain" is measured in any case.
        lengths: tokens in the cache when decoding starts.
        text: what fills the cache, repeated; empty: random tokens. Decoded is what plain decoding continues it with.
        n_tokens: tokens decoded per round and mode.
        rounds: interleaved repetitions.
        n_prefill: tokens of the prompt that is timed from nothing, at most the shortest length.
        flash_attn: settings to try; each mode is reported in its faster one.
        kwargs: passed on to pypcd.Llama.
    """
    n_ctx = max(lengths) + n_tokens + 8
    models: dict[tuple[bool, tuple[str, str | None]], _Model] = {}
    try:
        for fa in flash_attn:
            for second in dict.fromkeys(map(_second, modes.values())):
                progress(f"loading, flash attention {'on' if fa else 'off'}")
                stock = STOCK in modes and second == _second(None)
                models[fa, second] = _Model(model, stock, n_ctx=n_ctx, flash_attn=fa, **kwargs)
        modes = {
            name: config
            for name, config in modes.items()
            if models[flash_attn[0], _second(config)].llm.pcd_refusal(config) is None
        }
        first = models[flash_attn[0], _second(None)]
        context = _context(first.llm, text, n_ctx)

        prefill: dict[str, float] = {}
        for n_past in sorted(lengths):
            progress(f"filling the cache to {n_past} tokens")
            for m in models.values():
                m.fill(context[:n_past], stock=True)
            tokens = first.continuation(n_tokens)

            progress(f"{n_past} tokens: which flash attention setting is faster")
            few = tokens[: max(3, n_tokens // 4)]
            best: dict[str, _Model] = {}
            for name, config in modes.items():
                ways = [models[fa, _second(config)] for fa in flash_attn]
                best[name] = min(ways, key=lambda m: m.time(name, config, few)[0]) if len(ways) > 1 else ways[0]

            if not prefill:
                fa = best[PLAIN].flash_attn
                at = {name: models[fa, _second(config)] for name, config in modes.items()}
                prefill = _prefill_ratios(at, modes, context[: min(n_prefill, n_past)], progress)
                for m in set(at.values()):
                    m.fill(context[:n_past])

            times: dict[str, list[float]] = {name: [] for name in modes}
            twins: dict[str, float] = {}
            for i in range(rounds):
                for name, config in modes.items():
                    progress(f"{n_past} tokens, round {i + 1} of {rounds}, {name}")
                    seconds, twins[name] = best[name].time(name, config, tokens)
                    times[name].append(seconds)

            for name, config in modes.items():
                yield Measurement(
                    mode=name,
                    n_past=n_past,
                    flash_attn=best[name].flash_attn,
                    tokens_per_second=1 / statistics.median(times[name]),
                    ratio=_median_ratio(times[name], times[PLAIN]),
                    twins=twins[name],
                    prefill_ratio=prefill.get(name),
                    kv_bytes=best[name].kv_bytes(config),
                )
    finally:
        for m in models.values():
            m.close()


class _Model:
    """A model in one setting of flash attention and, if asked for, the stock library's beside it."""

    def __init__(self, path: str, stock: bool, **kwargs: Any) -> None:
        self.llm = _llama.Llama(path, **kwargs)
        self.flash_attn: bool = kwargs["flash_attn"]
        self.stock: subprocess.Popen[str] | None = None
        if stock:
            given = {name: value for name, value in kwargs.items() if name != "use_extra_bufts"}
            options = {**given, "model_path": self.llm.model_path, "n_gpu_layers": self.llm.model_params.n_gpu_layers}
            command = [sys.executable, _timing.__file__, json.dumps(options)]
            self.stock = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )

    def fill(self, tokens: list[int], *, stock: bool = False) -> float:
        seconds = _timing.fill(self.llm, tokens)
        if stock and self.stock:
            self._ask({"fill": tokens})
        return seconds

    def continuation(self, n_tokens: int) -> list[int]:
        """What plain decoding adds to the cache, greedily: one token to warm up and n_tokens to time."""
        self.llm.pcd = None
        n_past, tokens = self.llm.n_tokens, []
        for _ in range(n_tokens + 1):
            tokens.append(int(_engine.row(self.llm).argmax()))
            self.llm.eval(tokens[-1:])
        _timing.rewind(self.llm, n_past)
        return tokens

    def time(self, name: str, config: PCDConfig | None, tokens: list[int]) -> tuple[float, float]:
        """Seconds and twins per token."""
        if name == STOCK:
            return self._ask({"decode": tokens}), 0.0
        self.llm.pcd = config
        if name == TWO_ROWS:
            return _timing.time_two_rows(self.llm, tokens), 0.0
        before = self.llm.pcd_stats().n_twins
        seconds = _timing.time_decode(self.llm, tokens)
        return seconds, (self.llm.pcd_stats().n_twins - before) / len(tokens)

    def kv_bytes(self, config: PCDConfig | None) -> int:
        stats = self.llm.pcd_stats()
        return stats.kv_bytes + (stats.second_bytes if _keeps_second(config) else 0)

    def _ask(self, request: dict[str, Any]) -> float:
        assert self.stock and self.stock.stdin and self.stock.stdout
        try:
            self.stock.stdin.write(json.dumps(request) + "\n")
            self.stock.stdin.flush()
            line = self.stock.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PCDError(
                f"the process with the stock library ended with status {self.stock.wait()}; leave out the mode 'stock'"
            )
        return float(json.loads(line))

    def close(self) -> None:
        if self.stock:
            self.stock.communicate()
        self.llm.close()


def _context(llm: _llama.Llama, text: str, n: int) -> list[int]:
    if not text:
        return np.random.default_rng(0).integers(3, llm.n_vocab(), n).tolist()
    tokens = llm.tokenize(text.encode(), special=False)
    return (tokens * (n // len(tokens) + 1))[:n]


def _prefill_ratios(
    models: dict[str, _Model],
    modes: dict[str, PCDConfig | None],
    prompt: list[int],
    progress: Callable[[str], None],
    rounds: int = 3,
) -> dict[str, float]:
    """Of the modes with a prompt of their own: those with a dash read it as the one before the dash does, or as plain."""
    timed = {name: config for name, config in modes.items() if name != STOCK and "-" not in name}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for i in range(rounds):
        for name, config in timed.items():
            progress(f"prompt of {len(prompt)} tokens, round {i + 1} of {rounds}, {name}")
            models[name].llm.pcd = config
            _timing.rewind(models[name].llm, 0)
            times[name].append(models[name].fill(prompt))
    for m in models.values():
        m.llm.pcd = None
    return {name: _median_ratio(times[name], times[PLAIN]) for name in timed}


def _median_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, plain))
