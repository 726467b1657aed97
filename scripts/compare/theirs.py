"""The other side: Hugging Face transformers, and PCD as two passes over one cache. Run in the environment that has torch.

The second pass is what the PCD authors' code does (our `cache=shared`): the token's own query and key are rotated with
the over-rotated frequencies, the cached keys stay as they are. It runs first and is taken off the cache again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from child import Side, serve

CHANGING = ("dynamic", "longrope")  # tables that transformers makes anew from the length


def rho(n_rot: int, alpha: float, base_ratio: float) -> list[float]:
    """By how much each frequency is over-rotated (Eq. 4)."""
    factors = []
    for j in range(1, n_rot // 2 + 1):
        t = 2 - math.exp(alpha * j / (n_rot // 2))
        factors.append(t + (1 - t) * base_ratio ** (-2 * (j - 1) / n_rot))
    return factors


def contrasted(row: torch.Tensor, second: torch.Tensor, beta: float, gamma: int) -> int:
    """The best of the gamma most probable tokens by (1 + beta) L - beta L* (Eq. 6)."""
    values, tokens = row.topk(min(gamma, row.numel()))
    return int(tokens[((1 + beta) * values - beta * second[tokens]).argmax()])


class Theirs(Side):
    """
    Args:
        pcd: alpha, base_ratio, beta and gamma; None: plain decoding.
        dtype: that the weights are dequantised to.
    """

    def __init__(self, model: str, n_threads: int, dtype: str, pcd: dict[str, Any] | None) -> None:
        torch.set_num_threads(n_threads)
        transformers.utils.logging.set_verbosity_error()
        folder, name = os.path.split(os.path.abspath(model))
        kind = getattr(torch, dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=kind).eval()
        self.pcd, self.rows = pcd, []
        if pcd is not None:
            self.rotary = self._rotary()
            self.standard = self.rotary.inv_freq
            factors = rho(2 * self.standard.numel(), pcd["alpha"], pcd["base_ratio"])
            self.local = (self.standard.double() * torch.tensor(factors, dtype=torch.float64)).float()

    def _rotary(self) -> torch.nn.Module:
        found = [
            module for module in self.model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
        ]
        if len(found) != 1 or any(word in str(getattr(found[0], "rope_type", "")) for word in CHANGING):
            raise ValueError(
                f"transformers' {type(self.model).__name__} has no single table of frequencies that stays as it is, which "
                "the two passes need"
            )
        return found[0]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> int:
        self.cache = transformers.DynamicCache()  # keeps all keys, so that the last can be taken off
        if self.pcd is None:
            return self._choose(tokens)
        if len(tokens) > 1:
            self._pass(tokens[:-1])
        return self._choose(tokens[-1:])

    @torch.inference_mode()
    def step(self, token: int) -> int:
        return self._choose([token])

    def _choose(self, tokens: Sequence[int]) -> int:
        if self.pcd is None:
            self.rows = [self._pass(tokens)]
            return int(self.rows[0].argmax())
        self.rotary.inv_freq = self.local
        second = self._pass(tokens)
        self.rotary.inv_freq = self.standard
        self.cache.crop(-1)
        self.rows = [self._pass(tokens), second]
        return contrasted(*self.rows, self.pcd["beta"], self.pcd["gamma"])

    def _pass(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits of the last of these tokens."""
        ids = torch.tensor([list(tokens)])
        found = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return found.logits[0, -1].float()

    def save_rows(self, file: str) -> None:
        """The logits after the last token: L, and with PCD L*."""
        np.save(file, torch.stack(self.rows).numpy())


if __name__ == "__main__":
    serve(Theirs)
