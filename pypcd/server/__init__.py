"""llama-server with PCD as a process: its command, its settings, its start and its end.

    server = Server("model.gguf", pcd="unsure", port=8080)
    with server.running():
        server.wait_until_ready(stopped)
        server.wait(stopped)

The executable is llama.cpp's own server on pypcd's libllama (cmake/server.cmake). It gets threads, context and GPU as
pypcd.Llama chooses them, and presets and names of settings from here, so that they are written down once. With several models
it is llama.cpp's router, which starts a process for each. Knows nothing of requests or the terminal.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import llama_cpp

from pypcd import engine
from pypcd import library as library_module
from pypcd.decode.prompt_cache import PromptCache
from pypcd.errors import InputError, LibraryError, ModelError, PCDError, RPCError
from pypcd.gguf import explained, resolve_model
from pypcd.llama import machine
from pypcd.llama import threads as threads_module
from pypcd.llama.arguments import N_BATCH
from pypcd.llama.saved_state import weights_id
from pypcd.server.model_list import Served, check_name, to_ini
from pypcd.server.options import ELSEWHERE, known, of_environment, of_words
from pypcd.settings.config import PRESETS, RECOMMENDED, PCDConfig, PCDSetting, is_profile, load, typed
from pypcd.settings.fields import FIELDS
from pypcd.settings.ranges import Integer, literal
from pypcd.settings.remote import Servers, parse_servers

__all__ = ["OptionError", "Server", "executable", "requested", "show_options"]

_SECONDS = 10.0  # that it gets to answer
_PATIENCE = 2  # seconds that it gets to end by itself: while a client reads a stream it does not
_LINES = 200  # of its log, kept for an error message
_ABORTED = r"\S+\.\w+:\d+: "  # how ggml begins its last line, with file and line
_MAX_SLOTS = engine.N_SEQUENCES - 1
_AT_ONCE = 4  # models that are loaded at the same time, where they are not named one by one: llama.cpp's number


class OptionError(PCDError, ValueError):
    """llama-server does not know an option, or refuses its value."""


def executable() -> pathlib.Path:
    """
    Raises:
        LibraryError: it was not built.
    """
    name = "llama-server.exe" if sys.platform == "win32" else "llama-server"
    places = [folder.parent / "bin" / name for folder in library_module.library_dirs()]
    for path in places:
        if path.is_file():
            return path
    if not any((folder / "ggml.json").exists() for folder in library_module.library_dirs()):
        raise LibraryError(
            "llama-server belongs to pypcd's native part, which is not installed; docs/install.md says how to get it. What serves "
            "without it: pip install 'llama-cpp-python[server]', and then PYPCD=unsure python -m llama_cpp.server --model MODEL"
        )
    raise LibraryError(
        f"llama-server was not found; looked for {', '.join(map(str, dict.fromkeys(places)))}; it is part of pypcd unless it was "
        "built with -C cmake.define.PYPCD_SERVER=OFF: install pypcd without that"
    )


def show_options() -> int:
    """Have llama-server print its own options; its exit status."""
    program = executable()
    return subprocess.run([str(program), "--help"], env=_environment(program), check=False).returncode


def _settings(models: Mapping[str, tuple[PCDConfig | None, bool, str]]) -> str:
    """What the executable reads from LLAMA_ARG_PCD: settings and presets, as JSON, and how it says what PCD did.

    Args:
        models: for each, by name: the setting for requests that do not say (None: PCD is off for them, and others begin with the
            default), whether the server ends where the model cannot run it (else PCD is off there), and what tells the model's file
            from others (saved_state.weights_id).

    Raises:
        ValueError: PYPCD_CACHE_GIB is no number.
    """
    PromptCache()  # whose limit may be no number
    records = {name: _setting(*given) for name, given in models.items()}
    common = next(iter(records.values()))
    others = {name: {k: v for k, v in own.items() if v != common[k]} for name, own in records.items()}
    about = {"version": library_module.API_VERSION, "recommended": RECOMMENDED, "sentences": engine.SENTENCES}
    # of the others what differs, since an environment variable has to be short
    return json.dumps({**about, **common, "models": others}, separators=(",", ":"))


def _setting(config: PCDConfig | None, required: bool, weights: str) -> dict[str, Any]:
    given = config or PCDConfig()
    fixed = {"evaluation": given.evaluation, "type_k_over": given.type_k_over, "sequences": "chosen"}
    base = given.replace(**{name: FIELDS[name].default for name in fixed})
    # A context that over-rotates can have twins that do not, and makes no second keys for them. The other way round is refused.
    contexts = [base.replace(perturbation="over-rotation") if base.perturbation == "none" else base, base]
    if config is None:  # a model that cannot over-rotate has windows for those who ask
        contexts.append(PCDConfig.preset("window"))
    return {
        "default": config is not None,
        "required": required,
        "weights": weights,
        "fixed": fixed,
        "setting": _record(base, fixed),
        "contexts": [_record(context, fixed) for context in dict.fromkeys(contexts)],
        "presets": {name: _record(PCDConfig.preset(name), fixed) for name in PRESETS},
    }


def _record(config: PCDConfig, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """A setting for the executable: its text, and the numbers that differ from the paper's."""
    own = config.replace(**{name: value for name, value in fixed.items() if name not in config.differences()})
    numbers = {name: FIELDS[name].to_number(value) for name, value in own.differences().items()}
    return {"text": typed(config), "numbers": numbers}


def requested(setting: Any, base: str, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a request's field "pcd" means, for the executable; None: off.

    Args:
        base: the text of the setting that an object of fields changes.
        fixed: the fields that are the whole server's, as _settings() has them.

    Raises:
        ValueError: it is no setting, or a value is out of range.
    """
    if isinstance(setting, str) and is_profile(setting):
        raise InputError(
            f"pcd is {setting!r}; a request cannot name a file: write its values, such as paper:beta=1.5:window=64"
        )
    config = PCDConfig.resolve(setting, PCDConfig.resolve(base))
    return None if config is None else _record(config, fixed)


class Server:
    """One llama-server.

    Args:
        model: a GGUF file, or "demo"; or what model_list.read() gives: with several it is a router, which starts a server for each.
        pcd: for requests that do not say; anything that pypcd.Llama takes.
        pcd_required: False: where the model cannot run it the server goes on without PCD; see refusals().
        host: the address to listen on; several have commas between them.
        port: 0 takes a free one.
        parallel: requests that are answered at the same time; they share the context. 1 to 191.
        api_key: clients have to send it; None: none.
        rpc_servers: other machines that compute, as pypcd.Llama takes them. Each serves one process at a time, so that one model
            is loaded at a time.
        options: llama-server's own, behind those that are chosen here, so that they win. Its environment variables mean the same.
        log: called with each line of its log.

    Raises:
        FileNotFoundError, ModelError: there is no such model.
        LibraryError: llama-server was not built, or ggml has no RPC backend.
        OptionError: an option that is chosen here.
        ValueError: a value is out of range, or no setting.
        OSError: the port is taken, or this machine does not have the address.
        RPCError: a server on another machine cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Sequence[Served],
        *,
        pcd: PCDSetting = False,
        pcd_required: bool = True,
        host: str = "127.0.0.1",
        port: int = 8080,
        parallel: int = 4,
        api_key: str | None = None,
        rpc_servers: Servers = None,
        options: Sequence[str] = (),
        log: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            path = resolve_model(model)
            model = [Served("demo" if str(model) == "demo" else pathlib.Path(path).stem, path)]
        self.models = list(model)
        for one in self.models:
            check_name(one.name)
        self.configs = {one.name: PCDConfig.resolve(load(pcd if one.pcd is None else one.pcd)) for one in self.models}
        self.remarks: list[str] = []  # for the user
        self.hosts = [part.strip(" []") for part in host.split(",") if part.strip()]  # [::1]: as it is written in a URL
        if not self.hosts:
            raise InputError(f"host is {host!r}; allowed: addresses of this machine, with commas between them")
        host = ",".join(self.hosts)
        port = Integer(0, 65535)("port", port)
        parallel = Integer(1, _MAX_SLOTS)("parallel", parallel)
        program = executable()
        self.rpc_servers = parse_servers(rpc_servers)
        self._remote = engine.RemoteDevices(self.rpc_servers).devices if self.rpc_servers else []
        named = [word for word in options if of_words([word]).keys() & set(ELSEWHERE.values())]
        if named:
            raise OptionError(
                f"{named[0]} stands behind --; --host, --port, --parallel, --rpc, and MODEL, which may be a folder or a file of models "
                "with names of their own (models.ini), stand before it: pypcd serve --help"
            )
        elsewhere = [*filter(str.isupper, ELSEWHERE), "AIP_MODE"]  # by this it would listen on Vertex AI's port
        unread = [name for name in elsewhere if name in os.environ]
        if unread:
            self.remarks.append(f"{', '.join(unread)} in the environment is not read; pypcd serve --help lists what is")
        given = {**of_environment(), **of_words(options)}
        self._prefix = given.get("api-prefix", "")
        if self._prefix and not re.fullmatch(r"(/[\w.~-]+)+", self._prefix):
            raise OptionError(
                f"--api-prefix is {self._prefix!r}; allowed: a path such as /llm, with letters, digits and . _ ~ - between its slashes"
            )
        self.port = port
        for address in self.hosts:
            if not (port and "reuse-port" in given):
                self.port = port = machine.free_port(address, port)
        self.loaded = 0  # per cent of what is loaded at the start
        self._log = log
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        if api_key is not None and not _first_key(api_key):
            raise InputError(
                f"api_key is {api_key!r}; allowed: a key, or several with commas; without one leave it out"
            )
        self._key = _first_key(api_key or given.get("api-key", "")) or _first_key_of(given.get("api-key-file", ""))
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._parts: dict[str, int] = {}  # per cent of each model that is loaded, by the port of its process
        self._ini = ""  # the file of models
        self.at_start: list[str] = []  # the models that it loads then

        wanted = {
            one.name: (self.configs[one.name], pcd_required or one.pcd is not None, weights_id(one.path))
            for one in self.models
        }
        self.command = [str(program), "--host", host, "--port", str(self.port), "--metrics"]
        # without "localhost" any page that is open in a browser here could ask it
        chosen = {"kv-unified": "", "cors-origins": "localhost", "log-colors": "off"}
        n_at_once = self._at_once(given) if self.is_router else 1
        # one for each request that is answered, and more: else those that wait for a slot keep /health from an answer
        chosen["threads-http"] = str(max(64, n_at_once * (parallel + 4)))
        if self.is_router:
            chosen["models-max"] = str(n_at_once)
            self.at_start = [one.name for one in self.models if one.at_start][:n_at_once]
            self._ini = self._sections(n_at_once, parallel, of_words(options))
        else:
            (only,) = self.models
            chosen |= {"alias": only.name, **self._options(only, parallel, given)}
        for name, value in chosen.items():
            if name not in given:
                self.command += [f"--{name}", value] if value else [f"--{name}"]
        self.command += options
        self.environment = {
            **{name: value for name, value in _environment(program).items() if name not in unread},
            "GGML_NO_BACKTRACE": "1",  # a list of addresses, or a debugger's words, in place of the reason
            "LLAMA_ARG_PCD": _settings(wanted),
            "PYPCD_AMX": str(int(engine.configure_amx().on)),
            "PYPCD_HOST": host,
            # documents are read by this Python, started in this folder, since it imports from where it starts
            "PYPCD_PYTHON": sys.executable,
            "PYPCD_ROOT": str(pathlib.Path(__file__).resolve().parents[2]),
        }
        if self.rpc_servers and (rpc := engine.rpc_library()):
            self.environment["PYPCD_RPC"] = str(rpc)  # ggml's backend, which llama-server does not find
        if api_key is not None:
            self.environment["LLAMA_API_KEY"] = api_key  # a command line can be read by all users of the machine

    @property
    def is_router(self) -> bool:
        return len(self.models) > 1 or bool(self.models[0].options)

    def _at_once(self, given: Mapping[str, str]) -> int:
        """How many models are loaded at the same time: what the user says, else as many as fit."""
        sizes = sorted((one.size for one in self.models), reverse=True)
        n_start = sum(one.at_start for one in self.models)
        n_most = int(given["models-max"]) if given.get("models-max", "").isdecimal() else 0
        if self.rpc_servers:
            if n_most > 1:
                raise OptionError(
                    f"--models-max is {n_most}; allowed: 1 with --rpc, since RPC servers serve one process at a time"
                )
            if n_start > 1:
                self.remarks.append("RPC servers serve one process at a time, so one model is loaded at a time")
            return 1
        n_at_once = min(n_most or max(n_start, _AT_ONCE), len(sizes))
        room = machine.room_for_weights()
        n_fit = max(sum(sum(sizes[: n + 1]) <= room for n in range(n_at_once)), 1)
        if n_fit < n_at_once:
            what = f"{n_at_once} of these models take up to {sum(sizes[:n_at_once]) / 2**30:.1f} GiB together"
            where = f"there is room for {room / 2**30:.1f} GiB"
            n_at_once = n_at_once if n_most else n_fit
            self.remarks.append(f"{what}, {where}; {n_at_once} at most are loaded at the same time (-- --models-max)")
        return n_at_once

    def _options(self, one: Served, parallel: int, given: Mapping[str, str], n_at_once: int = 1) -> dict[str, str]:
        """What the process of a model is started with, as pypcd.Llama chooses it, unless the user did.

        Args:
            given: his options, as known() names them.

        Raises:
            OptionError: a batch or the context would have no room for a token of each request.
        """
        least = max(parallel, 2)  # llama.cpp warms up with two
        for name in ("batch-size", "ctx-size"):
            size = given.get(name, "")
            if size.isdecimal() and int(size) < least and not (name == "ctx-size" and int(size) == 0):
                raise OptionError(
                    f"--{name} is {size}; allowed: at least {least}, with --parallel {parallel}, which gives each request a token"
                )
        n_ctx = given.get("ctx-size", "")
        on_gpu = bool(self._remote) or machine.has_gpu()
        options = {"n_gpu_layers": -1 if on_gpu else 0, "flash_attn": on_gpu}
        threads = threads_module.choose(options)
        if not n_ctx.isdecimal() or not int(n_ctx):  # a wrong one is for llama-server to refuse
            n_ctx = str(machine.checked_n_ctx(one.path, options, parallel, n_at_once, self._remote))
        chosen = {
            "model": one.path,
            "parallel": str(parallel),
            "rpc": ",".join(self.rpc_servers),
            "ctx-size": n_ctx,
            # after each batch it reports how far a prompt is read, and other answers get a token; a micro-batch is never larger
            "batch-size": "" if "ubatch-size" in given else str(N_BATCH),
            # where all is taken, every request would be ended
            "kv-unified-per-slot": str(int(n_ctx) // parallel),
            "fit": "off",  # it does not count second keys
            "flash-attn": "on" if on_gpu else "off",
            "gpu-layers": "all" if on_gpu else "",
            "threads": str(threads.decode),
            "threads-batch": str(threads.batch),
            "temp": "0",  # as the terminal: an answer about a text is the most probable one
        }
        return {name: value for name, value in chosen.items() if value and name not in given}

    def _sections(self, n_at_once: int, parallel: int, given: Mapping[str, str]) -> str:
        """The file of models: for each what is chosen here, beneath what the user chose."""
        sections = {}
        for one in self.models:
            own = {**of_environment(), **known(one.options.items()), **given}
            n = own.get("parallel")
            slots = parallel if n is None else Integer(1, _MAX_SLOTS)(f"[{one.name}] parallel", literal(n))
            options = {"stop-timeout": str(_PATIENCE), **self._options(one, slots, own, n_at_once)}
            if one.name in self.at_start:
                options["load-on-startup"] = "1"
            sections[one.name] = {**options, **one.options}
        return to_ini(sections)

    @property
    def url(self) -> str:
        """Its address for a client on this machine."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}{self._prefix}"

    @property
    def _host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.hosts[0], self.hosts[0])

    @property
    def has_key(self) -> bool:
        """Whether clients have to send one."""
        return bool(self._key)

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """A block in which the process runs; it need not be ready."""
        with contextlib.ExitStack() as stack:
            command, environment = self.command, self.environment
            if self.is_router:
                folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pypcd-")))
                (folder / "models.ini").write_text(self._ini, encoding="utf-8")
                command = [*command, "--models-preset", str(folder / "models.ini")]
                environment = {**environment, "LLAMA_CACHE": str(folder)}  # else what was ever downloaded is served too
            self._start(command, environment)
            stack.callback(self._stop)
            yield self

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process in the thread that reads what it writes: on Linux it ends with the thread that has started it."""
        started: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                self._process = subprocess.Popen(
                    _tied(command),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for this process, which tells the server once
                )
            except BaseException as error:  # noqa: BLE001  result() raises it
                started.set_exception(error)
            else:
                started.set_result(None)
                self._read(self._process.stdout)

        self._reader = threading.Thread(target=run, daemon=True)
        self._reader.start()
        started.result()

    def _read(self, stream: Any) -> None:
        with stream:
            for line in stream:
                if loaded := re.fullmatch(r"(\[ *\d+\] )?loaded (\d+)%\n", line):
                    self._parts[loaded[1]] = int(loaded[2])
                    n = max(len(self.at_start), 1) if self.is_router else 1
                    self.loaded = min(sum(self._parts.values()) // n, 100)
                    continue
                if not re.sub(r"^\[ *\d+\] ", "", line).strip():  # a model's process writes these for its router
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
                raise self._failure(self.models[0].path, self._lines)
            if self._get("/health") is not None and (not self.is_router or self._are_loaded()):
                return True
            time.sleep(0.05)
        return False

    def _are_loaded(self) -> bool:
        """Whether the models of the start are.

        Raises:
            OptionError, ModelError: one of them could not be loaded.
        """
        entries = {entry["id"]: entry["status"] for entry in self._entries()}
        if not entries:
            return True  # it asks for a key that is not known here
        for one in self.models:
            if entries[one.name].get("failed"):
                words = entries[one.name]["args"]
                port = words[words.index("--port") + 1]
                raise self._failure(one.path, [line for line in self._lines if re.match(rf"\[ *{port}\] ", line)])
        return all(entries[name]["value"] == "loaded" for name in self.at_start)

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Returns when `stopped` does so with True.

        Raises:
            PCDError: it ended by itself.
        """
        while not stopped():
            code = self._ended()
            if code is not None:
                if self._reader is not None:
                    self._reader.join(_SECONDS)
                if lost := self._lost(self._lines):
                    raise lost
                how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                killed = "another program ended it, or the system did, which had too little memory"
                without = killed if how.endswith("SIGKILL") else "its log is empty"
                raise PCDError(f"llama-server ended {how}: {_said(self._lines, -1) or without}")
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
                    process.wait(_PATIENCE)
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

    def _entries(self) -> list[Any]:
        """What it lists; empty if it asks for a key that is not known here."""
        return list((self._get("/v1/models") or {"data": []})["data"])

    def names(self) -> list[str]:
        """The names that requests may give as their model, as far as they are known."""
        return [entry["id"] for entry in self._entries()]

    def refusals(self) -> dict[str, str]:
        """The models that cannot run PCD, of those that are loaded, and why."""
        told = {entry["id"]: entry.get("pcd") or {} for entry in self._entries()}
        return {name: pcd["refusal"] for name, pcd in told.items() if "refusal" in pcd}

    def has_page(self) -> bool:
        """Whether it has one at its address."""
        return self._get("/", str) is not None

    def _get(self, path: str, read: Callable[[bytes], Any] = json.loads) -> Any:
        """What it answers; None: nothing, or an error."""
        connection = http.client.HTTPConnection(self._host, self.port, timeout=_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            connection.request("GET", self._prefix + path, headers=headers)
            response = connection.getresponse()
            return read(response.read()) if response.status == 200 else None
        except (OSError, http.client.HTTPException):  # it does not listen yet
            return None
        finally:
            connection.close()

    def _lost(self, lines: Iterable[str]) -> RPCError | None:
        """An exception, if ggml ended it over a server on another machine."""
        if not any(re.search(r"ggml-rpc\.cpp:\d+: ", line) for line in lines):
            return None
        return RPCError(
            f"the connection to an RPC server ({', '.join(self.rpc_servers)}) was lost, so ggml ended llama-server; "
            "docs/rpc.md says how to stay safe"
        )

    def _failure(self, path: str, lines: Iterable[str]) -> PCDError:
        """Why it, or the process of one model, ended before it was ready."""
        if self._reader is not None and self._ended() is not None:
            self._reader.join(_SECONDS)
        lines = list(lines)
        if lost := self._lost(lines):
            return lost
        said = _said(lines)
        if re.match(
            r"invalid argument|error while handling argument|unknown value|expected value|option '.*' not recog", said
        ):
            return OptionError(f"llama-server: {said}; `pypcd serve MODEL -- --help` lists its options")
        if re.match(_ABORTED, said):
            said = f"llama.cpp gave up, which a value of an option may have caused: {said}"
        return ModelError(f"llama-server cannot serve {path}: {explained(said) or 'its log is empty'}")


def _said(lines: Iterable[str], which: int = 0) -> str:
    """The first error in a log, or the last one (-1), else its last line, without port, time, level and function."""
    told = [line for line in (re.sub(r"^\[ *\d+\] ", "", line) for line in lines) if line.strip()]
    errors = [line for line in told if re.match(rf"[\d.]+ E |error|terminate|{_ABORTED}", line)]
    said = (errors or told[-1:] or [""])[which]
    return re.sub(
        r"^([\d.]+ [A-Z] (\w{3,4} +)?\w+: +|error: )(failed to initialize router models: )?", "", said
    ).strip()


def _first_key(keys: str) -> str:
    return keys.split(",")[0].strip()


def _first_key_of(path: str) -> str:
    """Of a file of keys; empty if it has none, or cannot be read, which llama-server says."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n") if path else []
        return next((line for line in lines if line and not line.startswith("#")), "")
    return ""


_PATH_VARIABLE = {"darwin": "DYLD_LIBRARY_PATH", "win32": "PATH"}.get(sys.platform, "LD_LIBRARY_PATH")


def _environment(program: pathlib.Path) -> dict[str, str]:
    """Our libllama first, then llama-cpp-python's ggml and libmtmd: the two packages may be installed apart."""
    ggml = pathlib.Path(llama_cpp.__file__).parent / "lib"
    folders = [program.parent.parent / "lib", ggml, os.environ.get(_PATH_VARIABLE)]
    return {**os.environ, _PATH_VARIABLE: os.pathsep.join(str(folder) for folder in folders if folder)}


# The stack of a thread that reads a text: std::regex, by which many models' tokenizers split it, calls itself for each letter of a word.
# It takes memory when it is used, unless addresses count.
_STACK = 512 << 20
_TIE = """import ctypes, os, resource, sys
_, most = resource.getrlimit(resource.RLIMIT_STACK)
counts = open("/proc/sys/vm/overcommit_memory").read(1) == "2" or resource.getrlimit(resource.RLIMIT_AS)[0] >= 0
if not counts:
    wanted = int(sys.argv[2]) if most < 0 else min(int(sys.argv[2]), most)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: SIGTERM would wait for the streams that clients read
if os.getppid() == int(sys.argv[1]):  # else it has ended already
    os.execv(sys.argv[3], sys.argv[3:])"""


def _tied(command: Sequence[str]) -> list[str]:
    """A command that is killed if pypcd ends, however that happens. It is a Python that says so and becomes the command: between
    fork and exec, where other threads' locks may be held, nothing of ours runs."""
    if sys.platform != "linux" or not sys.executable:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), str(_STACK), *command]
