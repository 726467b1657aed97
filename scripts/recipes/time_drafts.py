"""Times what a draft model gains or costs, by how many of its guesses are right.

    python scripts/recipes/time_drafts.py MODEL [off window on] [--length N] [--n-tokens N] [--n-guesses N]

Prints the time for a text as a multiple of that without a draft model, after the prompt. The draft model is made up: it knows the text that decoding without it wrote, and
puts wrong tokens into it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import pypcd  # it chooses the library that llama_cpp loads, so it comes first

# isort: split
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel

SHARES = {"all": 1.0, "half": 0.5, "none": 0.0}


class Knowing(LlamaDraftModel):
    """Guesses from a text that it knows, of which a share is right."""

    def __init__(self, text: list[int], share: float, n: int, n_vocab: int) -> None:
        right = np.random.default_rng(0).random(len(text)) < share
        self.text = [token if is_right else (token + 1) % n_vocab for token, is_right in zip(text, right)]
        self.n = n

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        return np.array(self.text[len(input_ids) :][: self.n], dtype=np.intc)


def written(llm: pypcd.Llama, prompt: list[int], n: int) -> tuple[list[int], float]:
    """The text, greedily, and the seconds that it took after the first token."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    tokens = llm.generate(prompt, temp=0.0)
    first = next(tokens)
    start = time.perf_counter()
    return [first, *itertools.islice(tokens, n)], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", default=["off", "window", "paper"], help="default: off window paper")
    for name, default in (("--length", 256), ("--n-tokens", 48), ("--n-guesses", 10), ("--threads", 1)):
        parser.add_argument(name, type=int, default=default, help="default %(default)s")
    args = parser.parse_intermixed_args()
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    n_ctx = args.length + args.n_tokens + 2 * args.n_guesses + 64
    llm = pypcd.Llama(args.model, n_ctx=n_ctx, pcd=None, flash_attn=False, **threads)
    prompt = np.random.default_rng(0).integers(3, llm.n_vocab(), args.length).tolist()

    print("| right | " + " | ".join(args.settings) + " |\n" + "| --- |" + " ---: |" * len(args.settings))
    plain = {}
    for setting in args.settings:
        llm.pcd = setting
        written(llm, prompt, args.n_tokens)  # the first steps pay for what comes later
        plain[setting] = written(llm, prompt, args.n_tokens)
    for name, share in SHARES.items():
        cells = []
        for setting in args.settings:
            llm.pcd = setting
            text, without = plain[setting]
            llm.draft_model = Knowing(prompt + text, share, args.n_guesses, llm.n_vocab())
            cells.append(f"{written(llm, prompt, args.n_tokens)[1] / without:.2f}x")
            llm.draft_model = None
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
