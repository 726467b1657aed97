"""Whether a quantised model computes the same with ggml's AMX kernels as with its plain ones.

    python -I _amx_probe.py model.gguf

Prints "right", "ggml's kernels for it compute wrongly here (…)", or "none" if this ggml or this CPU has no AMX. A process of its own runs it, because kernels that a compiler broke
crash. It needs llama_cpp alone, whose own libllama it uses, and a small model in F16, which it quantises.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

import llama_cpp
import numpy as np
import numpy.typing as npt

PROMPT = list(range(5, 24)), [24]  # 19 tokens fill a tile and a part of another; a single one has a path of its own
N_THREADS = 2  # each sets its tiles up by itself
LIMIT = 1e-2  # of the differences, squared and normalised: kernels round in different ways by about 1e-5, broken ones by 1 or more


def logits(path: str, use_extra_bufts: bool) -> npt.NDArray[np.float64]:
    """The last row of each part of the prompt, shape (2, n_vocab)."""
    model_params, params = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    model_params.n_gpu_layers, model_params.use_extra_bufts = 0, use_extra_bufts
    params.n_ctx, params.n_threads, params.n_threads_batch = 64, N_THREADS, N_THREADS
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = []
    for part in PROMPT:
        tokens = (llama_cpp.llama_token * len(part))(*part)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(part))) != 0:
            raise RuntimeError("llama.cpp computes nothing")
        row = llama_cpp.llama_get_logits_ith(context, -1)
        rows.append(np.ctypeslib.as_array(row, shape=(n_vocab,)).astype(np.float64))
    return np.array(rows)


def verdict(rows: npt.NDArray[np.float64], plain: npt.NDArray[np.float64]) -> str:
    error = float(((rows - plain) ** 2).sum() / (plain**2).sum())
    return "right" if error < LIMIT else f"ggml's kernels for it compute wrongly here (logits differ by {error:.2g})"


def main(path: str) -> str:
    if b"AMX_INT8 = 1" not in llama_cpp.llama_print_system_info():
        return "none"
    with tempfile.TemporaryDirectory() as folder:
        quantised, params = os.path.join(folder, "q4_0.gguf"), llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        if llama_cpp.llama_model_quantize(path.encode(), quantised.encode(), ctypes.byref(params)) != 0:
            raise RuntimeError("llama.cpp quantises nothing")
        return verdict(logits(quantised, True), logits(quantised, False))


if __name__ == "__main__":
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, and leaves no file behind
    print(main(sys.argv[1]))
