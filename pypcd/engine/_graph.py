"""The graphs that llama.cpp computes, and the devices that run them, as the scheduler shows them to a callback.

Knows nothing of settings: what it measures is whatever is in force in the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import llama_cpp

from pypcd.engine._attention import watched
from pypcd.engine._tensors import Tensor, ggml

__all__ = ["Graph", "watch_graphs"]

_VIEWS = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
_EMBEDDINGS, _LAST = b"token_embd.weight", b"result_output"  # a graph without outputs has no such end


@dataclasses.dataclass
class Graph:
    """A graph that was computed, and where.

    Attributes:
        n_nodes: operations in it; views compute nothing and are none.
        n_splits: parts that run on one device each.
        devices: how many operations each device ran, by ggml's name of its memory; "CPU" for memory that the CPU reads.
        on_cpu: those that the CPU ran, as "OPERATION of name", and how often; names without the number of their layer.
    """

    n_nodes: int = 0
    n_splits: int = 0
    devices: Counter[str] = dataclasses.field(default_factory=Counter)
    on_cpu: Counter[str] = dataclasses.field(default_factory=Counter)


@contextlib.contextmanager
def watch_graphs(llm: llama_cpp.Llama) -> Iterator[list[Graph]]:
    """Collect the graphs that this context computes in the block, in their order: those that turn second keys too, but not llama.cpp's own
    small ones, which shift keys.

    Raises:
        UnsupportedError: the context has a callback already.
    """
    seen, last = list[Graph](), [""]

    def keep(tensor: int, is_asking: bool, data: Any) -> bool:
        op, name = ggml.ggml_op_desc(tensor).decode(), ggml.ggml_get_name(tensor)
        if is_asking and op not in _VIEWS and ggml.ggml_nelements(tensor):
            node = Tensor.from_address(tensor)
            if not last[0] or (op == "GET_ROWS" and ggml.ggml_get_name(node.src[0]) == _EMBEDDINGS):
                seen.append(Graph())
                last[0] = ""
            is_cpu = ggml.ggml_backend_buffer_is_host(node.buffer)
            device = "CPU" if is_cpu else ggml.ggml_backend_buffer_name(node.buffer).decode()
            graph = seen[-1]
            graph.n_nodes += 1
            graph.n_splits += device != last[0]
            graph.devices[device] += 1
            if is_cpu:
                graph.on_cpu[f"{op} of {_kind(name.decode())}"] += 1
            last[0] = "" if name == _LAST else device
        return not is_asking

    with watched(llm, keep, counts=True):
        yield seen


def _kind(name: str) -> str:
    """A tensor's name without numbers: of its layer, or of its place in the graph where nobody named it."""
    return re.sub(r"[-_]?\d+", "", name)
