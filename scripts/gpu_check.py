"""PCD on a GPU: are its rows those of the CPU, and what does it cost? For a machine without network.

    scripts/check_gpu pack --python-version 3.12 gpu.tar.xz       # where there is network
    scripts/check_gpu run gpu.tar.xz out --minutes 9              # there, in a checkout; again until it is done
    scripts/check_gpu run gpu.tar.xz out --backend cpu --shape 1b --lengths 64,128      # a dry run without a GPU

The archive has the part of llama-cpp-python's source that ggml (CPU and CUDA) and libllama are built from, and wheels.
The stages: unpack (and a virtual environment), llama (build llama-cpp-python), pypcd (build this checkout against it),
rows (scripts/gpu_rows.py, one process per model), bench (`pypcd bench` on a random model). What is done stays in
--work and is not done again while nothing it depends on has changed; an interrupted compilation goes on. OUT gets
check_gpu.json, check_gpu.md and the logs, also when a stage fails, written anew after every step.

Needed there: Linux on x86-64, a C++17 compiler, CMake 3.21, for CUDA its toolkit and a driver. Not needed: git (a stand-in
applies the patch), ninja, pip, ensurepip. Only the standard library is used here: this runs before anything is installed.

Written by reading, since no CPU shows it: nvcc is looked for on PATH, in $CUDA_HOME, in /usr/local/cuda* and in
packages installed by pip; the GPU's architecture comes from nvidia-smi, which any CMake takes, and is "native" (CMake
3.24) where that is silent; llama-cpp-python's libraries look for CUDA's in their own folder only, so the folders of
libcudart, libcublas and libcuda go to LD_LIBRARY_PATH, the toolkit's stubs never; NCCL is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import gpu_git
from gpu_archive import LLAMA, PACKAGES, ROOT, pack, pinned_version
from gpu_report import render

STAGES = ("unpack", "llama", "pypcd", "rows", "bench")
BUILDS = ("unpack", "llama", "pypcd")

# --- what the machine has ---


def output_of(*command: str) -> str:
    """What a command prints; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def find_nvcc() -> Path | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += ["/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True), "/opt/cuda"]
    for path in sys.path:
        homes += map(str, Path(path, "nvidia").glob("*")) if path else []
    on_path = shutil.which("nvcc")
    found = [Path(on_path)] if on_path else []
    found += [Path(home, "bin", "nvcc") for home in homes if Path(home, "bin", "nvcc").is_file()]
    return found[0] if found else None


def cuda_library_folders(nvcc: Path | None) -> list[str]:
    """Where CUDA's run time and the driver's library may lie, other than where every program looks."""
    homes = [nvcc.resolve().parent.parent] if nvcc else []
    folders = [home / name for home in homes for name in ("lib64", "targets/x86_64-linux/lib", "lib")]
    folders += map(Path, ("/usr/local/cuda/lib64", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"))
    for path in sys.path:
        folders += Path(path, "nvidia").glob("*/lib") if path else []
    names = ("libcudart.so*", "libcublas.so*", "libcublasLt.so*", "libcuda.so*")
    return [str(folder) for folder in dict.fromkeys(folders) if any(any(folder.glob(name)) for name in names)]


def cuda_architectures() -> str:
    """90-real for a compute capability of 9.0; several GPUs of one kind count once."""
    lines = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    numbers = sorted({line.replace(".", "") for line in lines if re.fullmatch(r"\d+\.\d", line)})
    return ";".join(f"{number}-real" for number in numbers) or "native"


def describe_machine(nvcc: Path | None) -> dict[str, Any]:
    fields = ("name", "driver_version", "memory.total", "compute_cap", "power.limit", "clocks.max.sm")
    gpus = output_of("nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader").splitlines()
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    release = re.search(r"release (\S+),", output_of(str(nvcc), "--version")) if nvcc else None
    compiler = (output_of(os.environ.get("CXX", "c++"), "--version").splitlines() or [""])[0]
    return {
        "gpus": [dict(zip(fields, map(str.strip, line.split(",")))) for line in gpus],
        "nvcc": release.group(1) if release else None,
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cmake": (output_of("cmake", "--version").split() or ["", "", ""])[2],
        "compiler": compiler,
    }


# --- a run ---


class Failed(Exception):
    """A stage cannot go on; the message says why."""


class OutOfTime(Exception):
    """--minutes are over."""


@dataclasses.dataclass
class Child:
    """How a process ended."""

    code: int = 0
    errors: str = ""


@dataclasses.dataclass
class Options:
    """What `run` was asked for."""

    file: Path
    out: Path
    work: Path
    backend: str
    stages: tuple[str, ...]
    jobs: int
    minutes: float
    shape: str
    lengths: tuple[int, ...]
    methods: str
    rounds: int
    n_tokens: int
    prompt: int
    models: tuple[str, ...]
    cuda_architectures: str


class Run:
    """One call of `run`: the stages, what they leave behind, and the report."""

    def __init__(self, options: Options) -> None:
        self.options, self.work = options, options.work
        self.deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.pack, self.venv = self.work / "pack", self.work / "venv"
        self.tree, self.logs = self.pack / "llama-cpp-python", self.work / "logs"
        self.nvcc = find_nvcc() if options.backend == "cuda" else None
        self.children: set[subprocess.Popen[bytes]] = set()
        self.stopping, self.written, self.lock = False, 0.0, threading.Lock()
        self.record: dict[str, Any] = {"stages": {}, "rows": [], "bench": []}
        if (self.work / "check_gpu.json").is_file():
            self.record.update(json.loads((self.work / "check_gpu.json").read_text()))
        self.record.update(backend=options.backend, shape=options.shape, machine=describe_machine(self.nvcc))
        self.record["machine"]["architectures"] = self.architectures() if options.backend == "cuda" else None

    def architectures(self) -> str:
        return self.options.cuda_architectures or cuda_architectures()

    # what a stage depends on

    def keys(self) -> dict[str, str]:
        """For every stage a digest of all that its result follows from."""
        o, keys, last = self.options, {}, ""
        inputs: dict[str, list[Any]] = {
            "unpack": [_digest([o.file]), o.backend, sys.version, str(self.work)],
            "llama": [self.cmake_args()],
            "pypcd": [_digest(_files("CMakeLists.txt", "pyproject.toml", "cmake/*", "cpp/**/*", "pypcd/**/*"))],
            "rows": [_digest(_files("scripts/gpu_rows.py", "tests/tiny_gguf.py"))],
            "bench": [o.shape, o.methods, o.rounds, o.n_tokens, o.prompt],
        }
        for name, values in inputs.items():
            keys[name] = hashlib.sha256(json.dumps([last, *values]).encode()).hexdigest()[:16]
            last = keys[name] if name in BUILDS else keys["pypcd"]
        return keys

    def run(self) -> int:
        """The stages asked for, as far as they can go. The exit status: 0 if all is done and well."""
        keys, status = self.keys(), 0
        stages = self.record["stages"]
        for name, stage in list(stages.items()):
            # other options than last time count where the stage is asked for, another build in any case
            asked = name in BUILDS or name in self.options.stages
            if stage["key"] != keys[name] if asked else stage["build"] != keys["pypcd"]:
                del stages[name]
        for name in ("rows", "bench"):
            valid = stages.get(name, {}).get("key")
            self.record[name] = [entry for entry in self.record[name] if entry["key"] == valid]
        actions: dict[str, Callable[[], None]] = {
            "unpack": self.unpack,
            "llama": self.build_llama,
            "pypcd": self.build_pypcd,
            "rows": self.compare_rows,
            "bench": self.measure,
        }
        for name in STAGES:
            done = stages.get(name, {}).get("status") == "done"
            if name not in self.options.stages:
                if name in BUILDS and not done and set(self.options.stages) & set(STAGES[STAGES.index(name) :]):
                    raise SystemExit(f"the stage {name} comes before those asked for and is not done; see --stages")
                continue
            if done and name in BUILDS:
                print(f"{name}: done before", flush=True)
                continue
            entry = stages.setdefault(name, {"key": keys[name], "build": keys["pypcd"], "seconds": 0.0})
            entry.update(status="unfinished", error="")
            self.write()
            print(f"{name}: starts", flush=True)
            start = time.monotonic()
            try:
                actions[name]()
                entry["status"] = "done"
            except OutOfTime:
                entry["error"] = "the time was over; the same command goes on from here"
            except Failed as error:
                entry.update(status="failed", error=str(error))
            finally:
                entry["seconds"] = round(entry["seconds"] + time.monotonic() - start, 1)
                self.write()
            print(f"{name}: {entry['status']}, {entry['seconds']:.0f} s {entry['error']}".rstrip(), flush=True)
            if entry["status"] != "done":
                status = 1
                if name in BUILDS or entry["status"] == "unfinished":
                    break
        return status

    # the stages

    def unpack(self) -> None:
        """The archive, and a virtual environment with its wheels."""
        for name in ("pack", "venv", "packages", "bin", "build-llama", "build-pypcd"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        with tarfile.open(self.options.file) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(self.pack, filter="data")
            else:
                archive.extractall(self.pack)
        about = json.loads((self.pack / "pack.json").read_text())
        version = ".".join(platform.python_version_tuple()[:2])
        if about["python"] != version:
            print(f"the wheels are for Python {about['python']}, this is {version}: some may not fit", flush=True)
        if about["llama_cpp_python"] != pinned_version():
            raise Failed(f"the archive has llama-cpp-python {about['llama_cpp_python']}, not {pinned_version()}")

        # what the machine has in good versions is used; pip itself comes from the archive
        try:
            command = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(self.venv)]
            self.execute(command, "unpack")
        except Failed:
            shutil.rmtree(self.venv, ignore_errors=True)
            print("no virtual environment can be made; a folder of packages instead", flush=True)
        self.install([*PACKAGES], "unpack", pip=next((self.pack / "wheels").glob("pip-*.whl")) / "pip")

    def cmake_args(self) -> list[str]:
        """For llama-cpp-python."""
        args = ["-DLLAVA_BUILD=OFF"]
        if self.options.backend == "cuda":
            args += ["-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF", f"-DCMAKE_CUDA_ARCHITECTURES={self.architectures()}"]
            args += [f"-DCMAKE_CUDA_COMPILER={self.nvcc}"] if self.nvcc else []
        return args

    def build_llama(self) -> None:
        if self.options.backend == "cuda" and self.nvcc is None:
            raise Failed("no nvcc on PATH, in CUDA_HOME, in /usr/local/cuda* or among the packages of pip")
        env = {"CMAKE_ARGS": shlex.join(self.cmake_args())}
        self.install([str(self.tree)], "llama", "--no-deps", build="build-llama", **env)

    def build_pypcd(self) -> None:
        env = {"PYPCD_LLAMA_CPP_SOURCE": str(self.tree / LLAMA)}
        if not shutil.which("git"):
            self.stand_in_for_git()
        self.install([str(ROOT)], "pypcd", "--no-deps", build="build-pypcd", **env)
        shown = self.ask(["-c", _ABOUT])
        self.record["versions"] = json.loads(shown)
        gpus = [device for device in self.record["versions"]["devices"] if device["is_gpu"]]
        if self.options.backend == "cuda" and not gpus:
            raise Failed(f"ggml finds no GPU; its devices: {self.record['versions']['devices']}")

    def compare_rows(self) -> None:
        """Every case of every model; a process per model, since ggml ends it where it fails."""
        key = self.record["stages"]["rows"]["key"]
        folder = self.work / "models"
        folder.mkdir(exist_ok=True)
        script = [str(ROOT / "scripts" / "gpu_rows.py"), str(folder), self.options.backend]
        names = [name for name in json.loads(self.ask(script)) if name in (self.options.models or name)]
        cases = self.record["rows"]
        ended = {case["model"] for case in cases if case["case"] == "end"}

        with ThreadPoolExecutor(max(1, min(8, self.options.jobs // 2))) as pool:
            try:
                for future in [pool.submit(self.check_model, script, name, key) for name in names if name not in ended]:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop_children()
                raise
        bad = [case for case in cases if case.get("status") in ("failed", "crashed")]
        if bad:
            raise Failed(f"{len(bad)} of {sum('status' in case for case in cases)} cases")

    def check_model(self, script: Sequence[str], model: str, key: str) -> None:
        """The cases of a model that were not done before. One that ends the process is "crashed", the others go on."""
        cases, running = self.record["rows"], ""
        while running != "end":
            skip = [case["case"] for case in cases if case["model"] == model]
            child = Child()
            running = "start"
            for line in self.lines([*script, model, json.dumps(skip)], f"rows-{model}", child=child):
                if not line.startswith("{"):  # something else that a library prints
                    continue
                got = json.loads(line)
                running = got["case"]
                if "status" in got or running == "end":
                    cases.append({"key": key, "model": model, **got})
                    running = "end" if running == "end" else "between two cases"
                    self.write(seldom=True)
            if running != "end":
                why = f"{_ending(child.code)}: {_last_words(child.errors)}"
                cases.append({"key": key, "model": model, "case": running, "status": "crashed", "why": [why]})
                if running == "start":  # not even a case was begun
                    return
        print(f"rows: {model}", flush=True)

    def measure(self) -> None:
        """The tables of `pypcd bench`, a command for each length so that each can be resumed."""
        o, entry = self.options, self.record["stages"]["bench"]
        model = self.work / f"random-{o.shape}.gguf"
        if not model.is_file():
            start, part = time.monotonic(), model.with_suffix(".part")
            script = [str(self.python()), str(ROOT / "scripts" / "make_random_model.py"), "--shape", o.shape]
            self.execute([*script, str(part)], "bench")
            part.rename(model)
            entry["model_seconds"] = round(time.monotonic() - start, 1)
        wrong = []
        for length in o.lengths:
            if any(table["length"] == length and "measurements" in table for table in self.record["bench"]):
                continue
            print(f"bench: {length} tokens", flush=True)
            # scores without flash attention take n_heads x 512 x length floats: 4 GiB at 64k, for nothing but to lose
            flash = "both" if length <= 16384 else "on"
            command = [str(self.python()), "-m", "pypcd", "bench", str(model), "--json", "--length", str(length)]
            command += ["--method", o.methods, "--flash-attn", flash, "--rounds", str(o.rounds)]
            command += ["--n-tokens", str(o.n_tokens), "--prompt", str(o.prompt)]
            table: dict[str, Any] = {"key": entry["key"], "length": length}
            start = time.monotonic()
            try:
                table.update(json.loads("\n".join(self.lines(command, f"bench-{length}", check=True))))
                del table["model"]
            except Failed as error:
                table["error"] = str(error)
                wrong.append(str(length))
            table["seconds"] = round(time.monotonic() - start, 1)
            self.record["bench"] = [t for t in self.record["bench"] if t["length"] != length] + [table]
            self.write()
        if wrong:
            raise Failed(f"no measurements at {', '.join(wrong)} tokens")

    # processes

    def python(self) -> Path:
        path = self.venv / "bin" / "python"
        return path if path.is_file() else Path(sys.executable)

    def environment(self, **more: str) -> dict[str, str]:
        drop = ("PYTHONPATH", "PYTHONHOME", "LLAMA_CPP_LIB_PATH", "PYPCD_DISABLE", "CMAKE_ARGS", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in drop}
        env.update(GGML_NO_BACKTRACE="1", OPENBLAS_NUM_THREADS="1", PYTHONNOUSERSITE="1", PIP_NO_INDEX="1")
        env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore", PIP_NO_CACHE_DIR="1")
        env["CMAKE_BUILD_PARALLEL_LEVEL"] = str(self.options.jobs)
        folders = [self.work / "bin", self.venv / "bin", self.work / "packages" / "bin"]
        path = [str(folder) for folder in folders if folder.is_dir()]
        path += [str(self.nvcc.parent)] if self.nvcc else []
        env["PATH"] = os.pathsep.join([*path, env.get("PATH", os.defpath)])
        if self.options.backend == "cuda":
            libraries = [*cuda_library_folders(self.nvcc), env.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        if (self.work / "packages").is_dir():
            env["PYTHONPATH"] = str(self.work / "packages")
        return {**env, **more}

    def install(
        self, what: list[str], log: str, *options: str, build: str = "", pip: Path | None = None, **env: str
    ) -> None:
        command = [str(self.python()), *([str(pip)] if pip else ["-m", "pip"]), "install", *options]
        command += ["--no-index", "--find-links", str(self.pack / "wheels"), "--no-build-isolation", "--verbose"]
        if build:
            command += ["--force-reinstall", "--config-settings", f"build-dir={self.work / build}"]
        if not (self.venv / "bin" / "python").is_file():
            (self.work / "packages").mkdir(exist_ok=True)
            command += ["--target", str(self.work / "packages"), "--upgrade"]
        self.execute([*command, *what], log, **env)

    def stand_in_for_git(self) -> None:
        """A `git` that can do nothing but `git apply`, which is all that building needs."""
        print("no git here: a stand-in applies the patch", flush=True)
        script = self.work / "bin" / "git"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(gpu_git.__file__)} "$@"\n')
        script.chmod(0o755)

    def execute(self, command: Sequence[str], log: str, **env: str) -> None:
        for _ in self.lines(command, log, check=True, **env):
            pass

    def ask(self, arguments: Sequence[str]) -> str:
        return "\n".join(self.lines([str(self.python()), *arguments], "ask", check=True))

    def lines(
        self, command: Sequence[str], log: str, *, check: bool = False, child: Child | None = None, **env: str
    ) -> Iterator[str]:
        """What a command prints, line by line; its errors go to a log, with check=True its output too.

        Raises:
            Failed: it ends with another status than 0, and check is set.
            OutOfTime: it would take longer than there is time.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.log"
        command = [str(self.python()), *command] if command[0].endswith(".py") else list(command)
        with open(path, "ab") as errors:
            errors.write(f"\n$ {shlex.join(command)}\n".encode())
            errors.flush()
            start = errors.tell()
            process = subprocess.Popen(
                command,
                env=self.environment(**env),
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            self.children.add(process)
            timer = threading.Timer(min(max(0.0, self.deadline - time.monotonic()), 10**6), _end, [process])
            timer.daemon = True
            timer.start()
            assert process.stdout
            try:
                for line in process.stdout:
                    if check:
                        errors.write(line)
                        errors.flush()
                    yield line.decode("utf-8", "replace").rstrip("\n")
                code = process.wait()
            finally:
                timer.cancel()
                _end(process)
                process.stdout.close()
                self.children.discard(process)
        if self.stopping or time.monotonic() >= self.deadline:
            raise OutOfTime
        with open(path, "rb") as errors:
            errors.seek(start)
            text = errors.read().decode("utf-8", "replace")
        if child is not None:
            child.code, child.errors = code, text
        if check and code:
            tail = "\n".join(text.splitlines()[-12:])
            raise Failed(f"{_ending(code)} of `{shlex.join(command)[:300]}`, logs/{log}.log ends with:\n{tail}")

    def stop_children(self) -> None:
        self.stopping = True
        for process in list(self.children):
            _end(process)

    # the report

    def write(self, *, seldom: bool = False) -> None:
        """check_gpu.json and check_gpu.md in OUT, the first also in --work, from where a next run takes it up."""
        with self.lock:
            if seldom and time.monotonic() - self.written < 5:
                return
            text = json.dumps(self.record)
            for folder in (self.work, self.options.out):
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / "check_gpu.json", text)
            _write(self.options.out / "check_gpu.md", render(self.record))
            if self.logs.is_dir():
                shutil.copytree(self.logs, self.options.out / "logs", dirs_exist_ok=True)
            self.written = time.monotonic()


_ABOUT = """
import json, pypcd, llama_cpp, numpy
from pypcd import _machine
devices = _machine.devices()
print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "numpy": numpy.__version__, "devices": devices,
                  "backends": _machine.backends(), "system_info": llama_cpp.llama_print_system_info().decode().strip()}))
"""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours, and what it started, if it still runs."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(5)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _last_words(errors: str) -> str:
    """The assertion that ended a process, or its last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"GGML_ASSERT|GGML_ABORT|CUDA error|Error: ", line)]
    return (told or lines or [""])[-1][:300]


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")  # a run may be cut off at any time
    part.write_text(text)
    part.replace(path)


def _files(*patterns: str) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in found if "__pycache__" not in path.parts and "lib" not in path.parts)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# --- the command ---


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("pack", help="make the archive").add_argument
    add("file", nargs="?", type=Path, default=ROOT / "build" / "check_gpu.tar.xz")
    version = ".".join(platform.python_version_tuple()[:2])
    add("--python-version", default=version, help="of the other machine (default %(default)s)")
    add = commands.add_parser("run", help="check and measure").add_argument
    add("file", type=Path, help="the archive")
    add("out", type=Path, help="where check_gpu.json, check_gpu.md and logs go")
    add("--work", type=Path, default=ROOT / "build" / "check_gpu", help="kept between runs (default %(default)s)")
    add("--backend", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run (default %(default)s)")
    add("--stages", default=",".join(STAGES), help="default %(default)s")
    add(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="compilers at a time; rows: half as many models, at most 8 (%(default)s)",
    )
    add("--minutes", type=float, default=0, help="stop in good order after so many (default: go on)")
    add("--models", default="", help="for the rows, some of gpu_rows.py's (default: all)")
    add("--shape", default="8b", help="of the random model (default %(default)s)")
    add("--lengths", default="4096,16384,65536", help="tokens in the context (default %(default)s)")
    methods = "two-rows,pcd,pcd:window=4096,pcd:cache=shared,pcd:cache=separate,pcd:window,pcd:evaluation=alternate"
    add("--methods", default=methods, help="default %(default)s")
    add("--rounds", type=int, default=5, help="of the benchmark (default %(default)s)")
    # many, since CUDA's recorded graphs are in use from the third equal step on
    add("--n-tokens", type=int, default=65, help="per round (default %(default)s)")
    add("--prompt", type=int, default=2048, help="tokens of the timed prompt (default %(default)s)")
    add("--cuda-architectures", default="", help="as CMake writes them (default: this GPU's)")
    args = vars(parser.parse_args(arguments))

    if args.pop("command") == "pack":
        pack(args["file"].resolve(), args["python_version"])
        return 0
    for name in ("file", "out", "work"):
        args[name] = args[name].resolve()
    args["stages"] = tuple(args["stages"].split(","))
    args["models"] = tuple(filter(None, args["models"].split(",")))
    args["lengths"] = tuple(map(int, args["lengths"].split(",")))
    unknown = set(args["stages"]) - set(STAGES)
    if unknown:
        raise SystemExit(f"there is no stage {unknown.pop()!r}; allowed: {', '.join(STAGES)}")
    if not args["file"].is_file():
        raise SystemExit(f"{args['file']} is missing; 'scripts/check_gpu pack' makes it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the report is written on the way out
    return Run(Options(**args)).run()


if __name__ == "__main__":
    sys.exit(main())
