"""check_gpu.md: what `scripts/check_gpu run` found, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GOAL = ("pcd:window=4096", "8b", 16384, 1.10)  # method, shape, tokens, time per token against plain decoding


def render(record: dict[str, Any]) -> str:
    """check_gpu.md."""
    machine, versions = record["machine"], record.get("versions", {})
    names = [f"{gpu['name']} ({gpu['memory.total']}, driver {gpu['driver_version']})" for gpu in machine["gpus"]]
    names = names or [device["description"] for device in versions.get("devices", []) if device["is_gpu"]]
    where = ", ".join(names) if record["backend"] == "cuda" else "a dry run on the CPU: both sides are computed there"
    about = (
        f"{where or 'no GPU found'}; {machine['cores']} cores of {machine['cpu']}; "
        f"CUDA {machine['nvcc']}, architectures {machine['architectures']}; "
        f"llama-cpp-python {versions.get('llama_cpp_python', '(not built)')}, Python {machine['python']}, "
        f"CMake {machine['cmake']}, {machine['compiler']}."
    )
    lines = [
        "# PCD on a GPU",
        "",
        about,
        "",
        *_table(
            ("stage", "status", "seconds"),
            [(name, stage["status"], f"{stage['seconds']:.0f}") for name, stage in record["stages"].items()],
        ),
    ]
    for name, stage in record["stages"].items():
        if stage.get("error"):
            lines += ["", f"**{name}: {stage['status']}.**", "", "```", stage["error"], "```"]
    return "\n".join([*lines, *_render_rows(record), *_render_bench(record)]) + "\n"


def _render_rows(record: dict[str, Any]) -> list[str]:
    cases = [case for case in record["rows"] if "status" in case]
    if not cases:
        return []
    bad = [case for case in cases if case["status"] in ("failed", "crashed")]
    other = "the GPU" if record["backend"] == "cuda" else "other micro-batches"
    about = (
        f"{len(cases)} cases of {len({case['model'] for case in cases})} models, {len(bad)} failed. Normalised mean "
        "squared errors, the worst of each group; `effect` is how far L* is from L, the least of each group; the last "
        "column counts the parts of a graph that ran on the CPU where PCD has most more than plain decoding, and plain "
        "decoding's. scripts/gpu_rows.py has the limits and the reasons for them."
    )
    lines = [
        "",
        f"## Rows: the CPU against {other}",
        "",
        about,
    ]
    for by in ("setting", "cache", "placement", "model"):
        groups: dict[str, list[dict[str, Any]]] = {}
        for case in cases:
            groups.setdefault(case.get(by, "(crashed)"), []).append(case)
        lines += ["", *_table(_row_titles(by), [_row_line(name, group) for name, group in groups.items()])]
    if bad:
        lines += ["", "### Failed", ""]
        lines += [
            f"- {case['model']}, {case['case']}: {case['status']}; {'; '.join(case['why'])}" for case in bad[:200]
        ]
    return lines


def _row_titles(by: str) -> tuple[str, ...]:
    errors = ("L", "L*", "largest difference", "effect", "identity", "fused/alternate")
    return (by, "cases", "refused", "failed", *errors, "parts on the CPU")


def _row_line(name: str, group: list[dict[str, Any]]) -> tuple[str, ...]:
    def worst(field: str) -> str:
        values = [case[field] for case in group if field in case]
        return f"{max(values):.1e}" if values else ""

    count = [sum(case["status"] in kinds for case in group) for kinds in (("refused",), ("failed", "crashed"))]
    splits = [(case["splits"], case["plain_splits"]) for case in group if "splits" in case]
    most = max(splits, default=None, key=lambda pair: pair[0] - pair[1])
    fields = ("standard", "over_rotated", "largest")
    effects = [case["effect"] for case in group if "effect" in case and "identity" not in case]
    return (
        *(name, str(len(group)), *map(str, count), *map(worst, fields), f"{min(effects):.1e}" if effects else ""),
        *(worst("identity"), worst("alternate"), f"{most[0]}, {most[1]}" if most else ""),
    )


def _render_bench(record: dict[str, Any]) -> list[str]:
    if not record["bench"]:
        return []
    lines = ["", f"## Cost: a random model of the {record['shape']} shape, Q4_0"]
    for table in sorted(record["bench"], key=lambda table: table["length"]):
        lines += ["", f"{table['length']} tokens in the context ({table['seconds']:.0f} s):", ""]
        if "error" in table:
            lines += ["```", table["error"], "```"]
            continue
        rows, goal = [], []
        for m in table["measurements"]:
            prompt = f"{m['prefill_ratio']:.2f}x" if m["prefill_ratio"] is not None else ""
            times = (f"{m['tokens_per_second']:.1f}", f"{m['ratio']:.3f}x", prompt, f"{m['kv_bytes'] / 2**20:.0f}")
            rows.append((m["method"], "on" if m["flash_attn"] else "off", *times))
            if (m["method"], record["shape"], table["length"]) == GOAL[:3] and record["backend"] == "cuda":
                met = "met" if m["ratio"] <= GOAL[3] else "not met"
                goal = ["", f"Goal for {GOAL[0]}: at most {GOAL[3]:.2f}x; measured {m['ratio']:.3f}x, {met}."]
        lines += [*_table(("method", "flash attention", "tok/s", "time/plain", "prompt/plain", "KV MiB"), rows), *goal]
    return lines


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
