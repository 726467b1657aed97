"""The tables of rows on a backend, of a file that PYPCD_TEST_REPORT named.

python3 scripts/recipes/rows_table.py rows.jsonl
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
TITLES = ("cases", "failed", "L", "L / plain", "L*", "L* / plain", "effect", "left", "splits")


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: what tests/engine/test_backend.py wrote down."""
    bad = [r for r in results if r["outcome"] not in ("passed", "skipped")]
    lines = [f"## Rows: {len(results)} cases, {len(bad)} failed", "", LEGEND]
    for by in ("engine", "setting", "kv", "work", "placement", "model"):
        groups: dict[str, list[dict[str, Any]]] = {}
        for r in results:
            if "effect" in r:
                groups.setdefault(r[by], []).append(r)
        lines += ["", *table((by, *TITLES), [(name, *of_group(group)) for name, group in groups.items()])]
    if bad:
        lines += ["", "### Failed", ""]
        lines += [f"- {r['test']}: {r['outcome']}; {(r['why'].strip().splitlines() or [''])[-1]}" for r in bad[:200]]
    return "\n".join(lines)


def of_group(group: list[dict[str, Any]]) -> tuple[Any, ...]:
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
    return len(group), failed, *worst, min(effects, default=""), left, " / ".join(map(str, splits))


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown; floats with three digits."""
    shown = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *shown)]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        found = {result["test"]: result for result in map(json.loads, lines)}  # of a test that was done again, the last
    print(tables(list(found.values())))
