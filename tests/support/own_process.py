"""A few lines of Python with pypcd.Llama in a process of their own, for what could end it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from conftest import run_python

PRELUDE = """if True:
    import gc, os, sys, threading, time
    import pypcd
    import llama_cpp, numpy as np
    def new(path=sys.argv[1], **kwargs):
        return pypcd.Llama(path, **{"n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, **kwargs})
    def said(do):
        try:
            print("returned", do())
        except Exception as error:
            print(type(error).__name__ + ":", error)
"""


def run(path: Path, code: str, *args: Any, stderr: str = "", **environment: str) -> list[str]:
    """The lines that a process prints; it ends by itself, with status 0, and on stderr says nothing, or what matches."""
    code = PRELUDE + "".join(f"    {line}\n" for line in code.strip().splitlines())
    done = run_python(code, path, *args, **environment)
    assert done.returncode == 0 and re.fullmatch(stderr, done.stderr), (done.returncode, done.stdout, done.stderr)
    return done.stdout.splitlines()
