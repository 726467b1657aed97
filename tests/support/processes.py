"""Processes of this machine, and waiting for what other processes do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 60  # for something to come about


def within(what: Callable[[], object], seconds: float = SECONDS) -> bool:
    """Whether it becomes true in that time."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)  # an answer that it is about may be short
    return bool(what())


def children(pid: int) -> dict[int, str]:
    """The processes that this one has started, with their commands. Linux."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def lives(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # it ended just now, or this system has no /proc
        return not Path("/proc").exists()
