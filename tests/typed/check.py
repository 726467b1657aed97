"""mypy --strict and pyright's strict mode over the programs in this folder, against the installed pypcd; scripts/lint runs it.

    python tests/typed/check.py     # with mypy and basedpyright in that Python's environment

Each has to report the lines that are marked as wrong, and no other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = ("right.py", "wrong.py")

Lines = dict[tuple[str, int], str]  # (file, line) -> what is said of it


def marked(folder: Path) -> Lines:
    """The lines that a type checker has to find."""
    found: Lines = {}
    for name in PROGRAMS:
        for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), 1):
            if line.endswith("  # wrong"):
                found[name, number] = line
    return found


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Where nothing but the programs is, so that pypcd is the installed one."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=env, text=True, capture_output=True, check=False
    )


def mypy(folder: Path) -> Lines:
    done = run(["mypy", "--strict", "--output=json", *PROGRAMS], folder)
    if done.returncode > 1:
        raise SystemExit(f"mypy failed: {done.stdout}{done.stderr}")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {(Path(r["file"]).name, r["line"]): r["message"] for r in reports if r["severity"] == "error"}


def pyright(folder: Path) -> Lines:
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = run(["basedpyright", "--pythonpath", sys.executable, "--outputjson", *PROGRAMS], folder)
    if done.returncode > 1:
        raise SystemExit(f"pyright failed: {done.stdout}{done.stderr}")
    reports = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(r["file"]).name, r["range"]["start"]["line"] + 1): r["message"] for r in reports}


def differences(name: str, found: Lines, wanted: Lines) -> list[str]:
    """What a type checker says of right lines, and the wrong ones of which it says nothing."""
    said = [f"{file}:{line}: {name}: {text}" for (file, line), text in found.items() if (file, line) not in wanted]
    missed = [f"{file}:{line}: {name} finds nothing wrong: {text}" for (file, line), text in wanted.items()]
    return said + [text for place, text in zip(wanted, missed) if place not in found]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program in PROGRAMS:
            (folder / program).write_bytes((HERE / program).read_bytes())
        wanted = marked(folder)
        wrong = [*differences("mypy", mypy(folder), wanted), *differences("pyright", pyright(folder), wanted)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if not wrong:
        print(f"mypy and pyright find the {len(wanted)} wrong lines and nothing else")
    return int(bool(wrong))


if __name__ == "__main__":
    missing = [name for name in ("mypy", "basedpyright") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} not installed; scripts/lint installs what this needs")
    sys.exit(main())
