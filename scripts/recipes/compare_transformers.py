"""The same GGUF in Hugging Face transformers and in pypcd, plain and with PCD, in turns: rows, times and memory.

    .venv/bin/nox --session transformers -- model.gguf --length 512,2048

nox runs this where torch and transformers are. transformers reads the GGUF with its own loader and dequantises it. PCD is two passes
over one cache there, as the PCD authors' code does it (`cache=shared`): the token's own query and key are rotated with the over-rotated
frequencies, the cached keys stay as they are. That pass runs first and is taken off the cache again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHANGING = ("dynamic", "longrope")  # tables of frequencies that transformers makes anew from the length
PAPER = {"alpha": 0.2, "base_ratio": 1e-4, "beta": 2.5, "gamma": 30}

# name: side, setting (None: plain); the first of each kind, plain and contrasted, is what pypcd's are compared with
WAYS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "transformers": ("Theirs", None),
    "transformers, two passes": ("Theirs", PAPER),
    "pypcd": ("Ours", None),
    "pypcd, paper:cache=shared": ("Ours", {**PAPER, "cache": "shared"}),
    "pypcd, paper": ("Ours", PAPER),
}

# Kernels for quantised weights round their inputs to 8 bits: rows differ by about a thousandth (normalised squared
# error). Another model makes tenths. Over-rotation makes more of the rounding the longer the prompt is, so L* may also
# differ by a share of what over-rotation does; a wrong rotation would differ by about all of that.
LIMIT, SHARE = 0.02, 0.1


def rho(n_rot: int, alpha: float, base_ratio: float) -> list[float]:
    """By how much each frequency is over-rotated (Eq. 4)."""
    factors = []
    for j in range(1, n_rot // 2 + 1):
        t = 2 - math.exp(alpha * j / (n_rot // 2))
        factors.append(t + (1 - t) * base_ratio ** (-2 * (j - 1) / n_rot))
    return factors


def contrasted(row: Any, second: Any, beta: float, gamma: int) -> int:
    """The best of the gamma most probable tokens by (1 + beta) L - beta L* (Eq. 6)."""
    values, tokens = row.topk(min(gamma, row.numel()))
    return int(tokens[((1 + beta) * values - beta * second[tokens]).argmax()])


class Theirs:
    def __init__(self, model: str, n_ctx: int, n_threads: int, pcd: dict[str, Any] | None) -> None:
        import torch
        import transformers

        torch.set_num_threads(n_threads)
        torch.set_grad_enabled(False)
        transformers.utils.logging.set_verbosity_error()
        folder, name = os.path.split(os.path.abspath(model))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        self.model = loaded.eval()
        self.tensor, self.new_cache, self.pcd = torch.tensor, transformers.DynamicCache, pcd
        if pcd is not None:
            self.rotary = self.find_rotary(torch.Tensor)
            self.standard = self.rotary.inv_freq
            factors = rho(2 * self.standard.numel(), pcd["alpha"], pcd["base_ratio"])
            self.over_rotated = (self.standard.double() * torch.tensor(factors, dtype=torch.float64)).float()

    def find_rotary(self, kind: type) -> Any:
        found = [part for part in self.model.modules() if isinstance(getattr(part, "inv_freq", None), kind)]
        if len(found) != 1 or any(word in str(getattr(found[0], "rope_type", "")) for word in CHANGING):
            name = type(self.model).__name__
            raise ValueError(f"{name} has no single table of frequencies that stays as it is, which two passes need")
        return found[0]

    def read(self, tokens: Sequence[int]) -> int:
        """Forget all and evaluate a prompt. Returns the next token."""
        self.cache = self.new_cache()  # keeps all keys, so that the last can be taken off
        if self.pcd is not None:
            self.evaluate(tokens[:-1])
            tokens = tokens[-1:]
        return self.step(tokens)

    def step(self, tokens: Sequence[int]) -> int:
        if self.pcd is None:
            self.rows = [self.evaluate(tokens)]
            return int(self.rows[0].argmax())
        self.rotary.inv_freq = self.over_rotated
        second = self.evaluate(tokens)
        self.rotary.inv_freq = self.standard
        self.cache.crop(-1)
        self.rows = [self.evaluate(tokens), second]
        return contrasted(*self.rows, self.pcd["beta"], self.pcd["gamma"])

    def evaluate(self, tokens: Sequence[int]) -> Any:
        """The logits of the last of these tokens."""
        ids = self.tensor([list(tokens)])
        found = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return found.logits[0, -1].float()


class Ours:
    def __init__(self, model: str, n_ctx: int, n_threads: int, pcd: dict[str, Any] | None) -> None:
        import pypcd

        setting = False if pcd is None else pypcd.PCDConfig(**pcd)
        self.llm = pypcd.Llama(model, pcd=setting, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads)

    def read(self, tokens: Sequence[int]) -> int:
        self.llm.reset()
        return self.step(tokens)

    def step(self, tokens: Sequence[int]) -> int:
        from pypcd import engine

        self.llm.eval(tokens)
        row = engine.row(self.llm)
        found = self.llm.pcd_logits() if self.llm.pcd else None
        self.rows = [np.array(row)] if found is None else [found.standard, found.local]
        return int(row.argmax())


def measure(side: Any, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """Seconds for the prompt and for a token, without the first; the rows after the prompt, L and with PCD L*; what would be chosen
    after each token."""
    side.read(prompt[:16])  # what is only done once
    side.step(tokens[:1])
    start = time.perf_counter()
    side.read(prompt)
    seconds = time.perf_counter() - start
    rows = np.stack([np.array(row) for row in side.rows])
    chosen = [side.step(tokens[:1])]
    start = time.perf_counter()
    chosen += [side.step([token]) for token in tokens[1:]]
    of_step = (time.perf_counter() - start) / (len(tokens) - 1)
    return {"prompt": seconds, "step": of_step, "rows": rows, "chosen": chosen}


def measured_alone(way: str, options: dict[str, Any], prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """The same in a process of its own, and the most main memory that it had (Linux)."""
    side, pcd = WAYS[way]
    found = measure(globals()[side](**options, pcd=pcd), prompt, tokens)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {**found, "peak_mib": int(peak[1]) // 1024 if peak else 0}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near pypcd's rows after the prompt are to transformers'. Differences are normalised squared errors.

    Attributes:
        plain: of L.
        second: of L*, with cache=shared.
        effect: of L* and L on transformers' side: what there is to see.
        same: after how many tokens both sides would choose the same next one, plain and contrasted.
    """

    plain: float
    second: float
    effect: float
    same: tuple[int, ...]

    @classmethod
    def of(cls, found: dict[str, dict[str, Any]]) -> Agreement:
        plain, passes, ours, shared, _ = found.values()
        pairs = ((ours, plain), (shared, passes))
        return cls(
            squared_error(ours["rows"][0], plain["rows"][0]),
            squared_error(shared["rows"][1], passes["rows"][1]),
            squared_error(passes["rows"][1], passes["rows"][0]),
            tuple(sum(a == b for a, b in zip(x["chosen"], y["chosen"])) for x, y in pairs),
        )

    def __bool__(self) -> bool:
        return self.plain <= LIMIT and self.second <= max(LIMIT, SHARE * self.effect)


def squared_error(row: Any, wanted: Any) -> float:
    """The squared difference over the squared row, each less its mean, which no probability depends on."""
    n = min(len(row), len(wanted))  # a file may pad the vocabulary
    a, b = row[:n].astype(np.float64), wanted[:n].astype(np.float64)
    a, b = a - a.mean(), b - b.mean()
    return float(((a - b) ** 2).sum() / (b**2).sum())


def compare(args: argparse.Namespace, n_prompt: int) -> Agreement:
    """Print the table of one length. Times are medians of the rounds."""
    import pypcd

    text = b"\n".join(page.read_bytes() for page in sorted(Path(__file__).parents[2].glob("docs/*.md")))
    options = {"model": args.model, "n_ctx": n_prompt + args.n_tokens + 32, "n_threads": args.threads}
    llm = pypcd.Llama(args.model, n_ctx=options["n_ctx"], n_threads=args.threads, n_threads_batch=args.threads)
    words = llm.tokenize(text, special=False)
    prompt = (words * (n_prompt // len(words) + 1))[:n_prompt]
    tokens = [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(args.n_tokens + 1))]
    llm.close()
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for i in range(args.rounds):
        for way, found in rounds.items():
            print(f"{n_prompt} tokens, round {i + 1} of {args.rounds}: {way}", file=sys.stderr)
            with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found.append(pool.submit(measured_alone, way, options, prompt, tokens).result())
    print(f"| {n_prompt} tokens | prompt tok/s | decode tok/s | peak MiB |\n| --- | ---: | ---: | ---: |")
    for way, found in rounds.items():
        seconds, step = (statistics.median(one[what] for one in found) for what in ("prompt", "step"))
        print(f"| {way} | {n_prompt / seconds:.0f} | {1 / step:.1f} | {max(one['peak_mib'] for one in found)} |")
    agreement = Agreement.of({way: found[-1] for way, found in rounds.items()})
    print(f"\n{agreement}, of {len(tokens)} tokens; differences are normalised squared errors", flush=True)
    return agreement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--length", default="512,2048", help="tokens of the prompt (default %(default)s)")
    for name, default in (("--n-tokens", 32), ("--rounds", 3), ("--threads", 2)):
        parser.add_argument(name, type=int, default=default, help="default %(default)s")
    args = parser.parse_args()
    agreed = [compare(args, int(n)) for n in args.length.split(",")]
    if not all(agreed):
        raise SystemExit("the sides do not compute the same, so their times say nothing")


if __name__ == "__main__":
    main()
