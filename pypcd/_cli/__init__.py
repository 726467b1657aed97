"""The `pypcd` command. Each subcommand is a module with HELP, add_arguments(parser) and run(args) -> exit status.

Logs go to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from pypcd import __version__
from pypcd._cli import _terminal

COMMANDS = (
    "chat",
    "generate",
    "answer",
    "explain",
    "info",
    "bench",
    "eval",
    "tune",
    "salience",
    "plot",
    "nocache",
    "spectrum",
    "demo",
)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    _terminal.setup()
    parser = argparse.ArgumentParser(prog="pypcd", description="Positional Contrastive Decoding for GGUF models.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    parser.add_argument("--version", action="version", version=f"pypcd {__version__}")

    try:
        for name in COMMANDS:
            module = importlib.import_module(f"pypcd._cli.{name}")
            sub = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)

        args = parser.parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; say nothing at exit either
        return 141
    except (
        RuntimeError,
        ValueError,
        TypeError,
        OSError,
    ) as error:  # PCDError and NotImplementedError are RuntimeErrors
        text = (
            error.strerror and f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        print(f"pypcd: {text}", file=sys.stderr)
        return 1
