"""Defaults that depend on the machine: threads, memory for a context (second keys of PCD included), a port."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pypcd.engine import MOST_THREADS, devices, logger, supports_gpu
from pypcd.errors import InputError
from pypcd.gguf import read_gguf
from pypcd.settings.ranges import Integer
from pypcd.settings.remote import is_loopback

__all__ = [
    "checked_n_ctx",
    "default_threads",
    "devices",
    "free_port",
    "has_gpu",
    "n_cores",
    "room_for_weights",
    "total_memory",
]


def n_cores() -> int:
    """The cores this process may use, and ggml can."""
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        n = os.cpu_count() or 1
    return min(n, MOST_THREADS)


def default_threads() -> int:
    """All cores up to four, else half of them: beyond that they are mostly hyper-threads."""
    n = n_cores()
    return n if n <= 4 else n // 2


def has_gpu(options: Mapping[str, Any] | None = None) -> bool:
    """Whether there is a GPU: this machine's, or what stands for one, the servers that a model's options name."""
    return bool((options or {}).get("rpc_servers")) or supports_gpu()


def total_memory() -> int:
    """Bytes of main memory this process may use; 16 GiB where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = 16 * 2**30
    try:  # a container may have less
        return min(total, int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return total


def room_for_weights() -> int:
    """Bytes that the weights of models may take together: a quarter of memory is for their contexts."""
    gpus = [device["free"] for device in devices() if device["is_gpu"]] if has_gpu() else []
    return (sum(gpus) or total_memory()) // 4 * 3


def checked_n_ctx(
    path: str, kwargs: Mapping[str, Any], n_texts: int = 1, n_models: int = 1, remote: Sequence[dict[str, Any]] = ()
) -> int:
    """The context to open a model with: the given one, or the model's own, or what fits in a quarter of memory.

    Rounded up to a multiple of 256, as llama.cpp does: llama_cpp.Llama's own arrays must have the same size.

    Args:
        kwargs: those of llama_cpp.Llama.
        n_texts: how many texts share it; each may be as long as the model's own context.
        n_models: how many models share the memory.
        remote: the devices of servers that hold a part of the model, as RemoteDevices has them.
    """
    n_ctx = Integer(0, note="0: the model's own, or what fits")("n_ctx", kwargs.get("n_ctx") or 0)

    shape = read_gguf(path).shape
    kv = shape.key_bytes + shape.value_bytes
    gpus = [device for device in devices() if device["is_gpu"]] if kwargs.get("n_gpu_layers") != 0 else []
    remote = remote if kwargs.get("n_gpu_layers") != 0 else ()
    gpus += remote
    # a server on loopback may be this machine; what a tunnel leads to is then not counted
    total = total_memory() + sum(device["memory"] for device in remote if not is_loopback(device["description"]))

    if n_ctx:
        memory = total_memory() + sum(device["memory"] for device in gpus)
        if n_ctx * kv // 16 > memory:  # quantised keys and values, windows and latent attention take less than f16
            raise InputError(
                f"n_ctx is {n_ctx}: keys and values would take about {n_ctx * kv / 2**30:,.0f} GiB, but "
                f"{'these machines have' if remote else 'this machine has'} {memory / 2**30:,.0f}; the model was trained for {shape.n_ctx_train}"
            )
    else:
        budget = total // 4
        free = sum(device["free"] for device in gpus) - os.path.getsize(path)
        if gpus and free > 0:
            budget = min(budget, free * 3 // 4)
        budget //= n_models
        per_token = kv + shape.key_bytes  # second keys
        if not kwargs.get("flash_attn"):
            per_token += 4 * shape.n_head * kwargs.get("n_ubatch", 512)  # attention scores
        if kwargs.get("logits_all"):
            per_token += 4 * shape.n_vocab
        n_ctx = min(n_texts * shape.n_ctx_train, max(2048, budget // max(per_token, 1) // 1024 * 1024))
        if n_ctx < shape.n_ctx_train:
            text = "n_ctx is %d instead of the model's %d, to fit in memory; set n_ctx to choose another"
            logger.info(text, n_ctx, shape.n_ctx_train)
    return -(-n_ctx // 256) * 256


def free_port(host: str, port: int) -> int:
    """A port that can be listened on.

    Raises:
        OSError: it is taken, or this machine does not have the address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"host is {host!r}, which is no address of this machine ({error.strerror})") from None
    with socket.socket(family) as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last user has just left is free
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise OSError(f"host is {host!r}, which is no address of this machine") from None
            remedy = "give another one, or 0 for any that is free"
            raise OSError(f"port is {port}, which {host} cannot listen on: {error.strerror}; {remedy}") from None
        return int(probe.getsockname()[1])
