"""How a command of research/ starts: python -m research.NAME, from a clone that pypcd is installed from."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from pypcd.cli import reported

__all__ = ["command"]


def command(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    words: Sequence[str] | None = None,
) -> int:
    """Parse the command line and run it; returns the exit status. Mistakes are reported as those of `pypcd` are."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{name}")
    add_arguments(parser)
    return reported(lambda: run(parser.parse_args(words)))
