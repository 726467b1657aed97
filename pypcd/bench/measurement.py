"""Times plain decoding and PCD settings: same model, same context, same tokens, interleaved rounds.

Ratios are medians over rounds of a method's time divided by plain decoding's ("greedy") in the same round: what else the machine does
weighs on both. Knows nothing of the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pypcd import engine, llama
from pypcd.decode import setting_of
from pypcd.settings.config import PCDConfig

__all__ = ["DEFAULT_METHODS", "Measurement", "bench", "methods_for"]

GREEDY = "greedy"  # plain decoding

# the two settings that gain more than they cost somewhere
DEFAULT_METHODS = ("pcd:unsure", "pcd:window:relative_top=0.1")

_PROMPT_ROUNDS = 3
_WARM_UP = 6  # tokens that are not timed: graphs are built, second keys made


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One method at one context length.

    Attributes:
        method: "greedy" or "pcd:...", as given.
        engine: of the context that it ran in.
        n_past: tokens in the cache.
        tokens_per_second: greedy's median, divided by the ratio.
        ratio: time of a step divided by greedy's, median of rounds; 1 for greedy.
        twins: twins (PCD's second evaluations of a token) per token.
        prefill_ratio: time of a fresh prompt divided by greedy's.
        kv_bytes: bytes of the context's keys and values, including the second ones that only twins see; 0 in the engine "stock",
            which does not know.
    """

    method: str
    engine: str
    n_past: int
    tokens_per_second: float
    ratio: float
    twins: float
    prefill_ratio: float
    kv_bytes: int


def methods_for(names: Iterable[str]) -> dict[str, PCDConfig | None]:
    """The settings of methods by name, "greedy" first. Without min_first_entropy: what is timed is an answer that PCD
    contrasts, whatever its first token would say; any other takes as long as plain decoding.

    Args:
        names: "greedy", "pcd:..." with any setting.

    Raises:
        ValueError: there is no such method, or it is not PCD.
    """
    settings = {name: setting_of(name) for name in (GREEDY, *names)}
    return {name: config and config.replace(min_first_entropy=0.0) for name, config in settings.items()}


def bench(
    model: str,
    methods: dict[str, PCDConfig | None],
    lengths: Sequence[int],
    *,
    n_tokens: int = 16,
    rounds: int = 5,
    n_prefill: int = 512,
    progress: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> Iterator[Measurement]:
    """Measure every method that the model can run, the shortest context first. Random tokens fill the cache, and all methods decode the
    same tokens behind them: those that plain decoding continues with.

    Args:
        model: a model path.
        methods: names and settings, as methods_for() gives them.
        lengths: tokens in the cache when decoding starts.
        n_tokens: tokens decoded per round and method.
        rounds: interleaved repetitions.
        n_prefill: tokens of the prompt whose prefill is timed, at most the shortest length.
        progress: called with what is under way.
        kwargs: passed to pypcd.Llama.
    """
    lengths = sorted(set(lengths))
    progress("loading")
    llm = llama.Llama(model, n_ctx=lengths[-1] + n_tokens + _WARM_UP + 2, **kwargs)
    with contextlib.closing(llm):
        context = _Context(llm)
        works = {name: config for name, config in methods.items() if engine.pcd_refusal(llm, config) is None}
        stream = np.random.default_rng(0).integers(3, llm.n_vocab(), lengths[-1]).tolist()
        prompt = stream[: min(n_prefill, lengths[0])]
        taken: dict[str, list[float]] = {name: [] for name in works}
        for i in range(_PROMPT_ROUNDS):
            for name, config in works.items():
                progress(f"prompt of {len(prompt)} tokens, round {i + 1} of {_PROMPT_ROUNDS}, {name}")
                taken[name].append(context.read(config, prompt))
        prefill = {name: _median_ratio(taken[name], taken[GREEDY]) for name in works}

        for n_past in lengths:
            progress(f"filling the cache, {n_past} tokens")
            context.fill(stream[:n_past])
            tokens = context.continuation(n_tokens + _WARM_UP)
            times: dict[str, list[float]] = {name: [] for name in works}
            twins: dict[str, float] = {}
            kv_bytes: dict[str, int] = {}
            for i in range(rounds):
                for name, config in works.items():
                    progress(f"{n_past} tokens, round {i + 1} of {rounds}, {name}")
                    seconds, twins[name], kv_bytes[name] = context.time(config, tokens)
                    times[name].append(seconds)

            plain = statistics.median(times[GREEDY])
            for name in works:
                ratio = _median_ratio(times[name], times[GREEDY])
                yield Measurement(
                    method=name,
                    engine=llm.engine,
                    n_past=n_past,
                    tokens_per_second=1 / (plain * ratio),
                    ratio=ratio,
                    twins=twins[name],
                    prefill_ratio=prefill[name],
                    kv_bytes=kv_bytes[name],
                )


class _Context:
    """A model's context, which holds a text, and nothing else may use."""

    def __init__(self, llm: llama.Llama) -> None:
        self.llm = llm
        self._n_past = 0
        # a recurrent state cannot go back to an earlier token: the one after fill() is kept, and loaded
        self._state: Any = None

    def read(self, config: PCDConfig | None, prompt: Sequence[int]) -> float:
        """Evaluate a prompt from an empty cache, with the logits of its last token. Returns the seconds it took."""
        # second keys stay: assigning llm.pcd would free them for a setting that needs none
        with self.llm._pcd_set_to(config):
            self.llm.reset()
            return self._seconds(prompt)

    def fill(self, tokens: Sequence[int]) -> None:
        """Have the cache hold a text."""
        self.llm.pcd = None
        self.llm.reset()
        self.llm.eval(tokens)
        self._n_past = len(tokens)
        self._state = self.llm.save_state() if engine.is_recurrent(self.llm) else None

    def continuation(self, n_tokens: int) -> list[int]:
        """The tokens that greedy decoding adds after fill()."""
        tokens: list[int] = []
        while len(tokens) < n_tokens:
            tokens.append(int(engine.row(self.llm).argmax()))
            self.llm.eval(tokens[-1:])
        self._rewind()
        return tokens

    def time(self, config: PCDConfig | None, tokens: Sequence[int]) -> tuple[float, float, int]:
        """Seconds for a step, without the first _WARM_UP; twins per token; and the bytes of the cache, which is left unchanged."""
        before = self.llm.pcd_stats().n_twins
        with self.llm._pcd_set_to(config):
            seconds = [self._seconds([token]) for token in tokens]
            stats = self.llm.pcd_stats()
            self._rewind()
        has_second = config is not None and config.cache == "rerotated" and config.perturbation == "over-rotation"
        kv_bytes = stats.kv_bytes and stats.kv_bytes + stats.second_bytes * has_second
        return statistics.fmean(seconds[_WARM_UP:]), (stats.n_twins - before) / len(tokens), kv_bytes

    def _seconds(self, tokens: Sequence[int]) -> float:
        start = time.perf_counter()
        self.llm.eval(tokens)
        engine.row(self.llm)  # a GPU has finished then
        return time.perf_counter() - start

    def _rewind(self) -> None:
        if self._state is not None:
            self.llm.load_state(self._state)
        else:
            engine.rewind(self.llm, self._n_past)
            self.llm.n_tokens = self._n_past


def _median_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, plain))
