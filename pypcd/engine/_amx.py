"""AMX, the matrix unit of some Intel CPUs: whether models use ggml's kernels for it, and why.

Some compilers break these kernels, which then crash. So they are off in every model of the process, stock
llama_cpp.Llamas included, until a probe has found that they compute rightly. The probe (_amx_probe.py) runs in a process
of its own, before a first model is opened, and what it found is remembered for that file of ggml. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import llama_cpp

from pypcd import folders
from pypcd.engine import _bindings
from pypcd.engine._log import logger
from pypcd.errors import InputError

__all__ = ["configure_amx"]

_VARIABLE = "PYPCD_AMX"
_PROBE = Path(__file__).with_name("_amx_probe.py")
_SECONDS = 30.0  # it takes a third of one on an idle machine
_RIGHT = "right"
_REMEDY = "'AMX is off' in docs/troubleshooting.md has the remedy"

_lock = threading.Lock()


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


def install_amx() -> None:
    """What is known without a probe, put in force when the library has just been loaded.

    Raises:
        ValueError: PYPCD_AMX has another value than 0 and 1.
    """
    forced = _forced()
    if not _bindings.is_native():
        return  # llama.cpp decides by itself
    _bindings.pcd_set_amx(_read().get(_key()) == _RIGHT if forced is None else forced)


def configure_amx(force: bool = False) -> AMX:
    """Decide whether models use AMX, put that in force and say why. Runs the probe if nothing is known.

    Args:
        force: on, whatever the probe says.
    """
    if not _bindings.is_native():
        return AMX(False, False, "this libllama decides by itself")
    with _lock:
        state = _state(force)
        _bindings.pcd_set_amx(state.on)
    if state.exists and not state.on:
        _say_once(state.why)
    return state


@functools.cache
def _say_once(why: str) -> None:
    logger.info("AMX is off: %s", why)


def _state(force: bool) -> AMX:
    forced = _forced()
    if not _bindings.pcd_has_amx():
        return AMX(False, False, _why_none())
    if forced is not None:
        return AMX(True, forced, f"{_VARIABLE} is {int(forced)}")
    if force:
        return AMX(True, True, "use_extra_bufts is True")
    verdict = _verdict()
    if verdict == _RIGHT:
        return AMX(True, True, "its products are right")
    return AMX(True, False, f"{verdict}; {_REMEDY}")


def _forced() -> bool | None:
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{_VARIABLE} is {value!r}; allowed: 0 (AMX off), 1 (on); unset, a probe decides")
    return bool(int(value)) if value else None


def _why_none() -> str:
    try:
        in_cpu = " amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        in_cpu = False  # not Linux: ggml uses AMX on Linux only
    return f"this build of llama-cpp-python has none, but this CPU does; {_REMEDY}" if in_cpu else "this CPU has none"


# --- the probe ---


def _folder() -> Path:
    """Of ggml's libraries."""
    return Path(llama_cpp.__file__).parent / "lib"


@functools.cache
def _verdict() -> str:
    """What the probe says, or has said of this file before."""
    key = _key()
    known = _read().get(key) if key else None
    if known is not None:
        return known
    verdict, is_certain = _probe()
    if is_certain and key:
        _write(key, verdict)
    return verdict


def _probe() -> tuple[str, bool]:
    """What is so, in a few words, and whether that will be so next time."""
    if not sys.platform.startswith("linux"):
        return "it is probed on Linux only", False
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen program would start itself once more
        return "there is no Python to run the probe with", False
    command = [sys.executable, "-I", "-S", str(_PROBE), str(_folder())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the probe took more than {_SECONDS:.0f} seconds", False
    except OSError as error:
        return f"the probe does not run: {error}", False
    if done.returncode < 0:
        return f"ggml's kernels for it crash here ({_signal_name(-done.returncode)})", True
    said = done.stdout.strip()
    if done.returncode == 0 and said == _RIGHT:
        return _RIGHT, True
    if done.returncode == 0 and said.startswith("wrong"):
        return f"ggml's kernels for it compute wrongly here ({said.partition(': ')[2]})", True
    return f"the probe ended with exit code {done.returncode}, saying {said!r}", False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- what was found before: a file of the user's cache ---


def _file() -> Path:
    return folders.cache() / "amx.json"


def _key() -> str:
    """The library with the kernels, as it is now; empty if there is no such file."""
    path = _folder() / "libggml-cpu.so"
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def _read() -> dict[str, str]:
    try:
        known = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no file, or no home; cut off
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str)} if isinstance(known, dict) else {}


def _write(key: str, verdict: str) -> None:
    """Add one entry and leave out those of files that are gone. What cannot be remembered is probed again."""
    entries = {k: v for k, v in _read().items() if Path(k.rsplit(" ", 2)[0]).exists()}
    with contextlib.suppress(OSError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({**entries, key: verdict}, file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
