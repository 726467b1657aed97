"""Times a quantised model with ggml's three kinds of CPU kernels: AMX, repacked weights without AMX, neither.

    python scripts/recipes/time_kernels.py MODEL [--threads N] [--prompt N] [--rounds N] [--n-tokens N]

Prints tokens per second: of a prompt, of plain decoding and of PCD's ways to decode; steps of two plain tokens per second.
One process has the model open three times and takes turns, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics

import numpy as np

import pypcd
from pypcd import PCDConfig
from pypcd.bench import timing

KERNELS = {"AMX": ("1", None), "repacked": ("0", None), "neither": ("0", False)}  # PYPCD_AMX, use_extra_bufts
SETTINGS = {
    "plain": None,
    "rerotated": PCDConfig(evaluation="fused"),
    "shared": PCDConfig(cache="shared", evaluation="fused"),
    "alternate": PCDConfig(evaluation="alternate"),
}


def opened(path: str, amx: str, extra: bool | None, **kwargs: int) -> pypcd.Llama:
    os.environ["PYPCD_AMX"] = amx
    return pypcd.Llama(path, use_extra_bufts=extra, flash_attn=False, n_gpu_layers=0, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    for name, default in (("--threads", 1), ("--prompt", 512), ("--rounds", 3), ("--n-tokens", 8)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    models = {
        name: opened(args.model, *how, n_ctx=args.prompt + args.n_tokens + 64, **threads)
        for name, how in KERNELS.items()
    }
    texts = {name: timing.Texts(llm) for name, llm in models.items()}
    random = np.random.default_rng(0)
    n_vocab = next(iter(models.values())).n_vocab()
    prompt, more = (random.integers(3, n_vocab, n).tolist() for n in (args.prompt, args.n_tokens + timing.WARM_UP))

    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for _ in range(args.rounds):
        for name, llm in models.items():
            llm.pcd = None
            seconds[name].setdefault("prompt", []).append(texts[name].read([prompt]) / len(prompt))
            for what, setting in SETTINGS.items():
                llm.pcd = setting
                seconds[name].setdefault(what, []).append(texts[name].time([more]))
            llm.pcd = None
            seconds[name].setdefault("two rows", []).append(texts[name].time([more], 2))

    print(f"{'':10}" + "".join(f"{what:>11}" for what in ("prompt", *SETTINGS, "two rows")))
    for name, found in seconds.items():
        print(f"{name:10}" + "".join(f"{1 / statistics.median(times):11.1f}" for times in found.values()))


if __name__ == "__main__":
    main()
