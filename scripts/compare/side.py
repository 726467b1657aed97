"""One side of scripts/compare_transformers, once: a process that loads a model, reads a prompt and evaluates tokens.

Options come as JSON in the first argument, figures go to the file that they name. transformers' side runs where torch is, pypcd's where
pypcd is. PCD with transformers is two passes over one cache, as the PCD authors' code does it (`cache=shared`): the token's own
query and key are rotated with the over-rotated frequencies, the cached keys stay as they are. That pass runs first and is taken off the
cache again.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHANGING = ("dynamic", "longrope")  # tables of frequencies that transformers makes anew from the length


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
    """
    Args:
        dtype: that the weights are dequantised to.
        pcd: alpha, base_ratio, beta and gamma; None: plain decoding.
    """

    def __init__(self, model: str, n_ctx: int, n_threads: int, dtype: str, pcd: dict[str, Any] | None) -> None:
        import torch
        import transformers

        torch.set_num_threads(n_threads)
        torch.set_grad_enabled(False)
        transformers.utils.logging.set_verbosity_error()
        folder, name = os.path.split(os.path.abspath(model))
        kind = getattr(torch, dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=kind).eval()
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
            raise SystemExit(f"{name} has no single table of frequencies that stays as it is, which two passes need")
        return found[0]

    def read(self, tokens: Sequence[int]) -> int:
        """Forget all and evaluate a prompt. Returns the next token."""
        self.cache = self.new_cache()  # keeps all keys, so that the last can be taken off
        if self.pcd is not None:
            self.evaluate(tokens[:-1])
            tokens = tokens[-1:]
        return self.choose(tokens)

    def step(self, token: int) -> int:
        return self.choose([token])

    def choose(self, tokens: Sequence[int]) -> int:
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
    def __init__(self, model: str, n_ctx: int, n_threads: int, dtype: str, pcd: dict[str, Any] | None) -> None:
        import pypcd

        setting = False if pcd is None else pypcd.PCDConfig(**pcd)
        self.llm = pypcd.Llama(model, pcd=setting, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads)

    def read(self, tokens: Sequence[int]) -> int:
        self.llm.reset()
        return self.evaluate(tokens)

    def step(self, token: int) -> int:
        return self.evaluate([token])

    def evaluate(self, tokens: Sequence[int]) -> int:
        from pypcd import engine

        self.llm.eval(tokens)
        row = engine.row(self.llm)
        self.found = self.llm.pcd_logits() if self.llm.pcd else None
        self.rows = [np.array(row)] if self.found is None else [self.found.standard, self.found.local]
        return int(row.argmax())


def peak_bytes() -> int:
    """The most main memory that this process has had."""
    try:  # the other number starts with what the parent had
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def measure(side: Any, prompt: list[int], tokens: list[int], rows: str) -> dict[str, Any]:
    """Seconds for the prompt and for a token, without the first, and what would be chosen after each; the rows after the prompt, L and
    with PCD L*, go to a file."""
    side.read(prompt[:16])  # what is only done once
    side.step(tokens[0])
    start = time.perf_counter()
    side.read(prompt)
    seconds = time.perf_counter() - start
    np.save(rows, np.stack([np.asarray(row) for row in side.rows]))
    chosen = [side.step(tokens[0])]
    start = time.perf_counter()
    chosen += [side.step(token) for token in tokens[1:]]
    of_step = (time.perf_counter() - start) / (len(tokens) - 1)
    return {"prompt": seconds, "step": of_step, "chosen": chosen, "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    made = {"theirs": Theirs, "ours": Ours}[asked["side"]](**asked["options"])
    Path(asked["out"]).write_text(json.dumps(measure(made, asked["prompt"], asked["tokens"], asked["rows"])))
