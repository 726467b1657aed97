"""llama-server's own options that pypcd has to know of: their names on its command line, in a file of models, in the environment.

Each is called by one name here, the first of its line. Knows nothing of what they mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ELSEWHERE", "known", "of_environment", "of_words"]

# Where pypcd serve has options or arguments of its own: what is served, where, and on which machines.
_ELSEWHERE = """
    host LLAMA_ARG_HOST
    port LLAMA_ARG_PORT
    rpc LLAMA_ARG_RPC
    parallel np LLAMA_ARG_N_PARALLEL
    model m LLAMA_ARG_MODEL
    model-url mu LLAMA_ARG_MODEL_URL
    hf-repo hf hfr LLAMA_ARG_HF_REPO
    hf-file hff LLAMA_ARG_HF_FILE
    docker-repo dr LLAMA_ARG_DOCKER_REPO
    models-dir LLAMA_ARG_MODELS_DIR
    models-preset LLAMA_ARG_MODELS_PRESET
    alias a LLAMA_ARG_ALIAS
"""
_OTHERS = """
    api-key LLAMA_API_KEY
    api-key-file LLAMA_ARG_API_KEY_FILE
    api-prefix LLAMA_ARG_API_PREFIX
    batch-size b LLAMA_ARG_BATCH
    cors-origins LLAMA_ARG_CORS_ORIGINS
    ctx-size c LLAMA_ARG_CTX_SIZE
    fit LLAMA_ARG_FIT
    flash-attn fa LLAMA_ARG_FLASH_ATTN
    gpu-layers n-gpu-layers ngl LLAMA_ARG_N_GPU_LAYERS
    kv-unified kvu no-kv-unified no-kvu LLAMA_ARG_KV_UNIFIED LLAMA_ARG_NO_KV_UNIFIED
    kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT
    log-colors LLAMA_ARG_LOG_COLORS
    log-verbosity verbosity lv LLAMA_ARG_LOG_VERBOSITY
    models-max LLAMA_ARG_MODELS_MAX
    reuse-port LLAMA_ARG_REUSE_PORT
    temp temperature LLAMA_ARG_TEMPERATURE
    threads t LLAMA_ARG_THREADS
    threads-batch tb
    threads-http LLAMA_ARG_THREADS_HTTP
    ubatch-size ub LLAMA_ARG_UBATCH
"""
ELSEWHERE = {name: line.split()[0] for line in _ELSEWHERE.strip().splitlines() for name in line.split()}
_NAMES = ELSEWHERE | {name: line.split()[0] for line in _OTHERS.strip().splitlines() for name in line.split()}


def known(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The values of the options that are known here, by the name that they have here; a later one wins."""
    return {_NAMES[name]: value for name, value in given if name in _NAMES}


def of_words(words: Sequence[str]) -> dict[str, str]:
    """Those on a command line, with the word behind each as its value."""
    return known(
        (word.lstrip("-").replace("_", "-") if word.startswith("--") else word[1:], value)
        for word, value in zip(words, [*words[1:], ""])
        if word.startswith("-")
    )


def of_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those in the environment that pypcd leaves to llama-server, which puts a command line's before them."""
    return known(
        (name, value) for name, value in environment.items() if name.startswith("LLAMA_") and name not in ELSEWHERE
    )
