"""`git apply`, where there is no git: all that building pypcd asks of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path


def git(arguments: Sequence[str]) -> int:
    """`git apply [--check] [--reverse] PATCH` in this folder: a unified diff without fuzz."""
    if not arguments or arguments[0] != "apply":
        return 1
    patch = Path(arguments[-1]).read_text()
    try:
        changed = patched(Path(), patch, reverse="--reverse" in arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if "--check" not in arguments:
        for path, text in changed.items():
            path.write_text(text)
    return 0


def patched(folder: Path, patch: str, *, reverse: bool = False) -> dict[Path, str]:
    """The files that a patch changes, with their new text; nothing is written.

    Raises:
        ValueError: the patch does not fit.
    """
    changed: dict[Path, str] = {}
    old, new = ("+", "-") if reverse else ("-", "+")
    for part in re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        name = re.search(r"^\+\+\+ b/(.*)$", part, re.MULTILINE)
        assert name
        path = folder / name.group(1)
        text, moved = path.read_text().split("\n"), 0
        for hunk in re.finditer(r"^@@ -(\d+).*? \+(\d+).*? @@.*\n((?:[-+ ].*\n|\n)*)", part, re.MULTILINE):
            body = [line or " " for line in hunk.group(3).rstrip("\n").split("\n")]
            before = [line[1:] for line in body if line[0] in " " + old]
            after = [line[1:] for line in body if line[0] in " " + new]
            at = int(hunk.group(2 if reverse else 1)) - 1 + moved
            near = sorted(range(len(text)), key=lambda i: abs(i - at))
            found = next((i for i in near if text[i : i + len(before)] == before), None)
            if found is None:
                raise ValueError(f"{path}: the hunk at line {hunk.group(1)} does not fit")
            text[found : found + len(before)] = after
            moved += len(after) - len(before)
        changed[path] = "\n".join(text)
    return changed


if __name__ == "__main__":
    sys.exit(git(sys.argv[1:]))
