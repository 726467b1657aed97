"""The stages of `scripts/check_gpu run`, and what they leave behind. __main__.py says what they are."""

from __future__ import annotations

import argparse
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archive import LLAMA, PACKAGES, ROOT, pinned_version
from report import render

sys.path.append(str(ROOT / "scripts"))

from backends import build_environment
from machine import cuda_library_folders, describe_machine, find_nvcc


class Failed(Exception):
    """A stage cannot go on; the message says why."""


class OutOfTime(Exception):
    """--minutes are over."""


# --- a run ---


class Run:
    """One call of `run`: the stages, what they leave behind, and the report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work
        self.deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.tree, self.logs = self.work / "pack" / "llama-cpp-python", self.work / "logs"
        self.named = [] if options.backend == "cpu" else ["--backend", options.backend]  # for scripts/install
        self.python = ROOT / "-".join([".venv", *self.named[1:]]) / "bin" / "python"
        self.wheels, self.results = self.work / "pack" / "wheels", self.work / "rows.jsonl"
        self.nvcc = find_nvcc() if options.backend == "cuda" else None
        self.record: dict[str, Any] = {"stages": {}, "bench": {}}
        if (self.work / "check_gpu.json").is_file():
            self.record.update(json.loads((self.work / "check_gpu.json").read_text()))
        self.record.update(backend=options.backend, machine=describe_machine(self.nvcc))

    def keys(self) -> dict[str, str]:
        """For every stage a digest of all that its result follows from, the stages before it included."""
        o, keys, last = self.options, {}, ""
        inputs: dict[str, list[Any]] = {
            "unpack": [digest(o.file), o.backend, sys.version, str(self.work)],
            "llama": [self.build_environment()],
            "pypcd": [digest(*files("CMakeLists.txt", "pyproject.toml", "cmake/**/*", "cpp/**/*", "pypcd/**/*"))],
            "rows": [digest(*files("tests/support/*.py", "tests/engine/test_backend.py"))],
            "bench": [o.bench],
        }
        for name, values in inputs.items():
            keys[name] = hashlib.sha256(json.dumps([last, *values]).encode()).hexdigest()[:16]
            last = keys[name] if name != "rows" else last
        return keys

    def run(self) -> int:
        """All stages, as far as they can go. The exit status: 0 if all is done and well."""
        if not Path(self.record.get("venv", os.sep)).exists():
            self.record["stages"] = {}  # somebody removed it
        stages = self.record["stages"]
        for name, key in self.keys().items():
            if stages.get(name, {}).get("key") != key:
                stages[name] = {"key": key, "status": "not begun", "seconds": 0}
        if stages["rows"]["status"] == "not begun":
            self.results.unlink(missing_ok=True)
        if stages["bench"]["status"] == "not begun":
            self.record["bench"] = {}
        for name, entry in stages.items():
            if entry["status"] == "done" and name != "bench":  # which may have other lengths to measure
                print(f"{name}: done before", flush=True)
                continue
            entry.update(status="unfinished", error="")
            print(f"{name}: starts", flush=True)
            start = time.monotonic()
            try:
                self.write()
                getattr(self, name)()
                entry["status"] = "done"
            except OutOfTime:
                entry["error"] = "the time is over; the same command goes on from here"
            except Failed as error:
                entry.update(status="failed", error=str(error))
            finally:
                entry["seconds"] += round(time.monotonic() - start)
                self.write()
            print(f"{name}: {entry['status']}, {entry['seconds']} s {entry['error']}".rstrip(), flush=True)
            if entry["status"] != "done" and name != "rows":  # costs are worth knowing where rows are wrong
                break
        return 0 if all(entry["status"] == "done" for entry in stages.values()) else 1

    # the stages

    def unpack(self) -> None:
        for name in ("pack", "build-llama"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        with tarfile.open(self.options.file) as archive:
            archive.extractall(self.work / "pack", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        about = json.loads((self.work / "pack" / "pack.json").read_text())
        version = ".".join(platform.python_version_tuple()[:2])
        if about["python"] != version:
            print(f"the wheels are for Python {about['python']}, this is {version}: some may not fit", flush=True)
        if about["llama_cpp_python"] != pinned_version():
            raise Failed(f"the archive has llama-cpp-python {about['llama_cpp_python']}, not {pinned_version()}")
        venv = self.python.parent.parent
        if not self.named and venv.exists() and self.record.get("venv") != str(venv):
            raise Failed(f"{venv} is there, and a trial would replace what it holds; make one in a clone of its own")
        self.record["venv"] = str(venv)
        if not self.python.exists():  # what the machine has in good versions is used; pip itself comes from the archive
            command = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", venv]
            self.execute(command, "unpack")
        pip = next(self.wheels.glob("pip-*.whl")) / "pip"
        self.execute([self.python, pip, "install", *PACKAGES], "unpack")

    def build_environment(self) -> dict[str, str]:
        """For llama-cpp-python."""
        best = f"CMAKE_PROJECT_llama_cpp_INCLUDE={ROOT / 'cmake' / 'llama-cpp-python.cmake'}"
        env = build_environment("cuda", ROOT) if self.options.backend == "cuda" else {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
        return {**env, "SKBUILD_CMAKE_DEFINE": best}

    def llama(self) -> None:
        """Its wheel, where scripts/install looks for one. A build that was cut off goes on."""
        if self.options.backend == "cuda" and self.nvcc is None:
            raise Failed("no nvcc on PATH, in CUDA_HOME, in /usr/local/cuda* or among the packages of pip")
        where = self.wheels
        if self.named:
            where = Path(
                self.execute([self.python, "-c", _KEPT, ROOT, *self.named[1:], pinned_version()], "llama").strip()
            )
        build = ["--no-deps", "--no-build-isolation", "--verbose", "-C", f"build-dir={self.work / 'build-llama'}"]
        command = [self.python, "-m", "pip", "wheel", *build, "--wheel-dir", where, self.tree]
        self.execute(command, "llama", **self.build_environment())

    def pypcd(self) -> None:
        env = {"PYPCD_LLAMA_CPP_SOURCE": str(self.tree / LLAMA), "PYTHON": sys.executable}
        if not self.named:
            env["SKBUILD_CMAKE_DEFINE"] = "PYPCD_SERVER=OFF"  # no page, no requests: rows are checked here
        self.execute([ROOT / "scripts" / "install", *self.named], "pypcd", **env)
        self.record["versions"] = json.loads(self.execute([self.python, "-c", _ABOUT], "pypcd"))
        devices = self.record["versions"]["devices"]
        if self.options.backend == "cuda" and not any(device["is_gpu"] for device in devices):
            raise Failed(f"ggml finds no GPU; its devices: {devices}")

    def rows(self) -> None:
        """The tests not done yet. Where ggml ends the process, one test is "crashed" and the others go on."""
        pytest = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        pytest += ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, ROOT / "tests" / "engine" / "test_backend.py"]
        env = {"PYPCD_TEST_REPORT": str(self.results), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        env["PYPCD_TEST_BACKEND"] = self.options.backend
        tests = re.findall(r"^tests/.*::.*$", self.execute([*pytest, "--collect-only"], "rows", **env), re.MULTILINE)
        while todo := [test for test in tests if test not in self.done()]:
            (self.work / "done").write_text("".join(f"--deselect={test}\n" for test in self.done()))
            try:
                self.execute([*pytest, f"@{self.work / 'done'}"], "rows", **env)
            except Failed as error:
                left = [test for test in todo if test not in self.done()]
                if not left:
                    break
                if not str(error).startswith("SIG"):
                    raise
                why = {"test": left[0], "outcome": "crashed", "why": str(error)}
                with self.results.open("a") as out:
                    out.write(json.dumps(why) + "\n")
        bad = [test for test, result in self.done().items() if result["outcome"] in ("failed", "crashed")]
        if bad:
            raise Failed(f"{len(bad)} of {len(tests)} tests")

    def done(self) -> dict[str, dict[str, Any]]:
        lines = self.results.read_text().splitlines() if self.results.is_file() else []
        return {result["test"]: result for result in map(json.loads, lines)}

    def bench(self) -> None:
        """A command for each shape and length, so that each can be resumed."""
        o, found = self.options, self.record["bench"]
        todo = [(shape, length) for shape in o.shapes.split(",") for length in filter(None, o.lengths.split(","))]
        for shape, length in todo:
            name = f"{shape}, {length} tokens"
            if "measurements" in found.get(name, {}):
                continue
            print(f"bench: {name}", flush=True)
            # scores without flash attention take n_heads x 512 x length floats: 4 GiB at 64k, for nothing but to lose
            flash = "both" if int(length) <= 16384 else "on"
            options = ["--json", "--length", length, "--flash-attn", flash, *shlex.split(o.bench)]
            try:
                command = [self.python, "-m", "pypcd", "bench", self.random_model(shape), *options]
                found[name] = json.loads(self.execute(command, "bench"))
            except Failed as error:
                found[name] = {"error": str(error)}
            self.write()
        wrong = [name for name, result in found.items() if "error" in result]
        if wrong:
            raise Failed(f"no measurements of {'; '.join(wrong)}")

    def random_model(self, shape: str) -> Path:
        model = self.work / f"random-{shape}.gguf"
        if not model.is_file():
            script, part = ROOT / "scripts" / "recipes" / "make_random_model.py", model.with_suffix(".part")
            self.execute([self.python, script, "--shape", shape, part], "bench")
            part.rename(model)
        return model

    # processes

    def environment(self, **more: str) -> dict[str, str]:
        drop = ("PYTHONPATH", "PYTHONHOME", "LLAMA_CPP_LIB_PATH", "PYPCD_DISABLE", "CMAKE_ARGS", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in drop}
        env.update(GGML_NO_BACKTRACE="1", OPENBLAS_NUM_THREADS="1", PYTHONNOUSERSITE="1", PIP_NO_INDEX="1")
        env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore", PIP_NO_CACHE_DIR="1")
        env.update(PIP_FIND_LINKS=str(self.wheels), XDG_CACHE_HOME=str(self.work / "cache"))
        env["CMAKE_BUILD_PARALLEL_LEVEL"] = str(self.options.jobs)
        path = [str(self.python.parent), *([str(self.nvcc.parent)] if self.nvcc else []), env.get("PATH", os.defpath)]
        env["PATH"] = os.pathsep.join(path)
        if self.options.backend == "cuda":
            libraries = [*cuda_library_folders(self.nvcc), env.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return {**env, **more}

    def execute(self, command: Sequence[Any], log: str, **env: str) -> str:
        """What a command prints; it goes to a log too, and so do its errors.

        Raises:
            Failed: it ends with another status than 0; the message begins with the signal or the status.
            OutOfTime: it would take longer than there is time.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        path, command = self.logs / f"{log}.log", [str(part) for part in command]
        with open(path, "a+b") as file:
            file.write(f"\n$ {shlex.join(command)}\n".encode())
            file.flush()
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": file}
            env = self.environment(**env)
            with subprocess.Popen(command, env=env, cwd=self.work, start_new_session=True, **pipes) as process:
                try:
                    left = min(max(0.0, self.deadline - time.monotonic()), 10**6)
                    output = process.communicate(timeout=left)[0]
                except subprocess.TimeoutExpired:
                    raise OutOfTime from None
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)  # and what it started
            file.write(output)
        if process.returncode:
            code = process.returncode
            ending = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            tail = "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            raise Failed(f"{ending} of `{shlex.join(command)[:300]}`, logs/{log}.log ends with:\n{tail}")
        return output.decode("utf-8", "replace")

    def write(self) -> None:
        """check_gpu.json and check_gpu.md in OUT, the first also in --work, from where a next run takes it up."""
        self.record["rows"] = list(self.done().values())
        for folder in (self.work, self.options.out):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / "check_gpu.json.part"  # a run may be cut off at any time
            part.write_text(json.dumps(self.record))
            part.replace(folder / "check_gpu.json")
        (self.options.out / "check_gpu.md").write_text(render(self.record))
        if self.logs.is_dir():
            shutil.copytree(self.logs, self.options.out / "logs", dirs_exist_ok=True)


_KEPT = """
import sys, pathlib
root, name, version = sys.argv[1:]
sys.path.insert(0, root + "/scripts")
import backends
print(backends.kept_wheels(name, version, pathlib.Path(root)))
"""
_ABOUT = """
import json, pypcd, llama_cpp
from pypcd import _machine
print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "devices": _machine.devices()}))
"""


def files(*patterns: str) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in found if "__pycache__" not in path.parts and "lib" not in path.parts)


def digest(*paths: Path) -> str:
    parts = (path.name.encode() + hashlib.sha256(path.read_bytes()).digest() for path in paths)
    return hashlib.sha256(b"".join(parts)).hexdigest()
