"""Times plain decoding and PCD settings: same model, same tokens, interleaved rounds, one or several sequences at once.

Ratios are medians over rounds of a method's time divided by plain decoding's time in the same round, or by that of as
many plain rows as the method computes ("two-rows"): what else the machine does weighs on both. Plain decoding ("greedy") and each method run with flash attention
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
from pypcd.settings.ranges import Integer

__all__ = ["DEFAULT_METHODS", "SEQUENCES", "STOCK", "Measurement", "bench", "methods_for"]

GREEDY = "greedy"  # plain decoding
TWO_ROWS = "two-rows"  # plain steps of two tokens of each sequence: the cost of a second row, without PCD
STOCK = "llama_cpp"  # llama_cpp.Llama with llama-cpp-python's own library, in another process, with one sequence

# the two settings that gain more than they cost somewhere
DEFAULT_METHODS = ("pcd:unsure", "pcd:window:relative_top=0.1")

SEQUENCES = Integer(1, engine.N_SEQUENCES)
_PROMPT_ROUNDS = 3
_OWN_TOKENS = 16  # the end of each sequence's text: what it begins with is the same in all, and evaluated only once


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One method at one context length and number of sequences.

    Attributes:
        method: "greedy", "two-rows", "llama_cpp" or "pcd:...", as given.
        engine: of the context that it ran in.
        n_sequences: sequences decoded in one batch.
        n_past: tokens of each of them in the cache.
        flash_attn: whether it ran with flash attention, the faster of the two for it.
        tokens_per_second: of all sequences together, one token of each at a time: greedy's median, divided by the ratio.
            two-rows' steps count as one token of each too.
        ratio: time of a step divided by greedy's, median of rounds; 1 for greedy.
        two_rows_ratio: time of a step divided by two-rows', median of rounds; None without two-rows.
        twins: twins (PCD's second evaluations of a token) per token.
        prefill_ratio: time of fresh prompts divided by greedy's; None for "two-rows" and "llama_cpp".
        kv_bytes: bytes of the context's keys and values, including the second ones that only twins see; 0 in the engine "stock",
            which does not know.
    """

    method: str
    engine: str
    n_sequences: int
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


def _keeps_second(config: PCDConfig | None) -> bool:
    """Whether a setting needs second keys."""
    if config is None or config.cache == "shared":
        return False
    return config.cache == "separate" or config.perturbation == "over-rotation"


_Place = tuple[str, str | None, bool]


def _place(config: PCDConfig | None) -> _Place:
    """The context that a setting runs in. Settings with different second keys get separate ones, since each switch would make them
    again. Settings without any run in the first."""
    if config is None or not _keeps_second(config):
        return ("rerotated", None, False)
    return (config.cache, config.type_k_over, config.window is not None)  # behind a window there may be no second keys


def bench(
    model: str,
    methods: dict[str, PCDConfig | None],
    lengths: Sequence[int],
    *,
    sequences: Sequence[int] = (1,),
    text: str = "",
    n_tokens: int = 16,
    rounds: int = 5,
    n_prefill: int = 512,
    flash_attn: Sequence[bool] = (False, True),
    progress: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> Iterator[Measurement]:
    """Measure every method that the model can run: the fewest sequences first, then the shortest context.

    Args:
        model: a model path.
        methods: names and settings, as methods_for() gives them. "llama_cpp" is measured with one sequence only.
        lengths: tokens of each sequence in the cache when decoding starts.
        sequences: how many to decode in one batch. Each number gets a context of its own size.
        text: text that fills the cache, repeated; empty: random tokens. Sequences differ in their last tokens. All
            methods decode the same tokens: those that plain decoding continues them with.
        n_tokens: tokens of each sequence decoded per round and method.
        rounds: interleaved repetitions.
        n_prefill: tokens of the prompts whose prefill is timed, all sequences together. Each has at most the shortest
            length.
        flash_attn: settings to try; each method is reported with its faster one.
        progress: called with what is under way.
        kwargs: passed to pypcd.Llama.

    Raises:
        ValueError: a number of sequences is out of range.
    """
    for n in sorted({SEQUENCES("sequences", n) for n in sequences}):
        able = {name: config for name, config in methods.items() if n == 1 or name != STOCK}
        plan = _Plan(n, n_tokens, rounds, n_prefill, flash_attn, progress)
        yield from plan.measure(model, able, sorted(set(lengths)), text, kwargs)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """bench() for one number of sequences."""

    n: int
    n_tokens: int
    rounds: int
    n_prefill: int
    flash_attn: Sequence[bool]
    say: Callable[[str], None]

    def measure(
        self,
        model: str,
        works: dict[str, PCDConfig | None],
        lengths: Sequence[int],
        text: str,
        kwargs: dict[str, Any],
    ) -> Iterator[Measurement]:
        n_ctx = self.n * (lengths[-1] + self.n_tokens + 8)
        models: dict[tuple[bool, _Place], _Model] = {}
        plain = _place(works[GREEDY])
        try:
            for fa in self.flash_attn:
                for place in dict.fromkeys(map(_place, works.values())):
                    self.say(f"loading, flash attention {'on' if fa else 'off'}")
                    stock = STOCK in works and place == plain
                    models[fa, place] = _Model(model, self.n, stock, n_ctx=n_ctx, flash_attn=fa, **kwargs)
            works = {
                name: config
                for name, config in works.items()
                if engine.pcd_refusal(models[self.flash_attn[0], _place(config)].llm, config) is None
            }
            first = models[self.flash_attn[0], plain]
            stream = _stream(first.llm, text, lengths[-1] + self.n)
            prefill: dict[str, float] = {}
            for n_past in lengths:
                texts = _texts(stream, self.n, n_past)
                self._fill(first, texts, f"1 of {len(models)}")
                tokens = first.texts.continuations(self.n_tokens + timing.WARM_UP)
                for i, m in enumerate((m for m in models.values() if m is not first), 2):
                    self._fill(m, texts, f"{i} of {len(models)}")
                best = self._faster(models, works, tokens, n_past)
                if not prefill:
                    at = {name: models[best[GREEDY].flash_attn, _place(config)] for name, config in works.items()}
                    prefill = self._prefill_ratios(at, works, texts)
                    for i, m in enumerate(set(at.values()), 1):
                        self._fill(m, texts, f"{i} of {len(set(at.values()))}")
                yield from self._rounds(best, works, tokens, n_past, prefill)
        finally:
            for m in models.values():
                m.close()

    @property
    def _n_few(self) -> int:
        """Tokens that tell which of two ways is faster."""
        return timing.WARM_UP + max(2, self.n_tokens // 4)

    def _fill(self, m: _Model, texts: Sequence[Sequence[int]], which: str) -> None:
        m.fill(texts, lambda done, total: self.say(f"filling cache {which}, {done} of {self._of(total)}"))

    def _faster(
        self,
        models: dict[tuple[bool, _Place], _Model],
        works: dict[str, PCDConfig | None],
        tokens: Sequence[Sequence[int]],
        n_past: int,
    ) -> dict[str, _Model]:
        """The model that each method is faster with: flash attention on or off."""
        few = [text[: self._n_few] for text in tokens]
        best: dict[str, _Model] = {}
        for name, config in works.items():
            ways = [models[fa, _place(config)] for fa in self.flash_attn]
            if len(ways) > 1:
                self.say(f"{self._of(n_past)}, flash attention on or off, {name}")
                best[name] = min(ways, key=lambda m: m.time(name, config, few)[0])
            else:
                best[name] = ways[0]
        return best

    def _rounds(
        self,
        best: dict[str, _Model],
        works: dict[str, PCDConfig | None],
        tokens: Sequence[Sequence[int]],
        n_past: int,
        prefill: dict[str, float],
    ) -> Iterator[Measurement]:
        times: dict[str, list[float]] = {name: [] for name in works}
        twins: dict[str, float] = {}
        for i in range(self.rounds):
            for name, config in works.items():
                self.say(f"{self._of(n_past)}, round {i + 1} of {self.rounds}, {name}")
                seconds, twins[name] = best[name].time(name, config, tokens)
                times[name].append(seconds)
        plain = statistics.median(times[GREEDY])
        for name, config in works.items():
            ratio = _median_ratio(times[name], times[GREEDY])
            yield Measurement(
                method=name,
                engine=best[name].llm.engine,
                n_sequences=self.n,
                n_past=n_past,
                flash_attn=best[name].flash_attn,
                tokens_per_second=self.n / (plain * ratio),
                ratio=ratio,
                two_rows_ratio=_median_ratio(times[name], times[TWO_ROWS]) if TWO_ROWS in times else None,
                twins=twins[name],
                prefill_ratio=prefill.get(name),
                kv_bytes=best[name].kv_bytes(config),
            )

    def _prefill_ratios(
        self,
        models: dict[str, _Model],
        works: dict[str, PCDConfig | None],
        texts: Sequence[Sequence[int]],
    ) -> dict[str, float]:
        prompts = [text[: max(1, self.n_prefill // self.n)] for text in texts]  # fill() may keep the first
        times: dict[str, list[float]] = {name: [] for name in works if name not in (TWO_ROWS, STOCK)}
        for i in range(_PROMPT_ROUNDS):
            for name, taken in times.items():
                self.say(f"prompt of {self._of(len(prompts[0]))}, round {i + 1} of {_PROMPT_ROUNDS}, {name}")
                taken.append(models[name].read(works[name], prompts))
        return {name: _median_ratio(taken, times[GREEDY]) for name, taken in times.items()}

    def _of(self, n_tokens: int) -> str:
        return f"{n_tokens} tokens" if self.n == 1 else f"{self.n} times {n_tokens} tokens"


class _Model:
    """A model with flash attention on or off, and optionally the same one with the stock library in another process."""

    def __init__(self, path: str, n: int, stock: bool, **kwargs: Any) -> None:
        self.llm = llama.Llama(path, n_seq_max=n, **kwargs)
        self.texts = timing.Texts(self.llm, n)
        self.flash_attn: bool = kwargs["flash_attn"]
        self.stock: subprocess.Popen[str] | None = None
        if stock:
            given = {name: value for name, value in kwargs.items() if name != "use_extra_bufts"}
            options = {**given, "model_path": self.llm.model_path, "n_gpu_layers": self.llm.model_params.n_gpu_layers}
            command = [sys.executable, timing.__file__, json.dumps(options)]
            # that variable would make this one pypcd's
            env = {name: value for name, value in os.environ.items() if name != "PYPCD"}
            self.stock = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
            )

    def fill(self, texts: Sequence[Sequence[int]], tell: Callable[[int, int], object]) -> None:
        self.llm.pcd = None
        with _reasons():
            self.texts.fill(texts, tell)
        for seq, text in enumerate(texts):  # a copied sequence does not have them
            engine.pcd(self.llm).set_tokens(text, seq)
        if self.stock:
            self._ask("fill", texts)

    def read(self, config: PCDConfig | None, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds for prompts, one for each sequence."""
        with self._set_to(config), _reasons():
            return self.texts.read(prompts)

    def time(self, name: str, config: PCDConfig | None, tokens: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Seconds for a step, and twins per token."""
        if name == STOCK:
            return self._ask("time", tokens), 0.0
        before = self.llm.pcd_stats().n_twins
        with self._set_to(config), _reasons():
            seconds = self.texts.time(tokens, 2 if name == TWO_ROWS else 1)
        return seconds, (self.llm.pcd_stats().n_twins - before) / sum(map(len, tokens))

    def _set_to(self, config: PCDConfig | None) -> contextlib.AbstractContextManager[None]:
        """Second keys stay: assigning llm.pcd would free them for a setting that needs none."""
        return self.llm._pcd_set_to(False if config is None else config)

    def kv_bytes(self, config: PCDConfig | None) -> int:
        stats = self.llm.pcd_stats()
        return stats.kv_bytes + (stats.second_bytes if _keeps_second(config) else 0)

    def _ask(self, what: str, *args: Any) -> float:
        """Call a function of the stock process's Texts."""
        assert self.stock and self.stock.stdin and self.stock.stdout
        try:
            self.stock.stdin.write(json.dumps({"do": what, "args": args}) + "\n")
            self.stock.stdin.flush()
            line = self.stock.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PCDError(
                f"the process with the stock library ended with status {self.stock.wait()}; leave out the method {STOCK!r}"
            )
        return float(json.loads(line) or 0)  # fill() returns nothing

    def close(self) -> None:
        if self.stock:
            self.stock.communicate()
        self.llm.close()


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """A block whose errors get llama.cpp's own reason."""
    engine.clear_errors()
    try:
        yield
    except RuntimeError as error:
        raise PCDError(f"{error}: {engine.reason()}") from error


def _stream(llm: llama.Llama, text: str, n: int) -> list[int]:
    """n tokens of the text, repeated, or random ones."""
    if not text:
        return np.random.default_rng(0).integers(3, llm.n_vocab(), n).tolist()
    tokens = llm.tokenize(text.encode(), special=False)
    return (tokens * (n // len(tokens) + 1))[:n]


def _texts(stream: list[int], n: int, n_past: int) -> list[list[int]]:
    """n texts of n_past tokens that begin alike and end differently."""
    common = max(0, n_past - _OWN_TOKENS)
    return [stream[:common] + stream[common + i : n_past + i] for i in range(n)]


def _median_ratio(times: Sequence[float], plain: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, plain))
