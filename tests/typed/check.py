"""mypy --strict and pyright's strict mode over the programs in this folder, against the installed pypcd; scripts/lint runs it.

    python tests/typed/check.py     # with mypy and basedpyright in that Python's environment

Each has to report the lines of wrong.py that are marked as wrong, and no other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = ("right.py", "wrong.py")
CHECKERS = {
    "mypy": ["mypy", "--strict", *PROGRAMS],
    "pyright": ["basedpyright", "--pythonpath", sys.executable, *PROGRAMS],
}
ERROR = re.compile(r"(\w+\.py):(\d+):.* error: (.*)")


def said(command: list[str], folder: Path) -> dict[tuple[str, int], str]:
    """What a type checker says of each line, where nothing but the programs is, so that pypcd is the installed one."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=env, text=True, capture_output=True, check=False
    )
    if done.returncode > 1 or "No module named" in done.stderr:
        raise SystemExit(f"{command[0]} failed: {done.stdout}{done.stderr}")
    return {(name, int(line)): text for name, line, text in ERROR.findall(done.stdout) if name in PROGRAMS}


def main() -> int:
    lines = (HERE / "wrong.py").read_text(encoding="utf-8").splitlines()
    wanted = {("wrong.py", i) for i, line in enumerate(lines, 1) if line.endswith("  # wrong")}
    n_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program in PROGRAMS:
            shutil.copy(HERE / program, folder)
        (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
        for checker, command in CHECKERS.items():
            found = said(command, folder)
            for file, line in sorted(wanted ^ found.keys()):
                n_wrong += 1
                print(f"{file}:{line}: {checker}: {found.get((file, line), 'finds nothing wrong')}")
    if not n_wrong:
        print(f"mypy and pyright find the {len(wanted)} wrong lines and nothing else")
    return int(bool(n_wrong))


if __name__ == "__main__":
    sys.exit(main())
