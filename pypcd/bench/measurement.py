"""Times plain decoding and PCD settings: same model, same tokens, interleaved rounds.

Ratios are medians over rounds of a method's time divided by plain decoding's time in the same round, or by that of two plain
rows ("two-rows"): what else the machine does weighs on both. Plain decoding ("greedy") and each method run with flash attention
on or off, whichever is faster for them. Knows nothing of the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import engine, llama
from pypcd.bench import timing
from pypcd.decode import setting_of
from pypcd.errors import PCDError
from pypcd.settings.config import PCDConfig

__all__ = ["DEFAULT_METHODS", "STOCK", "Measurement", "bench", "methods_for"]

GREEDY = "greedy"  # plain decoding
TWO_ROWS = "two-rows"  # plain steps of two tokens: the cost of a second row, without PCD
STOCK = "llama_cpp"  # llama_cpp.Llama with llama-cpp-python's own library, in another process

# the two settings that gain more than they cost somewhere
DEFAULT_METHODS = ("pcd:unsure", "pcd:window:relative_top=0.1")

_PROMPT_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One method at one context length.

    Attributes:
        method: "greedy", "two-rows", "llama_cpp" or "pcd:...", as given.
        engine: of the context that it ran in.
        n_past: tokens in the cache.
        flash_attn: whether it ran with flash attention, the faster of the two for it.
        tokens_per_second: greedy's median, divided by the ratio. two-rows' steps count as one token each too.
        ratio: time of a step divided by greedy's, median of rounds; 1 for greedy.
        two_rows_ratio: time of a step divided by two-rows', median of rounds; None without two-rows.
        twins: twins (PCD's second evaluations of a token) per token.
        prefill_ratio: time of a fresh prompt divided by greedy's; None for "two-rows" and "llama_cpp".
        kv_bytes: bytes of the context's keys and values, including the second ones that only twins see; 0 in the engine "stock",
            which does not know.
    """

    method: str
    engine: str
    n_past: int
    flash_attn: bool
    tokens_per_second: float
    ratio: float
    two_rows_ratio: float | None
    twins: float
    prefill_ratio: float | None
    kv_bytes: int


def methods_for(names: Iterable[str]) -> dict[str, PCDConfig | None]:
    """The settings of methods by name, "greedy" first. Without min_first_entropy: what is timed is an answer that PCD
    contrasts, whatever its first token would say; any other takes as long as plain decoding.

    Args:
        names: "greedy", "pcd:..." with any setting, "two-rows", "llama_cpp".

    Raises:
        ValueError: there is no such method, or it is not PCD.
    """
    own = (TWO_ROWS, STOCK)
    settings = {name: None if name in own else setting_of(name, own) for name in names}
    return {
        GREEDY: None,
        **{name: config and config.replace(min_first_entropy=0.0) for name, config in settings.items()},
    }


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
    """Measure every method that the model can run, the shortest context first.

    Args:
        model: a model path.
        methods: names and settings, as methods_for() gives them.
        lengths: tokens in the cache when decoding starts.
        text: text that fills the cache, repeated; empty: random tokens. All methods decode the same tokens: those that plain
            decoding continues it with.
        n_tokens: tokens decoded per round and method.
        rounds: interleaved repetitions.
        n_prefill: tokens of the prompt whose prefill is timed, at most the shortest length.
        flash_attn: settings to try; each method is reported with its faster one.
        progress: called with what is under way.
        kwargs: passed to pypcd.Llama.
    """
    lengths = sorted(set(lengths))
    n_ctx = lengths[-1] + n_tokens + timing.WARM_UP + 2
    with contextlib.ExitStack() as closing:
        contexts: list[_Context] = []
        for flash in flash_attn:
            progress(f"loading, flash attention {'on' if flash else 'off'}")
            opened = _Context(model, STOCK in methods, n_ctx=n_ctx, flash_attn=flash, **kwargs)
            contexts.append(closing.enter_context(contextlib.closing(opened)))
        llm = contexts[0].llm
        works = {name: config for name, config in methods.items() if engine.pcd_refusal(llm, config) is None}
        stream = _stream(llm, text, lengths[-1])
        prefill: dict[str, float] = {}
        for n_past in lengths:
            for i, context in enumerate(contexts, 1):
                progress(f"filling cache {i} of {len(contexts)}, {n_past} tokens")
                context.fill(stream[:n_past])
            tokens = contexts[0].text.continuation(n_tokens + timing.WARM_UP)
            few = tokens[: timing.WARM_UP + max(2, n_tokens // 4)]  # enough to tell which of two is faster
            best: dict[str, _Context] = {}
            for name, config in works.items():
                progress(f"{n_past} tokens, flash attention on or off, {name}")
                best[name] = min(contexts, key=lambda c: c.time(name, config, few)[0]) if contexts[1:] else contexts[0]

            times: dict[str, list[float]] = {name: [] for name in works}
            twins: dict[str, float] = {}
            kv_bytes: dict[str, int] = {}
            for i in range(rounds):
                for name, config in works.items():
                    progress(f"{n_past} tokens, round {i + 1} of {rounds}, {name}")
                    seconds, twins[name], kv_bytes[name] = best[name].time(name, config, tokens)
                    times[name].append(seconds)

            prompts: dict[str, list[float]] = {name: [] for name in works if name not in (TWO_ROWS, STOCK)}
            for i in range(_PROMPT_ROUNDS if n_past == lengths[0] else 0):
                for name, taken in prompts.items():
                    progress(f"prompt of {min(n_prefill, n_past)} tokens, round {i + 1} of {_PROMPT_ROUNDS}, {name}")
                    taken.append(best[name].read(works[name], stream[: min(n_prefill, n_past)]))
            prefill = prefill or {name: _median_ratio(taken, prompts[GREEDY]) for name, taken in prompts.items()}

            plain = statistics.median(times[GREEDY])
            for name in works:
                ratio = _median_ratio(times[name], times[GREEDY])
                yield Measurement(
                    method=name,
                    engine=best[name].llm.engine,
                    n_past=n_past,
                    flash_attn=best[name].flash_attn,
                    tokens_per_second=1 / (plain * ratio),
                    ratio=ratio,
                    two_rows_ratio=_median_ratio(times[name], times[TWO_ROWS]) if TWO_ROWS in times else None,
                    twins=twins[name],
                    prefill_ratio=prefill.get(name),
                    kv_bytes=kv_bytes[name],
                )


class _Context:
    """A model with flash attention on or off, and optionally the same one with the stock library in another process."""

    def __init__(self, path: str, stock: bool, **kwargs: Any) -> None:
        self.llm = llama.Llama(path, **kwargs)
        self.text = timing.Text(self.llm)
        self.flash_attn: bool = kwargs["flash_attn"]
        self._stock: subprocess.Popen[str] | None = None
        if stock:
            given = {name: value for name, value in kwargs.items() if name != "use_extra_bufts"}
            options = {**given, "model_path": self.llm.model_path, "n_gpu_layers": self.llm.model_params.n_gpu_layers}
            command = [sys.executable, timing.__file__, json.dumps(options)]
            # that variable would make this one pypcd's
            env = {name: value for name, value in os.environ.items() if name != "PYPCD"}
            self._stock = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
            )

    def fill(self, tokens: Sequence[int]) -> None:
        self.llm.pcd = None
        self.text.fill(tokens)
        if self._stock:
            self._ask("fill", tokens)

    def read(self, config: PCDConfig | None, prompt: Sequence[int]) -> float:
        """Seconds for a prompt."""
        with self._set_to(config):
            return self.text.read(prompt)

    def time(self, name: str, config: PCDConfig | None, tokens: Sequence[int]) -> tuple[float, float, int]:
        """Seconds for a step, twins per token, and the bytes of the cache."""
        before = self.llm.pcd_stats().n_twins
        with self._set_to(config):
            seconds = self._ask("time", tokens) if name == STOCK else self.text.time(tokens, 1 + (name == TWO_ROWS))
            stats = self.llm.pcd_stats()
        second = stats.second_bytes if config is not None and _keeps_second(config) else 0
        return seconds, (stats.n_twins - before) / len(tokens), stats.kv_bytes + second

    def _set_to(self, config: PCDConfig | None) -> contextlib.AbstractContextManager[None]:
        """Second keys stay, for the methods that have them: assigning llm.pcd would free them for a setting that needs none."""
        return self.llm._pcd_set_to(config)

    def _ask(self, what: str, *args: Any) -> float:
        """Call a function of the stock process's Text."""
        assert self._stock and self._stock.stdin and self._stock.stdout
        try:
            self._stock.stdin.write(json.dumps({"do": what, "args": args}) + "\n")
            self._stock.stdin.flush()
            line = self._stock.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PCDError(
                f"the process with the stock library ended with status {self._stock.wait()}; leave out the method {STOCK!r}"
            )
        return float(json.loads(line) or 0)  # fill() returns nothing

    def close(self) -> None:
        if self._stock:
            self._stock.communicate()
        self.llm.close()


def _keeps_second(config: PCDConfig) -> bool:
    """Whether a setting needs second keys."""
    return config.cache == "separate" or (config.cache == "rerotated" and config.perturbation == "over-rotation")


def _stream(llm: llama.Llama, text: str, n: int) -> list[int]:
    """n tokens of the text, repeated, or random ones."""
    if not text:
        return np.random.default_rng(0).integers(3, llm.n_vocab(), n).tolist()
    tokens = llm.tokenize(text.encode(), special=False)
    return (tokens * (n // len(tokens) + 1))[:n]


def _median_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, plain))
