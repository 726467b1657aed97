"""Tries docs/recipes.md: installs the packages it is about beside pypcd, and runs each recipe's tests against them.

    scripts/test --consumers                  # all of them
    scripts/test --consumers quick            # those that install in seconds
    scripts/test --consumers dspy txtai       # these; behind --, arguments to pytest

The table says what each package needs, and with which others it shares an environment: .venv-NAME beside .venv, kept between runs.
Into it goes the wheel of pypcd that install.py made and the llama-cpp-python of pip's cache, so that nothing is compiled again.
What cannot be installed here is skipped, by name and with the reason. Only the standard library is used; nothing here knows
what a recipe does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from install import ROOT, Display, Failed, State, make_venv, run

__all__ = ["CONSUMERS", "Consumer", "chosen", "prepare"]

QUICK = "quick"
NEEDED = ("pytest>=8", "hypothesis", "gguf>=0.10", "ruff==0.17.6")  # by the tests themselves


class NotInstalled(Failed):
    """Packages could not be installed; the message is pip's reason."""


class Consumer(NamedTuple):
    """A package that uses llama_cpp.Llama or `pypcd serve`.

    Attributes:
        environment: .venv-ENVIRONMENT, where it is installed; those of "quick" are tried by continuous integration.
        requires: what pip installs, at the version that was tried.
        python: the first version of Python that it runs on.
        tests: test modules that need it beside that of its recipe.
    """

    environment: str
    requires: tuple[str, ...]
    python: tuple[int, int] = (3, 10)
    tests: tuple[str, ...] = ()


# In one environment are packages that can live together. The tests of "x-y" are tests/consumers/test_x_y.py.
CONSUMERS: dict[str, Consumer] = {
    # guidance's extra llamacpp wants another llama-cpp-python; outlines' brings numba, without which it does not constrain
    "guidance": Consumer(QUICK, ("guidance==0.3.1",)),
    "outlines": Consumer(QUICK, ("outlines[llamacpp]==1.3.3",)),
    "lm-format-enforcer": Consumer(QUICK, ("lm-format-enforcer==0.11.3",)),
    "instructor": Consumer(QUICK, ("instructor==1.17.0",)),
    "langchain": Consumer(QUICK, ("langchain-community==0.4.2", "langchain-openai==1.7.3")),
    "llama-index": Consumer("agents", ("llama-index-llms-llama-cpp==0.7.0",)),
    "haystack": Consumer("agents", ("llama-cpp-haystack==3.0.2", "haystack-ai==3.4.0"), (3, 11)),
    "llm": Consumer("agents", ("llm==0.32.1", "llm-gguf==0.2")),
    "smolagents": Consumer("agents", ("smolagents[openai]==1.26.0",)),
    "litellm": Consumer("agents", ("litellm==1.106.2",)),
    "dspy": Consumer("agents", ("dspy==3.4.1",)),
    "lm-evaluation-harness": Consumer("lm-eval", ("lm-eval==0.4.13",), tests=("tests/integrations/test_lm_eval.py",)),
    "txtai": Consumer("txtai", ("txtai==9.14.0", "torch==2.13.0")),  # named, so that a wheel for the CPU fits
    "webuis": Consumer(QUICK, ()),  # text-generation-webui and Open WebUI: the requests that they send
}


def chosen(words: Sequence[str]) -> list[str]:
    """The names of consumers that words stand for: their own, or "quick"; none: all."""
    allowed = [QUICK, *CONSUMERS]
    for word in words:
        if word not in allowed:
            raise Failed(f"the consumer is {word!r}; allowed: {', '.join(allowed)}")
    return [
        name
        for name, consumer in CONSUMERS.items()
        if not words or name in words or (QUICK in words and consumer.environment == QUICK)
    ]


def module_of(name: str) -> str:
    return f"tests/consumers/test_{name.replace('-', '_')}.py"


def prepare(root: Path, environment: str, names: Sequence[str], out: TextIO) -> Path:
    """The Python of an environment that has these consumers, beside those that it had already.

    Raises:
        Failed: pypcd is not there to be installed.
        NotInstalled: something cannot be installed.
    """
    state = State(root, environment)
    wheel = next(iter((root / ".cache" / "wheel").glob("pypcd-*.whl")), None)
    if wheel is None:
        raise Failed("there is no wheel of pypcd in .cache/wheel; scripts/install makes one")
    record, python = state.venv / "pypcd-consumers.json", state.venv / "bin" / "python"
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never written, or cut off
        before = {}
    kept = [
        name for name in before.get("names", []) if name in CONSUMERS and CONSUMERS[name].environment == environment
    ]
    wanted = [name for name in CONSUMERS if name in {*names, *kept}]
    requires = [*NEEDED, *(text for name in wanted for text in CONSUMERS[name].requires)]
    now = {
        "folder": str(root),
        "python": state.python_version(),
        "wheel": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "requires": requires,
        "names": wanted,
    }
    if before == now:
        return python

    log = root / ".cache" / f"install{state.suffix}.log"
    log.write_text("")
    record.unlink(missing_ok=True)  # half an installation is none
    if before and before.get("folder") != now["folder"]:  # its scripts hold the folder's name
        shutil.rmtree(state.venv)
    step = _Steps(f".venv-{environment}", log, root, out)
    if not python.exists():
        make_venv(state, lambda _, __, *commands: step(*commands))
        now["python"] = state.python_version()
    # a wheel whose version is installed already would be left alone
    pip = [python, "-m", "pip", "--verbose", "install"]
    try:
        step([*pip, "--force-reinstall", "--no-deps", wheel], [*pip, wheel, *requires])
    except Failed as error:
        raise NotInstalled(reason(log)) from error
    step.display.end("done in")
    record.write_text(json.dumps(now, indent=1), encoding="utf-8")
    return python


class _Steps:
    """Commands that are one line of the display."""

    def __init__(self, title: str, log: Path, root: Path, out: TextIO) -> None:
        self.display, self.log, self.root = Display(title, "", out), log, root

    def __call__(self, *commands: Sequence[str | Path]) -> None:
        for command in commands:
            run(command, self.display, self.log, self.root)


def reason(log: Path) -> str:
    """Why pip failed, in a line: the last error of its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.partition(":")[2].strip() for line in lines if re.match(r"\s*error:", line, re.IGNORECASE)]
    return next((error for error in reversed(errors) if error), f"pip failed; its log is {log}")


def main() -> int:
    arguments = sys.argv[1:]
    words, more = arguments, []
    if "--" in arguments:
        words, more = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="scripts/test --consumers", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{QUICK}, {', '.join(CONSUMERS)}; none: all")
    skipped, failed = {}, []
    try:
        names = chosen(parser.parse_args(words).names)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    for name in names:
        needed = CONSUMERS[name].python
        if sys.version_info < needed:
            skipped[name] = (
                f"it needs Python {'.'.join(map(str, needed))}, this is {'.'.join(map(str, sys.version_info[:2]))}"
            )
    names = [name for name in names if name not in skipped]
    for environment in dict.fromkeys(CONSUMERS[name].environment for name in names):
        here = [name for name in names if CONSUMERS[name].environment == environment]
        try:
            python = prepare(ROOT, environment, here, sys.stderr)
        except NotInstalled as error:
            skipped.update(dict.fromkeys(here, str(error)))
            continue
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        command = [
            python.with_name("pytest"),
            *map(module_of, here),
            *(module for name in here for module in CONSUMERS[name].tests),
            *more,
        ]  # not -m: it would find pypcd in this folder
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "PYPCD_CONSUMERS": "1"}, check=False).returncode:
            failed.append(environment)
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}", file=sys.stderr)
    if failed:
        print(f"failed: in {', '.join(f'.venv-{environment}' for environment in failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
