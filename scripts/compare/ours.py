"""pypcd's side: run in the environment that has pypcd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from child import Side, serve

import pypcd
from pypcd import engine


class Ours(Side):
    """
    Args:
        pcd: fields of PCDConfig; None: plain decoding.
    """

    def __init__(self, model: str, n_ctx: int, n_threads: int, pcd: dict[str, Any] | None) -> None:
        setting = False if pcd is None else pypcd.PCDConfig(**pcd)
        self.llm = pypcd.Llama(model, pcd=setting, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads)

    def read(self, tokens: Sequence[int]) -> int:
        self.llm.reset()
        return self._evaluate(tokens)

    def step(self, token: int) -> int:
        return self._evaluate([token])

    def _evaluate(self, tokens: Sequence[int]) -> int:
        self.llm.eval(tokens)
        return int(engine.row(self.llm).argmax())

    def tokens(self, text: str, n: int) -> list[int]:
        """n tokens of a text, repeated if it is shorter."""
        found = self.llm.tokenize(text.encode(), special=False)
        return (found * (n // len(found) + 1))[:n]

    def save_rows(self, file: str) -> None:
        """The logits after the last token: L, and with PCD L*."""
        if self.llm.pcd is None:
            rows = [engine.row(self.llm)]
        else:
            found = self.llm.pcd_logits()
            assert found.local is not None  # no cut is set, so every token has its twin
            rows = [found.standard, found.local]
        np.save(file, np.stack(rows))


if __name__ == "__main__":
    serve(Ours)
