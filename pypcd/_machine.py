"""What the machine under us suggests: threads, memory for a context, AMX. Knows nothing of PCD."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import llama_cpp

from pypcd import _log


def n_cores() -> int:
    """The cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def default_threads() -> int:
    """All cores up to four, else half of them: beyond that they are mostly hyper-threads."""
    n = n_cores()
    return n if n <= 4 else n // 2


def has_gpu() -> bool:
    return bool(llama_cpp.llama_supports_gpu_offload())


@functools.cache
def has_amx() -> bool:
    """Whether the CPU has AMX and the library was compiled to use it (GCC 12 miscompiles ggml's AMX set-up)."""
    try:
        in_cpu = " amx_tile" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False  # AMX needs a kernel interface that only Linux has in use here
    in_library = "AMX_INT8 = 1" in llama_cpp.llama_print_system_info().decode()
    return in_cpu and in_library


def total_memory() -> int:
    """Bytes of main memory; 16 GiB where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 * 2**30


def model_metadata(path: str) -> dict[str, str]:
    """A GGUF's scalar metadata, without loading its weights; {} if the file cannot be read."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        return {}
    try:
        buffer = ctypes.create_string_buffer(2**16)
        result = {}
        for i in range(llama_cpp.llama_model_meta_count(model)):
            llama_cpp.llama_model_meta_key_by_index(model, i, buffer, len(buffer))
            key = buffer.value.decode("utf-8", "replace")
            llama_cpp.llama_model_meta_val_str_by_index(model, i, buffer, len(buffer))
            result[key] = buffer.value.decode("utf-8", "replace")
        return result
    finally:
        llama_cpp.llama_model_free(model)


def fitting_n_ctx(path: str) -> int:
    """The context the model was trained for, or less where its KV cache with second keys (f16) would take more than
    a quarter of main memory."""
    meta = model_metadata(path)
    arch = meta.get("general.architecture", "")

    def number(key: str, default: int) -> int:
        text = meta.get(f"{arch}.{key}", "")
        values = [int(v) for v in text.strip("[]").split(",") if v.strip().isdigit()]  # some models list one per layer
        return max(values, default=default)

    n_train = number("context_length", 4096)
    n_head = max(number("attention.head_count", 1), 1)
    head = number("attention.key_length", number("embedding_length", 4096) // n_head)
    per_token = 3 * 2 * number("block_count", 32) * number("attention.head_count_kv", n_head) * head

    fits = total_memory() // 4 // max(per_token, 1)
    if fits >= n_train:
        return n_train
    n_ctx = max(2048, fits // 1024 * 1024)
    _log.logger.info("n_ctx is %d, not the model's %d, to fit in memory; set n_ctx to have another", n_ctx, n_train)
    return n_ctx
