"""Times twins with a window where second keys are made in each step, beside a context that keeps them.

    python scripts/recipes/time_made_keys.py MODEL [--length N,...] [--window N,...] [--n-ctx N] [--flash-attn]

Prints milliseconds a step, and the median of the ratios. The two contexts take turns in one process. They differ in one
sequence that is given no window and never used: as long as it may come, second keys are kept (docs/settings.md).
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

import pypcd
from pypcd import PCDConfig
from pypcd._cli import _options
from pypcd.measure import _timing

KEPT, MADE = "kept", "made"


def opened(args: argparse.Namespace, name: str) -> pypcd.Llama:
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    llm = pypcd.Llama(args.model, pcd=True, n_ctx=args.n_ctx, n_seq_max=2, flash_attn=args.flash_attn, **threads)
    if name == KEPT:
        llm.pcd_for(1, {"window": None})
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--length", default="512,2048,8192", help="tokens in the context (default %(default)s)")
    parser.add_argument("--window", default="64,512", help="default %(default)s")
    parser.add_argument("--flash-attn", action="store_true")
    for name, default in (("--n-ctx", 8704), ("--threads", 1), ("--rounds", 7), ("--n-tokens", 5)):
        parser.add_argument(name, type=int, default=default, help="default %(default)s")
    args = parser.parse_args()
    lengths, windows = (
        _options.lengths(text, option) for option, text in (("--length", args.length), ("--window", args.window))
    )
    models = {name: opened(args, name) for name in (KEPT, MADE)}
    texts = {name: _timing.Texts(llm) for name, llm in models.items()}
    random = np.random.default_rng(0)
    more = random.integers(3, models[KEPT].n_vocab(), args.n_tokens + _timing.WARM_UP).tolist()
    text = random.integers(3, models[KEPT].n_vocab(), max(lengths)).tolist()

    print("| tokens | window | kept, ms | made, ms | made / kept |\n| ---: | ---: | ---: | ---: | ---: |")
    for length in sorted(lengths):
        for each in texts.values():
            each.fill([text[:length]])
        for window in windows:
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(args.rounds):
                for name, llm in models.items():
                    llm.pcd = PCDConfig(window=window, evaluation="fused")
                    if (llm.pcd_stats().second_bytes > 0) != (name == KEPT):
                        parser.error(f"--window has {window}; allowed: up to an eighth of --n-ctx, less n_sink")
                    seconds[name].append(texts[name].time([more]))
            ratio = statistics.median(m / k for m, k in zip(seconds[MADE], seconds[KEPT]))
            ms = " | ".join(f"{1000 * statistics.median(seconds[name]):.2f}" for name in (KEPT, MADE))
            print(f"| {length} | {window} | {ms} | {ratio:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
