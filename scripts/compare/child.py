"""What both sides of the comparison are asked, and a child process that answers: requests on stdin, one JSON object a
line, replies on stdout. Imports neither torch nor pypcd."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable


class Side:
    """A model that reads prompts and tokens. A subclass says how."""

    def read(self, tokens: Sequence[int]) -> int:
        """Forget all and evaluate a prompt. Returns the most probable next token."""
        raise NotImplementedError

    def step(self, token: int) -> int:
        """Evaluate one more token. Returns the most probable next one."""
        raise NotImplementedError

    def prompt(self, tokens: Sequence[int]) -> dict[str, Any]:
        start = time.perf_counter()
        chosen = self.read(tokens)
        return {"seconds": time.perf_counter() - start, "chosen": [chosen]}

    def decode(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Evaluate these tokens one by one, whatever would be chosen. Returns the seconds for a token, without the first,
        and what would be chosen after each."""
        chosen = [self.step(tokens[0])]
        start = time.perf_counter()
        chosen += [self.step(token) for token in tokens[1:]]
        return {"seconds": (time.perf_counter() - start) / (len(tokens) - 1), "chosen": chosen}

    def continuation(self, tokens: Sequence[int], n: int) -> list[int]:
        """The n tokens that follow a prompt."""
        found = [self.read(tokens)]
        while len(found) < n:
            found.append(self.step(found[-1]))
        return found

    def peak_bytes(self) -> int:
        """The most main memory that this process has had."""
        try:  # the other number starts with what the parent had
            status = Path("/proc/self/status").read_text()
            return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        except (OSError, StopIteration):  # not Linux
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024


def serve(make: Callable[..., Side]) -> None:
    """Make a side with the options in the first argument, then answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the replies

    def answer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result, reply = None, {}
        try:
            result = function(*args, **kwargs)
            reply = {"value": None if isinstance(result, Side) else result}
        except Exception as error:  # noqa: BLE001  whatever it is: the parent ends with it
            reply = {"error": " ".join(str(error).split()) or type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)
        return result

    side = answer(make, **json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answer(getattr(side, request["do"]), *request["args"])
