"""The run: a child process for each way, and the same prompt and tokens for all of them, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
from environment import Failed
from figures import WAYS, Agreement, Figures, Rows, Way, agreement, figures

from pypcd import PCDConfig

HERE = Path(__file__).resolve().parent
ROOM = 16  # cells of a context beyond prompt and tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        python: that of transformers' side.
        n_tokens: decoded in each round, after the first.
    """

    model: str
    python: str
    n_tokens: int
    rounds: int
    threads: int
    dtype: str
    text: str
    progress: Callable[[str], None]

    def at(self, n_prompt: int) -> tuple[list[Figures], Agreement]:
        """The figures at one length, and whether both sides compute the same.

        Raises:
            Failed: one of the sides cannot run the model.
        """
        with contextlib.ExitStack() as stack:
            children = {}
            for way in WAYS:
                self.progress(f"loading {way.name}")
                child = Child(way.name, self._command(way, n_prompt))
                children[way.name] = stack.enter_context(contextlib.closing(child))
                child.wait()
            plain = children[next(way.name for way in WAYS if way.side == "ours" and way.pcd is None)]
            prompt = plain.ask("tokens", self.text, n_prompt)
            tokens = plain.ask("continuation", prompt, self.n_tokens + 1)

            rows: dict[str, Rows] = {}
            chosen: dict[str, list[int]] = {}
            prompts: dict[str, list[float]] = {name: [] for name in children}
            steps: dict[str, list[float]] = {name: [] for name in children}
            for i in range(self.rounds):
                for name, child in children.items():
                    self.progress(f"{n_prompt} tokens, round {i + 1} of {self.rounds}: {name}")
                    prompts[name].append(child.ask("prompt", prompt)["seconds"])
                    if not i:
                        rows[name] = child.rows()
                    found = child.ask("decode", tokens)
                    steps[name].append(found["seconds"])
                    chosen[name] = found["chosen"]
            peaks = {name: child.ask("peak_bytes") for name, child in children.items()}
        self.progress("")
        return figures(n_prompt, prompts, steps, peaks), agreement(rows, chosen)

    def _command(self, way: Way, n_prompt: int) -> list[str]:
        config = None if way.pcd is None else PCDConfig(**way.pcd)
        options: dict[str, Any] = {"model": self.model, "n_threads": self.threads}
        if way.side == "ours":
            options.update(n_ctx=n_prompt + self.n_tokens + ROOM, pcd=way.pcd)
            return [sys.executable, str(HERE / "ours.py"), json.dumps(options)]
        names = ("alpha", "base_ratio", "beta", "gamma")
        options.update(dtype=self.dtype, pcd=config and {name: getattr(config, name) for name in names})
        return [self.python, str(HERE / "theirs.py"), json.dumps(options)]


class Child:
    """A process that serves a Side."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory()
        self._log = (Path(self._folder.name) / "log").open("w+", errors="replace")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's
        )

    def wait(self) -> None:
        """Until the model is loaded.

        Raises:
            Failed: it cannot be.
        """
        self._reply("cannot load the model")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._folder.cleanup()

    def ask(self, what: str, *args: Any) -> Any:
        """What a function of its Side returns.

        Raises:
            Failed: it raised an exception, or the process ended.
        """
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # _reply() says more
            self._process.stdin.write(json.dumps({"do": what, "args": args}) + "\n")
            self._process.stdin.flush()
        return self._reply("failed")

    def rows(self) -> Rows:
        file = Path(self._folder.name) / "rows.npy"
        self.ask("save_rows", str(file))
        return np.load(file)

    def _reply(self, otherwise: str) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            said = (self._log.read().strip().splitlines() or ["nothing"])[-1]
            raise Failed(f"{self._name} {otherwise}: its process ended with status {status} and said last: {said}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(f"{self._name} {otherwise}: {reply['error']}")
        return reply["value"]
