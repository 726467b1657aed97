"""Apply a unified diff to a source tree, as `git apply` does: at the nearest place where its lines fit, without fuzz.

    python cmake/apply_patch.py PATCH FOLDER

If the patch is applied already, nothing happens. Nothing is written unless all of it fits. With this, building does not
need git. Handles changed files only: no new, deleted or renamed ones.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def patched(folder: Path, patch: str, *, reverse: bool = False) -> dict[Path, str]:
    """The files that a patch changes, with their new text; nothing is written.

    Raises:
        ValueError: the patch does not fit.
    """
    changed: dict[Path, str] = {}
    old, new = ("+", "-") if reverse else ("-", "+")
    for part in re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        name = re.search(r"^\+\+\+ b/([^\t\n]*)", part, re.MULTILINE)  # a tab ends a name with spaces
        path = folder / name.group(1) if name else folder
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        text, moved = path.read_text(encoding="utf-8").split("\n"), 0
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


def main(patch: str, folder: str) -> int:
    text = Path(patch).read_text(encoding="utf-8")
    try:
        patched(Path(folder), text, reverse=True)  # first: lines that were added already may fit again
        print("applied already")
        return 0
    except ValueError:
        pass
    try:
        changed = patched(Path(folder), text)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for path, new in changed.items():
        path.write_bytes(new.encode())
    print("applied")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
