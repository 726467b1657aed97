"""check_gpu.md: what `scripts/check_gpu run` found, as text. Knows nothing of how it was found.

python3 scripts/gpu/report.py rows.jsonl     # the tables of rows alone, of a file that PYPCD_TEST_REPORT named
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

LEGEND = """\
A case is a test of tests/engine/test_backend.py: L and L* of some work against the float64 reference, in normalised mean squared
errors. The tables have the worst of each group, and how many times that is what plain rows differ by in the same work;
"effect" is how far L* is from L, the least of each group. Where all of a model is on the device, "left" are the cases in which
operations of PCD's left it, "splits" the most parts of a graph that run on one device each: of plain decoding, and of PCD's."""


def render(record: dict[str, Any]) -> str:
    """check_gpu.md."""
    machine, versions = record["machine"], record.get("versions", {})
    gpus = [device["description"] for device in versions.get("devices", []) if device["is_gpu"]]
    where = (
        f"{', '.join(machine['gpus'] or gpus) or 'No GPU found'}; {machine['cores']} cores of {machine['cpu']}; "
        f"CUDA {machine['nvcc']}, llama-cpp-python {versions.get('llama_cpp_python', '(not built)')}, "
        f"Python {machine['python']}, {machine['compiler']}. Backend: {record['backend']}."
    )
    lines = [
        "# PCD on a GPU",
        "",
        where,
        "",
        *table(("stage", "status", "seconds"), [(n, s["status"], s["seconds"]) for n, s in record["stages"].items()]),
    ]
    for name, stage in record["stages"].items():
        if stage.get("error"):
            lines += ["", f"**{name}: {stage['status']}.**", "", "```", stage["error"], "```"]
    return "\n".join([*lines, *rows(record.get("rows", [])), *_bench(record.get("bench", {}))]) + "\n"


def rows(results: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: what tests/engine/test_backend.py wrote down with PYPCD_TEST_REPORT."""
    if not results:
        return []
    bad = [r for r in results if r["outcome"] not in ("passed", "skipped")]
    lines = ["", f"## Rows: {len(results)} cases, {len(bad)} failed", "", LEGEND]
    measured = [r for r in results if "effect" in r]
    for by in ("setting", "kv", "work", "placement", "model"):
        groups: dict[str, list[dict[str, Any]]] = {}
        for r in measured:
            groups.setdefault(r[by], []).append(r)
        titles = (by, "cases", "failed", "L", "L / plain", "L*", "L* / plain", "effect", "left", "splits")
        lines += ["", *table(titles, [_group(name, group) for name, group in groups.items()])]
    if bad:
        lines += ["", "### Failed", ""]
        lines += [f"- {r['test']}: {r['outcome']}; {(r['why'].strip().splitlines() or [''])[-1]}" for r in bad[:200]]
    return lines


def _group(name: str, group: list[dict[str, Any]]) -> tuple[Any, ...]:
    failed = sum(r["outcome"] != "passed" for r in group)
    effects = [r["effect"] for r in group if not r["setting"].endswith("identity")]
    worst = [
        max(r["standard"] for r in group),
        max(r["standard"] / r["plain"] for r in group),
        max(r["over"] for r in group),
        max(r["over"] / r["plain_over"] for r in group),
    ]
    on_device = [r for r in group if r["placement"] not in ("cpu", "two-layers", "keys-in-ram")]  # all of it
    left = sum(bool(r.get("left")) for r in on_device)
    splits = [max(numbers) for numbers in zip(*(r["splits"] for r in on_device if "splits" in r))]
    return name, len(group), failed, *worst, min(effects, default=""), left, " / ".join(map(str, splits))


def _bench(tables: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["", "## Cost: `pypcd bench` on random models"] if tables else []
    for name, found in tables.items():
        lines += ["", f"{name} in the context:", ""]
        if "error" in found:
            lines += ["```", found["error"], "```"]
        else:
            measured = found["measurements"]
            lines += table(list(measured[0]), [list(row.values()) for row in measured])
    return lines


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown; floats with three digits."""
    shown = [[f"{v:.3g}" if isinstance(v, float) else "" if v is None else str(v) for v in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *shown)]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        found = {result["test"]: result for result in map(json.loads, lines)}  # of a test that was done again, the last
    print("\n".join(rows(list(found.values()))))
