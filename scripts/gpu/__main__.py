"""scripts/check_gpu: PCD on a machine with a GPU and without network. Are its rows right there, and what do they cost?

    scripts/check_gpu pack --python-version 3.12 gpu.tar.xz       # where there is network
    scripts/check_gpu run gpu.tar.xz out --minutes 9              # there, in a checkout; again until all is done
    scripts/check_gpu run gpu.tar.xz out --backend cpu --shapes 1b --lengths 64,128      # a trial without a GPU

The stages: unpack (the archive), llama (a wheel of llama-cpp-python), pypcd (`scripts/install --backend cuda` from these
wheels, into .venv-cuda), rows (tests/engine/test_backend.py as `scripts/test --backend cuda` runs it, but that a test which ends the
process is the only one lost), bench (`pypcd bench` on random models). What is done stays in --work and is not done again
while nothing it depends on has changed. OUT gets check_gpu.md, check_gpu.json and the logs, also when a stage fails.

Needed there: Linux on x86-64, a C++17 compiler, CMake 3.21, for CUDA its toolkit and a driver; not git, ninja or pip.
nvcc is looked for on PATH, in $CUDA_HOME, in /usr/local/cuda* and in packages installed by pip. Only the standard library
is used here: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from archive import ROOT, pack
from check import Run

# many tokens, since CUDA's recorded graphs are in use from the third equal step on
BENCH = (
    "--method two-rows,pcd,pcd:window=4096,pcd:cache=shared,pcd:cache=separate,pcd:window,pcd:evaluation=alternate "
    "--n-tokens 65 --prompt 2048"
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("pack", help="make the archive").add_argument
    add("file", nargs="?", type=Path, default=ROOT / "build" / "check_gpu.tar.xz", help="default: %(default)s")
    version = ".".join(platform.python_version_tuple()[:2])
    add("--python-version", default=version, help="of the other machine (default: %(default)s)")
    add = commands.add_parser("run", help="build, test and measure").add_argument
    add("file", type=Path, help="the archive")
    add("out", type=Path, help="folder for the report and the logs")
    add("--work", type=Path, default=ROOT / "build" / "check_gpu", help="kept between runs (default: %(default)s)")
    add("--backend", choices=("cuda", "cpu"), default="cuda", help="cpu is for a trial (default: %(default)s)")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time (default: %(default)s)")
    add("--minutes", type=float, default=0, help="stop after so many, to go on later (default: no limit)")
    add("--shapes", default="1b,8b", help="sizes of the random models (default: %(default)s)")
    add("--lengths", default="4096,16384,32768", help="tokens in the context; empty: no timings (default: %(default)s)")
    add("--bench", default=BENCH, help="further arguments of `pypcd bench` (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.command == "run":
        args.file, args.out, args.work = (path.resolve() for path in (args.file, args.out, args.work))
        if not args.file.is_file():
            parser.error(f"{args.file} is missing; 'scripts/check_gpu pack' makes it")
    return args


def main() -> int:
    args = parse()
    if args.command == "pack":
        pack(args.file.resolve(), args.python_version)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the report is written on the way out
    return Run(args).run()


if __name__ == "__main__":
    sys.exit(main())
