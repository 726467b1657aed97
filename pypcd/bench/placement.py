"""Which operations leave the device: with a model on a GPU, or on others' machines, what ggml's scheduler puts on the CPU.

A device that cannot run an operation has it run by the CPU, and its numbers are copied there and back. That gives the right
result slowly, and nothing says so. llama.cpp itself looks up a token's embedding on the CPU; what counts is what PCD adds to
that, so each way to run PCD is set beside plain decoding. Knows nothing of the terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pypcd import engine
from pypcd.llama import Llama
from pypcd.settings.config import PCDConfig

__all__ = ["left_device", "placements"]

_MODES: dict[str, dict[str, Any]] = {
    "rerotated": {},
    "shared": {"cache": "shared"},
    "window": {"perturbation": "none", "window": 8},
}
WAYS = {
    f"{name}, {evaluation}": PCDConfig(evaluation=evaluation, **mode)
    for name, mode in _MODES.items()
    for evaluation in ("fused", "alternate")
}
N_PROMPT, N_STEPS = 40, 2
_FLASH = "FLASH_ATTN_EXT of "


def left_device(graphs: Sequence[engine.Graph], plain: Sequence[engine.Graph]) -> dict[str, int]:
    """The operations that the CPU ran in a graph, more than in any graph of plain decoding: the most of each. If plain decoding's flash
    attention is the CPU's, since the device has none for the model's heads, then so is PCD's."""
    usual = _most(plain)
    is_usual = any(name.startswith(_FLASH) for name in usual)
    return {name: n for name, n in (_most(graphs) - usual).items() if not (is_usual and name.startswith(_FLASH))}


def _most(graphs: Sequence[engine.Graph]) -> Counter[str]:
    found: Counter[str] = Counter()
    for graph in graphs:
        found |= graph.on_cpu
    return found


def placements(llm: Llama) -> dict[str, dict[str, int]]:
    """What the CPU runs in a prompt and two steps that it does not run for plain decoding, for each way that this model can run PCD;
    empty if everything runs on the CPU. PCD is off at the end.

    Returns:
        By cache mode and evaluation: "OPERATION of name", and how often in a graph.
    """
    tokens = np.random.default_rng(0).integers(0, llm.n_vocab(), N_PROMPT + N_STEPS).tolist()

    def watched(config: PCDConfig | None) -> Sequence[engine.Graph]:
        llm.reset()
        llm.pcd = config
        with engine.watch_graphs(llm) as graphs:
            for part in (tokens[:N_PROMPT], *([token] for token in tokens[N_PROMPT:])):
                llm.eval(part)
        return graphs

    try:
        plain = watched(None)
        if all(sum(graph.on_cpu.values()) == graph.n_nodes for graph in plain):
            return {}  # everything runs on the CPU
        able = {way: config for way, config in WAYS.items() if engine.pcd_refusal(llm, config) is None}
        return {way: left_device(watched(config), plain) for way, config in able.items()}
    finally:
        llm.pcd = False
