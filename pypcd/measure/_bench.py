"""Times plain decoding and PCD settings: same model, same tokens, interleaved rounds.

Ratios are medians over rounds of a method's time divided by plain decoding's time in the same round. Plain decoding
("greedy") and each method run with flash attention on or off, whichever is faster for them. Knows nothing of the
terminal.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import _engine, _llama
from pypcd._config import PCDConfig
from pypcd._errors import PCDError
from pypcd.measure import _timing
from pypcd.methods import setting_of

__all__ = ["Measurement", "bench", "default_methods", "methods_for"]

GREEDY = "greedy"  # plain decoding
TWO_ROWS = "two-rows"  # plain steps of two tokens with the logits of both: the cost of a second row, without PCD
STOCK = "stock"  # llama_cpp.Llama with llama-cpp-python's own library, in another process


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One method at one context length.

    Attributes:
        method: "greedy", "two-rows", "stock" or "pcd:...", as given.
        n_past: tokens in the cache.
        flash_attn: whether it ran with flash attention, the faster of the two for it.
        tokens_per_second: decoding one token at a time, median; for two-rows, steps per second.
        ratio: time per token divided by greedy's, median of rounds; 1 for greedy.
        twins: twins (PCD's second evaluations of a token) per token.
        prefill_ratio: time of a fresh prompt divided by greedy's; None if it was not measured.
        kv_bytes: bytes of the context's keys and values, including the second ones that only twins see.
    """

    method: str
    n_past: int
    flash_attn: bool
    tokens_per_second: float
    ratio: float
    twins: float
    prefill_ratio: float | None
    kv_bytes: int


def default_methods() -> list[str]:
    """The methods measured by default; without the stock library where AMX is off, since it cannot turn that off."""
    amx = _engine.settle_amx()
    return [
        *([] if amx.exists and not amx.on else [STOCK]),
        TWO_ROWS,
        "pcd",
        "pcd:cache=shared",
        "pcd:cache=separate",
        "pcd:window",
        "pcd:evaluation=fused",
        "pcd:evaluation=alternate",
        "pcd:relative_top=0.1",
        "pcd:evaluation=alternate:relative_top=0.1",
    ]


def methods_for(names: Iterable[str]) -> dict[str, PCDConfig | None]:
    """The settings of methods by name, "greedy" first.

    Args:
        names: "greedy", "pcd:..." with any setting, "two-rows", "stock".

    Raises:
        ValueError: there is no such method, or it is not PCD.
    """
    own = (TWO_ROWS, STOCK)
    return {GREEDY: None, **{name: None if name in own else setting_of(name, own) for name in names}}


def _keeps_second(config: PCDConfig | None) -> bool:
    """Whether a setting needs second keys."""
    if config is None or config.cache == "shared":
        return False
    return config.cache == "separate" or config.perturbation == "over-rotation"


def _second(config: PCDConfig | None) -> tuple[str, str | None]:
    """The second keys that a setting needs. Settings with different ones get separate contexts, since each switch would
    make them again. Settings without any run in the first context."""
    if config is None or not _keeps_second(config):
        return ("rerotated", None)
    return (config.cache, config.type_k_over)


def bench(
    model: str,
    methods: dict[str, PCDConfig | None],
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
    """Measure every method that the model can run, at every context length, the shortest first.

    Args:
        model: a model path.
        methods: names and settings, as methods_for() gives them.
        lengths: tokens in the cache when decoding starts.
        text: text that fills the cache, repeated; empty: random tokens. All methods decode the same tokens: those that
            plain decoding continues it with.
        n_tokens: tokens decoded per round and method.
        rounds: interleaved repetitions.
        n_prefill: tokens of the prompt whose prefill is timed, at most the shortest length.
        flash_attn: settings to try; each method is reported with its faster one.
        kwargs: passed to pypcd.Llama.
    """
    n_ctx = max(lengths) + n_tokens + 8
    models: dict[tuple[bool, tuple[str, str | None]], _Model] = {}
    try:
        for fa in flash_attn:
            for second in dict.fromkeys(map(_second, methods.values())):
                progress(f"loading, flash attention {'on' if fa else 'off'}")
                stock = STOCK in methods and second == _second(None)
                models[fa, second] = _Model(model, stock, n_ctx=n_ctx, flash_attn=fa, **kwargs)
        methods = {
            name: config
            for name, config in methods.items()
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
            for name, config in methods.items():
                ways = [models[fa, _second(config)] for fa in flash_attn]
                best[name] = min(ways, key=lambda m: m.time(name, config, few)[0]) if len(ways) > 1 else ways[0]

            if not prefill:
                fa = best[GREEDY].flash_attn
                at = {name: models[fa, _second(config)] for name, config in methods.items()}
                prefill = _prefill_ratios(at, methods, context[: min(n_prefill, n_past)], progress)
                for m in set(at.values()):
                    m.fill(context[:n_past])

            times: dict[str, list[float]] = {name: [] for name in methods}
            twins: dict[str, float] = {}
            for i in range(rounds):
                for name, config in methods.items():
                    progress(f"{n_past} tokens, round {i + 1} of {rounds}, {name}")
                    seconds, twins[name] = best[name].time(name, config, tokens)
                    times[name].append(seconds)

            for name, config in methods.items():
                yield Measurement(
                    method=name,
                    n_past=n_past,
                    flash_attn=best[name].flash_attn,
                    tokens_per_second=1 / statistics.median(times[name]),
                    ratio=_median_ratio(times[name], times[GREEDY]),
                    twins=twins[name],
                    prefill_ratio=prefill.get(name),
                    kv_bytes=best[name].kv_bytes(config),
                )
    finally:
        for m in models.values():
            m.close()


class _Model:
    """A model with flash attention on or off, and optionally the same one with the stock library in another process."""

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
        """The tokens that plain greedy decoding adds: one to warm up and n_tokens to time."""
        self.llm.pcd = None
        n_past, tokens = self.llm.n_tokens, []
        for _ in range(n_tokens + 1):
            tokens.append(int(_engine.row(self.llm).argmax()))
            self.llm.eval(tokens[-1:])
        _timing.rewind(self.llm, n_past)
        return tokens

    def time(self, name: str, config: PCDConfig | None, tokens: list[int]) -> tuple[float, float]:
        """Seconds per token and twins per token."""
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
                f"the process with the stock library ended with status {self.stock.wait()}; leave out the method 'stock'"
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
    methods: dict[str, PCDConfig | None],
    prompt: list[int],
    progress: Callable[[str], None],
    rounds: int = 3,
) -> dict[str, float]:
    timed = {name: config for name, config in methods.items() if _reads_as_itself(name, config)}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for i in range(rounds):
        for name, config in timed.items():
            progress(f"prompt of {len(prompt)} tokens, round {i + 1} of {rounds}, {name}")
            models[name].llm.pcd = config
            _timing.rewind(models[name].llm, 0)
            times[name].append(models[name].fill(prompt))
    for m in models.values():
        m.llm.pcd = None
    return {name: _median_ratio(times[name], times[GREEDY]) for name in timed}


def _reads_as_itself(name: str, config: PCDConfig | None) -> bool:
    """Whether to time a method's prefill. If a setting changes only how twins are evaluated, what they see, or the type
    of second keys, its prefill is the same as without that change."""
    if config is None:
        return name == GREEDY
    window = config.window if config.perturbation == "none" else None
    return config == config.replace(
        evaluation=PCDConfig().evaluation, relative_top=0.0, type_k_over=None, window=window
    )


def _median_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, plain))
