"""Reads a file in a process of its own, which may take so much time and memory, and whose end is not the caller's."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from pypcd.document.formats import converted
from pypcd.document.parts import Converted, bound, most
from pypcd.errors import InputError

__all__ = ["converted_apart", "end_with_parent", "limit"]

TIMES = 8  # as much memory as a file may unpack to

_ROOT = str(pathlib.Path(__file__).parents[2])
# Python's own modules go first, then this very pypcd, then what it may import
_CODE = "import json, sys; sys.path += json.loads(sys.argv[2]); from pypcd.document import apart; apart.main()"


def converted_apart(kind: str, data: bytes, n_seconds: float) -> Converted:
    """As converted(), in a process of its own where Python can start one."""
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself once more
        return converted(kind, data)
    # without what starts with each Python, which takes longer than to read most files
    command = [sys.executable, "-I", "-S", "-c", _CODE, kind, json.dumps([_ROOT, *sys.path])]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=n_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"takes more than {n_seconds:g} seconds to read; PYPCD_DOCUMENT_SECONDS={2 * n_seconds:g} allows them"
        ) from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if done.returncode < 0:
            last = signal.Signals(-done.returncode).name
        raise InputError(
            f"cannot be read: its reader ended ({last}); it is damaged, or takes more than {TIMES * most() >> 20} MiB of memory"
        )
    answer = json.loads(done.stdout)
    if isinstance(answer, str):
        raise InputError(answer)
    return Converted(*answer)


def limit(n_bytes: int, n_seconds: float = 0) -> None:
    """Let this process take so much more memory, and so many seconds of a CPU, on Linux."""
    with contextlib.suppress(ImportError, OSError):  # other systems have no such limits
        import resource

        size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = {resource.RLIMIT_AS: size + n_bytes}
        if n_seconds:
            limits[resource.RLIMIT_CPU] = math.ceil(n_seconds)
        for kind, n in limits.items():
            with contextlib.suppress(ValueError):  # a stricter one is in force
                resource.setrlimit(kind, (n, resource.getrlimit(kind)[1]))


def end_with_parent() -> None:
    """End this process soon after the one that started it, whatever it does then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries write is no answer
    limit(TIMES * most(), bound("SECONDS", 60) + 1)  # who started it may have ended
    try:
        answer: Converted | str = converted(sys.argv[1], sys.stdin.buffer.read())
    except InputError as error:
        answer = str(error)
    with out:
        out.write(json.dumps(answer).encode())
