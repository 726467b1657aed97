"""AMX: the probe of ggml's kernels, what is remembered of it, and what models then use."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny, run_python

import pypcd
from pypcd import engine
from pypcd.engine import _amx, _amx_probe
from pypcd.gguf import DEMO_MODEL

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ggml uses AMX on Linux only")
HAS_AMX = not _amx._missing()
Says = Callable[[str], None]
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="this CPU or this build of ggml has no AMX")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known yet, here and in child processes; afterwards all is as before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYPCD_AMX", raising=False)
    _amx._verdict.cache_clear()
    yield
    monkeypatch.undo()
    _amx._verdict.cache_clear()
    engine.configure_amx()


# --- the probe ---


def test_kernels_that_work_are_found_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe itself, on the kernels that this CPU has in AMX's place, where it has none."""
    monkeypatch.setattr(_amx_probe.llama_cpp, "llama_print_system_info", lambda: b"AMX_INT8 = 1")
    assert HAS_AMX or _amx_probe.main(str(DEMO_MODEL)) == "right"


def test_other_logits_are_found_wrong() -> None:
    rng = np.random.default_rng(3)
    plain = rng.normal(size=(2, 100))
    assert _amx_probe.verdict(plain + 0.01 * rng.normal(size=plain.shape), plain) == "right"
    one_row = np.stack([plain[0], rng.normal(size=100)])  # a single token's products alone
    for rows in (one_row, 0 * plain, np.full_like(plain, np.nan), np.full_like(plain, np.inf)):
        assert _amx_probe.verdict(rows, plain).startswith(
            "ggml's kernels for it compute wrongly here (logits differ by"
        )


def test_the_probe_answers_and_says_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    verdict, is_certain = _amx._probe()
    if HAS_AMX:
        found = (
            r"right|ggml's kernels for it (crash here \([A-Z][a-z ]+\)|compute wrongly here \(logits differ by .+\))"
        )
        assert is_certain and re.fullmatch(found, verdict), verdict
    else:
        assert (verdict, is_certain) == ("the probe ended with exit code 0, saying 'none'", False)
    assert capfd.readouterr() == ("", "")


# --- what it finds, and what is remembered ---


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Has a script in the probe's place; each run leaves a line in `runs`. There is AMX, whatever this CPU has, and a ggml in `lib`."""
    monkeypatch.setattr(_amx, "_missing", lambda: "")
    monkeypatch.setattr(_amx, "_LIB", tmp_path / "lib")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libggml-cpu.so").write_text("a library")
    script = tmp_path / "probe.py"
    monkeypatch.setattr(_amx, "_PROBE", script)

    def write(code: str) -> None:
        script.write_text(f"import os, sys\nopen({str(tmp_path / 'runs')!r}, 'a').write('x')\n{code}")
        _amx._verdict.cache_clear()

    return write


def runs(tmp_path: Path) -> int:
    """Runs of the probe, as of processes that start one after the other."""
    _amx._verdict.cache_clear()
    path = tmp_path / "runs"
    return len(path.read_text()) if path.exists() else 0


@linux
@pytest.mark.parametrize(
    ("code", "on", "why", "remembered"),
    [
        ("print('right')", True, "its products are right", True),
        ("print('ggml\\'s kernels compute wrongly')", False, "kernels compute wrongly; 'AMX is off'", True),
        ("os.kill(os.getpid(), 4)", False, "crash here (Illegal instruction)", True),
        ("print('hello')", False, "exit code 0, saying 'hello'", False),
        ("print('right'); sys.exit(1)", False, "exit code 1, saying 'right'", False),
        ("import time; time.sleep(60)", False, "timed out after 1.0 seconds", False),
    ],
)
def test_each_way_to_end_has_its_meaning(
    code: str, on: bool, why: str, remembered: bool, says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_amx, "_SECONDS", 1.0 if "sleep" in code else 30.0)
    says(code)
    for i in range(2):
        state = engine.configure_amx()
        assert (state.exists, state.on) == (True, on) and why in state.why
        assert runs(tmp_path) == (1 if remembered else i + 1)


@linux
def test_another_file_of_ggml_is_probed_anew(says: Says, tmp_path: Path) -> None:
    says("os.kill(os.getpid(), 11)")
    assert not engine.configure_amx().on
    (tmp_path / "lib/libggml-cpu.so").write_text("built with the cure")
    says("print('right')")
    assert engine.configure_amx().on and runs(tmp_path) == 2
    engine.configure_amx()
    assert runs(tmp_path) == 2


@linux
@pytest.mark.parametrize("content", [b"", b"one line", b"/a\nright\n", b"/a\nright\nmore", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_no_answer(content: bytes, says: Says, tmp_path: Path) -> None:
    file = tmp_path / "cache/pypcd/amx.txt"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    says("os.kill(os.getpid(), 11)")
    for _ in range(2):
        assert not engine.configure_amx().on and runs(tmp_path) == 1
    assert [path.name for path in file.parent.iterdir()] == ["amx.txt"]


@linux
def test_where_nothing_can_be_written_it_is_probed_each_time(says: Says, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    says("print('right')")
    for i in range(2):
        assert engine.configure_amx().on and runs(tmp_path) == i + 1


@linux
@pytest.mark.parametrize(("attribute", "value"), [("executable", None), ("executable", ""), ("frozen", True)])
def test_a_program_without_a_python_of_its_own_is_not_started_again(
    attribute: str, value: Any, says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("print('right')")
    monkeypatch.setattr(sys, attribute, value, raising=False)
    state = engine.configure_amx()
    assert not state.on and state.why.startswith("there is no Python to run the probe with") and not runs(tmp_path)


# --- who decides ---


@pytest.mark.parametrize("value", ["on", "2", " 1", "true"])
def test_the_variable_is_0_or_1(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPCD_AMX", value)
    with pytest.raises(ValueError, match=f"PYPCD_AMX is {value!r}; allowed: 0 .AMX off., 1 .on.; unset"):
        engine.configure_amx()


@linux
def test_the_variable_is_heard_before_the_probe(says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says("os.kill(os.getpid(), 11)")
    for value in "01":
        monkeypatch.setenv("PYPCD_AMX", value)
        state = engine.configure_amx()
        assert (state.exists, state.on) == (True, value == "1") and f"PYPCD_AMX is {value}" in state.why
    monkeypatch.delenv("PYPCD_AMX")
    monkeypatch.setattr(_amx, "_missing", lambda: "there is none")
    assert engine.configure_amx()[:2] == (False, False) and runs(tmp_path) == 0


@linux
@pytest.mark.parametrize(("code", "text"), [("print('right')", "on: "), ("os.kill(os.getpid(), 4)", "off: ")])
def test_info_says_what_is_in_force_and_where_the_remedy_is(
    code: str, text: str, says: Says, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pypcd.cli import _terminal, main

    monkeypatch.setattr(_terminal, "setup", lambda: None)
    says(code)
    assert main(["info", "--no-test"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("AMX"))
    assert line.split(None, 1)[1].startswith(text)
    heading, page = "AMX is off", Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert (f"'{heading}' in docs/{page.name}" in line) == (text == "off: ")
    assert f"\n## {heading}\n" in page.read_text(encoding="utf-8")


# --- what models use ---


@linux
@pytest.mark.parametrize(
    ("verdict", "asked", "native", "given"),
    [
        ("right", None, False, None),
        ("crash", None, False, False),  # the stock library cannot leave out AMX alone
        ("crash", True, False, True),
        ("crash", False, False, False),
        ("right", None, True, None),
        ("crash", None, True, None),  # the native one can
        ("crash", False, True, False),
    ],
)
def test_a_model_is_opened_without_broken_kernels_on_both_engines(
    verdict: str, asked: bool | None, native: bool, given: bool | None, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(_amx._bindings, "is_native", lambda: native)
    monkeypatch.setattr(_amx._bindings, "pcd_set_amx", told.append)
    says("print('right')" if verdict == "right" else "os.kill(os.getpid(), 11)")
    assert engine.choose_extra_bufts(asked) is given
    assert told == ([] if not native or asked is False else [verdict == "right"])


@linux
def test_so_is_a_stock_engines_model(says: Says, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What llama.cpp is given, and one line in the log."""
    monkeypatch.setattr(_amx._bindings, "is_native", lambda: False)
    says("os.kill(os.getpid(), 11)")
    _amx._say_once.cache_clear()
    with caplog.at_level("INFO", "pypcd"):
        for _ in range(2):
            llm = pypcd.Llama(tiny("llama"), n_ctx=256, n_threads=1, n_gpu_layers=0, engine="stock")
            assert llm.model_params.use_extra_bufts is False
            llm.close()
    said = [record.getMessage() for record in caplog.records if "AMX" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(
        "AMX is off: ggml's kernels for it crash here (Segmentation fault); 'AMX is off' in docs/"
    )


BUFFERS = """
import logging, sys
import pypcd, llama_cpp
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("pypcd").addHandler(handler)
logging.getLogger("pypcd").setLevel(logging.DEBUG)
path, who, tokens = sys.argv[1], sys.argv[2], list(range(3, 40))
kwargs = dict(n_ctx=256, n_threads=1, n_threads_batch=1, n_gpu_layers=0, verbose=False)
opens = {"stock": llama_cpp.Llama, "pypcd": pypcd.Llama, "False": lambda *a, **k: pypcd.Llama(*a, use_extra_bufts=False, **k)}
for word in who.split(","):
    lines.append("model buffer size |")
    llm = opens[word](path, **kwargs)
    llm.eval(tokens)
    llm.close()
print(*("|" if line.endswith("|") else line.split()[1] for line in lines if "model buffer size" in line))
"""


@needs_amx
def test_what_each_class_uses_follows_what_is_known_of_the_kernels(tiny: Tiny, tmp_path: Path) -> None:
    """Also a stock llama_cpp.Llama, which asks for all buffer types and runs no probe: AMX is left out until a pypcd.Llama is opened."""
    path, file = tiny("llama", weight_type="Q4_0", n_embd=256), tmp_path / "cache/pypcd/amx.txt"

    def buffers(who: str, **environment: str) -> list[set[str]]:
        """The types of buffers for weights that these classes, one after the other, have used in a process."""
        done = run_python(BUFFERS, path, who, **environment)
        assert done.returncode == 0, done.stderr
        found = [set(one.replace("_Mapped", "").split()) for one in done.stdout.split("|")[1:]]  # of the file itself
        assert len(found) == len(who.split(",")) and all(found), done.stdout
        return found

    without = {"CPU", "CPU_REPACK"}
    assert buffers("stock") == [without] and not file.exists(), "the stock class has run a probe"
    state = engine.configure_amx()
    assert state.on or state.why.startswith("ggml's kernels for it")
    if state.on:  # else it would end the process
        other = {"XDG_CACHE_HOME": str(tmp_path / "other"), "PYPCD_AMX": "1"}  # where nothing is known
        assert ["AMX" in found for found in buffers("pypcd,stock", **other)] == [True] * 2
    assert ["AMX" in found for found in buffers("pypcd,stock")] == [
        state.on
    ] * 2  # the second one by what the first one knows
    assert buffers("stock") == [without]
    first, second = buffers("False,pypcd")
    assert first == {"CPU"} and second & {"AMX", "CPU_REPACK"}
    file.write_text(f"{_amx._key()}\nright\n")
    assert buffers("stock,pypcd", PYPCD_AMX="0") == [without] * 2
    for verdict in ("crashes", "right?"):
        file.write_text(f"{_amx._key()}\n{verdict}\n")
        assert buffers("stock,pypcd") == [without] * 2


# --- the cure of compilers that break it ---

CURED = """
#include <immintrin.h>
extern "C" void stored_behind_the_first_bytes();
struct alignas(64) config { unsigned char palette, start_row, reserved[14]; const void * marker; unsigned char rest[40]; };
void set_up() {
    config c = {};
    c.palette = 1;
    c.marker = reinterpret_cast<const void *>(&stored_behind_the_first_bytes);
    _tile_loadconfig(&c);
}
"""


@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("c++"), reason="there is no cmake or no c++")
def test_with_the_cure_a_compiler_keeps_the_whole_configuration_of_tiles(tmp_path: Path) -> None:
    """In a project of ggml's name and places, included as llama.cpp includes it; other files stay as they were."""
    ggml = tmp_path / "ggml with a space"
    (ggml / "src/ggml-cpu/amx").mkdir(parents=True)
    (ggml / "src/ggml-cpu/amx/mmq.cpp").write_text(CURED)
    (ggml / "src/other.cpp").write_text("int other() { return 1; }")
    (ggml / "src/CMakeLists.txt").write_text(
        "add_library(ggml-cpu STATIC ggml-cpu/amx/mmq.cpp other.cpp)\n"
        "target_compile_options(ggml-cpu PRIVATE -O3 -mamx-tile)\n"
    )
    (ggml / "CMakeLists.txt").write_text("project(ggml CXX)\nadd_subdirectory(src)\n")
    (tmp_path / "CMakeLists.txt").write_text(
        f'cmake_minimum_required(VERSION 3.21)\nproject(outer CXX)\nadd_subdirectory("{ggml.name}")\n'
    )
    cure = Path(__file__).parents[2] / "cmake" / "amx.cmake"
    build, options = tmp_path / "build", [f"-DCMAKE_PROJECT_ggml_INCLUDE={cure}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    made = subprocess.run(["cmake", "-S", tmp_path, "-B", build, *options], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    done = subprocess.run(["cmake", "--build", build], capture_output=True, text=True, check=False)
    if "mamx-tile" in done.stderr or "immintrin.h" in done.stderr:
        pytest.skip("this compiler knows no AMX")
    assert done.returncode == 0, done.stdout + done.stderr
    (kernels,) = build.rglob("mmq.cpp.o")
    assert b"stored_behind_the_first_bytes" in kernels.read_bytes()
    commands = {Path(c["file"]).name: c["command"] for c in json.loads((build / "compile_commands.json").read_text())}
    assert "-fno-dse" not in commands["other.cpp"]
    assert ("-fno-dse" in commands["mmq.cpp"]) == ("loses stores before _tile_loadconfig" in made.stdout)
