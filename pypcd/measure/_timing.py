"""Times one token at a time on a llama_cpp.Llama.

Run as a script, it times llama-cpp-python's own library, in a process without pypcd: `_bench` sends requests on stdin,
one JSON object a line. So it imports nothing from pypcd.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp


def rewind(llm: llama_cpp.Llama, n_past: int) -> None:
    """Keep the first n_past tokens of the cache."""
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm._ctx.ctx), -1, n_past, -1)
    llm.n_tokens = n_past


def fill(llm: llama_cpp.Llama, tokens: list[int]) -> float:
    """Fill the cache with these tokens; returns the seconds it took."""
    rewind(llm, min(llm.n_tokens, len(tokens)))
    start = time.perf_counter()
    if llm.n_tokens < len(tokens):
        llm.eval(tokens[llm.n_tokens :])
        llm._ctx.get_logits_ith(-1)  # waits for the computation
    return time.perf_counter() - start


def time_decode(llm: llama_cpp.Llama, tokens: list[int]) -> float:
    """Seconds per token, after one untimed token (builds graphs, makes second keys); the cache is left unchanged."""
    n_past = llm.n_tokens
    llm.eval(tokens[:1])
    start = time.perf_counter()
    for token in tokens[1:]:
        llm.eval([token])
        llm._ctx.get_logits_ith(-1)
    seconds = (time.perf_counter() - start) / (len(tokens) - 1)
    rewind(llm, n_past)
    return seconds


def time_two_rows(llm: llama_cpp.Llama, tokens: list[int]) -> float:
    """Seconds for a step of two tokens with the logits of both: the cost of a second row, without PCD."""
    n_past = llm.n_tokens
    batch = llama_cpp.llama_batch_init(2, 0, 1)
    try:
        batch.n_tokens = 2
        seconds = []
        for i in range(0, len(tokens) - 1, 2):
            for k in range(2):
                batch.token[k], batch.pos[k], batch.logits[k] = tokens[i + k], n_past + i + k, True
                batch.n_seq_id[k], batch.seq_id[k][0] = 1, 0
            start = time.perf_counter()
            if llama_cpp.llama_decode(llm._ctx.ctx, batch) != 0:
                raise RuntimeError("llama_decode failed")
            llm._ctx.get_logits_ith(-1)  # waits for the computation
            seconds.append(time.perf_counter() - start)
    finally:
        llama_cpp.llama_batch_free(batch)
    rewind(llm, n_past)
    timed = seconds[1:] or seconds  # the first step builds the graph
    return sum(timed) / len(timed)


def main() -> None:
    llm = llama_cpp.Llama(verbose=False, **json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        result = fill(llm, request["fill"]) if "fill" in request else time_decode(llm, request["decode"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
