"""The rows of tiny random models on the GPU against the same on the CPU, for scripts/gpu_check.py.

    python scripts/gpu_rows.py FOLDER cuda|cpu                 # the models' names
    python scripts/gpu_rows.py FOLDER cuda|cpu MODEL [SKIP]    # SKIP: a JSON list of cases not to do again

prints a line of JSON before each case (its name: ggml may end the process) and one after it. Heads have 64 dimensions:
CUDA's flash attention has no kernels for those of the tests' models. With --backend cpu the other side is the CPU too,
with micro-batches of another size.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import pypcd  # it chooses the library that llama_cpp loads, so it comes first

# isort: split
import llama_cpp
import numpy as np
from tiny_gguf import ROPE_ARCHS, write_tiny_gguf

# Limits of normalised mean squared errors. 1e-4 is llama.cpp's own for one model on two devices (its test-llama-archs).
# What is behind it: CUDA multiplies float32 matrices with factors rounded to 10 bits (TF32), f16 ones as they are. The
# CPU rounds so where weights are F16: on it these models with F16 weights differ from those with F32 by 3e-6 (median of
# all settings and architectures) to 1e-5.
LIMIT = 1e-4
# Where keys or weights are quantised, so is what they are multiplied with, and a rounding error ahead of it tips values
# into the next step: the same F16 weights then make 1e-4 to 4e-4, flash attention with Q4_0 weights up to 9e-4. The
# least distance of L* from L is 7e-2.
LIMIT_QUANTISED = 3e-3
# A model that differs more than that without PCD may differ this many times as much with it.
ABOVE_PLAIN = 4.0
# The error of L* must leave its distance from L visible: a wrong angle, cell or mask in one layer costs a tenth of it.
SHARE = 0.1

SHAPE: dict[str, Any] = {"n_embd": 256, "n_head": 4, "n_ff": 256}
MODELS: dict[str, dict[str, Any]] = {
    **{arch: {"arch": arch} for arch in ROPE_ARCHS},
    "deepseek2": {"arch": "deepseek2"},  # a latent key for all heads
    "bloom": {"arch": "bloom"},  # no RoPE: the window alone
    "llama-factors": {"arch": "llama", "rope_freqs": [1 + i / 8 for i in range(32)]},
    "llama-yarn": {"arch": "llama", "yarn": (4.0, 64)},
    "llama-f16": {"arch": "llama", "weight_type": "F16"},
    "llama-q4_0": {"arch": "llama", "weight_type": "Q4_0"},
}

F16, Q8_0 = llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_Q8_0
CACHES: dict[str, dict[str, Any]] = {
    "f16": {"type_k": F16, "type_v": F16, "flash_attn": False},
    "f16, flash": {"type_k": F16, "type_v": F16, "flash_attn": True},
    "q8_0 K": {"type_k": Q8_0, "type_v": F16, "flash_attn": False},
    "q8_0, flash": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
}

PLAIN = "plain"
SETTINGS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "rerotated": {},
    "shared": {"cache": "shared"},
    "separate": {"cache": "separate"},
    "window": {"perturbation": "none", "window": 20},
    "rerotated, window": {"window": 20},
    "shared, window": {"cache": "shared", "window": 20},
    "separate, window": {"cache": "separate", "window": 20},
    "noise": {"perturbation": "noise", "cache": "shared", "noise": 0.3, "band": "all"},
    "noise, separate": {"perturbation": "noise", "cache": "separate", "noise": 0.1, "offset_min": -2, "offset_max": 9},
    "rerotated, q8_0": {"type_k_over": "q8_0"},
    "separate, q8_0": {"cache": "separate", "type_k_over": "q8_0"},
    "rerotated, high": {"band": "high", "base_ratio": 0.01},
    "rerotated, base_ratio=1": {"base_ratio": 1.0},
    "separate, base_ratio=1": {"cache": "separate", "base_ratio": 1.0},
    "rerotated, all rows": {},
    "separate, all rows": {"cache": "separate"},
}
ALTERNATE = [name for name in SETTINGS if name != PLAIN and not name.endswith(("base_ratio=1", "all rows"))]

CPU: dict[str, Any] = {"n_gpu_layers": 0, "offload_kqv": False, "n_ubatch": 32}
PLACEMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "all layers": {"n_gpu_layers": -1, "n_ubatch": 32},
        "two layers": {"n_gpu_layers": 2, "n_ubatch": 32},
        "keys in RAM": {"n_gpu_layers": -1, "offload_kqv": False, "n_ubatch": 32},
    },
    "cpu": {
        "all layers": {**CPU, "n_ubatch": 16},
        "two layers": {**CPU, "n_ubatch": 10},
        "keys in RAM": {**CPU, "n_ubatch": 20},
    },
}

TOKENS: list[int] = [1, *np.random.default_rng(7).integers(3, 384, 119).tolist()]
PROMPT, SINGLE = 100, 3  # four batches, then tokens one by one
Rows = np.ndarray


def nmse(a: Rows, b: Rows) -> float:
    """mse(a, b) / mse(b, 0); infinite where a row has none."""
    error = float(((a - b) ** 2).mean() / (b**2).mean())
    return error if np.isfinite(error) else float("inf")


def compare(cpu: Rows, other: Rows) -> dict[str, float]:
    """The measures of two arrays of points x (L, L*) x n_vocab, or x (L,) without PCD."""
    result = {"standard": nmse(other[:, 0], cpu[:, 0]), "largest": float(np.abs(other - cpu).max())}
    if cpu.shape[1] == 2:
        result.update(over_rotated=nmse(other[:, 1], cpu[:, 1]), effect=nmse(cpu[:, 1], cpu[:, 0]))
    return result


def faults(case: dict[str, Any]) -> list[str]:
    """Why a case fails, in words."""
    limit = max(case["limit"], ABOVE_PLAIN * case["plain"])
    names = ("standard", "over_rotated", "identity", "alternate")
    wrong = [f"{name} {case[name]:.1e}, limit {limit:.1e}" for name in names if case.get(name, 0.0) > limit]
    if case.get("over_rotated", 0.0) > SHARE * case.get("effect", np.inf) and "identity" not in case:
        wrong.append(f"over_rotated {case['over_rotated']:.1e} hides an effect of {case['effect']:.1e}")
    return wrong


class Splits(logging.Handler):
    """Which devices the parts of the last graph ran on, from the scheduler's own words."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"## SPLIT #(\d+): (\S+)", record.getMessage())
        if found:
            self.names = [*(self.names if found.group(1) != "0" else []), found.group(2)]


class Model:
    """A model file, and its rows in any setting and place."""

    def __init__(self, folder: Path, name: str, backend: str) -> None:
        self.name, self.placements = name, PLACEMENTS[backend]
        self.path = folder / f"{name}-{os.getpid()}.gguf"
        write_tiny_gguf(self.path, **{**SHAPE, **MODELS[name]})
        self.splits = Splits()
        if backend == "cuda":
            os.environ["GGML_SCHED_DEBUG"] = "1"
            logging.getLogger("pypcd").setLevel(logging.DEBUG)
            logging.getLogger("pypcd").addHandler(self.splits)
            logging.getLogger("pypcd").propagate = False
        self.rows = functools.lru_cache(maxsize=256)(self._rows)

    def _rows(self, cache: str, setting: str, evaluation: str, placement: str) -> tuple[Rows | str, int]:
        """Rows, or why they are refused, and the number of parts of the last graph that ran on the CPU."""
        config, every = SETTINGS[setting], setting.endswith("all rows")
        options = {**CACHES[cache], **(CPU if placement == "cpu" else self.placements[placement])}
        try:
            llm = pypcd.Llama(
                self.path,
                pcd=False if config is None else {**config, "evaluation": evaluation},
                n_ctx=256,
                n_batch=64 if every else 32,
                logits_all=every,
                n_threads=1,
                n_threads_batch=1,
                **options,
            )
        except (pypcd.UnsupportedError, pypcd.ModelError) as error:
            return str(error), 0
        try:
            points: list[list[Any]] = []
            for start, stop in ((0, PROMPT), *((n, n + 1) for n in range(PROMPT, PROMPT + SINGLE))):
                llm.eval(TOKENS[start:stop])
                for i in range((stop - start) % 64 if every else 1):
                    if config is None:
                        row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
                        points.append([np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).copy()])
                    else:
                        got = llm.pcd_logits(i if every else -1)
                        points.append([got.standard, got.over_rotated])
            return np.array(points, np.float64), self.splits.names.count("CPU")
        finally:
            llm.close()

    def cases(self) -> Iterator[tuple[str, str, str, str]]:
        for cache in CACHES:
            for placement in self.placements:
                if placement == "keys in RAM" and self.name != "llama":
                    continue
                for setting in SETTINGS:
                    yield cache, setting, "fused", placement
                    if setting in ALTERNATE:
                        yield cache, setting, "alternate", placement

    def check(self, cache: str, setting: str, evaluation: str, placement: str) -> dict[str, Any]:
        """What is printed about a case."""
        result: dict[str, Any] = {"cache": cache, "setting": setting, "evaluation": evaluation, "placement": placement}
        cpu, _ = self.rows(cache, setting, evaluation, "cpu")
        other, splits = self.rows(cache, setting, evaluation, placement)
        if isinstance(cpu, str) or isinstance(other, str):
            alike = isinstance(cpu, str) and isinstance(other, str)
            why = [text.replace(str(self.path), self.name) for text in (cpu, other) if isinstance(text, str)][:1]
            return {**result, "status": "refused" if alike else "failed", "why": why}

        plain_cpu, _ = self.rows(cache, PLAIN, "fused", "cpu")
        plain, plain_splits = self.rows(cache, PLAIN, "fused", placement)
        quantised = "q8_0" in cache + setting or MODELS[self.name].get("weight_type") == "Q4_0"
        result.update(compare(cpu, other), limit=LIMIT_QUANTISED if quantised else LIMIT)
        result["plain"] = nmse(plain, plain_cpu)  # type: ignore[arg-type]
        if self.placements is PLACEMENTS["cuda"]:
            result.update(splits=splits, plain_splits=plain_splits)
        if setting.endswith("base_ratio=1"):
            result["identity"] = nmse(other[:, 1], other[:, 0])
        if evaluation == "alternate":
            fused, _ = self.rows(cache, setting, "fused", placement)
            result["alternate"] = nmse(other, fused)  # type: ignore[arg-type]
        why = faults(result)
        if placement == "all layers" and self.placements is PLACEMENTS["cuda"] and not result["largest"]:
            why.append("not a bit differs: it was the CPU that computed")
        return {**result, "status": "failed" if why else "ok", "why": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("backend", choices=PLACEMENTS)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("skip", nargs="?", type=json.loads, default=[])
    args = parser.parse_args()
    if not args.model:
        print(json.dumps(list(MODELS)))
        return

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    model = Model(args.folder, args.model, args.backend)
    try:
        for names in model.cases():
            case = "; ".join(names)
            if case not in args.skip:
                say(case=case)
                try:
                    say(case=case, **model.check(*names))
                except pypcd.PCDError as error:
                    about = dict(zip(("cache", "setting", "evaluation", "placement"), names))
                    say(case=case, **about, status="failed", why=[str(error)])
    finally:
        model.path.unlink()
    say(case="end")


if __name__ == "__main__":
    main()
