"""The operations that PCD adds to a model's graphs: what they are, as a backend's supports_op() would see them.

Graphs are read where llama.cpp hands them to ggml's scheduler, by a small library that is preloaded into a process of its own
(graph_nodes.c). The graphs are those of a device with memory of its own, computed on the CPU. Knows nothing of backends.

    python scripts/recipes/graph_nodes.py    # in an environment with pypcd and a C compiler: these operations, with the types of operands
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")  # nothing is computed
SIZES = {"f32": 4, "f16": 2, "i32": 4, "i64": 8, "q8_0": 34}  # of an element or a block
MODEL: dict[str, Any] = {
    "n_embd": 256,
    "n_head": 4,
    "n_ff": 256,
    "n_ctx_train": 2048,
}  # heads of 64 dimensions, two for each key
MODELS = ("llama", "qwen2vl", "gemma2", "deepseek2", "lfm2")
CACHES = {
    "f16": ("f16", "f16", False),
    "flash": ("f16", "f16", True),
    "q8_0": ("q8_0", "f16", False),
    "q8_0 flash": ("q8_0", "q8_0", True),
}

# Each mode, and the settings that are tried in it.
MODES: dict[str, list[dict[str, Any]]] = {
    "rerotated": [{}, {"window": 20}, {"type_k_over": "q8_0"}],
    "shared": [{"cache": "shared"}],
    "window": [{"perturbation": "none", "window": 20}],
}
N_SHORT, N_LONG = 90, 1100  # of the second length a window leaves out enough to be worth an attention of its own


# --- reading ---


def layout(t: dict[str, Any]) -> str:
    """How a tensor lies in memory: "" without gaps, "rows" with gaps between rows, "permuted" with its dimensions in another order."""
    size, block = SIZES[t["type"]], 32 if t["type"].startswith("q") else 1
    want = [size, size * t["ne"][0] // block]
    want += [want[1] * t["ne"][1], want[1] * t["ne"][1] * t["ne"][2]]
    real = [(nb, w) for ne, nb, w in zip(t["ne"], t["nb"], want) if ne > 1]
    if all(nb == w for nb, w in real):
        return ""
    return "rows" if [nb for nb, _ in real] == sorted(nb for nb, _ in real) else "permuted"


def shown(t: dict[str, Any]) -> str:
    return f"{t['type']} {layout(t)}".strip()


def describe(node: dict[str, Any]) -> str:
    """An operation with its types: "SET_ROWS q8_0 <- f32, i64". Where it is written to is its type's, not a source."""
    sources = [t for t in node["src"] if not (node["op"] in ("SET_ROWS", "CPY") and t is node["src"][-1])]
    name: str = node["op"]
    if name == "CONCAT":
        name += f" along {node['params'][0]}"
    if name == "ROPE" and node["params"][15]:
        name += " at an offset"  # the rotated dimensions are not a head's first
    return f"{name} {node['type']} <- {', '.join(map(shown, sources))}" if sources else f"{name} {node['type']}"


# --- in the process that graph_nodes.c is preloaded into ---


def work(llm: Any, text: list[int], pcd: Any, *, later: bool, shift: bool) -> None:
    """A prompt, two steps; with `later` PCD is off while the prompt is read; with `shift` all cells move before the last step."""
    import llama_cpp

    llm.reset()
    llm.pcd = False if later else pcd
    llm.eval(text)
    llm.pcd = pcd
    llm.eval(text[:1])
    if shift:
        llama_cpp.llama_memory_seq_add(llama_cpp.llama_get_memory(llm.ctx), 0, 0, -1, 3)
        llm.n_tokens += 3
    llm.eval(text[:1])


def tries(model: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(mode, setting, further options of the work); mode "" is llama.cpp without PCD."""
    can_shift = model not in ("qwen2vl", "deepseek2", "lfm2")
    yield "", False, {"n": N_SHORT, "shift": can_shift}
    for mode, settings in MODES.items():
        for setting in settings:
            yield mode, setting, {"n": N_SHORT}
            yield (
                mode,
                {**setting, "evaluation": "alternate"},
                {"n": N_SHORT, "later": True, "shift": can_shift and not setting.get("window")},
            )
    if model == "llama":
        yield "", False, {"n": N_LONG}
        yield "window", {**MODES["window"][-1], "window": 40}, {"n": N_LONG}


def record(shim: Path, folder: Path) -> dict[str, list[str]]:
    """What each operation of PCD's is found in: modes, for all models and types of caches."""
    import pypcd  # before llama_cpp

    # isort: split
    import llama_cpp

    sys.path.append(str(HERE.parents[1] / "tests" / "support"))
    from tiny_gguf import write_tiny_gguf

    library, lines = ctypes.CDLL(str(shim)), folder / "graphs"
    types = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
    found: dict[str, set[str]] = defaultdict(set)

    def nodes_of(act: Any) -> set[str]:
        if not library.graph_nodes_to(str(lines).encode()):
            raise OSError(f"cannot write {lines}")
        try:
            act()
        finally:
            library.graph_nodes_to(None)
        graphs = [json.loads(line) for line in lines.read_text().splitlines()]
        assert graphs, "no graph was seen: the library is not preloaded"
        return {describe(node) for graph in graphs for node in graph if node["op"] not in VIEWS}

    for model in MODELS:
        path = write_tiny_gguf(folder / f"{model}.gguf", model, **MODEL)
        for type_k, type_v, flash in CACHES.values():
            if model == "deepseek2" and type_k != type_v:
                continue  # its values are a part of its keys
            seen: dict[str, set[str]] = defaultdict(set)
            for n in (N_SHORT, N_LONG):
                options = {"n_ctx": 256 if n == N_SHORT else 1280, "n_batch": 64, "n_threads": 1, "n_gpu_layers": 0}
                cache = {"type_k": types[type_k], "type_v": types[type_v], "flash_attn": flash}
                llm = pypcd.Llama(path, pcd=False, **options, **cache)
                text = [1 + i % 300 for i in range(n)]
                for mode, setting, more in tries(model):
                    pcd = pypcd.PCDConfig(**setting) if mode else False
                    if more["n"] != n or (pcd and pypcd.engine.pcd_refusal(llm, pcd)):
                        continue
                    given = {name: more.get(name, False) for name in ("later", "shift")}
                    for node in nodes_of(
                        lambda llm=llm, text=text, pcd=pcd, given=given: work(llm, text, pcd, **given)
                    ):
                        seen[node].add(mode)
                llm.close()
            for node, modes in seen.items():
                if "" not in modes:  # llama.cpp itself does not have it, with this model and cache
                    found[node] |= modes
    order = list(MODES)
    return {node: sorted(modes, key=order.index) for node, modes in sorted(found.items())}


# --- starting it ---


def run(folder: Path) -> dict[str, list[str]]:
    """Compile graph_nodes.c, and record in a process that it is preloaded into."""
    shim, out = folder / "graph_nodes.so", folder / "nodes.json"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    headers = Path(sysconfig.get_paths()["purelib"]) / "include"  # llama-cpp-python's
    for path in map(Path, sys.path):
        headers = path / "include" if (path / "include" / "ggml-backend.h").is_file() else headers
    command = [*compiler, "-O1", "-shared", "-fPIC", f"-I{headers}", "-o", shim, HERE / "graph_nodes.c", "-ldl"]
    subprocess.run(command, check=True)
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD", ""), str(shim)]))
    env = {**os.environ, "LD_PRELOAD": preload, "GGML_NO_BACKTRACE": "1"}
    subprocess.run([sys.executable, __file__, shim, folder], env=env, check=True)
    return json.loads(out.read_text())


def table(nodes: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """(operation, its types, modes) for each operation."""
    grouped: dict[str, list[str]] = defaultdict(list)
    modes: dict[str, set[str]] = defaultdict(set)
    for node, found in nodes.items():
        name, dst, *sources = re.split(r" (f32|f16|i32|q8_0)(?: <- |$)", node, maxsplit=1)
        grouped[name].append(f"`{dst} <- {sources[0]}`" if sources[0] else f"`{dst}`")
        modes[name].update(found)
    order = list(MODES)
    return [
        (name, ", ".join(types), ", ".join(sorted(modes[name], key=order.index))) for name, types in grouped.items()
    ]


def main() -> None:
    if len(sys.argv) == 3:
        (Path(sys.argv[2]) / "nodes.json").write_text(json.dumps(record(Path(sys.argv[1]), Path(sys.argv[2]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        for row in table(run(Path(folder))):
            print("| `{}` | {} | {} |".format(*row))


if __name__ == "__main__":
    main()
