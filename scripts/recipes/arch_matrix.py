#!/usr/bin/env python3
"""Find out on which architectures of llama.cpp PCD works, and write docs/lab/architectures.md and .json.

    python scripts/recipes/arch_matrix.py "$(scripts/recipes/arch_models)"            # all: a minute on two cores
    python scripts/recipes/arch_matrix.py "$(scripts/recipes/arch_models)" qwen3 phi3 # only these; writes no files
    python scripts/recipes/arch_matrix.py --render                                    # the table again, from the numbers

The checks themselves are in arch_checks.py; this file only collects and prints what they find.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JSON, TABLE = ROOT / "docs/lab/architectures.json", ROOT / "docs/lab/architectures.md"

ABOUT = """\
# Architectures

This page says on which architectures of llama.cpp Positional Contrastive Decoding (PCD) works, at the pinned version. The checks use tiny random models, so they show whether the computation
is right, not whether PCD helps. This command writes the page, and the numbers in [architectures.json](architectures.json), against which `tests/engine/test_archs.py` checks the library:

    python scripts/recipes/arch_matrix.py "$(scripts/recipes/arch_models)"

The columns are [what PCD's local pass sees](../settings.md#values): a value of `cache`, or a window alone.
"""

CHECKED = """\
"yes" means that all checks passed, on the CPU with a float32 cache and without flash attention (`scripts/recipes/arch_checks.py`):

- The model's own logits are those of llama.cpp without PCD.
- The local pass has the model's own logits where it has to (`base_ratio=1`, a window longer than the text), and elsewhere others, by more than rounding.
- Fused and alternate evaluation agree.
- llama.cpp without PCD computes the local pass in another way, such as with another RoPE base or on a cache without the other cells, and agrees within a share of 0.001 of its effect.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="?", type=Path, help="the folder that scripts/recipes/arch_models prints")
    parser.add_argument("names", nargs="*", help="only these architectures; prints them and writes no files")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time (default %(default)s)")
    parser.add_argument(
        "--render", action="store_true", help="only write the table again, from the numbers in architectures.json"
    )
    args = parser.parse_args()
    if args.render:
        TABLE.write_text(render(json.loads(JSON.read_text())))
        return
    if args.models is None or not (args.models / "names").exists():
        parser.error("name the folder that scripts/recipes/arch_models prints")

    paths = [p for p in sorted(args.models.glob("*.gguf")) if not args.names or architecture(p) in args.names]
    if not paths:
        parser.error("no such model")
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(checks().run, paths):
            results.append(rounded(result))
            states = [f"{name} {reading['status']}" for name, reading in result["readings"].items()]
            print(
                f"{len(results)}/{len(paths)} {result['file']}:", ", ".join(states) or result["stock"], file=sys.stderr
            )
            if args.names:
                print(json.dumps(results[-1], indent=1))
    if not args.names:
        names = (args.models / "names").read_text().split()
        found = {"pin": pin(), "architectures": names, "limits": limits(), "models": results}
        JSON.parent.mkdir(exist_ok=True)
        JSON.write_text(dump(found))
        TABLE.write_text(render(found))


def checks() -> Any:
    """arch_checks.py; loads the library, which --render does without."""
    sys.path.insert(0, str(ROOT))
    import arch_checks

    return arch_checks


def architecture(path: Path) -> str:
    return re.sub(r"(-7b|-single)?-(dense|moe)$", "", path.stem)


def pin() -> str:
    match = re.search(r"llama-cpp-python==([^\"]+)", (ROOT / "pyproject.toml").read_text())
    assert match
    return match.group(1)


def limits() -> dict[str, float]:
    c = checks()
    return {name.lower(): getattr(c, name) for name in ("MOVED", "SHARE", "SHIFT")}


def rounded(value: Any) -> Any:
    """Two digits: more would change with the compiler."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return float(f"{value:.1e}") if isinstance(value, float) else value


def dump(found: dict[str, Any]) -> str:
    """One line for each model, for readable differences."""
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in found.items() if key != "models")
    lines = ",\n  ".join(json.dumps(model) for model in found["models"])
    return f'{{\n{head} "models": [\n  {lines}\n ]\n}}\n'


# --- the table ---


def number(notes: list[str], text: str) -> int:
    """Of a sentence below the table, which is added if it is not there yet."""
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def cell(reading: dict[str, Any] | None, name: str, notes: list[str], compared: bool) -> str:
    if reading is None:
        return ""
    status = reading["status"]
    if status == "refused":
        return f"no ({number(notes, reading['sentence'].replace(repr(name), 'NAME'))})"
    if status == "crashed":
        return f"**crashes** ({number(notes, reading['error'])})"
    if status == "wrong" and reading["wrong"] == ["moved"]:
        return "**no effect**"
    if status == "wrong":
        return f"**wrong**: {', '.join(reading['wrong'])}"
    note = ""
    if not compared:
        note = f" ({number(notes, 'not compared with llama.cpp without PCD; architectures.json says why (no_oracle)')})"
    return "yes" + note


def render(found: dict[str, Any]) -> str:
    models = found["models"]
    readings = list(dict.fromkeys(name for model in models for name in model["readings"]))
    by_arch: dict[str, list[dict[str, Any]]] = {}
    for model in models:
        by_arch.setdefault(model["architecture"], []).append(model)

    notes: list[str] = []
    alike: dict[tuple[str, ...], list[str]] = {}  # what readings do -> the architectures of which that is so
    for name in sorted(by_arch, key=str.lower):
        variants = by_arch[name]
        if any("error" in model["stock"] for model in variants):
            text = next(model["stock"]["error"] for model in variants if "error" in model["stock"])
            alike.setdefault((f"not runnable ({number(notes, text)})",) * len(readings), []).append(name)
            continue
        row = []
        for reading in readings:
            tried = [model["readings"].get(reading) for model in variants]
            compared = any("oracle" in (r or {}) for r in tried)
            cells = [cell(r, name, notes, compared) for r in tried]
            row.append(" / ".join(dict.fromkeys(cells)))
        note = ""
        if any("note" in model["stock"] for model in variants):
            note = f" ({number(notes, variants[0]['stock']['note'])})"
        alike.setdefault(tuple(row), []).append(name + note)

    def n_supported(reading: str) -> int:
        """Where it works on one variant and is refused, at worst, on the other."""
        states = [{m["readings"].get(reading, {}).get("status") for m in variants} for variants in by_arch.values()]
        return sum("supported" in s and not s & {"wrong", "crashed"} for s in states)

    counts = [f"{n_supported(r)} in {r}" for r in readings]
    without = [name for name in found["architectures"] if name not in by_arch]
    head = [
        f"Of {len(found['architectures'])} architectures (llama-cpp-python {found['pin']}), {len(by_arch)} have such a model.",
        f"PCD works on {', '.join(counts)}.",
        "An architecture that this page does not name works in all columns: `pypcd info MODEL` says which one a model has.",
    ]
    sentences = [f"{i}. {text}" for i, text in enumerate(notes, 1)]
    columns = ["architectures", *readings]
    alike.pop(("yes",) * len(readings))
    groups = sorted(alike.items(), key=lambda group: -len(group[1]))
    table = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    table += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in groups]
    untried = f"Not tried, since there is no such model: {', '.join(without)}."
    return "\n".join([ABOUT, *head, "", *table, "", *sentences, "", CHECKED, untried, ""])


if __name__ == "__main__":
    main()
