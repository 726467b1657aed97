"""llama-server with PCD as a process: its command, its settings, its start and its end.

    server = Server("model.gguf", pcd="gentle", port=8080)
    with server.running():
        server.wait_until_ready(stopped)
        server.wait(stopped)

The executable is llama.cpp's own server on pypcd's libllama (cmake/server.cmake). It gets threads, context and GPU as
pypcd.Llama chooses them, and presets and names of settings from here, so that they are written down once. Knows nothing of
requests or the terminal.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import llama_cpp

from pypcd import _engine, _library, _machine, _threads
from pypcd._checks import Integer
from pypcd._config import PCDConfig, PCDSetting
from pypcd._errors import LibraryError, ModelError, PCDError
from pypcd._gguf import resolve_model
from pypcd._settings import PRESETS, load

__all__ = ["OptionError", "Server", "executable", "settings", "show_options"]

_SECONDS = 10.0  # that the server gets to end by itself
_LINES = 40  # of its log, kept for an error message
_MAX_SLOTS = _engine.N_SEQUENCES - 1


class OptionError(PCDError, ValueError):
    """llama-server does not know an option, or refuses its value."""


def executable() -> pathlib.Path:
    """
    Raises:
        LibraryError: it was not built.
    """
    name = "llama-server.exe" if sys.platform == "win32" else "llama-server"
    places = [folder.parent / "bin" / name for folder in _library.library_dirs()]
    for path in places:
        if path.is_file():
            return path
    raise LibraryError(
        f"llama-server was not found; looked for {', '.join(map(str, dict.fromkeys(places)))}; it is part of pypcd unless it was "
        "built with -C cmake.define.PYPCD_SERVER=OFF: install pypcd without that"
    )


def show_options() -> int:
    """Have llama-server print its own options; its exit status."""
    program = executable()
    return subprocess.run([str(program), "--help"], env=_environment(program), check=False).returncode


def settings(config: PCDConfig | None, *, required: bool = True) -> str:
    """What the executable reads from LLAMA_ARG_PCD: the setting, the presets and the names of values, as JSON.

    Args:
        config: for requests that do not say; None: PCD is off for them, and others begin with the default.
        required: whether the server ends where the model cannot run it; else PCD is off there.
    """
    base = (config or PCDConfig()).replace(sequences="chosen")
    # A context that over-rotates can have twins that do not, and makes no second keys for them. The other way round is refused.
    can_turn = base.perturbation == "none" and base.cache != "separate"
    turning = base.replace(perturbation="over-rotation") if can_turn else base
    presets = {
        name: PCDConfig.preset(name).replace(
            evaluation=base.evaluation, type_k_over=base.type_k_over, sequences="chosen"
        )
        for name in PRESETS
    }
    return json.dumps(
        {
            "version": _library.API_VERSION,
            "default": config is not None,
            "required": required,
            "setting": _engine.native_fields(base),
            "contexts": [_engine.native_fields(context) for context in dict.fromkeys([turning, base])],
            "presets": {name: _engine.native_fields(preset) for name, preset in presets.items()},
            "values": {
                field: {"null" if name is None else name: number for name, number in names.items()}
                for field, names in _engine.native_names().items()
            },
        }
    )


class Server:
    """One llama-server.

    Args:
        model: a GGUF file, or "demo".
        pcd: for requests that do not say; anything that pypcd.Llama takes.
        pcd_required: False: where the model cannot run it the server goes on without PCD; see refusal().
        host: the address to listen on.
        port: 0 takes a free one.
        parallel: requests that are answered at the same time; they share the context. 1 to 191.
        api_key: clients have to send it; None: none.
        options: llama-server's own, behind those that are chosen here, so that they win.
        log: called with each line of its log.

    Raises:
        FileNotFoundError, ModelError: there is no such model.
        LibraryError: llama-server was not built.
        ValueError: a value is out of range, or no setting.
        OSError: the port is taken, or this machine does not have the address.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        pcd: PCDSetting = False,
        pcd_required: bool = True,
        host: str = "127.0.0.1",
        port: int = 8080,
        parallel: int = 4,
        api_key: str | None = None,
        options: Sequence[str] = (),
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.path = resolve_model(model)
        self.name = "demo" if str(model) == "demo" else pathlib.Path(self.path).stem
        self.config = PCDConfig.resolve(load(pcd))
        self.host = host
        port = Integer(0, 65535)("port", port)
        parallel = Integer(1, _MAX_SLOTS)("parallel", parallel)
        program = executable()
        self.port = _free_port(host, port)
        self.loaded = 0  # per cent of the model
        self._log = log
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._key = api_key
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

        self.command = [str(program), "--model", self.path, "--alias", self.name]
        self.command += ["--host", host, "--port", str(self.port), "--parallel", str(parallel), "--kv-unified"]
        self.command += [*_chosen(self.path, parallel, options), "--metrics", *options]
        self.environment = {
            **_environment(program),
            "LLAMA_ARG_PCD": settings(self.config, required=pcd_required),
            "PYPCD_AMX": str(int(_engine.settle_amx().on)),
            "PYPCD_HOST": host,
        }
        if api_key is not None:
            self.environment["LLAMA_API_KEY"] = api_key  # a command line can be read by all users of the machine

    @property
    def url(self) -> str:
        """Its address for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """A block in which the process runs; it need not be ready."""
        self._start()
        try:
            yield self
        finally:
            self._stop()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which tells the server once
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  no locks are taken
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: Any) -> None:
        with stream:
            for line in stream:
                if loaded := re.fullmatch(r"loaded (\d+)%\n", line):
                    self.loaded = int(loaded[1])
                    continue
                self._lines.append(line.rstrip("\n"))
                if self._log is not None:
                    self._log(line.rstrip("\n"))

    def wait_until_ready(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Whether it answers requests now; False: `stopped` returned True first.

        Raises:
            OptionError: it ended over one of its options.
            ModelError: it could not load the model, or run the setting.
        """
        while not stopped():
            if self._ended() is not None:
                raise self._failure()
            if self._get("/health") is not None:
                return True
            time.sleep(0.05)
        return False

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Returns when `stopped` does so with True.

        Raises:
            PCDError: it ended by itself.
        """
        while not stopped():
            code = self._ended()
            if code is not None:
                how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                raise PCDError(f"llama-server ended {how}: {self._said() or 'its log is empty'}")
            time.sleep(0.1)

    def _stop(self) -> None:
        """End it: as Ctrl-C does, and by force if that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT if sys.platform != "win32" else signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS)
        finally:  # also if a second Ctrl-C ends the wait
            if process.poll() is None:
                process.kill()
            process.wait()
            if self._reader is not None:
                self._reader.join(_SECONDS)

    # -- what it says ------------------------------------------------------------------------------------------------

    def _ended(self) -> int | None:
        assert self._process is not None, "running() comes first"
        return self._process.poll()

    def names(self) -> list[str]:
        """The names that requests may give as their model; empty if it asks for a key that is not known here."""
        return [entry["id"] for entry in (self._get("/v1/models") or {"data": []})["data"]]

    def refusal(self) -> str:
        """Why PCD cannot run in it; empty if it can."""
        return str(((self._get("/props") or {}).get("pcd") or {}).get("refusal", ""))

    def _get(self, path: str) -> Any:
        """What it answers; None: nothing, or an error."""
        address = self.url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
        connection = http.client.HTTPConnection(address, self.port, timeout=_SECONDS)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._key}"} if self._key else {})
            response = connection.getresponse()
            return json.loads(response.read()) if response.status == 200 else None
        except (OSError, http.client.HTTPException):  # it does not listen yet
            return None
        finally:
            connection.close()

    def _failure(self) -> PCDError:
        """Why it ended before it was ready."""
        if self._reader is not None:
            self._reader.join(_SECONDS)
        said = self._said()
        if re.match(r"invalid argument|error while handling argument|unknown value|expected value", said):
            return OptionError(f"llama-server: {said}; `pypcd serve MODEL -- --help` lists its options")
        return ModelError(f"llama-server cannot serve {self.path}: {said or 'its log is empty'}")

    def _said(self) -> str:
        """The first error in its log, else its last line, without time, level and function."""
        errors = [line for line in self._lines if re.match(r"[\d.]+ E |error|terminate|.*GGML_ASSERT", line)]
        told = errors or [line for line in self._lines if line.strip()][-1:]
        return re.sub(r"^([\d.]+ [A-Z] (\w{3,4} +)?\w+: +|error: )", "", told[0]).strip() if told else ""


def _chosen(path: str, parallel: int, given: Sequence[str]) -> list[str]:
    """What is chosen here, as pypcd.Llama chooses it, unless the user did."""
    n_ctx = next((value for value, name in zip(given[::-1], given[-2::-1]) if name in ("--ctx-size", "-c")), "")
    on_gpu = _machine.has_gpu()
    options = {"n_gpu_layers": -1 if on_gpu else 0, "flash_attn": on_gpu}
    threads = _threads.choose(_threads.width_of(path, options))
    if not n_ctx.isdecimal() or not int(n_ctx):  # a wrong one is for llama-server to refuse
        n_ctx = str(_machine.checked_n_ctx(path, options, parallel))
    chosen = {
        ("--ctx-size", "-c"): n_ctx,
        ("--kv-unified-per-slot",): str(int(n_ctx) // parallel),  # where all is taken, every request would be ended
        ("--fit", "-fit"): "off",  # it does not count second keys
        ("--flash-attn", "-fa"): "on" if on_gpu else "off",
        ("--gpu-layers", "--n-gpu-layers", "-ngl"): "all" if on_gpu else "",
        ("--threads", "-t"): str(threads.decode),
        ("--threads-batch", "-tb"): str(threads.batch),
        ("--cors-origins",): "localhost",  # else any page that is open in a browser here could ask it
        ("--log-colors",): "off",
    }
    return [
        word for names, value in chosen.items() if value and not set(names) & set(given) for word in (names[0], value)
    ]


_PATH_VARIABLE = {"darwin": "DYLD_LIBRARY_PATH", "win32": "PATH"}.get(sys.platform, "LD_LIBRARY_PATH")


def _environment(program: pathlib.Path) -> dict[str, str]:
    """Our libllama first, then llama-cpp-python's ggml and libmtmd: the two packages may be installed apart."""
    ggml = pathlib.Path(llama_cpp.__file__).parent / "lib"
    folders = [program.parent.parent / "lib", ggml, os.environ.get(_PATH_VARIABLE)]
    return {**os.environ, _PATH_VARIABLE: os.pathsep.join(str(folder) for folder in folders if folder)}


def _free_port(host: str, port: int) -> int:
    """A port that can be listened on.

    Raises:
        OSError: it is taken, or this machine does not have the address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"host is {host!r}, which is no address of this machine ({error.strerror})") from None
    with socket.socket(family) as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last user has just left is free
        try:
            probe.bind(address)
        except OSError as error:
            remedy = "give another one, or 0 for any that is free"
            raise OSError(f"port is {port}, which {host} cannot listen on: {error.strerror}; {remedy}") from None
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """In the new process: have it ended if pypcd is, however that happens."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
