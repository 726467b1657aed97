"""A virtual environment with torch and transformers for the other side of the comparison, made once. pypcd itself needs
neither. Knows nothing of what is compared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "compare_transformers"
MODULES = ("torch", "transformers", "accelerate", "gguf")
OLDEST = (3, 10)  # of Python, for transformers

Progress = Callable[[str], None]


class Failed(Exception):
    """Nothing more can be done; the message is for the user."""


def requirements(platform: str = sys.platform) -> list[str]:
    """Versions are pinned, so that figures can be made again. "+cpu" is a torch without CUDA, a tenth as large; not every package
    index has it (PIP_EXTRA_INDEX_URL adds one that does)."""
    torch = "torch==2.13.0" + ("+cpu" if platform == "linux" else "")
    return [torch, "transformers==5.17.0", "accelerate==1.15.0", "gguf>=0.17"]


def find(given: str | None, progress: Progress) -> tuple[str, dict[str, str]]:
    """A Python that has torch and transformers, and the versions of MODULES.

    Args:
        given: that of --python; None: that of the environment, which is made if need be.

    Raises:
        Failed: there is none; the message says why.
    """
    python = given or str(_made(progress))
    code = f"import json; from importlib.metadata import version; print(json.dumps([version(n) for n in {MODULES}]))"
    try:
        done = subprocess.run([python, "-c", code], text=True, capture_output=True, check=False)
    except OSError as error:
        raise Failed(f"--python is {python}, which does not run: {error.strerror}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Failed(f"{python} lacks one of {', '.join(MODULES)}: {last.rpartition(': ')[2]}")
    return python, dict(zip(MODULES, json.loads(done.stdout)))


def _made(progress: Progress) -> Path:
    python, ready = FOLDER / "bin" / "python", FOLDER / "ready.json"
    wanted = [list(sys.version_info[:2]), *requirements()]
    if ready.is_file() and json.loads(ready.read_text()) == wanted:
        return python
    if sys.version_info < OLDEST:
        raise Failed(f"transformers needs Python {'.'.join(map(str, OLDEST))} or later; give one with --python")
    print(f"Installing torch and transformers into {FOLDER}: 1.2 GB, a few minutes, once", file=sys.stderr, flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    status, lines = _run([*install, *requirements()], progress)
    if status != 0 and "+cpu" in requirements()[0]:
        print("There is no torch without CUDA here; taking the one with it, 2 GB more", file=sys.stderr, flush=True)
        status, lines = _run([*install, *(name.replace("+cpu", "") for name in requirements())], progress)
    progress("")
    if status != 0:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Failed(
            f"pip cannot install torch and transformers for Python {version}: {cause(lines)}; it needs network, or give "
            "--python, a Python that has them"
        )
    ready.write_text(json.dumps(wanted) + "\n")
    return python


def _run(command: Sequence[str], progress: Progress) -> tuple[int, list[str]]:
    """Run pip and say what it is doing."""
    lines: list[str] = []
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as pip:
        assert pip.stdout
        for line in pip.stdout:
            lines.append(line.rstrip())
            if line.split(" ")[0] in ("Collecting", "Downloading", "Processing", "Installing"):
                progress(line.strip()[:78])
    return pip.returncode, lines


def cause(lines: Iterable[str]) -> str:
    """The last error in pip's output."""
    errors = [line.partition(": ")[2] for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors else "it does not say why"
