"""AMX, the matrix unit of some Intel CPUs: whether models use ggml's kernels for it, and why.

Some compilers break these kernels, which then crash. So models do without them until a probe (_amx_probe.py, a process of its own) has
found that they compute rightly; what it found is remembered for that file of ggml. The native library leaves out AMX alone, for
every model of the process; with any other, pypcd's models are opened without any extra buffer types. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import sys
from typing import NamedTuple

import llama_cpp

from pypcd import files
from pypcd.engine import _bindings
from pypcd.engine._log import logger
from pypcd.errors import InputError
from pypcd.gguf import DEMO_MODEL

__all__ = ["choose_extra_bufts", "configure_amx"]

_VARIABLE = "PYPCD_AMX"
_LIB = pathlib.Path(llama_cpp.__file__).parent / "lib"
_PROBE = pathlib.Path(__file__).with_name("_amx_probe.py")
_SECONDS = 30.0  # it takes one on an idle machine
_RIGHT = "right"
_REMEDY = "'AMX is off' in docs/troubleshooting.md has the remedy"


class AMX(NamedTuple):
    """
    Attributes:
        exists: this CPU has AMX, and ggml was compiled for it.
        on: models that are opened from now on use it.
        why: in a few words.
    """

    exists: bool
    on: bool
    why: str


def configure_amx() -> AMX:
    """Decide whether models use AMX, put that in force and say why. Runs the probe if nothing is known.

    Raises:
        ValueError: PYPCD_AMX has another value than 0 and 1.
    """
    forced, missing = _forced(), _missing()
    if missing:
        state = AMX(False, False, missing)
    elif forced is not None:
        state = AMX(True, forced, f"{_VARIABLE} is {int(forced)}")
    elif (verdict := _verdict()) == _RIGHT:
        state = AMX(True, True, "its products are right")
    else:
        state = AMX(True, False, f"{verdict}; {_REMEDY}")
    if _bindings.is_native():
        _bindings.pcd_set_amx(state.on)
    if state.exists and not state.on:
        _say_once(state.why)
    return state


def choose_extra_bufts(asked: bool | None) -> bool | None:
    """What llama_model_params.use_extra_bufts has to be for a model of ours; None: as llama.cpp has it.

    Args:
        asked: by the user, who is heard first.
    """
    if asked is False:
        return False
    state = configure_amx()
    return asked if asked or _bindings.is_native() or state.on or not state.exists else False


@functools.cache
def _say_once(why: str) -> None:
    logger.info("AMX is off: %s", why)


def _forced() -> bool | None:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{_VARIABLE} is {value!r}; allowed: 0 (AMX off), 1 (on); unset, a probe decides")
    return bool(int(value)) if value else None


def _missing() -> str:
    """Why there is no AMX; empty if there is."""
    cpu = pathlib.Path("/proc/cpuinfo")  # ggml uses AMX on Linux only
    if not (cpu.exists() and " amx_int8" in cpu.read_text(encoding="utf-8")):
        return "this CPU has none"
    if b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info():
        return ""
    return f"this build of llama-cpp-python has none, but this CPU does; {_REMEDY}"


def _key() -> str:
    """The files with the kernels, as they are now."""
    stats = [(path, path.stat()) for path in sorted(_LIB.glob("libggml-cpu*"))]
    return " ".join(f"{path} {one.st_size} {one.st_mtime_ns}" for path, one in stats)


def _remembered() -> str:
    """What was found of these files; empty if nothing was."""
    with contextlib.suppress(OSError, ValueError):  # no file, no home, or not as it was written
        key, verdict = _file().read_text(encoding="utf-8").splitlines()
        return verdict if key == _key() else ""
    return ""


def _file() -> pathlib.Path:
    return files.cache() / "amx.txt"


@functools.cache
def _verdict() -> str:
    """What the probe says, or has said of these files before."""
    if known := _remembered():
        return known
    verdict, is_certain = _probe()
    if is_certain and _key():
        with contextlib.suppress(OSError):  # what cannot be remembered is probed again
            _file().parent.mkdir(parents=True, exist_ok=True)
            files.write(_file(), f"{_key()}\n{verdict}\n")
    return verdict


def _probe() -> tuple[str, bool]:
    """What is so, in a few words, and whether that will be so next time."""
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself once more
        return "there is no Python to run the probe with", False
    command = [sys.executable, "-I", str(_PROBE), str(DEMO_MODEL)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the probe does not run: {error}", False
    said = done.stdout.strip()
    if done.returncode < 0:
        return f"ggml's kernels for it crash here ({signal.strsignal(-done.returncode)})", True
    if done.returncode == 0 and said.startswith((_RIGHT, "ggml's kernels")):
        return said, True
    return f"the probe ended with exit code {done.returncode}, saying {said!r}", False
